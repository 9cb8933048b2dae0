"""Agents of several hosts: one decides, each looks after its own disks (PROTOCOL 17)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstore.agent.background_jobs import BackgroundJob, JobKind
from hpstore.agent.operator_requests import give_order
from hpstore.agreement.registers import KEEPER
from hpstore.cli.pool_verdict import agent_sight
from hpstore.cli.status_report import host_lines
from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import LockTimeout, RegistersUnavailable
from hpstore.format.records import DeviceState
from hpstore.health.policy.operator_commands import Command
from hpstore.maintenance import dependents
from hpstore.membership import changes
from hpstore.membership.pool_registers import PoolRegisters
from tests.unit.agents_of_hosts import HostAgents
from tests.unit.tended import Tended


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[HostAgents]:
    made = HostAgents(tmp_path)
    yield made
    made.stop()


def events(fleet: HostAgents, name: str) -> str:
    return "\n".join(event.text for event in fleet.agents[name].jobs.events())


def test_one_agent_decides_and_the_others_observe_their_own_disks(fleet: HostAgents) -> None:
    """The keeper probes all and walks the keys; the others do neither."""
    fleet.start("a", "b", "c")
    fleet.rounds(60.0)
    assert fleet.keepers() == "a"
    a, b = fleet.agents["a"], fleet.agents["b"]
    assert set(a.eyes.seen()) == fleet.ids("abcd")
    assert set(b.eyes.seen()) == fleet.ids("b")
    assert a.eyes.walked is not None
    assert b.eyes.walked is None
    assert str(fleet.status["b"].keeper).startswith("a (process ")


def test_a_second_agent_of_one_run_directory_is_refused(fleet: HostAgents) -> None:
    fleet.start("a")
    with pytest.raises(LockTimeout, match=r"agent\.lock"):
        fleet.start("a")


def test_an_agent_on_one_host_decides_at_once_and_leaves_no_record(tended: Tended) -> None:
    """As before: no election, no wait, no byte in a register."""
    tended.rounds(5.0)
    assert not tended.agent.keeper.shared
    assert tended.agent.keeper.decides
    found = tended.pool.admin.registers.update_own(KEEPER, lambda _: None, what="a test")
    assert found.value is None
    assert tended.status is not None
    assert tended.status.keeper.alone
    assert tended.status.hosts == ()


def test_a_host_is_waited_for_and_then_leaves_in_one_generation(fleet: HostAgents) -> None:
    """PROTOCOL 17: for 15 minutes only objects without parity are rebuilt; then it is evicted by
    its name, and every object is whole without it."""
    fleet.start("a", "c")
    fleet.rounds(30.0)
    before = fleet.generation()
    fleet.harness.lose(fleet.disks("b"))
    fleet.rounds(880.0, step=20.0)
    assert fleet.evicted() == set()
    assert fleet.generation() == before
    (host,) = [row for row in fleet.status["a"].hosts if row.status.host == "host-b"]
    assert host.state.startswith("away for 8")
    assert "waited for" in host.state
    fleet.rounds(60.0)
    assert fleet.evicted() == {"host-b"}
    assert "heal of domain:host-b" in events(fleet, "a")
    assert "heal" not in events(fleet, "c")
    gone = {m.since_ms for m in fleet.pools["a"].admin.record.evicted}
    assert len(gone) == 1  # both left in one generation
    fleet.rounds(60.0)
    assert fleet.whole()


def test_a_host_that_restarts_in_time_costs_no_rebuild(fleet: HostAgents) -> None:
    fleet.start("a")
    fleet.rounds(30.0)
    before = fleet.generation()
    fleet.harness.lose(fleet.disks("b"))
    fleet.rounds(600.0, step=20.0)
    fleet.harness.bring_back()
    fleet.rounds(1200.0, step=20.0)
    assert fleet.generation() == before
    assert fleet.whole()


def test_a_wall_clock_that_jumps_evicts_no_host(fleet: HostAgents) -> None:
    """It jumps by a day; five minutes have passed."""
    fleet.start("a")
    fleet.rounds(30.0)
    fleet.harness.lose(fleet.disks("b"))
    fleet.rounds(150.0)
    fleet.clock.now_ms += 86_400_000
    fleet.rounds(150.0)
    assert fleet.evicted() == set()


def test_a_keeper_that_was_paused_evicts_nobody_for_what_it_did_not_see(fleet: HostAgents) -> None:
    """Alone, paused for an hour: it saw the host away for a minute."""
    fleet.start("a")
    fleet.rounds(30.0)
    fleet.harness.lose(fleet.disks("b"))
    fleet.rounds(60.0)
    fleet.clock.advance(3600.0)
    fleet.rounds(60.0)
    assert fleet.evicted() == set()


def test_nothing_is_evicted_while_more_than_parity_is_away(tmp_path: Path) -> None:
    """Two of five hosts, which weigh 4: not after an hour; one of them when the other is back."""
    fleet = HostAgents(tmp_path, hosts=5)
    fleet.start("a")
    fleet.rounds(30.0)
    before = fleet.generation()
    fleet.harness.lose(fleet.disks("bc"))
    fleet.rounds(3600.0, step=20.0)
    assert fleet.pools["a"].admin.record.generation == before
    assert set(fleet.agents["a"].hosts.gone()) == {"host-b", "host-c"}
    said = [decision.reason for decision in fleet.status["a"].decisions]
    assert any("4 columns of an object are away, and parity replaces 2" in text for text in said)
    assert "not evicted" not in events(fleet, "a")  # it was not even tried
    fleet.harness.bring_back()
    fleet.rounds(60.0)  # what is back is judged, and takes part again
    fleet.harness.lose(fleet.disks("b"))
    fleet.rounds(1200.0, step=20.0)
    assert fleet.evicted() == {"host-b"}
    fleet.rounds(120.0, step=20.0)
    assert fleet.whole()
    fleet.stop()


def test_a_paused_keeper_is_succeeded_and_does_nothing_when_it_is_back(fleet: HostAgents) -> None:
    """A has queued the eviction, and is stopped for an hour. B takes over after 15 s, waits for the
    host by itself, evicts it. What A has queued is not done: also not for another host."""
    fleet.start("a", "c")
    fleet.rounds(30.0)
    fleet.harness.lose(fleet.disks("b"))
    fleet.rounds(880.0, "a", "c", step=20.0)
    fleet.rounds(60.0, "a", "c", work=False)  # queued, and not begun
    waiting = fleet.agents["a"].jobs.waiting()
    assert (waiting[0].kind, waiting[0].domain) == (JobKind.HEAL, "host-b")
    fleet.rounds(5.0, "c")
    assert fleet.keepers() == "a"  # nobody can know better yet
    fleet.rounds(20.0, "c")
    assert fleet.keepers() == "c"
    fleet.rounds(860.0, "c", step=20.0)
    assert fleet.evicted() == set()  # c has not seen b away for long enough
    fleet.rounds(60.0, "c")
    assert fleet.evicted() == {"host-b"}
    generation = fleet.generation()
    fleet.agents["a"].jobs.submit(BackgroundJob(kind=JobKind.HEAL, device=min(fleet.ids("d"))))
    fleet.agents["a"].finish_jobs()  # before its next round
    assert fleet.generation() == generation
    assert "is not the keeper of the pool any more" in events(fleet, "a")
    fleet.rounds(60.0)
    assert fleet.keepers() == "c"
    assert fleet.agents["a"].jobs.waiting() == []
    assert fleet.whole()


def test_a_keeper_that_is_paused_in_an_eviction_does_not_store_it(
    fleet: HostAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has closed the host's disks and judged; then it is stopped, another agent takes over and
    the host comes back. The eviction is refused, its disks take columns again."""
    fleet.start("a", "c")
    fleet.rounds(30.0)
    fleet.harness.lose(fleet.disks("b"))
    plain, back = dependents.endangered, list[float]()

    def paused(*arguments: object, **named: object) -> list[str]:
        found = plain(*arguments, **named)  # type: ignore[arg-type]
        monkeypatch.undo()
        for device in fleet.harness.devices.values():
            device.restart()  # its locks are its own host's, which is gone for the others
        fleet.harness.bring_back()
        fleet.rounds(60.0, "c", work=False)
        back.append(fleet.clock.monotonic())
        return found

    monkeypatch.setattr(changes, "endangered", paused)
    while not back:
        fleet.rounds(20.0, "a", step=20.0)
    assert "not evicted yet: this agent is not the keeper" in events(fleet, "a")
    assert fleet.keepers() == "c"
    assert fleet.evicted() == set()
    fleet.rounds(60.0)
    members = fleet.pools["c"].admin.record.members
    assert {m.state for m in members} == {DeviceState.ONLINE}
    assert fleet.whole()


def kill_in_an_eviction(fleet: HostAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL of a's agent between the generation that closes a host and the one without it; the
    host comes back."""

    def killed(*_: object, **__: object) -> list[str]:
        raise SimulatedCrash

    monkeypatch.setattr(changes, "endangered", killed)
    with pytest.raises(SimulatedCrash):
        fleet.rounds(960.0, "a", step=20.0)
    monkeypatch.undo()
    fleet.kill("a")
    for device in fleet.harness.devices.values():
        device.restart()
    fleet.harness.bring_back()


def test_what_a_keeper_closed_before_it_was_killed_is_opened_by_its_successor(
    fleet: HostAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the note the successor would take it for a drain, and empty the host."""
    fleet.start("a", "c")
    fleet.rounds(30.0)
    fleet.harness.lose(fleet.disks("b"))
    kill_in_an_eviction(fleet, monkeypatch)
    with fleet.harness.open(read_only=True) as pool:
        closed = [m.domain for m in pool.admin.record.members if m.state is DeviceState.DRAINING]
    assert closed == ["host-b", "host-b"]
    fleet.rounds(120.0)
    assert fleet.keepers() == "c"
    members = fleet.pools["c"].admin.record.members
    assert {m.state for m in members} == {DeviceState.ONLINE}
    assert len(members) == 8
    assert fleet.agents["c"].keeper.left_closed is False


@pytest.mark.parametrize("drained", [0, 1])
def test_a_host_of_which_a_disk_was_drained_is_opened_by_the_successor(
    fleet: HostAgents, monkeypatch: pytest.MonkeyPatch, drained: int
) -> None:
    """Whichever of its disks it was: the note on the host went by the first one alone, and the
    other stayed closed, to be emptied."""
    fleet.start("a", "c")
    fleet.rounds(30.0)
    first, second = sorted(fleet.ids("b"))
    fleet.pools["a"].admin.devices.begin_drain((first, second)[drained])
    fleet.harness.lose(fleet.disks("b"))
    kill_in_an_eviction(fleet, monkeypatch)
    fleet.rounds(120.0)
    assert fleet.keepers() == "c"
    members = {m.device_id: m.state for m in fleet.pools["c"].admin.record.members}
    assert members[(second, first)[drained]] is DeviceState.ONLINE
    assert fleet.agents["c"].keeper.left_closed is False


def test_without_registers_nothing_is_evicted_and_known_damage_is_repaired(
    fleet: HostAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are away for an hour: the last keeper repairs on, decides nothing, and decides again
    when they are back."""
    fleet.start("a", "c")
    fleet.rounds(30.0)

    def away(*_: object, **__: object) -> object:
        raise RegistersUnavailable("no majority of etcd answers.")

    monkeypatch.setattr(PoolRegisters, "update_own", away)
    for name in "ac":  # looked up when it was made
        fleet.agents[name].keeper._election._update_register = away  # type: ignore[assignment]
    fleet.harness.lose(fleet.disks("b"))
    url, path = fleet.harness.columns("large")[0]
    if url in fleet.disks("b"):
        url, path = next(x for x in fleet.harness.columns("large") if x[0] not in fleet.disks("b"))
    before = fleet.generation()
    fleet.rounds(30.0)
    assert fleet.keepers() == ""
    del fleet.harness.devices[url].files[path]  # damage that a walk finds
    fleet.rounds(3600.0, step=20.0)
    assert fleet.generation() == before
    assert len([x for x in fleet.harness.columns("large") if x[0] not in fleet.disks("b")]) >= 4
    assert "no majority of etcd" in str(fleet.status["c"].keeper)
    monkeypatch.undo()
    for name in "ac":
        update = fleet.pools[name].admin.registers.update_own
        fleet.agents[name].keeper._election._update_register = update
    fleet.rounds(30.0)
    assert len(fleet.keepers()) == 1


def test_each_agent_scrubs_the_disks_of_its_host_and_repairs_what_it_finds(tmp_path: Path) -> None:
    """A flipped bit on a host's disk is found by its agent alone; no byte of its columns is read
    by another agent's scrub."""
    fleet = HostAgents(tmp_path, scrub_days=1.0)
    url, path = fleet.harness.columns("large")[0]
    mine = next(name for name in fleet.names if url in fleet.disks(name))
    other = next(name for name in fleet.names if name != mine)
    fleet.start(other, mine)
    file = fleet.harness.devices[url].files[path]
    file.bytes[len(file.bytes) // 2] ^= 1
    fleet.rounds(60.0, other)
    assert fleet.agents[other].memory.scrub_ended_ms
    assert "damaged" not in events(fleet, other)
    fleet.rounds(60.0, other, mine)
    assert "1 damaged columns found, 1 objects repaired" in events(fleet, mine)
    assert fleet.whole()
    with fleet.harness.open() as pool:
        assert pool.scrub().clean
    fleet.stop()


def test_an_order_to_an_agent_that_does_not_decide_names_the_keeper(fleet: HostAgents) -> None:
    fleet.start("a", "c")
    fleet.rounds(30.0)
    directory = fleet.pools["c"].admin.state_directory
    give_order(directory, Command.DRAIN, min(fleet.ids("d")), fleet.clock)
    fleet.rounds(10.0)
    assert "drain is for the keeper of the pool, which is a (process" in events(fleet, "c")
    assert fleet.agents["c"].memory.orders_done == 1
    members = fleet.pools["a"].admin.record.members
    assert {m.state for m in members} == {DeviceState.ONLINE}


def test_status_shows_hosts_their_disks_who_decides_and_what_may_be_lost(fleet: HostAgents) -> None:
    """As text, as JSON and on the page; host b is away."""
    fleet.start("a", "c")
    fleet.rounds(30.0)
    with fleet.harness.open(read_only=True) as pool:
        found = pool.status()
    assert [(h.host, h.answering, h.columns, h.may_be_lost) for h in found.hosts] == [
        (f"host-{name}", 2, 2, True) for name in "abcd"
    ]
    assert found.hosts_tolerated == 1
    fleet.harness.lose(fleet.disks("b"))
    fleet.rounds(30.0)
    with fleet.harness.open(read_only=True) as pool:
        found = pool.status()
    assert found.hosts_tolerated == 0
    body = fleet.status["c"].as_dict()
    sight = agent_sight(body, found.pool_id, fleet.clock.wall_ms())
    assert sight is not None
    text = "\n".join(host_lines(found, sight))
    assert "no more hosts may be lost" in text
    assert "keeper: a (process" in text
    sight = agent_sight(fleet.status["a"].as_dict(), found.pool_id, fleet.clock.wall_ms())
    text = "\n".join(host_lines(found, sight))
    assert "host-b  0 of 2  2        away for 2" in text
    assert "host-a  2 of 2  2        online" in text
    from hpstore.agent.status_page import render

    page = render(fleet.status["a"])
    assert "<h2>Hosts</h2>" in page
    assert "memory://d2, memory://d3" in page
    assert "Keeper: a (process" in page
