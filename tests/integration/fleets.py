"""Small made-up fleets of drives, as drive-stats files have them; seeded."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np

from hpstore.health.forecast.drive_histories import DriveHistory, Gathered, history
from hpstore.health.smart.counters import COUNTERS, INDEX

FIRST = date(2024, 1, 1)
HEADER = (
    "date",
    "serial_number",
    "model",
    "capacity_bytes",
    "failure",
    "smart_5_raw",
    "smart_187_raw",
    "smart_188_raw",
    "smart_197_raw",
    "smart_198_raw",
)
COUNTED = ("smart_5", "smart_187", "smart_188", "smart_197", "smart_198")


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeDrive:
    """One drive: `counts` (days, 5), the last day being that of its failure if it failed."""

    serial: str
    model: str
    counts: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    failed: bool


def fleet(
    drives: int = 120, days: int = 120, *, seed: int = 0, model: str = "ST4000DM000"
) -> list[MadeDrive]:
    """A third of the drives fail on a day of the later two thirds, most of them after rising
    errors; some healthy ones have old or few errors."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(drives):
        failed = number % 3 == 0
        length = int(rng.integers(days // 3, days)) if failed else days
        counts = np.zeros((length, len(COUNTED)), np.int64)
        if failed and rng.random() < 0.8:
            sick = int(rng.integers(3, 12))
            rises = rng.poisson(6, (min(sick, length), len(COUNTED)))
            counts[-len(rises) :] = np.cumsum(rises, axis=0)
        elif rng.random() < 0.2:
            counts[int(rng.integers(length)) :, int(rng.integers(5))] = int(rng.integers(1, 4))
        made.append(
            MadeDrive(serial=f"S{seed}-{number:04d}", model=model, counts=counts, failed=failed)
        )
    return made


def rows(drives: Iterable[MadeDrive]) -> Iterator[tuple[object, ...]]:
    """Rows by day, as public files are."""
    drives = list(drives)
    for day in range(max(len(d.counts) for d in drives)):
        for drive in drives:
            if day < len(drive.counts):
                last = drive.failed and day == len(drive.counts) - 1
                yield (
                    (FIRST + timedelta(day)).isoformat(),
                    drive.serial,
                    drive.model,
                    4_000_787_030_016,
                    int(last),
                    *map(int, drive.counts[day]),
                )


def write_csv(path: Path, drives: Iterable[MadeDrive], header: tuple[str, ...] = HEADER) -> Path:
    """A file of these drives; columns that `header` lacks are left out."""
    kept = [HEADER.index(name) for name in header]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows([row[i] for i in kept] for row in rows(drives))
    return path


def histories(drives: Iterable[MadeDrive]) -> Gathered:
    """What reading their file gives."""
    made: list[DriveHistory] = []
    for drive in drives:
        values = np.full((len(drive.counts), len(COUNTERS)), np.nan)
        values[:, [INDEX[name] for name in COUNTED]] = drive.counts
        days = FIRST.toordinal() + np.arange(len(drive.counts))
        made.append(
            history(
                drive.serial, drive.model, days, values, int(days[-1]) if drive.failed else None
            )
        )
    return Gathered(
        histories=tuple(made), healthy_share=1.0, rows=sum(len(h.days) for h in made), repeated=0
    )
