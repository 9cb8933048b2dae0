"""Devices that come back, and what other processes report: the policy by rounds."""

from __future__ import annotations

from dataclasses import replace

from hpstore.format.records import DeviceState
from hpstore.health import HealthState
from hpstore.health.policy.states import ActionKind, PolicyConfig, Role
from tests.unit.health_rounds import Policy

S = HealthState
AGENT = PolicyConfig(role=Role.AGENT)


def healed_away(policy: Policy) -> Policy:
    """d0 is away, evicted after the grace, and made up for."""
    policy.fact("d0", present=False)
    policy.round().round(after=15).round(after=900)
    assert policy.asked() == [(ActionKind.HEAL, "d0")]
    policy.fact("d0", pool_state=DeviceState.EVICTED)
    policy.round()
    policy.fact("d0", pool_state=DeviceState.HEALED)
    return policy.round()


def test_what_was_healed_while_it_was_away_is_readmitted_after_a_minute() -> None:
    """By the agent; then it is reconciled and on probation. Away again: the minute begins anew."""
    policy = healed_away(Policy(AGENT))
    policy.fact("d0", present=True)
    assert policy.round().asked() == []
    assert policy.round(after=59).asked() == []
    policy.fact("d0", present=False)
    policy.round()
    policy.fact("d0", present=True)
    assert policy.round().asked() == []
    assert policy.round(after=59).asked() == []
    assert policy.round(after=1).asked() == [(ActionKind.READMIT, "d0")]
    assert policy.round().asked() == []
    policy.fact("d0", pool_state=DeviceState.ONLINE, reconciled=True)
    assert policy.round().states() == {"d0": S.REBUILDING}
    assert policy.round().states() == {"d0": S.PROBATION}
    assert not policy.health().lapsed


def test_a_return_while_it_is_being_healed_is_readmitted_too() -> None:
    """It need not wait for the ten minutes until anything is asked again; nor is it healed more."""
    policy = Policy(AGENT)
    policy.fact("d0", present=False)
    policy.round().round(after=15).round(after=900)
    policy.fact("d0", pool_state=DeviceState.EVICTED)
    assert policy.round().asked() == [(ActionKind.HEAL, "d0")]
    policy.fact("d0", present=True)
    policy.round()
    assert policy.round(after=60).asked() == [(ActionKind.READMIT, "d0")]
    assert policy.round(after=700).asked() == [(ActionKind.READMIT, "d0")]


def test_what_was_evicted_otherwise_does_not_come_back_by_itself() -> None:
    """By an operator, or since it was faulty and there."""
    policy = Policy(AGENT)
    policy.fact("d0", pool_state=DeviceState.HEALED)
    assert policy.round(after=3600).round(after=3600).asked() == []
    policy = Policy(AGENT).round(faulted=["d0"])
    assert policy.round(faulted=["d0"], after=900).asked() == [(ActionKind.HEAL, "d0")]
    policy.fact("d0", pool_state=DeviceState.HEALED)
    assert policy.round(after=3600).round(after=3600).asked() == []


def test_a_process_does_not_readmit_rule_16() -> None:
    """PROTOCOL 16: that is a pool decision."""
    policy = Policy()
    policy.state = healed_away(Policy(AGENT)).state
    policy.now += 10_000
    policy.fact("d0", pool_state=DeviceState.HEALED)
    assert policy.round().round(after=3600).asked() == []


def test_faults_of_an_absence_are_forgiven_at_the_return() -> None:
    """A device that was pulled out fails every call; what counts is what it does now."""
    policy = Policy(AGENT).round(faulted=["d0"])
    assert policy.states() == {"d0": S.FAULTED}
    policy.fact("d0", present=False)
    policy.round(faulted=["d0"])
    assert policy.round(faulted=["d0"], after=15).states() == {"d0": S.REMOVED}
    policy.fact("d0", present=True)
    assert policy.round(faulted=["d0"]).states() == {"d0": S.REBUILDING}
    assert (ActionKind.FORGIVE, "d0") in policy.asked()
    assert policy.round(faulted=["d0"]).states() == {"d0": S.FAULTED}


def test_devices_made_up_for_count_for_nothing_in_guards_rule_17() -> None:
    """PROTOCOL 17: three of them do not keep a slow device from sitting out."""
    policy = Policy(AGENT)
    for device in ("d5", "d6", "d7"):
        policy.fact(device, pool_state=DeviceState.HEALED, present=False)
    policy.round(slow=["d0"]).round(slow=["d0"])
    assert policy.states()["d0"] is S.SITOUT
    assert policy.state.alarm == ""
    policy = Policy(AGENT)
    for device in ("d5", "d6", "d7"):
        policy.fact(device, pool_state=DeviceState.EVICTED, present=False)
    policy.round(slow=["d0"]).round(slow=["d0"])
    assert policy.states()["d0"] is S.SUSPECT
    assert "of 8 devices are bad" in policy.state.alarm


def test_a_report_drains_by_the_guards_leave_rule_17() -> None:
    """PROTOCOL 17: not while a rebuild runs, and not the one that an operator has ignored."""
    policy = Policy(AGENT)
    policy.facts = replace(policy.facts, busy="a rebuild")
    policy.fact("d0", reported="a process reports: 3 sit-outs within a day")
    assert policy.round().states() == {}
    assert "a rebuild is running" in policy.decisions[0].reason
    policy.facts = replace(policy.facts, busy="")
    assert policy.round().states() == {"d0": S.DRAINING}
    assert policy.asked() == [(ActionKind.DRAIN, "d0")]
    other = Policy()
    other.fact("d0", reported="a process reports: 3 sit-outs within a day")
    assert other.round().states() == {}
