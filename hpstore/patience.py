"""Waiting for devices with a deadline that runs while this process does."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any

STEP_SECONDS = 0.5


def wait_awake(
    futures: Collection[Future[Any]], seconds: float, *, first: bool = False
) -> float:  # fmt: skip
    """Wait until all futures are done, with `first` any of them; for `seconds` at most.

    Time in which the process was stopped (SIGSTOP, a virtual machine that is moved) is no time in
    which a device did not answer: of every half second no more than that is counted. Returns the
    seconds that were.
    """
    waited, left = 0.0, set(futures)
    when = FIRST_COMPLETED if first else ALL_COMPLETED
    while left and waited < seconds:
        step, began = min(STEP_SECONDS, seconds - waited), time.monotonic()
        done, left = wait(left, timeout=step, return_when=when)
        waited += min(step, time.monotonic() - began)
        if first and done:
            break
    return waited


__all__ = ["STEP_SECONDS", "wait_awake"]
