"""A few calls that wait for devices, made at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = 4  # opening an object is a few small reads on each of its devices, one after the other

T = TypeVar("T")


def together(calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """Outcomes of calls, in order; all have ended. One alone is made by the caller's thread."""
    if len(calls) > 1:
        with ThreadPoolExecutor(min(THREADS, len(calls)), "hpstore-together") as threads:
            return [threads.submit(call) for call in calls]
    return [_outcome(call) for call in calls]


def _outcome(call: Callable[[], T]) -> Future[T]:
    future = Future[T]()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 (raised by the future)
        future.set_exception(error)
    return future


__all__ = ["together"]
