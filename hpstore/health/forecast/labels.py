"""Which rows teach or test what, by day and by drive. Pure.

A day is *positive* when the drive fails 1 to `horizon` days later, *negative* when it is known to
live through the horizon, and otherwise unknown: the day of the failure and after, the last days
before a drive leaves the files or before the files (or our knowledge) end. Unknown days are never
used. Nothing that happens after `until` is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

import numpy as np
from numpy.typing import NDArray

from hpstore.errors import ConfigError
from hpstore.health.forecast.drive_histories import DriveHistory, drive_hash

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Masks over a history's rows. `failed`: the drive fails within what is known."""

    positive: BoolArray
    negative: BoolArray
    failed: bool


def labels(history: DriveHistory, *, horizon: int, until: int, since: int = 0) -> Labels:
    """Labels of the rows after day `since`, with what is known at the end of day `until`.

    A failure is known from its own day on. A drive that has not failed is known to have lived until
    its last row that is not after `until`, and no longer.
    """
    days = history.days
    used = (days > since) & (days <= until)
    failed = history.failed_day is not None and history.failed_day <= until
    if failed:
        ahead = (history.failed_day or 0) - days
        positive = used & (ahead >= 1) & (ahead <= horizon)
        negative = used & (ahead > horizon)
    else:
        seen = days[days <= until]
        last = int(seen[-1]) if len(seen) else 0
        positive = np.zeros(len(days), bool)
        negative = used & (days + horizon <= last)
    return Labels(positive=positive, negative=negative, failed=failed)


def fold_of(salt: str, serial: str, folds: int) -> int:
    """The fold of a drive: of the model's parts, the one that has never seen it."""
    return int(drive_hash(f"{salt}/fold", serial) * folds)


def inner_fold_of(salt: str, serial: str, folds: int) -> int:
    """A second division, independent of the first, by which thresholds are set."""
    return int(drive_hash(f"{salt}/inner", serial) * folds)


def thinned(history: DriveHistory, mask: BoolArray, *, stride: int, salt: str) -> BoolArray:
    """Every `stride`-th day of a mask, from a day that differs from drive to drive."""
    phase = int(drive_hash(f"{salt}/phase", history.serial) * stride)
    return np.asarray(mask & (history.days % stride == phase))


def split_day(first: int, last: int, until: str) -> int:
    """The last day that training knows: "last", a date, or "" for two thirds of the period.

    Raises ConfigError.
    """
    if until == "last":
        return last
    if not until:
        return first + (last - first + 1) * 2 // 3 - 1
    try:
        day = date.fromisoformat(until).toordinal()
    except ValueError as error:
        raise ConfigError(f"until is {until!r}: a date such as 2025-06-30, or last") from error
    if not first <= day <= last:
        raise ConfigError(
            f"until is {until}, but the files hold {day_text(first)} to {day_text(last)}"
        )
    return day


def day_text(day: int) -> str:
    """A day as a date."""
    return date.fromordinal(day).isoformat()
