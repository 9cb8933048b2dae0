"""What a soak found: JSON for programs, text for people."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any  # figures are JSON

from tests.fault.soak.crew import Life


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """A fault of the schedule, and what became of it."""

    planned: str
    at_seconds: float
    target: str  # that it really had
    note: str = ""
    healed_seconds: float | None = None  # from when it was lifted until the pool was whole


@dataclass
class Report:
    """One soak."""

    seed: int
    seconds: float = 0.0
    commit: str = ""
    happened: list[Happened] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Of the trainer while it lived."""
        return float(self.figures.get("trainer", {}).get("goodput", 0.0))

    def write(self, directory: Path) -> None:
        """As soak-SEED.json and soak-SEED.txt."""
        directory.mkdir(parents=True, exist_ok=True)
        stem = directory / f"soak-{self.seed}"
        stem.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1, default=str))
        stem.with_suffix(".txt").write_text(self.text())

    def text(self) -> str:
        """For people."""
        faults = Counter(row.planned.split()[1] for row in self.happened)
        kills = Counter(life.name for life in self.lives if life.killed_at is not None)
        lines = [
            f"soak, seed {self.seed}, {self.seconds / 60:.1f} minutes, commit {self.commit}",
            f"faults: {dict(faults)}; skipped: {len(self.skipped)}",
            f"lives ended by the rig: {dict(kills)}",
        ]
        lines += [f"{name}: {_compact(figures)}" for name, figures in self.figures.items()]
        lines += [f"at the end: {_compact(self.end)}", "", "what happened:"]
        lines += [
            f"  {row.at_seconds:7.1f}  {row.planned.strip()} -> {row.target} {row.note}"
            + ("" if row.healed_seconds is None else f" (whole {row.healed_seconds:.0f} s later)")
            for row in self.happened
        ]
        lines += [f"  skipped: {text}" for text in self.skipped]
        lines += ["", f"{len(self.problems)} problems"]
        return "\n".join([*lines, *(f"  {text}" for text in self.problems)]) + "\n"


def _compact(figures: dict[str, Any]) -> str:
    shown = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in figures.items()
    }
    return ", ".join(f"{name} {value}" for name, value in shown.items())
