"""Keep Python's collector out of a stall or a load: a full collection takes 0.2 s with torch's
modules alone, longer than to stage 10,000 tensors, and all threads of a load wait for it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pauses:
    """How many sections keep the collector out now: it is one for all threads of the process."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._was_on = False  # before the first of them
        os.register_at_fork(after_in_child=self._forked)  # once: it lives as long as the process

    def begin(self) -> None:
        with self._lock:
            if self._count == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count = max(self._count - 1, 0)  # 0 before: it began in the parent
            if self._count == 0 and self._was_on:
                gc.enable()

    def _forked(self) -> None:
        """The threads that would end the pauses are not in a child."""
        self._lock = threading.Lock()
        if self._count and self._was_on:
            gc.enable()
        self._count = 0


_pauses = _Pauses()


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic garbage collection inside; as it was before when no other pause is left.

    A stall or a load is one section: what was allocated in it counts at its end, so a full
    collection falls between two of them.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()


@contextmanager
def collector_allowed() -> Iterator[None]:
    """Lift the pause that this thread is in, for a wait in the middle that may be long."""
    _pauses.end()
    try:
        yield
    finally:
        _pauses.begin()
