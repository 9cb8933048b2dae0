"""Rows of the fault suite: what was measured, printed and written."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from hpstore.health.detect.peer_group import quantile
from hpstore.runtime.text_files import write_atomically
from hpstore.units import format_bytes
from tests.fault.suite.workload import Read

COLUMNS = (
    "fault",
    "done by",
    "detected after",
    "reads before",
    "during",
    "after",
    "healed",
    "verdict",
)
CELL = 400  # characters


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Of reads in a span of time, in milliseconds."""

    count: int
    p50: float
    p99: float
    slowest: float

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p99:.1f}" if self.count else "-"


def latency(reads: Sequence[Read]) -> Latency:
    """Of these."""
    times = sorted(1e3 * read.seconds for read in reads)
    if not times:
        return Latency(count=0, p50=0.0, p99=0.0, slowest=0.0)
    return Latency(
        count=len(times), p50=quantile(times, 0.5), p99=quantile(times, 0.99), slowest=times[-1]
    )


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
    seconds: float = 0.0  # that all of it took

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
        cells = (
            self.fault,
            self.method,
            seen,
            str(self.before),
            str(self.during),
            str(self.after),
            healed,
            self.verdict,
        )
        return tuple(_in_a_cell(text) for text in cells)


def markdown(rows: Sequence[Row]) -> str:
    """A table with its date, machine and units."""
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {machine()}. Reads: p50 / p99 in ms.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """What the suite ran on."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.release()}"


def _in_a_cell(text: str) -> str:
    """One line of a table's cell; what an error says may be pages."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= CELL else f"{line[: CELL - 4]} ..."


class Table:
    """Rows as they come, each written at once: a run that is cut leaves those that it has.

    `path`: of the table, beside the same as JSON; None for a table that is not kept.
    """

    def __init__(self, path: Path | None) -> None:
        self.rows: list[Row] = []
        self._path = path

    def add(self, row: Row) -> None:
        """One more."""
        self.rows.append(row)
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, markdown(self.rows))
        raw = [{**asdict(row), "verdict": row.verdict} for row in self.rows]
        write_atomically(self._path.with_suffix(".json"), json.dumps(raw, indent=1) + "\n")

    def row(self, fault: str, method: str) -> Filling:
        """A row to be filled in."""
        return Filling(self, Row(fault=fault, method=method))


class Filling:
    """A row is filled in; it stands in the table however that ends, also by a time limit."""

    def __init__(self, table: Table, row: Row) -> None:
        self._table, self._row = table, row
        self._began = time.monotonic()

    def __enter__(self) -> Row:
        return self._row

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        row = self._row
        row.seconds = time.monotonic() - self._began
        if kind is not None:
            row.failures.append(f"{kind.__name__}: {error}")
        self._table.add(row)
