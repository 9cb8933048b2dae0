"""Guards of voluntary removals, operators' words, and dry runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpstore.errors import MembershipError
from hpstore.format.records import DeviceState
from hpstore.health import HealthState
from hpstore.health.policy.operator_commands import Command, command
from hpstore.health.policy.states import ActionKind, PolicyConfig, PolicyState, Role
from tests.unit.health_rounds import WELL, Policy

S = HealthState


def order(policy: Policy, word: Command, device: str = "d0") -> Policy:
    """An operator's word."""
    found = command(policy.state, word, device, policy.facts, policy.now, policy.config)
    policy.state, policy.actions = found.state, list(found.actions)
    policy.decisions = list(found.decisions)
    return policy


def quick(**changes: object) -> PolicyConfig:
    """Without the guards of rate and of many bad ones."""
    return replace(
        PolicyConfig(removal_seconds=0.1, removals_per_hour_ratio=1.0, bad_ratio_most=1.0),
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("parity", "most"), [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_sit_outs_leave_a_reserve_of_parity_rule_17(parity: int, most: int) -> None:
    """PROTOCOL 17: m - 1 of a pool at the most, however many are slow; others stay suspect."""
    policy, everyone = Policy(quick(), parity=parity), [f"d{i}" for i in range(8)]
    for _ in range(5):
        policy.round(slow=everyone)
    states = list(policy.states().values())
    assert states.count(S.SITOUT) == most
    assert states.count(S.SUSPECT) == 8 - most


def test_what_is_lost_already_counts_rule_17() -> None:
    """And so do objects that are degraded, though all devices are there."""
    policy = Policy(quick())
    policy.fact("d7", present=False)
    policy.round(slow=["d0", "d1"]).round(slow=["d0", "d1"])
    assert list(policy.states().values()).count(S.SITOUT) == 1
    policy = Policy(quick())
    policy.facts = replace(policy.facts, losses_tolerated=1)
    policy.round(slow=["d0"]).round(slow=["d0"])
    assert policy.states() == {"d0": S.SUSPECT}
    assert "parity 3 allows 0" in policy.decisions[0].reason


def test_a_sit_out_ends_when_parity_is_needed_elsewhere_rule_17() -> None:
    """Two sit out of 5+3, two others die: the least slow is read again, then the other one."""
    policy = Policy(quick())
    for _ in range(3):
        policy.round(slow=["d0", "d1"])
    assert policy.states() == {"d0": S.SITOUT, "d1": S.SITOUT}
    policy.round(faulted=["d5"], slow=["d1"])
    assert policy.states() == {"d0": S.SUSPECT, "d1": S.SITOUT, "d5": S.FAULTED}
    assert "parity is needed" in next(d for d in policy.decisions if d.device == "d0").reason
    policy.round(faulted=["d5", "d6"], slow=["d1"])
    assert policy.states()["d1"] is S.SUSPECT


def test_one_device_is_removed_in_ten_minutes_rule_17() -> None:
    """PROTOCOL 17. The refusal is written once, not each round; nor is it reset by a restart."""
    policy = Policy(replace(PolicyConfig(), removals_per_hour_ratio=1.0)).sit_out("d0")
    policy.round(slow=["d1"]).round(slow=["d1"])
    assert policy.states() == {"d0": S.SITOUT, "d1": S.SUSPECT}
    assert "at the earliest in 580 s" in policy.decisions[0].reason
    assert policy.round(slow=["d1"]).decisions == []
    policy.state = PolicyState.decode(policy.state.encode(), where="state")
    assert policy.round(slow=["d1"], after=569).states()["d1"] is S.SUSPECT
    assert policy.round(slow=["d1"], after=1).states()["d1"] is S.SITOUT


def test_a_tenth_of_the_devices_is_removed_in_an_hour_rule_17() -> None:
    """One of eight, though ten minutes are over; the next one an hour after it."""
    policy = Policy().sit_out("d0").round(slow=["d1"]).round(slow=["d1"], after=1200)
    assert policy.states()["d1"] is S.SUSPECT
    assert "within the hour" in policy.decisions[0].reason
    policy.round(slow=["d1"], after=2400)
    assert policy.states()["d1"] is S.SITOUT


def test_nothing_is_removed_above_a_quarter_bad_rule_17() -> None:
    """PROTOCOL 17: three of eight. One alarm, not one a round; suspects are still found."""
    policy = Policy(replace(quick(), bad_ratio_most=0.25))
    slow = ["d0", "d1", "d2"]
    policy.round(slow=slow)
    assert policy.asked() == [(ActionKind.ALARM, "")]
    policy.round(slow=slow)
    assert policy.asked() == []
    assert set(policy.states().values()) == {S.SUSPECT}
    policy.round(slow=slow[:2])
    policy.round(slow=slow[:2], after=60)
    policy.round(slow=slow[:2]).round(slow=slow[:2])
    assert policy.state.alarm == ""
    assert policy.states() == {"d0": S.SITOUT, "d1": S.SITOUT}


def test_nothing_is_removed_while_something_runs() -> None:
    """A rebuild needs the reads, an upgrade the peace."""
    policy = Policy()
    policy.facts = replace(policy.facts, busy="a rebuild")
    policy.round(slow=["d0"]).round(slow=["d0"])
    assert policy.states() == {"d0": S.SUSPECT}
    assert "a rebuild is running" in policy.decisions[0].reason
    policy.facts = replace(policy.facts, busy="")
    assert policy.round(slow=["d0"]).states() == {"d0": S.SITOUT}


def test_an_operator_may_use_the_reserve_but_not_more() -> None:
    """Three of 5+3 sit out by hand, the fourth is refused and nothing changes."""
    policy = Policy()
    for device in ("d0", "d1", "d2"):
        order(policy, Command.SIT_OUT, device)
    before = policy.state
    with pytest.raises(MembershipError, match=r"parity replaces 3 more\. Nothing was changed"):
        order(policy, Command.SIT_OUT, "d3")
    assert policy.state == before
    policy.fact("d0", **WELL)
    assert policy.round(after=86400).states() == dict.fromkeys(("d0", "d1", "d2"), S.SITOUT)
    policy.round(faulted=["d7"])
    assert list(policy.states().values()).count(S.SITOUT) == 2


def test_readmit_ends_what_was_said_and_pinned() -> None:
    """And its strikes; the detector starts anew."""
    policy = order(Policy().sit_out(), Command.READMIT)
    assert policy.states() == {}
    assert [action.kind for action in policy.actions] == [ActionKind.READMIT, ActionKind.FORGIVE]
    assert (policy.health().sitouts, policy.health().level) == ((), 0)
    flapping = Policy(replace(PolicyConfig(), release_seconds=1.0))
    for _ in range(3):
        flapping.round(suspect=["d0"]).round().round()
    flapping.round(suspect=["d0"])
    assert flapping.health().pinned
    order(flapping, Command.READMIT)
    assert not flapping.health().pinned
    assert flapping.round().states() == {}


def test_what_is_lost_returns_by_reconciling() -> None:
    """An operator's word does not make columns valid; a drain of it is refused."""
    policy = Policy().round(faulted=["d0"])
    with pytest.raises(MembershipError, match="is faulted: there is nothing to drain"):
        order(policy, Command.DRAIN)
    assert order(policy, Command.READMIT).states() == {"d0": S.REBUILDING}


def test_an_operators_drain_is_asked_of_the_pool() -> None:
    """And confirmed by its record."""
    policy = order(Policy(replace(PolicyConfig(), role=Role.AGENT)), Command.DRAIN)
    assert policy.asked() == [(ActionKind.DRAIN, "d0")]
    policy.fact("d0", pool_state=DeviceState.DRAINING)
    assert policy.round().states() == {"d0": S.DRAINING}
    assert policy.health().confirmed


def test_maintenance_is_left_alone() -> None:
    """No verdict and no absence moves it, until it is readmitted."""
    policy = order(Policy(), Command.MAINTENANCE)
    policy.fact("d0", present=False)
    policy.round(faulted=["d0"]).round(after=3600, slow=["d0"])
    assert policy.states() == {"d0": S.MAINTENANCE}
    policy.fact("d0", present=True)
    assert order(policy, Command.READMIT).states() == {}


def test_an_ignored_device_may_be_slow_but_not_faulted() -> None:
    """An operator knows it."""
    policy = order(Policy().round(suspect=["d0"]), Command.IGNORE)
    assert policy.round(slow=["d0"]).states() == {}
    assert policy.round(faulted=["d0"]).states() == {"d0": S.FAULTED}


def test_what_is_accepted_is_calibrated_anew() -> None:
    """Accept ends an ignore, and asks the detector."""
    policy = order(order(Policy(), Command.IGNORE), Command.ACCEPT)
    assert policy.asked() == [(ActionKind.ACCEPT, "d0")]
    assert not policy.health().ignored


def test_an_unknown_device_is_refused_by_name() -> None:
    """With those that there are."""
    with pytest.raises(MembershipError, match="device x9 is not of this pool; it has d0, d1"):
        order(Policy(), Command.DRAIN, "x9")


def test_a_dry_run_tells_and_does_nothing() -> None:
    """States go on as if; every action and line says so."""
    policy = Policy(replace(PolicyConfig(), dry_run=True)).probation()
    assert policy.states() == {"d0": S.PROBATION}
    assert [action.dry_run for action in policy.actions] == [True]
    assert [line.dry_run for line in policy.decisions] == [True]
