"""The simulator over several hosts: links, hosts, registers; and that it finds broken rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpstore.devices.base import Hold
from hpstore.errors import DeviceError, DeviceMissing, DeviceTimeout, RegistersUnavailable
from hpstore.testing.memory_pool import Harness
from hpstore.testing.simulation import Schedule, SimulationOutcome, installed, run
from hpstore.testing.simulation.actions import ActionScene
from hpstore.testing.simulation.host_draw import draw_hosts
from hpstore.testing.simulation.machinery import STAGE, SimulatedDevice
from hpstore.testing.simulation.mutations import mutated
from hpstore.testing.simulation.run_history import RunHistory, Save
from hpstore.testing.simulation.schedule import Fault, Setup, Turn
from hpstore.testing.simulation.simulated_registers import RegisterStore, SimulatedSwaps
from hpstore.testing.simulation.world import Process, World
from tests.simulation.test_simulation import command
from tests.thorough import LONG

SEEDS = 100 if LONG else 12
HOUR_MS = 3_600_000


class Rig:
    """Three hosts of one disk each, and a process on each of the first two."""

    def __init__(self) -> None:
        self.world = World(Setup(data=1, parity=1, devices=3, hosts=3), 1)
        self.a, self.b = (Process(self.world, name, 0, 0.0) for name in ("p0", "p1"))
        self.world.processes += [self.a, self.b]

    def disk(self, process: Process, number: int) -> SimulatedDevice:
        return SimulatedDevice(self.world.device(f"memory://d{number}"), process)

    def files(self, number: int) -> list[str]:
        return sorted(self.world.device(f"memory://d{number}").files)


def test_a_cut_one_way_has_the_effect_or_not_and_is_never_answered() -> None:
    """A request that is lost changes nothing, an answer that is lost hides what was done; a disk of
    the own host meets no link."""
    rig = Rig()
    rig.world.cut_links(0, [1], "to")
    with pytest.raises(DeviceTimeout):
        rig.disk(rig.a, 1).write_small("x", b"1")
    assert rig.files(1) == []
    rig.world.network.all_well()
    rig.world.cut_links(0, [1], "from")
    with pytest.raises(DeviceTimeout):
        rig.disk(rig.a, 1).write_small("x", b"1")
    assert rig.files(1) == ["x"]
    rig.disk(rig.a, 0).write_small("x", b"1")
    rig.disk(rig.b, 1).write_small("y", b"1")
    assert rig.disk(rig.b, 2).entries("") == []


def test_what_was_sent_to_a_stopped_host_takes_effect_when_it_goes_on_in_order() -> None:
    """A name is given late, before the file's maker could give it up; later calls have no effect;
    what a cut has dropped, or a kernel given up, never arrives."""
    rig = Rig()
    disk = rig.disk(rig.a, 1)
    writer = disk.create(4)
    writer.write(0, [np.zeros(4, np.uint8)])
    writer.sync()
    rig.world.network.freeze(1)
    for path in ("objects/a", "objects/b"):
        with pytest.raises(DeviceTimeout):
            writer.publish(path)
    writer.abort()
    assert not any(name.startswith("objects") for name in rig.files(1))
    rig.world.network.thaw(1)
    assert rig.files(1) == ["objects/a"]
    for way, seconds in (("to", 0.0), ("to kept", 90.0)):
        rig.world.cut_links(0, [2], way)
        with pytest.raises(DeviceTimeout):
            rig.disk(rig.a, 2).write_small(way, b"1")
        rig.world.network.pass_time(seconds)
        rig.world.network.all_well()
        assert rig.files(2) == []
    rig.world.cut_links(0, [2], "kept")
    with pytest.raises(DeviceTimeout):
        rig.disk(rig.a, 2).write_small("late", b"1")
    rig.world.network.all_well()
    assert rig.files(2) == ["late"]


def test_what_a_host_loses_when_it_falls() -> None:
    """Its processes die, sessions of others end: files that they make, ranges that they hold."""
    rig = Rig()
    writer, hold = rig.disk(rig.a, 1).create(4), rig.disk(rig.a, 1).hold(0, 8)
    rig.world.fall(1)
    assert rig.b.dead
    assert not rig.a.dead
    with pytest.raises(DeviceMissing):
        rig.disk(rig.a, 1).entries("")
    rig.world.start_host(1)
    with pytest.raises(DeviceError, match="started again"):
        writer.publish("objects/a")
    with pytest.raises(DeviceError, match="is over"):
        hold.write(0, b"x")
    assert rig.disk(rig.a, 1).hold(0, 8).taken


def test_a_range_whose_holder_is_cut_off_is_free_when_its_session_has_ended() -> None:
    """Not before: its holder may be back, and what it had sent arrive."""
    rig = Rig()

    def held(process: Process) -> Hold:
        return rig.disk(process, 2).hold(0, 8)

    first = held(rig.a)
    rig.world.cut_links(0, [2], "")
    rig.a.die()
    assert not held(rig.b).taken
    rig.world.network.pass_time(90.0)
    assert held(rig.b).taken
    assert first.taken  # as far as it knows


def test_registers_answer_whom_a_majority_of_hosts_answers_and_may_be_late_or_lost() -> None:
    """A swap that is late takes effect after its caller gave up; lost data is as never written."""
    rig = Rig()
    STAGE.world = rig.world
    try:
        store = RegisterStore(rig.world)
        swaps = SimulatedSwaps(store, "")
        rig.world.observer.host = 0
        assert swaps.swap("r", b"1", "", 1.0)
        found = swaps.read("r", 1.0)
        rig.world.cut_links(0, [1], "to")
        assert swaps.read("r", 1.0) == found
        rig.world.cut_links(0, [2], "to")
        with pytest.raises(RegistersUnavailable):
            swaps.read("r", 1.0)
        rig.world.network.all_well()
        store.slow = True
        with pytest.raises(RegistersUnavailable):
            swaps.swap("r", b"2", found.revision, 1.0)
        assert swaps.read("r", 1.0) == found
        store.all_well()
        assert swaps.read("r", 1.0).data == b"2"
        store.lose()
        assert swaps.read("r", 1.0).data is None
    finally:
        STAGE.world = None


def outcome(setup: Setup, *turns: Turn, mutation: str = "") -> SimulationOutcome:
    """What a schedule of these turns comes to."""
    numbered = tuple(replace(turn, number=n) for n, turn in enumerate(turns))
    with installed(checkpoints=False), mutated(mutation):
        return run(Schedule(seed=1, setup=setup, turns=numbered))


FOUR = Setup(data=1, parity=1, devices=4, hosts=4, outside=True)
AHEAD = replace(FOUR, offsets_ms=(HOUR_MS, 0, 0, 0))


def by(process: int, action: str, *faults: Fault, seconds: float = 0.0, device: int = 0) -> Turn:
    """A turn; the key is the one of conditional puts."""
    key = "c0" if action in ("put_absent", "put_version", "get") else ""
    return Turn(
        number=0,
        process=process,
        action=action,
        key=key,
        size=100 if key else 0,
        seconds=seconds,
        device=device,
        faults=faults,
    )


def stopped(where: str, until: int, seconds: float = 20.0) -> Fault:
    """Before the first call of a kind."""
    return Fault(kind="pause", where=where, nth=1, seconds=seconds, until=until, firm=True)


UNANSWERED = Fault(kind="error", where="look", nth=2, error="EIO", times=20)
BROKEN: dict[str, tuple[str, Setup, list[Turn]]] = {
    "acknowledges-unanswered": (
        "not linearizable",
        FOUR,
        [
            by(0, "put_absent", stopped("publish", 2), UNANSWERED),
            by(1, "put_absent", stopped("publish", 3, 0.0)),
            by(0, "list"),
            by(1, "list"),
        ],
    ),
    "no-fence": (
        "not linearizable",
        FOUR,
        [
            by(0, "put_absent", stopped("publish", 2)),
            by(1, "put_absent", stopped("publish", 3, 0.0)),
            by(0, "list"),
            by(1, "list"),
        ],
    ),
    "claims-without-counters": (
        "not linearizable",
        AHEAD,
        [
            by(1, "put_absent"),
            by(0, "get"),
            by(0, "put_version", stopped("publish", 4)),
            by(1, "put_version"),
            by(0, "get"),
        ],
    ),
    "lost-is-new": (
        "not linearizable",
        AHEAD,
        [
            by(1, "put_absent"),
            by(0, "get"),
            by(0, "put_version", stopped("raise_counter", 5, 0.0)),
            by(-1, "registers_lost"),
            by(1, "put_version"),
            by(0, "get"),
        ],
    ),
    "no-election": ("two keepers", FOUR, [by(0, "tend", seconds=5.0), by(1, "tend", seconds=5.0)]),
    "endless-terms": (
        "two keepers",
        FOUR,
        [by(0, "tend", seconds=5.0), by(1, "tend", seconds=5.0), by(1, "tend", seconds=20.0)],
    ),
}


@pytest.mark.parametrize("mutation", BROKEN)
def test_a_rule_that_is_taken_out_is_missed_over_hosts(mutation: str) -> None:
    """Each schedule ends well with the rule, and breaks a claim without it."""
    kind, setup, turns = BROKEN[mutation]
    assert outcome(setup, *turns).findings == ()
    found = outcome(setup, *turns, mutation=mutation).findings
    assert {finding.kind for finding in found} == {kind}


def test_a_keeper_evicts_a_host_that_fell_and_a_stopped_keeper_is_succeeded() -> None:
    """Agents are the real ones: after the wait a host's disk leaves; its objects are whole."""
    done = outcome(
        FOUR,
        by(0, "put_absent"),
        by(0, "tend", seconds=10.0),
        by(-1, "freeze", device=0),
        by(1, "tend", seconds=90.0),
        by(-1, "rejoin", device=0),
        by(0, "tend", seconds=5.0),
        by(0, "get"),
    )
    assert done.findings == ()
    seen = [line.split(None, 2)[2] for line in done.trace if " sees " in line]
    assert seen == [f"{who} sees ['memory://d0'] leave the pool" for who in ("p1", "p0")]


def test_a_membership_that_goes_back_and_two_of_one_generation_are_findings(
    tmp_path: Path,
) -> None:
    """What was acknowledged stays, for every process."""
    with Harness(tmp_path, data=1, parity=1, devices=3).open() as pool:
        record = pool.admin.record
    newer, older, other = (
        replace(record, generation=generation, nonce=nonce)
        for generation, nonce in ((5, "a"), (4, "a"), (5, "b"))
    )
    process = Rig().a
    looks: list[Callable[[ActionScene], None]] = [
        lambda scene: scene.claims.changed(scene, other),
        lambda scene: scene.claims.opened(scene, older, scene.claims.newest),
        lambda scene: scene.claims.saw(scene, process, older),
    ]
    for look in looks:
        scene = ActionScene(process.world, pool.config, tmp_path, 1)
        scene.claims.changed(scene, newer)
        scene.claims.saw(scene, process, newer)
        assert not scene.findings
        look(scene)
        assert len(scene.findings) == 1


def test_a_session_that_has_lost_the_run_commits_nothing() -> None:
    """A save that was called after another session's first one was committed."""
    history = RunHistory()

    def save(step: int, called: int, ended: int, session: str) -> str:
        made = Save(step, step, called, session=session)
        history.saves.append(made)
        return history.acknowledge(made, ended, 1)

    assert save(1, 1, 5, "a") == ""
    assert save(2, 6, 9, "b") == ""
    assert save(3, 8, 10, "a") == ""  # called before: it may have been committed first
    assert "in session a, after" in save(4, 11, 12, "a")
    assert save(5, 13, 14, "b") == ""


def test_a_seed_over_hosts_replays_exactly_and_is_text() -> None:
    """The same seed gives the same schedule and the same trace; a schedule survives as text."""
    for seed in range(200):
        assert Schedule.from_json(draw_hosts(seed).to_json()) == draw_hosts(seed)
    schedules = [s for s in map(draw_hosts, range(100)) if not s.saves]  # those need torch
    with installed(checkpoints=False):
        for schedule in schedules[: 30 if LONG else 3]:
            first, second = run(schedule), run(schedule)
            assert first.trace == second.trace
            assert len(first.trace) > 3


def test_a_few_seeds_over_hosts_find_nothing(tmp_path: Path) -> None:
    """The same ones in each run; none with checkpoints, which need torch."""
    paths = []
    for seed in range(SEEDS):
        schedule = draw_hosts(seed)
        if not schedule.saves:
            paths.append(tmp_path / f"seed-{seed}.json")
            paths[-1].write_text(schedule.to_json())
    done = command("--replay", *map(str, paths))
    assert done.returncode == 0, done.stdout[-8000:]
    assert done.stdout.count("no finding") == len(paths)


@pytest.mark.skipif(not LONG, reason="HPSTORE_LONG_TESTS: half a minute")
def test_some_hundred_seeds_over_hosts_find_nothing() -> None:
    """With checkpoints."""
    done = command("--hosts", "--seeds", "300", "--json", "--no-shrink")
    assert done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["findings"], found["seeds"]) == ([], 300)
