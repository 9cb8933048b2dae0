"""From figures to verdicts: ratios of pairs taken in the same repetition, against a bar."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

# Any: JSON
Verdict = dict[str, Any]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, lowest, highest, and all in order."""
    return {
        "median": round(statistics.median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
        "values": [round(value, 4) for value in values],
    }


def verdict(
    values: Sequence[float], bar: float | None, *, least: bool | None = None, **facts: object
) -> Verdict:
    """A ratio whose median decides whether the bar is met: at most it, with `least` at least it.
    With `least` given the bar says which."""
    found = {name: value for name, value in spread(values).items() if name != "values"}
    if bar is not None:
        middle = statistics.median(values)
        found |= {
            "bar": bar if least is None else f"{'>=' if least else '<='} {bar}",
            "met": middle >= bar if least else middle <= bar,
        }
    return found | facts


def skipped(reason: str) -> Verdict:
    """A figure that cannot be had."""
    return {"skipped": reason}


def pairs(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs, repetition by repetition."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
