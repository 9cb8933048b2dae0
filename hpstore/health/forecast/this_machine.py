"""This machine's own disks: what is recorded of them, and the verdict on what they say now."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hpstore.health.forecast.drive_histories import DriveHistory, history, load_histories
from hpstore.health.forecast.drive_stats import BadRows
from hpstore.health.forecast.forecaster import FailureForecaster, Forecast
from hpstore.health.smart.counters import COUNTERS, family_of
from hpstore.health.smart.readout import Readout, SmartReading

_RECORD_BYTES = 256 << 20  # of memory, for rows of this machine's own record


def recorded(record: str | os.PathLike[str], bad: BadRows) -> dict[str, DriveHistory]:
    """Disks of a record by serial number; none when there is no record. Raises ForecastError."""
    path = Path(record)
    if not path.exists() or not path.stat().st_size:
        return {}
    gathered = load_histories([path], bad=bad, salt="", memory_bytes=_RECORD_BYTES, empty_ok=True)
    return {found.serial: found for found in gathered.histories}


def judge_reading(
    forecaster: FailureForecaster, reading: SmartReading, before: DriveHistory | None, today: int
) -> Forecast | None:
    """A verdict on what a disk says now, after what is recorded of it; None without an answer.

    Days after today were recorded by a clock that was ahead: they are left out.
    """
    if reading.readout is not Readout.OK:
        return None
    days = np.array([today], np.int64)
    values = np.array([reading.values], np.float64).reshape(1, len(COUNTERS))
    if before is not None:
        known = before.days <= today
        days = np.concatenate([before.days[known], days])
        values = np.concatenate([before.values[known], values])
    made = history(reading.serial, family_of(reading.model), days, values)
    return forecaster.judge(made, flags=reading.flags)


def judge_past(
    forecaster: FailureForecaster, before: DriveHistory, first_day: int, today: int
) -> list[Forecast]:
    """The verdicts of each recorded day from `first_day` to `today`, as they were on that day."""
    return [
        forecaster.judge(
            DriveHistory(
                serial=before.serial,
                family=before.family,
                days=before.days[:end],
                values=before.values[:end],
            )
        )
        for end in range(1, len(before.days) + 1)
        if first_day <= before.days[end - 1] <= today
    ]
