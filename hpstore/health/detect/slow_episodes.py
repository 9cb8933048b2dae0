"""How long slowness lasts among devices of a kind, and whether acting on it gains. Pure.

A device that pauses for five seconds is well again before reads that avoid it have gained anything.
So the lengths of episodes that ended by themselves are remembered: what is left of one that has
lasted for a while is the mean of what was left of those that lasted as long, and, where none did,
as long as is usual for faults.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hpstore.health.detect.slow_config import SlowConfig

_REMEMBERED = 64
_FORGET_SECONDS = 3600.0
_SLACK = 1.1  # what lasted about as long may end now


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGain:
    """What avoiding a device is expected to bring and to cost, in seconds of one stream of reads.

    `lasted_seconds` and `expected_seconds` are of its slowness until now and from now on.
    """

    lasted_seconds: float = 0.0
    expected_seconds: float = 0.0
    saved_seconds: float = 0.0
    cost_seconds: float = 0.0
    gains: bool = False


class SlowEpisodes:
    """Lengths of the last episodes of a group of devices. Not thread-safe."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # (when, seconds)

    def note(self, now_seconds: float, lasted_seconds: float) -> None:
        """An episode has ended."""
        self._ended.append((now_seconds, lasted_seconds))

    def gain(
        self, now_seconds: float, lasted_seconds: float, ratio: float, config: SlowConfig
    ) -> ActionGain:
        """Of avoiding a device that is `ratio` times as slow as its peers and has been so long.

        It gains when reads save more than the detour costs, also while the device is avoided
        though it is well again, and when more of that time is slow than well.
        """
        while self._ended and now_seconds - self._ended[0][0] > _FORGET_SECONDS:
            self._ended.popleft()
        at_risk = [d for _, d in self._ended if _SLACK * d >= lasted_seconds]
        longer = [max(0.0, d - lasted_seconds) for d in at_risk]
        weight, lag = config.expected_weight, config.release_lag_seconds
        expected = max(config.expected_seconds, lasted_seconds)
        expected = (weight * expected + sum(longer)) / (weight + len(longer))
        saved = (ratio - 1) * expected
        cost = config.detour_ratio * (expected + lag)
        return ActionGain(
            lasted_seconds=lasted_seconds,
            expected_seconds=expected,
            saved_seconds=saved,
            cost_seconds=cost,
            gains=saved > cost and expected >= lag,
        )
