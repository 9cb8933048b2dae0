"""What a policy remembers, where the wall clock is set or its process was stopped (PROTOCOL 17).

Times are seconds since 1970, as they outlast a restart and are compared with what other processes
report. Durations must not be the clock's: a step of it would end every grace at once.
"""

from __future__ import annotations

import math

from hpstore.health.policy.states import PolicyState

_SLEWED_SECONDS = 1.0  # less is no step: a clock that is slewed, and rounding


class PolicyClock:
    """Of one policy; one thread.

    `gap_seconds`: of a longer pause between two rounds no more counts. The process was stopped, and
    has seen nothing.
    """

    def __init__(self, gap_seconds: float = math.inf) -> None:
        self._gap = gap_seconds
        self._last: tuple[float, float] | None = None  # monotonic and wall clock, of the last round

    def follow(
        self, state: PolicyState, *, monotonic_seconds: float, wall_seconds: float
    ) -> PolicyState:
        """Return what is remembered, with its times moved by what the wall clock has gone beyond
        the time that was observed since the last call.

        After a restart only the wall clock is known, so the first call moves nothing.
        """
        last, self._last = self._last, (monotonic_seconds, wall_seconds)
        if last is None:
            return state
        observed = min(max(0.0, monotonic_seconds - last[0]), self._gap)
        step = wall_seconds - last[1] - observed
        return state if abs(step) < _SLEWED_SECONDS else state.moved(step)
