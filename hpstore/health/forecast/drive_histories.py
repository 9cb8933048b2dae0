"""Histories of drives, gathered from drive-stats files within a limit of memory.

Two passes: one learns which drives there are and which of them fail, the other keeps the rows of
those that are wanted. Failed drives are always kept; of the healthy ones as many as fit, chosen by
a hash of their serial numbers, so that FDR and FAR stay what they are.

The limit is `memory_bytes` for rows, and as much again for what is known of drives, DRIVE_BYTES
each: files that name more drives than that are refused.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpstore.errors import ForecastError
from hpstore.health.forecast.drive_stats import BadRows, BytesDone, read_rows, tables_in
from hpstore.health.smart.counters import COUNTERS, INDEX, SPEC_FLAG

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

ROW_BYTES = 4 + 8 * len(COUNTERS)
DRIVE_BYTES = 1200  # two names of up to 256 characters, facts, place in tables, empty rows
_SORTING = 3  # a drive's rows are copied when they are put in order
_UNIT = float(1 << 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveHistory:
    """One drive. Rows are in the order of days, one a day.

    `days`: (rows,), from date.toordinal(). `values`: (rows, len(COUNTERS)), NaN where absent.
    `failed_day`: day of the row that says so; rows after it are dropped.
    """

    serial: str
    family: str
    days: IntArray
    values: FloatArray
    failed_day: int | None = None


@dataclass(slots=True, kw_only=True)
class DriveFacts:
    """What the first pass learns of a drive."""

    family: str
    first: int
    last: int
    rows: int = 0
    failed_day: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Histories by serial number, and what was left out.

    `healthy_share`: how many of the healthy drives of the files were kept.
    """

    histories: tuple[DriveHistory, ...]
    healthy_share: float
    rows: int
    repeated: int  # rows of a drive and day that came before: left out


def drive_hash(salt: str, serial: str) -> float:
    """A number in [0, 1) for a drive: the same on every machine. Pure."""
    return xxhash.xxh3_64_intdigest(f"{salt}\0{serial}".encode()) / _UNIT


def survey(
    paths: Sequence[str | os.PathLike[str]],
    *,
    bad: BadRows,
    family: str | None = None,
    drives_most: int | None = None,
    progress: BytesDone | None = None,
) -> dict[str, DriveFacts]:
    """First pass: drives by serial number; at most DRIVE_BYTES of memory each.

    Raises ForecastError, also where the files name more than `drives_most` drives.
    """
    found: dict[str, DriveFacts] = {}
    for path in paths:
        for row in read_rows(path, bad=bad, family=family, progress=progress):
            facts = found.get(row.serial)
            if facts is None:
                if drives_most is not None and len(found) >= drives_most:
                    raise ForecastError(
                        f"{os.fspath(path)} names more than {drives_most} drives, which is what "
                        "fits into the memory allowed: allow more, or give fewer files. Nothing "
                        "was written"
                    )
                facts = found[row.serial] = DriveFacts(
                    family=row.family, first=row.day, last=row.day
                )
            facts.rows += 1
            facts.first = min(facts.first, row.day)
            facts.last = max(facts.last, row.day)
            if row.failed:
                known = facts.failed_day
                facts.failed_day = row.day if known is None else min(known, row.day)
    return found


def choose(
    drives: Mapping[str, DriveFacts], *, memory_bytes: int, salt: str
) -> tuple[frozenset[str], float]:
    """The drives whose rows fit into `memory_bytes`, and the share of healthy ones kept. Pure.

    Raises ForecastError when the failed ones alone do not fit.
    """
    budget = memory_bytes // (ROW_BYTES * _SORTING)
    kept = {serial for serial, facts in drives.items() if facts.failed_day is not None}
    budget -= sum(drives[serial].rows for serial in kept)
    if budget < 0:
        raise ForecastError(
            f"the {len(kept)} failed drives alone need more than {memory_bytes} bytes of memory: "
            "allow more, or give fewer files"
        )
    healthy = sorted(
        (serial for serial in drives if serial not in kept),
        key=lambda serial: (drive_hash(salt, serial), serial),
    )
    count = 0
    for serial in healthy:
        budget -= drives[serial].rows
        if budget < 0:
            break
        count += 1
    kept.update(healthy[:count])
    return frozenset(kept), count / len(healthy) if healthy else 1.0


class _Rows:
    """Rows of one drive as they come."""

    __slots__ = ("days", "values")

    def __init__(self) -> None:
        self.days, self.values = array("i"), array("d")


def gather(
    paths: Sequence[str | os.PathLike[str]],
    drives: Mapping[str, DriveFacts],
    wanted: Collection[str],
    *,
    healthy_share: float = 1.0,
    progress: BytesDone | None = None,
) -> Gathered:
    """Second pass: the histories of `wanted`. Bad rows were counted before. Raises the same."""
    kept: dict[str, _Rows] = {serial: _Rows() for serial in wanted}
    for path in paths:
        for row in read_rows(path, bad=BadRows(), family="", progress=progress):
            rows = kept.get(row.serial)
            if rows is not None:
                rows.days.append(row.day)
                rows.values.extend(row.values)
    histories, total, repeated = [], 0, 0
    for serial in sorted(kept):
        facts = drives[serial]
        rows = kept.pop(serial)
        made = history(
            serial,
            facts.family,
            np.asarray(rows.days, np.int64),
            np.asarray(rows.values, np.float64).reshape(len(rows.days), len(COUNTERS)),
            facts.failed_day,
        )
        late = 0 if facts.failed_day is None else sum(d > facts.failed_day for d in rows.days)
        repeated += len(rows.days) - late - len(made.days)
        total += len(made.days)
        histories.append(made)
    return Gathered(
        histories=tuple(histories), healthy_share=healthy_share, rows=total, repeated=repeated
    )


def history(
    serial: str, family: str, days: IntArray, values: FloatArray, failed_day: int | None = None
) -> DriveHistory:
    """A history from rows in any order; of rows of one day the last one given counts. Pure."""
    order = np.argsort(days, kind="stable")
    days, values = days[order], values[order]
    keep = np.append(days[1:] != days[:-1], True) if len(days) else np.zeros(0, bool)
    if failed_day is not None:
        keep &= days <= failed_day
    return DriveHistory(
        serial=serial, family=family, days=days[keep], values=values[keep], failed_day=failed_day
    )


def load_histories(
    paths: Sequence[str | os.PathLike[str]],
    *,
    bad: BadRows,
    salt: str,
    memory_bytes: int,
    family: str | None = None,
    empty_ok: bool = False,
    progress: BytesDone | None = None,
) -> Gathered:
    """Both passes, over files and folders of files.

    Memory: `memory_bytes` for rows, and as much again at most for drives. `progress` gets bytes of
    the stored files, in all twice their size. Raises ForecastError, also when there is no drive in
    them, unless `empty_ok`.
    """
    paths = tables_in(paths)
    drives = survey(
        paths,
        bad=bad,
        family=family,
        drives_most=max(1, memory_bytes // DRIVE_BYTES),
        progress=progress,
    )
    if not drives and not empty_ok:
        raise ForecastError(f"no drive in {', '.join(str(path) for path in paths)}")
    wanted, share = choose(drives, memory_bytes=memory_bytes, salt=salt)
    return gather(paths, drives, wanted, healthy_share=share, progress=progress)


def stored_bytes(paths: Sequence[str | os.PathLike[str]]) -> int:
    """Bytes of the files. Raises ForecastError when one is not there."""
    try:
        return sum(os.stat(path).st_size for path in tables_in(paths))
    except OSError as error:
        raise ForecastError(f"cannot read {error.filename}: {error.strerror}") from error


def has_flag(values: FloatArray) -> NDArray[np.bool_]:
    """Which rows carry a spec flag. Shape (rows, counters) to (rows,). Pure."""
    return np.asarray(values[:, INDEX[SPEC_FLAG]] == 1.0)
