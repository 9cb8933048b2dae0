"""Time in which this process, or all of its devices at once, stood still accuses no device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from hpstore.health.detect.evidence import Signs

_STALL_TICKS = 3.0  # a tick that comes so much later than it should: the process did not run
_REMEMBERED = 64
_HANG_SECONDS = 5.0  # calls in flight for longer look like a hang


class Stalls:
    """When the process was stopped or starved. Not thread-safe. `shared` counts vetoes."""

    def __init__(self, period_seconds: float) -> None:
        self.shared = 0
        self._period = period_seconds
        self._ticked: float | None = None
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # (end, seconds)

    def note(self, now_seconds: float) -> None:
        """A tick."""
        if self._ticked is not None:
            gap = now_seconds - self._ticked - self._period
            if gap > _STALL_TICKS * self._period:
                self._gaps.append((now_seconds, gap))
        self._ticked = now_seconds

    def excused(
        self, signs: Mapping[str, Signs], now_seconds: float, devices: int, parity: int
    ) -> dict[str, Signs]:
        """Signs without such time; no hang at all where more devices hang than parity replaces, of
        which there are so many besides: then it is the host, or a link."""
        found = {}
        for device, sign in signs.items():
            began = now_seconds - sign.oldest_seconds
            still = sum(seconds for end, seconds in self._gaps if end > began)
            oldest = max(0.0, sign.oldest_seconds - still)
            found[device] = replace(sign, oldest_seconds=oldest)
        hanging = [d for d, sign in found.items() if sign.oldest_seconds > _HANG_SECONDS]
        if len(hanging) > max(1, parity) and devices > 1:
            self.shared += 1
            for device in hanging:
                found[device] = replace(found[device], oldest_seconds=0.0)
        return found
