"""Verdicts on a disk by what it says now and by its record, whatever days that has."""

from __future__ import annotations

import numpy as np

from hpstore.health.forecast.drive_histories import DriveHistory
from hpstore.health.forecast.forecaster import FailureForecaster, Risk
from hpstore.health.forecast.this_machine import judge_past, judge_reading
from hpstore.health.smart.counters import COUNTERS, INDEX
from hpstore.health.smart.readout import Readout, SmartReading

TODAY = 739_000


def counters(reallocated: float) -> tuple[float, ...]:
    """Of a disk with so many reallocated sectors, and no other error."""
    values = [0.0] * len(COUNTERS)
    values[INDEX["smart_5"]] = reallocated
    return tuple(values)


def test_days_after_today_do_not_stand_for_what_the_disk_says_now() -> None:
    """A row that a clock wrote which was a year ahead was the last one: the disk was judged by it
    until that day, whatever became of it."""
    forecaster = FailureForecaster()
    reading = SmartReading(device="/dev/sda", readout=Readout.OK, serial="A", values=counters(400))
    past = DriveHistory(
        serial="A",
        family="F",
        days=np.array([TODAY - 1, TODAY + 365], np.int64),
        values=np.array([counters(0), counters(0)]),
    )
    found = judge_reading(forecaster, reading, past, TODAY)
    assert found is not None
    assert found.risk is Risk.WARN
    assert found.error_sum == 400
    earlier = judge_past(forecaster, past, TODAY - 2, TODAY)
    assert len(earlier) == 1
