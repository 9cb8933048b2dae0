"""Interleaved repeats, medians and spreads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Keep = Callable[[dict[str, object]], None]


def forget(_: object) -> None:
    """Drop a result that is not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of every benchmark. `directory` None means a temporary one."""

    directory: Path | None
    size_bytes: int
    repeats: int
    peers: str = ""  # comma-separated names of other libraries to measure beside hpstore
    compression: bool = False  # of checkpoints: what each codec costs
    cases: str = ""  # of loaders, caches, training: comma-separated, all unless given
    device: str = "cpu"  # of loaders and training: where batches go
    stages: bool | None = None  # of loaders: those of a GPU first; None: where there is one
    quick: bool = False  # of caches, health, training: small data, to show that all works
    plots: Path | None = None  # of caches and training: a directory for pictures
    drive_stats: tuple[Path, ...] = ()  # of health: files that failures are forecast from
    keep: Keep = forget  # is told what has been found so far, from time to time


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def interleave(
    contenders: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each contender, A B C A B C ..., after one unmeasured round.

    The unmeasured round gives all of them the same warm memory.
    """
    for run in contenders.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            found[name].append(run())
    return found


def rates(times: Mapping[str, list[float]], nbytes: Mapping[str, int]) -> dict[str, object]:
    """Median, minimum and maximum GB/s by contender."""
    rows: dict[str, object] = {}
    for name, values in times.items():
        speeds = sorted(nbytes[name] / value / 1e9 for value in values)
        rows[name] = {
            "gb_per_second": round(statistics.median(speeds), 3),
            "lowest": round(speeds[0], 3),
            "highest": round(speeds[-1], 3),
        }
    return rows


def ratio(ours: list[float], raw: list[float], scale: float = 1.0) -> dict[str, float]:
    """How our rate stands to the raw one, pair by pair: median and range. 1.0 is raw speed.

    `scale`: our bytes over raw bytes, when they differ.
    """
    pairs = sorted(scale * b / a for a, b in zip(ours, raw, strict=True))
    return {
        "median": round(statistics.median(pairs), 3),
        "lowest": round(pairs[0], 3),
        "highest": round(pairs[-1], 3),
    }


def unmet(results: Mapping[str, object], path: str = "") -> list[str]:
    """Where a figure misses its bar: the path of every "met" that is False."""
    found = []
    for key, value in results.items():
        here = f"{path}/{key}" if path else str(key)
        if isinstance(value, Mapping):
            found += unmet(value, here)
        elif (key == "met" or key.endswith("_met")) and key != "not_met" and value is False:
            found.append(here)
    return found
