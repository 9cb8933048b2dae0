"""The agent by rounds, on memory devices and a clock that stands still between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpstore.agent import Agent, AgentConfig
from hpstore.agent.agent_status import AgentStatus
from hpstore.agent.background_jobs import BackgroundJob, JobKind
from hpstore.agent.saved_state import MEMORY_FILE, load_memory
from hpstore.agreement.registers import REPAIR, WAITING
from hpstore.errors import ConfigError, LockTimeout, TooManyErasures
from hpstore.format.records import DeviceState
from hpstore.health import HealthState
from hpstore.maintenance.rebuild import Progress
from hpstore.membership.agent_observations import read_status
from tests.unit.tended import Tended

S = HealthState


def test_a_lost_device_is_healed_after_fifteen_minutes_rule_17(tended: Tended) -> None:
    """PROTOCOL 17: not a round earlier; then it is evicted and every object is whole without it."""
    tended.rounds(10)
    tended.harness.lose(["memory://d0"])
    tended.rounds(10)
    assert tended.states() == {}
    tended.rounds(25)
    assert tended.states() == {0: S.REMOVED}
    tended.rounds(860, step=20)
    assert 0 in tended.members()
    tended.rounds(40)
    assert 0 not in tended.members()
    assert tended.states() == {0: S.EVICTED}
    assert tended.whole()
    (evicted,) = tended.pool.admin.record.evicted
    assert evicted.state is DeviceState.HEALED
    reasons = [d.reason for d in tended.agent.history.decisions(10)]
    assert "it does not answer" in reasons


def test_without_parity_left_nothing_waits_rule_17(tmp_path: Path) -> None:
    """PROTOCOL 17: with m = 1 the second loss would cost data. The device itself is waited for."""
    tended = Tended(tmp_path, data=3, parity=1, devices=6)
    tended.rounds(10)
    url = tended.harness.columns("large")[0][0]
    tended.harness.lose([url])
    assert tended.pool.admin.condition().spare == 0
    tended.rounds(45)
    assert tended.pool.admin.condition().spare == 1
    assert len(tended.members()) == 6
    tended.rounds(900, step=20)
    assert int(url.rpartition("d")[2]) not in tended.members()
    assert tended.whole()
    tended.stop()


def test_a_device_that_is_back_in_time_is_reconciled_and_serves_again(tended: Tended) -> None:
    """Nothing is evicted; what was put meanwhile reaches it; probation comes before online."""
    tended.rounds(10)
    tended.harness.lose(["memory://d0"])
    tended.rounds(60)
    tended.pool.put("meanwhile", b"x" * 300_000)
    tended.content["meanwhile"] = b"x" * 300_000
    tended.harness.bring_back()
    tended.rounds(5, work=False)
    assert tended.states() == {0: S.REBUILDING}
    tended.agent.finish_jobs()
    tended.rounds(10)
    assert tended.states() == {0: S.PROBATION}
    tended.rounds(400, step=20)
    assert tended.states() == {}
    assert len(tended.members()) == 7
    assert tended.pool.admin.record.generation == 1
    assert tended.whole()


def test_a_device_healed_while_away_comes_back_by_itself_rule_12(tended: Tended) -> None:
    """PROTOCOL 12: its columns are judged first; then it is a member again and takes columns."""
    tended.rounds(10)
    tended.harness.lose(["memory://d0"])
    tended.rounds(960, step=20)
    assert 0 not in tended.members()
    tended.pool.put("large", b"new" * 200_000)  # what d0 holds of it is superseded
    tended.content["large"] = b"new" * 200_000
    tended.harness.bring_back()
    tended.rounds(50)
    assert 0 not in tended.members()
    tended.rounds(30)
    assert 0 in tended.members()
    tended.rounds(20)
    assert tended.states() == {0: S.PROBATION}
    tended.rounds(400, step=20)
    assert tended.states() == {}
    assert tended.whole()
    assert [url for url, path in tended.harness.columns("large")].count("memory://d0") <= 1


def lose_columns(tended: Tended, key: str, count: int) -> dict[tuple[str, str], object]:
    """Files that vanish from under the pool; to be put back."""
    devices = tended.harness.devices
    return {(u, p): devices[u].files.pop(p) for u, p in tended.harness.columns(key)[:count]}


def test_a_rebuild_that_could_do_nothing_holds_up_no_other_object(tended: Tended) -> None:
    """By their number they looked the same, and the other one waited an hour (kill loop)."""
    tended.rounds(10)
    lost = lose_columns(tended, "large", 3)  # one too many
    tended.rounds(1200, step=20)
    assert tended.pool.admin.condition().todo == 1
    for (url, path), file in lost.items():
        tended.harness.devices[url].files[path] = file  # type: ignore[assignment]
    lose_columns(tended, "a/b", 1)
    assert tended.pool.admin.condition().todo == 1
    tended.rounds(700, step=20)
    assert tended.whole()


def test_what_came_while_a_rebuild_ran_was_not_looked_at_by_it(tended: Tended) -> None:
    """It wrote nothing, and what was short at its end counted as what it could do nothing about."""
    tended.rounds(700, step=20)
    job = BackgroundJob(kind=JobKind.REBUILD, reason="by hand")
    tended.agent.due.started(job)
    nothing = tended.pool.rebuild()
    lose_columns(tended, "a/b", 1)
    tended.agent.eyes.disturb()
    tended.rounds(10, work=False)
    condition = tended.agent.eyes.condition()
    assert condition is not None
    assert condition.todo == 1  # a walk has seen it
    tended.agent.jobs._queue.clear()  # the one that runs is the one that was asked for
    tended.agent.due.finished(job, nothing)
    tended.rounds(700, step=20)
    assert tended.whole()


def test_a_device_that_is_back_before_its_heal_begins_is_not_drained(tended: Tended) -> None:
    """The job may wait for hours behind others: it was drained, evicted and never taken back."""
    tended.rounds(10)
    tended.harness.lose(["memory://d0"])
    tended.rounds(60)
    tended.rounds(900, step=20, work=False)
    assert tended.states() == {0: S.REMOVED}
    assert JobKind.HEAL in {job.kind for job in tended.agent.jobs.waiting()}
    tended.harness.bring_back()
    tended.rounds(5, work=False)
    assert tended.states() == {0: S.REBUILDING}
    tended.rounds(400, step=20)
    assert tended.states() == {}
    assert len(tended.members()) == 7
    assert tended.pool.admin.record.generation == 1
    assert tended.whole()


@pytest.mark.parametrize("ended", [True, False])
def test_a_device_that_is_back_while_its_eviction_runs_is_taken_back(
    tended: Tended, ended: bool
) -> None:
    """An eviction looks at all objects, which takes a while; by its end, or by the kill that cuts
    it short, the device is back."""
    tended.rounds(10)
    tended.harness.lose(["memory://d0"])
    tended.rounds(60)
    tended.rounds(900, step=20, work=False)
    assert JobKind.HEAL in {job.kind for job in tended.agent.jobs.waiting()}
    tended.harness.bring_back()
    tended.rounds(5, work=False)
    assert tended.states() == {0: S.REBUILDING}
    (tended.pool.evict if ended else tended.pool.admin.devices.begin_drain)("memory://d0")
    tended.stop()
    tended.start()
    tended.rounds(900, step=20)
    assert tended.states() == {}
    assert len(tended.members()) == 7
    assert tended.whole()


def readable(tended: Tended, key: str) -> bool:
    """Whether an object can be read now."""
    try:
        return tended.pool.get(key) == tended.content[key]
    except TooManyErasures:
        return False


def test_nothing_is_removed_on_incomplete_knowledge_rule_16(tmp_path: Path) -> None:
    """PROTOCOL 16: with three of seven away nothing is evicted, no file that needs them goes."""
    tended = Tended(tmp_path, parity=2)
    tended.rounds(10)
    tended.harness.lose([url for url, _ in tended.harness.columns("large")[:3]])
    needing = [key for key in tended.content if not readable(tended, key)]
    assert "large" in needing
    before = {key: tended.harness.columns(key) for key in needing}
    tended.rounds(2400, step=30)
    assert len(tended.members()) == 7
    assert {key: tended.harness.columns(key) for key in needing} == before
    events = [e.text for e in tended.agent.jobs.events() if not e.ok]
    assert any("not evicted yet" in text for text in events)
    tended.harness.bring_back()
    tended.rounds(1800, step=30)
    assert tended.whole()
    assert tended.states() == {}
    tended.stop()


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    """Not on the devices, not beside them; what would be done is told."""
    tended = Tended(tmp_path, dry_run=True)
    tended.harness.lose(["memory://d0"])
    before = tended.files()
    tended.rounds(1200, step=20)
    assert tended.files() == before
    assert not list(tmp_path.rglob(MEMORY_FILE))
    assert not list(tmp_path.rglob("*.sqlite"))
    assert read_status(tended.agent.run_directory, tended.clock.wall_ms()) is None
    events = [event.text for event in tended.agent.jobs.events()]
    assert "dry run: would heal memory://d0: it has not come back" in events
    tended.stop()


def test_a_restart_resets_neither_grace_nor_guards_rule_17(tended: Tended) -> None:
    """PROTOCOL 17: the fifteen minutes go on where they were."""
    tended.rounds(10)
    tended.harness.lose(["memory://d0"])
    tended.rounds(800, step=20)
    tended.stop()
    tended.start()
    tended.rounds(60)
    assert 0 in tended.members()
    tended.rounds(80)
    assert 0 not in tended.members()


def test_the_state_is_durable_before_it_is_acted_on(
    tended: Tended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is asked for finds the decision in the file."""
    tended.rounds(10)
    directory, submit = tended.pool.admin.state_directory, tended.agent.jobs.submit
    seen = []

    def submitted(job: BackgroundJob) -> bool:
        if job.kind is JobKind.HEAL:
            seen.append(load_memory(directory).policy.health(job.device).lapsed)
        return submit(job)

    monkeypatch.setattr(tended.agent.jobs, "submit", submitted)
    tended.harness.lose(["memory://d0"])
    tended.rounds(930, step=15)
    assert seen == [True]


def test_a_damaged_memory_is_refused(tended: Tended) -> None:
    """It is not taken for an empty one: that would reset the guards."""
    tended.rounds(10)
    tended.stop()
    path = tended.pool.admin.state_directory / MEMORY_FILE
    path.write_text(path.read_text().replace("online", "evicted", 1))
    with pytest.raises(ConfigError, match="move the file away"):
        tended.start()
    path.unlink()
    tended.start()


def test_one_agent_looks_after_a_pool_rule_15(tended: Tended) -> None:
    """PROTOCOL 15: it holds most of the devices, which are free again when it ends."""
    first = tended.agent
    with pytest.raises(LockTimeout, match="agent of pool"):
        tended.start()
    first.close()
    tended.start()


def test_an_agent_that_has_lost_its_devices_takes_them_again_or_rests_rule_15(
    tended: Tended,
) -> None:
    """Disks are replaced while it is stopped; two agents would both act."""

    def all_replaced() -> None:
        for device in tended.harness.devices.values():
            device.restart()

    tended.rounds(5)
    with pytest.raises(LockTimeout, match=r"agent of pool.*process \d+ on"):
        Agent(tended.pool, tended.config, threads=False)
    all_replaced()
    second = Agent(tended.pool, tended.config, threads=False)
    with pytest.raises(LockTimeout, match="agent of pool"):
        tended.agent.tick()
    second.close()
    tended.rounds(5)
    with pytest.raises(LockTimeout, match="agent of pool"):
        Agent(tended.pool, tended.config, threads=False)


def test_a_scrub_begins_when_it_is_time_and_its_end_is_remembered(tmp_path: Path) -> None:
    """It mends what it finds; the next pass is days later, over restarts."""
    config = AgentConfig(smart_hours=0.0, scrub_days=2.0)
    tended = Tended(tmp_path, config=config)
    url, path = tended.harness.columns("large")[0]
    tended.harness.flip(url, path, 70_000)
    tended.rounds(10)
    began, ended = tended.agent.memory.scrub_began_ms, tended.agent.memory.scrub_ended_ms
    assert ended >= began > 0
    assert any("1 damaged columns found, 1 written" in e.text for e in tended.agent.jobs.events())
    tended.stop()
    tended.start()
    tended.rounds(3600, step=900)
    assert tended.agent.memory.scrub_began_ms == began
    assert tended.agent.memory.scrub_ended_ms == ended
    tended.rounds(2 * 86400, step=7200)
    assert tended.agent.memory.scrub_began_ms > began
    tended.stop()


def test_a_scrub_is_due_when_the_clock_was_ahead_at_the_last_one(tmp_path: Path) -> None:
    """It would not come for as long as the clock was ahead."""
    tended = Tended(tmp_path, config=AgentConfig(smart_hours=0.0, scrub_days=2.0))
    tended.clock.advance(400 * 86400)
    tended.rounds(10)
    ended = tended.agent.memory.scrub_ended_ms
    tended.clock.now_ms -= 400 * 86_400_000
    tended.rounds(20)
    assert 0 < tended.agent.memory.scrub_ended_ms < ended
    tended.stop()


def test_a_scrub_that_cannot_run_is_tried_again_later(tmp_path: Path) -> None:
    """While an operator rebuilds: told once in five minutes, not at each round."""
    config = AgentConfig(smart_hours=0.0, scrub_days=2.0)
    tended = Tended(tmp_path, config=config)
    with tended.harness.open() as other, other.admin.registers.hold(REPAIR, "a test"):
        tended.rounds(600, step=30)
        told = [e.text for e in tended.agent.jobs.events() if e.text.startswith("scrub was not")]
        assert 1 <= len(told) <= 3
    tended.rounds(600, step=30)
    assert tended.agent.memory.scrub_ended_ms > 0
    tended.stop()


def test_the_agents_scrub_gives_way_to_whoever_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held the pool for a pass of days: an operator's scrub, rebuild and rebalance ended after
    30 s with the name of a lock file."""
    config = AgentConfig(smart_hours=0.0, scrub_days=2.0)
    tended = Tended(tmp_path, config=config)
    other, jobs, seen = tended.harness.open(), tended.agent.jobs, list[str]()
    with ExitStack() as waiting:

        def step(progress: Progress) -> None:
            if not seen and jobs.running is not None and jobs.running.kind is JobKind.SCRUB:
                waiting.enter_context(other.admin.registers.hold(WAITING, "an operator's rebuild"))
            seen.append(progress.key)
            tended.clock.advance(3.0)

        monkeypatch.setattr(jobs, "_step", step)
        tended.rounds(10)
        assert len(seen) == 1
        assert any("it goes first" in event.text for event in jobs.events())
        assert tended.agent.memory.scrub_ended_ms == 0
        with other.admin.registers.hold(REPAIR, "rebuild", deadline_seconds=0.0):
            pass  # the pass holds nothing while it rests
    tended.rounds(700, step=30)
    assert tended.agent.memory.scrub_ended_ms > 0
    assert len(set(seen)) == len(tended.content)  # it went on where it was
    other.close()
    tended.stop()


def test_a_walk_that_is_not_of_the_devices_there_are_is_not_believed(tended: Tended) -> None:
    """What the objects survive is asked anew when a device has gone."""
    tended.rounds(10)
    assert tended.agent.eyes.condition() is not None
    before = tended.agent.eyes.condition()
    tended.harness.lose([tended.harness.columns("large")[0][0]])
    tended.agent.eyes.presence.look(tended.clock.monotonic() + 100)
    assert tended.agent.eyes.condition() is None
    tended.clock.advance(100)
    tended.rounds(5, work=False)
    after = tended.agent.eyes.condition()
    assert after is not None
    assert before is not None
    assert after.losses_tolerated < before.losses_tolerated


def test_a_rebuild_that_can_do_nothing_is_not_repeated_each_round(tended: Tended) -> None:
    """While a device may still return, objects wait; one look at that is enough for an hour."""
    tended.rounds(10)
    tended.harness.lose(["memory://d0"])
    tended.rounds(60)
    jobs = []
    submit = tended.agent.jobs.submit
    tended.agent.jobs.submit = lambda job: jobs.append(job.kind) or submit(job)  # type: ignore[func-returns-value,method-assign]
    tended.rounds(600, step=20)
    assert jobs == []


def test_a_faulty_device_that_answers_is_a_source_until_all_is_whole(tmp_path: Path) -> None:
    """Asked to heal it again while it is being drained, the agent does not throw it away: with
    another device lost, objects would be left without parity."""
    tended = Tended(tmp_path, parity=2)
    tended.rounds(10)
    device = tended.device(1)
    jobs = tended.agent.jobs
    jobs.submit(BackgroundJob(kind=JobKind.HEAL, device=device, reason="ten errors"))
    jobs._do(jobs.waiting()[0])
    member = tended.pool.admin.record.member(device)
    assert member is not None
    assert member.state is DeviceState.DRAINING
    jobs._do(BackgroundJob(kind=JobKind.HEAL, device=device, reason="ten errors"))
    assert tended.pool.admin.record.member(device) is not None
    tended.rounds(120)
    assert 1 not in tended.members()
    assert tended.whole()
    tended.stop()


def test_a_round_that_fails_is_told_and_the_next_one_is_made(
    tended: Tended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the listener raises is not taken for a round that failed: it ends the agent."""
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: self.is_set())
    monkeypatch.setattr(tended.agent, "tick", iter_of(TooManyErasures("x"), tended.agent.tick()))
    seen: list[int] = []

    def each(status: AgentStatus) -> None:
        seen.append(status.ticks)
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        tended.agent.run(threading.Event(), each)
    assert seen == [1]
    assert tended.pool.metrics.value("agent_round_error_total") == 1
    assert [e.text for e in tended.agent.jobs.events()] == ["a round failed: x"]


def test_an_answer_nobody_thought_of_does_not_end_the_agent(
    tended: Tended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One disk whose serial number cannot be written down must not keep the others unhealed."""
    odd = UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: self.is_set())
    monkeypatch.setattr(tended.agent, "tick", iter_of(odd, tended.agent.tick()))
    stop = threading.Event()
    tended.agent.run(stop, lambda status: stop.set())
    assert tended.pool.metrics.value("agent_round_error_total") == 1
    assert "a round failed: UnicodeEncodeError" in tended.agent.jobs.events()[0].text


def iter_of(*outcomes: object) -> Callable[[], object]:
    """A call that gives one after the other, or raises it."""
    rest = iter(outcomes)

    def call() -> object:
        found = next(rest)
        if isinstance(found, Exception):
            raise found
        return found

    return call


def test_a_job_that_crashes_is_counted_and_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in one must not end healing for good."""
    tended = Tended(tmp_path, config=AgentConfig(smart_hours=0.0, scrub_days=2.0))
    tended.rounds(10)
    monkeypatch.setattr(tended.pool.admin, "scrub", iter_of(ZeroDivisionError("a bug")))
    jobs = tended.agent.jobs
    jobs.submit(BackgroundJob(kind=JobKind.SCRUB))
    jobs.submit(BackgroundJob(kind=JobKind.REBUILD))
    jobs.run_all()
    monkeypatch.undo()
    jobs.submit(BackgroundJob(kind=JobKind.SCRUB))
    jobs.run_all()
    assert tended.pool.metrics.value("agent_job_crash_total") == 1
    assert any("crashed" in event.text for event in jobs.events())
    tended.stop()
