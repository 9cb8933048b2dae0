"""Bytes per second of long work."""

from __future__ import annotations

import threading

from hpstore.runtime.clock import Clock

CREDIT_SECONDS = 2.0


class RateLimit:
    """Spreads bytes over time: at most `bytes_per_second`, None for no limit. Thread-safe.

    Time that the work itself takes counts, so that the rate is reached by work that could go
    faster. What was not moved in the last two seconds may be moved later; older time is lost.
    """

    def __init__(self, bytes_per_second: float | None, clock: Clock) -> None:
        self._rate, self._clock = bytes_per_second, clock
        self._free_at = clock.monotonic()
        self._lock = threading.Lock()  # guards _free_at

    def due(self, nbytes: int) -> float:
        """When bytes that are about to be moved may be, by the clock; accounts for them."""
        with self._lock:
            now = self._clock.monotonic()
            if not self._rate:
                return now
            self._free_at = max(now - CREDIT_SECONDS, self._free_at) + nbytes / self._rate
            return self._free_at

    def __call__(self, nbytes: int) -> None:
        """Account for bytes that are about to be moved; waits when they come too fast."""
        pause = self.due(nbytes) - self._clock.monotonic()
        if pause > 0:
            self._clock.wait(pause)

    def go_on(self) -> bool:
        """Always."""
        return True
