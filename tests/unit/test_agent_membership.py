"""What the agent does when others change the membership."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hpstore.agent import AgentConfig
from hpstore.agent.background_jobs import JobKind
from hpstore.format.records import DeviceState
from hpstore.health import HealthState
from tests.unit.tended import Tended

S = HealthState


def test_what_an_operator_evicts_stays_out(tended: Tended) -> None:
    """Though its device answers."""
    tended.rounds(10)
    tended.pool.evict("memory://d3")
    tended.rounds(600, step=20)
    assert 3 not in tended.members()
    assert tended.states() == {3: S.EVICTED}
    assert tended.whole()


def test_an_idle_agent_follows_what_others_make_of_the_membership(tmp_path: Path) -> None:
    """An idle agent never noticed evict and add: it saw the old members for 41 minutes,
    and all their objects whole. One round of five seconds is enough, long before a probe is due."""
    config = AgentConfig(scrub_days=0.0, smart_hours=0.0, probe_seconds=1e6, survey_seconds=1e6)
    tended = Tended(tmp_path, config=config)
    tended.rounds(15)
    with tended.harness.open() as other:
        url = tended.harness.columns("large")[0][0]
        other.evict(url)
        added = other.add_device("memory://d7")
    tended.rounds(5, work=False)
    assert int(url.rpartition("d")[2]) not in tended.members()
    assert added in tended.pool.admin.devices.places
    condition = tended.agent.eyes.condition()
    assert condition is not None
    assert condition.degraded
    tended.stop()


class _Waits(threading.Event):
    """A stop that is never set; what happens while it is waited for the second time."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.waited: list[float] = []
        self._meanwhile = meanwhile

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        if len(self.waited) == 2:
            self._meanwhile()
        return len(self.waited) > 100


def test_between_long_rounds_the_membership_is_followed_within_five_seconds(
    tmp_path: Path,
) -> None:
    """Whatever tick_seconds says."""
    config = AgentConfig(scrub_days=0.0, smart_hours=0.0, tick_seconds=600.0)
    tended = Tended(tmp_path, config=config)
    tended.rounds(15)
    with tended.harness.open() as other:
        stop = _Waits(lambda: other.evict("memory://d3"))
        tended.agent._rest(stop)
    assert len(stop.waited) == 2
    assert sum(stop.waited) <= 5.0
    tended.stop()


def test_a_shrunk_pool_grows_back(tmp_path: Path) -> None:
    """With five devices for 3+2, the loss of one re-lays objects as 2+2; its return widens them."""
    tended = Tended(tmp_path, devices=5)
    tended.rounds(10)
    tended.harness.lose(["memory://d1"])
    tended.rounds(960, step=20)
    assert tended.pool.stat("large").data == 2
    assert tended.whole()
    tended.harness.bring_back()
    tended.rounds(400, step=20)
    assert tended.pool.stat("large").data == 3
    assert tended.whole()
    tended.stop()


def test_a_device_that_was_readmitted_without_an_agent_has_its_grace_rule_17(
    tended: Tended,
) -> None:
    """PROTOCOL 17: the agent remembered that it was evicted, and evicted it again at once."""
    tended.rounds(10)
    tended.pool.evict("memory://d3")
    tended.rounds(60)
    assert tended.states() == {3: S.EVICTED}
    tended.stop()
    with tended.harness.open() as pool:
        pool.readmit("memory://d3")
    tended.harness.lose(["memory://d3"])
    tended.start()
    tended.rounds(600, step=20)
    assert 3 in tended.members()
    assert tended.states() == {3: S.REMOVED}
    tended.rounds(400, step=20)
    assert 3 not in tended.members()
    tended.harness.bring_back()
    tended.rounds(600, step=20)
    assert tended.states() == {}


def test_a_device_is_taken_back_from_an_eviction_that_a_kill_cut_short(tended: Tended) -> None:
    """An eviction closes the device first, as a drain does; the next agent took it for one."""
    tended.rounds(10)
    tended.harness.lose(["memory://d0"])
    tended.rounds(60)
    tended.rounds(900, step=20, work=False)
    assert JobKind.HEAL in {job.kind for job in tended.agent.jobs.waiting()}
    tended.pool.admin.devices.begin_drain(
        "memory://d0"
    )  # so far the eviction comes, then the agent is killed
    tended.stop()
    tended.harness.bring_back()
    tended.start()
    tended.rounds(900, step=20)
    assert tended.states() == {}
    assert len(tended.members()) == 7
    assert {member.state for member in tended.pool.admin.record.members} == {DeviceState.ONLINE}
    assert tended.whole()
