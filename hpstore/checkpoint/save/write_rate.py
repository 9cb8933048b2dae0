"""How fast a save is written in the background. Pure."""

from __future__ import annotations

import os

from hpstore.errors import CheckpointError
from hpstore.units import MIB

BACKGROUND = ("fast", "gentle")
# Encoding, hashing and handing over cost some 0.4 core-seconds a GB: at this rate 3 % of one core
# of two, and a step that runs on all cores waits for the slowest of them
GENTLE_BYTES_PER_CORE_SECOND = 32 * MIB
INTERVAL_SHARE = 0.8  # of the time between two saves is used for writing when that is not enough


def checked_background(name: str) -> str:
    """Raises CheckpointError for an unknown manner."""
    if name not in BACKGROUND:
        raise CheckpointError(f"background {name!r} is not one of {', '.join(BACKGROUND)}")
    return name


def pace(background: str, nbytes: int, interval_seconds: float | None) -> float | None:
    """Bytes a second for a save, None for as fast as the devices are.

    "gentle" writes slowly enough to cost the step little, but in time for the next save.
    """
    if background == "fast" or not nbytes:
        return None
    rate = float(GENTLE_BYTES_PER_CORE_SECOND * (os.cpu_count() or 1))
    if interval_seconds:
        rate = max(rate, nbytes / (INTERVAL_SHARE * interval_seconds))
    return rate


__all__ = ["BACKGROUND", "checked_background", "pace"]
