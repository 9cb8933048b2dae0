"""Rows of the fault suite: what was measured, printed and written."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from hpstore.units import format_bytes
from tests.fault.suite.workload import Read

COLUMNS = ("fault", "done by", "detected after", "reads before", "during", "after", "healed",
           "verdict")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Of reads in a span of time, in milliseconds."""

    count: int
    p50: float
    p99: float

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p99:.1f}" if self.count else "-"


def latency(reads: Sequence[Read]) -> Latency:
    """Of these."""
    times = sorted(1e3 * read.seconds for read in reads)
    if not times:
        return Latency(count=0, p50=0.0, p99=0.0)

    def at(share: float) -> float:
        return times[min(len(times) - 1, int(share * len(times)))]

    return Latency(count=len(times), p50=at(0.5), p99=at(0.99))


@dataclass(kw_only=True)
class Row:
    """One fault, or one kind of restart."""

    fault: str
    method: str
    detected_seconds: float | None = None
    detected_by: str = ""
    before: Latency = field(default_factory=lambda: latency([]))
    during: Latency = field(default_factory=lambda: latency([]))
    after: Latency = field(default_factory=lambda: latency([]))
    healed_bytes: int = 0
    healed_columns: int = 0
    failures: list[str] = field(default_factory=list)
    note: str = ""
    skipped: str = ""

    @property
    def verdict(self) -> str:
        """ok, or what was not."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        text = "FAILED: " + "; ".join(self.failures) if self.failures else "ok"
        return f"{text}, {self.note}" if self.note else text

    def cells(self) -> tuple[str, ...]:
        """As it is printed."""
        seen = "-"
        if self.detected_seconds is not None:
            seen = f"{self.detected_seconds:.1f} s, {self.detected_by}"
        healed = "-"
        if self.healed_columns or self.healed_bytes:
            healed = f"{format_bytes(self.healed_bytes)}, {self.healed_columns} columns"
        return (self.fault, self.method, seen, str(self.before), str(self.during), str(self.after),
                healed, self.verdict)  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """A table with its date, machine and units."""
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {machine()}. Reads: p50 / p99 in ms.", "",
        "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def machine() -> str:
    """What the suite ran on."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.release()}"


def write(rows: Sequence[Row], path: Path) -> None:
    """The table beside the same as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(rows))
    raw = [{**asdict(row), "verdict": row.verdict} for row in rows]
    path.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")


__all__ = ["Latency", "Row", "latency", "machine", "markdown", "write"]
