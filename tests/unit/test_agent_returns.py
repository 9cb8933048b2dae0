"""What is taken back by itself, and what stays as an operator wants it (PROTOCOL 16, 17)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstore.agent.background_jobs import JobKind, Jobs
from hpstore.errors import LockTimeout
from hpstore.format.records import DeviceState
from hpstore.health import HealthState
from hpstore.health.policy.states import ActionKind, PolicyConfig, Role
from hpstore.pool.pool_devices import PoolDevices
from tests.unit.health_rounds import Policy
from tests.unit.tended import Tended

S = HealthState
AGENT = PolicyConfig(role=Role.AGENT)


def events(tended: Tended) -> str:
    return "\n".join(event.text for event in tended.agent.jobs.events())


def test_a_drain_after_an_eviction_that_was_called_off_is_the_operators_rule_16(
    tmp_path: Path,
) -> None:
    """1+1: a disk is unplugged for 20 s, so no parity is left and an eviction is asked for; it is
    back before that. When the operator then drained it, the agent took it back at once."""
    tended = Tended(tmp_path, data=1, parity=1, devices=4)
    tended.rounds(10)
    url = tended.harness.columns("large")[0][0]
    tended.harness.lose([url])
    tended.rounds(25, work=False)
    assert JobKind.HEAL in {job.kind for job in tended.agent.jobs.waiting()}
    tended.harness.bring_back()
    tended.rounds(20, work=False)
    tended.agent.jobs.run_all(1)  # the rebuild that reconciles it waits, and may take hours
    assert "called off, the device is back" in events(tended)
    tended.rounds(5, work=False)
    tended.pool.admin.devices.begin_drain(url)
    tended.rounds(20, work=False)
    tended.agent.finish_jobs()
    assert f"readmit of {url}" not in events(tended)
    members = tended.pool.admin.record.members
    assert url not in {m.url for m in members if m.state is DeviceState.ONLINE}
    assert tended.whole()
    tended.stop()


def test_what_an_operator_evicts_after_the_agent_could_not_stays_out_rule_16() -> None:
    """Its own eviction was refused, so what comes back is the operator's to take back."""
    policy = Policy(AGENT)
    policy.fact("d0", present=False)
    policy.round().round(after=20.0).round(after=900.0)
    assert (ActionKind.HEAL, "d0") in policy.asked()
    policy.fact("d0", leaving=True)
    policy.round()
    policy.fact("d0", leaving=False)  # the job has ended, and the device is a member still
    policy.round()
    assert not policy.health().lapsed
    policy.fact("d0", pool_state=DeviceState.EVICTED)
    policy.round()
    policy.fact("d0", present=True)
    policy.round().round(after=600.0)
    assert (ActionKind.READMIT, "d0") not in policy.asked()
    assert policy.states() == {"d0": S.EVICTED}


def test_what_this_agent_evicted_for_being_away_comes_back() -> None:
    """Its job was under way for several rounds."""
    policy = Policy(AGENT)
    policy.fact("d0", present=False)
    policy.round().round(after=20.0).round(after=900.0)
    policy.fact("d0", leaving=True)
    policy.round().round()
    policy.fact("d0", leaving=False, pool_state=DeviceState.EVICTED)
    policy.round()
    policy.fact("d0", present=True)
    policy.round().round(after=600.0)
    assert (ActionKind.READMIT, "d0") in policy.asked()


def test_a_disk_that_is_drained_and_then_away_stays_out_rule_16() -> None:
    """It left while an operator drained it. The agent evicts it, as it is away, and does not take
    it back when it answers."""
    policy = Policy(AGENT)
    policy.fact("d0", pool_state=DeviceState.DRAINING)
    policy.round()
    policy.fact("d0", present=False)
    policy.round().round(after=20.0).round(after=900.0)
    assert (ActionKind.HEAL, "d0") in policy.asked()
    policy.fact("d0", leaving=True)
    policy.round()
    policy.fact("d0", leaving=False, pool_state=DeviceState.EVICTED)
    policy.round()
    policy.fact("d0", present=True)
    policy.round().round(after=600.0)
    assert (ActionKind.READMIT, "d0") not in policy.asked()


@pytest.mark.parametrize("confirmations", [1, 2])
def test_a_device_that_is_back_while_its_eviction_waits_for_a_lock_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confirmations: int
) -> None:
    """Whether it is back is looked at again before each membership is stored."""
    tended = Tended(tmp_path)
    tended.rounds(10)
    tended.harness.lose(["memory://d2"])
    tended.rounds(40)
    tended.rounds(900, step=20, work=False)
    plain, asked = Jobs._confirm_away, list[int]()

    def back(jobs: Jobs, leaving: list[str]) -> None:
        asked.append(1)
        if len(asked) == confirmations:
            tended.harness.bring_back()
            tended.rounds(20, work=False)
        plain(jobs, leaving)

    monkeypatch.setattr(Jobs, "_confirm_away", back)
    tended.agent.finish_jobs()
    assert "not evicted yet: it answers again" in events(tended)
    assert 2 in tended.members()
    tended.rounds(900, step=20)
    assert tended.states() == {}
    assert {m.state for m in tended.pool.admin.record.members} == {DeviceState.ONLINE}
    assert tended.whole()
    tended.stop()


def test_a_drain_that_the_agent_ends_first_is_a_drain(
    tended: Tended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's command said that the device was taken back or evicted, though all went well
    (exit code 33 of `hpstore drain` beside a running agent)."""
    tended.rounds(10)
    plain = PoolDevices._end_drain

    def agent_first(devices: PoolDevices, *args: object, **named: object) -> int | None:
        monkeypatch.undo()
        tended.rounds(120)
        assert 3 not in tended.members()
        return plain(devices, *args, **named)  # type: ignore[arg-type]

    with tended.harness.open() as operator:
        monkeypatch.setattr(PoolDevices, "_end_drain", agent_first)
        assert operator.drain("memory://d3") >= 0
        left = operator.admin.devices.find("memory://d3")
        assert left.state is DeviceState.HEALED
    assert tended.whole()


def test_a_rebuild_that_never_ran_is_tried_again_soon(
    tended: Tended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process held the pool: that counted as a rebuild that could do nothing, which is
    tried again after an hour."""
    tended.rounds(10)
    url = tended.harness.columns("large")[0][0]
    tended.pool.evict(url)

    def busy(*_: object, **__: object) -> object:
        raise LockTimeout("rebuild: another process is at work. Nothing was changed.")

    monkeypatch.setattr(type(tended.pool.admin), "rebuild", busy)
    tended.rounds(60)
    assert "rebuild was not done" in events(tended)
    monkeypatch.undo()
    tended.rounds(400, step=20)
    assert tended.whole()
