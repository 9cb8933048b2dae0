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
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)  # asked twice for each call on a device

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


FAR_MS = 366 * 86400 * 1000  # no honest clock is a year ahead


class HybridCounter:
    """The counter of versions: max(milliseconds since 1970, highest seen + 1) (PROTOCOL 1)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._highest = 0
        self._lock = threading.Lock()  # guards _highest

    def next(self, seen: int = 0) -> int:
        """A counter above every one seen here and above `seen`."""
        with self._lock:
            now = self._clock.wall_ms()
            self._highest = max(now, self._highest + 1)
            if seen < now + FAR_MS:
                self._highest = max(self._highest, seen + 1)
            return max(self._highest, seen + 1)  # a far one does not drag other keys along


__all__ = ["Clock", "HybridCounter", "SystemClock"]
