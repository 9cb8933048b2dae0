"""How fast background work goes: a share of the time, so a share of what it would reach alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hpstore.runtime.clock import Clock
from hpstore.runtime.rate_limit import RateLimit

_COUNTED_SECONDS = 2.0  # of one step: a device that stalls does not stop the work for minutes
_STEP_SECONDS = 0.2  # of a wait, between two looks at whether to stop


class SharedPace:
    """Waits after each step for as long as keeps the work to `share()` of the time.

    Its bandwidth is then that share of what was measured while it worked, without a figure for any
    device. `bytes_per_second` limits it further. `stop` ends waits at once. Several threads may
    call it, one at a time or not.
    """

    def __init__(
        self,
        clock: Clock,
        share: Callable[[], float],
        *,
        stop: Callable[[], bool],
        bytes_per_second: float | None = None,
    ) -> None:
        self._clock, self._share, self._stop = clock, share, stop
        self._limit = RateLimit(bytes_per_second, clock)
        self._lock = threading.Lock()  # guards all below; the limit's is taken inside of it
        self._resumed = self._began = clock.monotonic()
        self.bytes = 0
        self.busy_seconds = 0.0

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            now = self._clock.monotonic()
            busy = max(0.0, now - self._resumed)
            self.bytes += nbytes
            self.busy_seconds += busy
            # who comes while another waits waits as long: the pause is for all of the work
            until = max(now, self._resumed) + pause_seconds(busy, self._share())
            until = max(until, self._limit.due(nbytes))
            self._resumed = until
        while not self._stop():
            left = until - self._clock.monotonic()
            if left <= 0:
                return
            self._clock.wait(min(left, _STEP_SECONDS))
        with self._lock:
            self._resumed = min(self._resumed, self._clock.monotonic())

    def go_on(self) -> bool:
        """Return True until a stop is requested."""
        return not self._stop()

    def rates(self) -> tuple[float, float]:
        """Return bytes per second: over the elapsed time, and over the time that it worked."""
        with self._lock:
            elapsed = self._clock.monotonic() - self._began
            return (
                self.bytes / elapsed if elapsed > 0 else 0.0,
                self.bytes / self.busy_seconds if self.busy_seconds > 0 else 0.0,
            )


def pause_seconds(busy_seconds: float, share: float) -> float:
    """How long to wait after working so long, to work `share` of the time. Pure."""
    return min(busy_seconds, _COUNTED_SECONDS) * (1 - share) / share


def scrub_rate(used_bytes: int, days: float, *, least: float = 1 << 20) -> float:
    """Return the bytes per second that read all data within nine tenths of `days`. Pure."""
    return max(least, used_bytes / (0.9 * days * 86400.0))
