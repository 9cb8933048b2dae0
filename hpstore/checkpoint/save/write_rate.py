"""How fast a save is written in the background. Pure."""

from __future__ import annotations

import os

from hpstore.units import MIB

PACES = ("fast", "gentle")
# Encoding, hashing and handing over cost some 0.4 core-seconds a GB: at this rate 3 % of one core
# of two, and a step that runs on all cores waits for the slowest of them
GENTLE_BYTES_PER_CORE_SECOND = 32 * MIB
INTERVAL_SHARE = 0.8  # of the time between two saves is used for writing when that is not enough


def save_rate(pace: str, nbytes: int, interval_seconds: float | None) -> float | None:
    """Bytes per second for a save, None for as fast as the devices are.

    "gentle" writes slowly enough to cost the step little, but in time for the next save.
    """
    if pace == "fast" or not nbytes:
        return None
    rate = float(GENTLE_BYTES_PER_CORE_SECOND * (os.cpu_count() or 1))
    if interval_seconds:
        rate = max(rate, nbytes / (INTERVAL_SHARE * interval_seconds))
    return rate
