"""What processes of this node have decided about devices, for people. Pure but for who lives."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.states import Decision, Role
from hpstore.runtime.process_identity import may_live

_TOLD_SECONDS = 3600.0  # after that a process that lives would have said something else


def verdicts_of_processes(
    decisions: Collection[Decision], now_seconds: float, lives: Callable[[str], bool] = may_live
) -> dict[str, Decision]:
    """The last decision of a process about each device that is not well for it.

    Of each process its last word counts, while it `lives` and for an hour at most: one that is gone
    reads nothing any more. Of several processes the latest is given.
    """
    last: dict[tuple[str, str], Decision] = {}
    for said in sorted(decisions, key=lambda decision: decision.at_seconds):
        if said.role is Role.PROCESS:
            last[said.device, said.process] = said
    return {
        said.device: said
        for said in sorted(last.values(), key=lambda decision: decision.at_seconds)
        if said.becomes is not HealthState.ONLINE
        and now_seconds - said.at_seconds <= _TOLD_SECONDS
        and lives(said.process)
    }
