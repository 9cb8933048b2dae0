"""What an operator says goes before what the policy thinks, but not before parity. Pure."""

from __future__ import annotations

from enum import StrEnum

from hpstore.errors import MembershipError
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.guards import kept_off, lost, weight
from hpstore.health.policy.health_policy import PolicyTurn
from hpstore.health.policy.states import (
    ActionKind,
    PolicyConfig,
    PolicyOutcome,
    PolicyState,
    PoolFacts,
)

_LOST = (HealthState.FAULTED, HealthState.REMOVED, HealthState.EVICTED, HealthState.REBUILDING)


class Command(StrEnum):
    """An operator's words."""

    SIT_OUT = "sit-out"  # until readmitted
    DRAIN = "drain"
    READMIT = "readmit"  # ends a sit-out, a drain, maintenance, and what pinned or ignored it
    MAINTENANCE = "maintenance"  # no automation for this device
    IGNORE = "ignore"  # never act on its slowness
    ACCEPT = "accept"  # what it does now is normal for it


def command(
    state: PolicyState,
    word: Command,
    device: str,
    facts: PoolFacts,
    now_seconds: float,
    config: PolicyConfig,
    *,
    reason: str = "",
) -> PolicyOutcome:
    """Obey, and note it like any decision, with a `reason` or as an operator's word.

    A sit-out or maintenance needs parity for it, without reserve: raises MembershipError when there
    is none, or for a device that the pool does not have. Nothing has changed then.
    """
    if device not in facts.devices:
        known = ", ".join(sorted(facts.devices))
        raise MembershipError(f"device {device} is not of this pool; it has {known}")
    turn = PolicyTurn(state, facts, now_seconds, config)
    health, said = turn.devices[device], reason or f"by an operator: {word}"
    if word in (Command.SIT_OUT, Command.MAINTENANCE, Command.DRAIN):
        _check(turn, device, word)
    if word is Command.SIT_OUT:
        turn.enter(device, HealthState.SITOUT, said, manual=True, pinned=False)
    elif word is Command.MAINTENANCE:
        turn.enter(device, HealthState.MAINTENANCE, said)
    elif word is Command.DRAIN:
        turn.enter(device, HealthState.DRAINING, said, pinned=False)
        turn.ask(device, ActionKind.DRAIN, said)
    elif word is Command.READMIT:
        if health.state in _LOST:
            turn.enter(device, HealthState.REBUILDING, said)
        else:
            turn.enter(device, HealthState.ONLINE, said)
        turn.set(
            device,
            pinned=False,
            ignored=False,
            level=0,
            sitouts=(),
            sat_out=(),
            changes=(),
            pardoned_seconds=turn.now,
        )
        turn.act(ActionKind.READMIT, device, said)
        turn.act(ActionKind.FORGIVE, device, said)
    else:
        turn.set(device, ignored=word is Command.IGNORE)
        turn.log(device, health.state, health.state, said)
        if word is Command.ACCEPT:
            turn.act(ActionKind.ACCEPT, device, said)
    return turn.outcome()


def _check(turn: PolicyTurn, device: str, word: Command) -> None:
    """Raise MembershipError unless parity replaces the device, too."""
    if turn.devices[device].state in _LOST:
        raise MembershipError(
            f"device {device} is {turn.devices[device].state}: there is nothing to {word}. "
            "Nothing was changed."
        )
    off = kept_off(turn.devices, turn.facts) - {device}
    gone, parity = lost(turn.devices, turn.facts), turn.facts.parity
    spare = parity - weight(gone, turn.facts)
    if turn.facts.losses_tolerated is not None:
        spare = min(spare, turn.facts.losses_tolerated)
    if len(off) + 1 > spare:
        raise MembershipError(
            f"device {device} cannot {word}: {len(off)} are kept off and {len(gone)} lost already, "
            f"parity replaces {spare} more. Nothing was changed. Readmit or rebuild others first."
        )
