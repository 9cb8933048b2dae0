"""Time as an argument: wall time for versions, monotonic time for durations and deadlines."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. Thread-safe."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def wait(self, seconds: float) -> None:
        """Let time pass (throttles, retries)."""


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return max(0, time.time_ns() // 1_000_000)  # before 1970 it is set wrong: nobody reads that

    monotonic = staticmethod(time.monotonic)  # asked twice for each call on a device

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


FAR_MS = 366 * 86400 * 1000


class HybridCounter:
    """The counter of versions: max(milliseconds since 1970, highest seen + 1) (PROTOCOL 1).

    `covered`: counters up to it are below the pool's mark, as this process knows.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.highest = self.covered = 0
        self._lock = threading.Lock()  # guards highest and covered

    def next(self, seen: int = 0, *, trusted: bool = False) -> int:
        """A counter above every one given out here and above `seen`.

        One that is a year ahead, as of a damaged file name, does not drag other keys along, unless
        it is `trusted`: then this clock is behind.
        """
        with self._lock:
            self.highest = max(self._clock.wall_ms(), self.highest + 1)
            if trusted or seen < self.highest + FAR_MS:
                self.highest = max(self.highest, seen + 1)
            return max(self.highest, seen + 1)

    def cover(self, counter: int) -> None:
        """The pool's mark is there."""
        with self._lock:
            self.covered = max(self.covered, counter)
