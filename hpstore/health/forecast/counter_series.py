"""A drive's counters over days: rises, last values, where windows begin. Pure.

Everything said of a row is made from that row and rows before it.
"""

from __future__ import annotations

import numpy as np

from hpstore.health.forecast.drive_histories import FloatArray, IntArray

STALE_DAYS = 7  # a row this much older than a window's beginning is no beginning of it


def increases(values: FloatArray) -> FloatArray:
    """What each counter has risen by since the first row, falls left out. Shape (rows, n), both.

    A fall is a reset (or, of pending sectors, a repair): what comes after it counts from there.
    NaN is skipped; before a counter's first value there is no rise.
    """
    held = held_values(values)
    steps = np.diff(held, axis=0, prepend=held[:1])
    return np.asarray(np.cumsum(np.where(steps > 0, steps, 0.0), axis=0))


def held_values(values: FloatArray) -> FloatArray:
    """Each counter's last known value. Shape (rows, n), both; NaN before the first."""
    at = np.where(np.isnan(values), 0, np.arange(len(values))[:, None])
    at = np.maximum.accumulate(at, axis=0)
    return np.asarray(np.take_along_axis(values, at, axis=0))


def begins(days: IntArray, window: int) -> IntArray:
    """The row at which each row's window begins; -1 where the history is too short or broken."""
    at = np.searchsorted(days, days - window, side="right") - 1
    age = days - days[np.maximum(at, 0)]
    return np.asarray(np.where((at < 0) | (age > window + STALE_DAYS), -1, at))


def rises(days: IntArray, increased: FloatArray, window: int) -> FloatArray:
    """Rise over `window` days. Shape (rows, n), both; NaN where `begins` has no row."""
    at = begins(days, window)
    rise = increased - increased[np.maximum(at, 0)]
    rise[at < 0] = np.nan
    return rise
