"""Waiting for devices with a deadline that runs while this process does."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from hpstore.errors import DeviceTimeout

STEP_SECONDS = 0.5
QUICK_SECONDS = 0.005  # all answers are waited for so long at once: each look in between costs


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for devices that can be done without.

    `spare(devices)`: whether the answers of all others are enough. `seconds`: at least so long all
    are waited for, and at least twice as long as it took until the others were enough.
    """

    seconds: float
    spare: Callable[[set[str]], bool]


def wait_awake(futures: Collection[Future[Any]], seconds: float, *, first: bool = False) -> float:
    """Wait until all futures are done, with `first` any of them; for `seconds` at most.

    Time in which the process was stopped (SIGSTOP, a virtual machine that is moved) is no time in
    which a device did not answer: of every half second no more than that is counted. Returns the
    seconds that were.
    """
    waited, left = 0.0, {future for future in futures if not future.done()}
    if first and len(left) < len(futures):
        return waited
    when = FIRST_COMPLETED if first else ALL_COMPLETED
    while left and waited < seconds:
        step, began = min(STEP_SECONDS, seconds - waited), time.monotonic()
        done, left = wait(left, timeout=step, return_when=when)
        waited += min(step, time.monotonic() - began)
        if first and done:
            break
    return waited


def wait_for_enough(
    futures: Mapping[str, Future[Any]], seconds: float, patience: Patience, late: Collection[str]
) -> None:
    """Wait until all futures are done, for `seconds` at most, and no longer than `patience` where
    those that are not, those that failed and the `late` ones can be done without."""
    waited = wait_awake(futures.values(), min(seconds, patience.seconds))
    limit = seconds
    while waited < limit:
        left = {device for device, future in futures.items() if not future.done()}
        if not left:
            return
        if limit == seconds and patience.spare({*late, *left, *_failed(futures)}):
            grace = 0.0 if waited <= patience.seconds else waited  # nobody was quick
            limit = min(seconds, waited + grace)
        waited += wait_awake([futures[d] for d in left], max(0.0, limit - waited), first=True)


def _failed(futures: Mapping[str, Future[Any]]) -> set[str]:
    return {
        device
        for device, future in futures.items()
        if future.done() and future.exception() is not None
    }


def no_answer(device: str, deadline_seconds: float) -> DeviceTimeout:
    """The error for a call that is not over in time."""
    return DeviceTimeout(
        f"device {device} did not answer within {deadline_seconds:.1f} s", device=device
    )


def still_owes(device: str) -> DeviceTimeout:
    """The error for a device that is not asked, as it has not answered an earlier call."""
    return DeviceTimeout(
        f"device {device} still owes an answer; it is not waited for", device=device
    )
