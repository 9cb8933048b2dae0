"""Tools for tests of hpstore and of devices written elsewhere: the device contract, moved time."""

from __future__ import annotations

import threading


class ManualClock:
    """A Clock that moves only when it is told to, or when somebody waits on it. Thread-safe."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._seconds = 0.0
        self._began_ms = wall_ms
        self._lock = threading.Lock()  # guards _seconds

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        return self._began_ms + int(self.monotonic() * 1000)

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        with self._lock:
            return self._seconds

    def wait(self, seconds: float) -> None:
        """Let time pass without waiting."""
        self.advance(max(0.0, seconds))

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        with self._lock:
            self._seconds += seconds


__all__ = ["ManualClock"]
