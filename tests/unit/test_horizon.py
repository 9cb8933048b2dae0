"""The horizon: what a sweep has passed comes back by no writer, repair or device (rule 12)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from hpstore.devices.base import Device
from hpstore.devices.horizon_guard import HORIZON
from hpstore.devices.wrappers import DeviceWrapper, SimulatedCrash
from hpstore.errors import DeviceError, MembershipError, ObjectNotFound
from hpstore.format.keys import Version
from hpstore.maintenance.sweep import DUE_DELETES, sweep_surveyed
from hpstore.objects.key_listing import walk
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness

T = TypeVar("T")
HOUR = 3600.0  # Settings.tombstone_seconds
OLD, NEW = (np.random.default_rng(seed).bytes(300_000 + seed) for seed in (1, 2))


class Gated(DeviceWrapper):
    """Asks `hook` before each operation, with its name and the device's URL."""

    def __init__(self, inner: Device, hook: Callable[[str, str], None]) -> None:
        super().__init__(inner)
        self._hook = hook

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        self._hook(operation, self.url)
        return call()


class Once:
    """Runs `act` before operation number `at` of one kind; counts all operations by kind."""

    def __init__(self, operation: str, at: int, act: Callable[[], object]) -> None:
        self.operation, self.at, self.act = operation, at, act
        self.seen: dict[str, int] = {}
        self.armed = True

    def __call__(self, operation: str, url: str) -> None:
        number = self.seen[operation] = self.seen.get(operation, 0) + 1
        if self.armed and operation == self.operation and number - 1 == self.at:
            self.armed = False
            self.act()


def hooked(harness: Harness, hook: Callable[[str, str], None]) -> Pool:
    return harness.open(lambda _, device: Gated(device, hook))


def make(tmp_path: Path, devices: int = 6, parity: int = 2) -> tuple[FakeClock, Harness]:
    clock = FakeClock()
    harness = Harness(tmp_path, data=4, parity=parity, devices=devices, clock=clock)
    return clock, harness


def scrub_an_hour_later(harness: Harness, clock: FakeClock) -> Callable[[], object]:
    def act() -> None:
        clock.advance(2 * HOUR)
        with harness.open() as other:
            other.scrub()

    return act


def sweep(pool: Pool) -> int:
    """As a scrub on another host does, which has no lock in common with this one."""
    return sweep_surveyed(pool._store, walk(pool._store).surveys)


def deleted(pool: Pool, key: str = "k") -> bool:
    try:
        pool.get(key)
    except ObjectNotFound:
        return True
    return False


# --- writers that were stopped -------------------------------------------------------------------


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("size", [1_000, 300_000])
@pytest.mark.parametrize("before", ["new key", "overwrite", "deleted"])
def test_a_put_that_was_stopped_while_a_sweep_ran_is_whole_when_acknowledged_r02(
    tmp_path: Path, at: int, size: int, before: str
) -> None:
    """r02: stopped between any two renames past the time of tombstones. It is planned again with a
    counter above the horizon, and blames no device."""
    clock, harness = make(tmp_path)
    with harness.open() as pool:
        if before != "new key":
            pool.put("k", OLD[:size])
        if before == "deleted":
            pool.delete("k")
    hook = Once("publish", at, scrub_an_hour_later(harness, clock))
    with hooked(harness, hook) as pool:
        info = pool.put("k", NEW[:size])
        assert info.losses_tolerated == 2
        assert "column_write_error_total" not in pool.metrics.snapshot()
    with harness.open() as pool:
        assert pool.get("k") == NEW[:size]
        assert pool.rebuild().whole
    harness.lose(harness.urls[:2])
    with harness.open() as pool:
        assert pool.get("k") == NEW[:size]


@pytest.mark.parametrize("at", range(4))
def test_a_delete_that_was_stopped_while_a_sweep_ran_holds(tmp_path: Path, at: int) -> None:
    """Its first tombstones were swept, as a clock was ahead; it writes all of them again."""
    clock, harness = make(tmp_path)
    with harness.open() as pool:
        pool.put("k", OLD)
    hook = Once("publish", at, scrub_an_hour_later(harness, clock))
    with hooked(harness, hook) as pool:
        pool.delete("k")
    with harness.open() as pool:
        assert deleted(pool)
        pool.rebuild()
        assert deleted(pool)


def damage(harness: Harness, key: str) -> None:
    """Take one column away, so that a rebuild makes it again."""
    url, path = harness.columns(key)[0]
    del harness.devices[url].files[path]


@pytest.mark.parametrize("size", [1_000, 300_000])
@pytest.mark.parametrize("how", ["column", "layout"])
def test_a_repair_that_was_stopped_brings_nothing_deleted_back(
    tmp_path: Path, size: int, how: str
) -> None:
    """It publishes an old counter, rightly; not when a sweep was there since it looked."""
    clock, harness = make(tmp_path, devices=7 if how == "column" else 6)
    with harness.open() as pool:
        pool.put("k", OLD[:size])
        gone = harness.columns("k")[0][0]
        pool.evict(gone)
    swept: list[int] = []

    def delete_and_sweep() -> None:
        with harness.open() as other:
            other.delete("k")
            clock.advance(2 * HOUR)
            swept.append(sweep(other))

    with hooked(harness, Once("publish", 0, delete_and_sweep)) as pool:
        pool.rebuild(include_missing=True)
    assert swept == [3]
    assert {url for url, _ in harness.columns("k")} <= {gone}
    with harness.open() as pool:
        assert deleted(pool)


def test_a_repair_is_not_held_up_by_sweeps_of_older_counters(tmp_path: Path) -> None:
    """Its counter is above the horizon: nothing that was swept can be what it writes."""
    clock, harness = make(tmp_path, devices=7)
    with harness.open() as pool:
        pool.put("gone", OLD)
        pool.delete("gone")
        clock.advance(2 * HOUR)
        pool.put("k", OLD)
    damage(harness, "k")

    swept: list[int] = []

    def meanwhile() -> None:
        with harness.open() as other:
            swept.append(sweep(other))

    hook = Once("publish", 0, meanwhile)
    with hooked(harness, hook) as pool:
        assert pool.rebuild().whole
        assert hook.seen["publish"] == 1
    assert swept == [3]


# --- sweeps --------------------------------------------------------------------------------------


def test_nothing_is_swept_while_a_member_does_not_take_the_horizon(tmp_path: Path) -> None:
    """A writer on that device may be about to publish."""
    clock, harness = make(tmp_path)
    with harness.open() as pool:
        pool.put("k", OLD)
        pool.delete("k")
    clock.advance(2 * HOUR)

    def refuse(operation: str, url: str) -> None:
        if operation == "raise_counter" and url == "memory://d3":
            raise DeviceError("no", device=url)

    with hooked(harness, refuse) as pool:
        assert pool.scrub().swept == 0
        assert pool.metrics.snapshot()["horizon_error_total"] == 1
    assert len(harness.columns("k")) == 3
    with harness.open() as pool:
        assert pool.scrub().swept == 3


def test_nothing_is_swept_when_a_device_joins_meanwhile(tmp_path: Path) -> None:
    """The horizon of the new member was not raised: the next sweep has it."""
    clock, harness = make(tmp_path)
    with harness.open() as pool:
        pool.put("k", OLD)
        pool.delete("k")
    clock.advance(2 * HOUR)

    def join() -> None:
        with harness.open() as other:
            other.add_device("memory://new")

    raised = Once("raise_counter", 5, join)
    with hooked(harness, raised) as pool:
        assert pool.scrub().swept == 0
        assert not raised.armed
        assert pool.scrub().swept == 3
    assert len({device.counter(HORIZON) for device in harness.devices.values()}) == 1


def test_a_sweep_raises_the_horizon_once_for_many_keys(tmp_path: Path) -> None:
    """Not one fsync a key: 100 tombstones cost one raise on each of six devices."""
    clock, harness = make(tmp_path)
    with harness.open() as pool:
        for number in range(100):
            pool.put(f"k/{number}", b"x")
            pool.delete(f"k/{number}")
    clock.advance(2 * HOUR)
    counted = Once("", 0, lambda: None)
    with hooked(harness, counted) as pool:
        assert pool.scrub().swept == 300
    assert counted.seen["raise_counter"] == 6


def test_a_rebuild_sweeps_what_is_past_its_time_r21(tmp_path: Path) -> None:
    """r21: where no scrub runs tombstones do not pile up for ever."""
    clock, harness = make(tmp_path)
    with harness.open() as pool:
        pool.put("k", b"x")
        pool.delete("k")
        assert pool.rebuild().swept == 0
        clock.advance(2 * HOUR)
        assert pool.rebuild().swept == 3
    assert harness.columns("k") == []


def test_a_process_that_deletes_sweeps_its_own_tombstones_r21(tmp_path: Path) -> None:
    """r21: a trainer with keep_last and neither agent nor scrub has an hour of tombstones, and no
    more; the sweeps come in batches."""
    clock, harness = make(tmp_path)
    counted = Once("", 0, lambda: None)
    with hooked(harness, counted) as pool:
        raised = 0
        for number in range(600):
            pool.put(f"step/{number}", b"x")
            pool.delete(f"step/{number}")
            clock.advance(60.0)
            if number == 300:
                raised = counted.seen["raise_counter"]
        tombstones = sum(len(harness.columns(f"step/{number}")) for number in range(600))
        assert tombstones <= 3 * (60 + DUE_DELETES + 1)
        marks = 2 * 6 * 300  # what puts and deletes raise themselves
        assert counted.seen["raise_counter"] - raised <= marks + 6 * (300 / DUE_DELETES + 1)


def test_what_a_tombstone_stands_for_is_durably_gone_before_it_is_swept(tmp_path: Path) -> None:
    """A device that was away brings its copy; one scrub removes copy and tombstones. Power goes
    when the devices of the tombstones have written that down, and this one has not."""
    clock, harness = make(tmp_path, devices=7)
    with harness.open() as pool:
        pool.put("k", b"x")
    away = harness.columns("k")[0][0]
    harness.lose([away])
    with harness.open() as pool:
        pool.delete("k")
    harness.bring_back()
    clock.advance(2 * HOUR)
    with harness.open() as pool:
        assert pool.scrub().swept == 3
    for url in set(harness.urls) - {away}:
        harness.devices[url].sync_directory("objects/k/@")
    harness.power_cut()
    with harness.open() as pool:
        assert deleted(pool)


# --- devices that return -------------------------------------------------------------------------


def delete_while_away(harness: Harness, clock: FakeClock, jump_seconds: float) -> str:
    """Evict a device with a copy, delete, scrub with the clock ahead; which device."""
    with harness.open() as pool:
        pool.put("k", b"to be deleted")
        pool.put("big", OLD)
        pool.put("stays", b"stays")
        gone = harness.columns("k")[0][0]
        pool.evict(gone)
        pool.rebuild()
        clock.advance(60)
        pool.delete("k")
        pool.delete("big")
        clock.advance(jump_seconds)
        assert bool(pool.scrub().swept) == bool(jump_seconds)
        clock.advance(60 - jump_seconds)
    return gone


@pytest.mark.parametrize("jump_seconds", [0.0, 2 * HOUR])
def test_what_was_deleted_while_a_device_was_away_stays_so_whatever_the_clocks_r04(
    tmp_path: Path, jump_seconds: float
) -> None:
    """r04: a scrub by a clock that is two hours ahead sweeps the tombstones; the device is back
    within two minutes of its eviction. What it has is not served, and not deleted."""
    clock, harness = make(tmp_path, devices=7)
    gone = delete_while_away(harness, clock, jump_seconds)
    with harness.open() as pool:
        found = pool.readmit(gone)
        assert found is not None
        assert (found.quarantined > 0) == bool(jump_seconds)
        assert pool.list() == ["stays"]
        assert pool.rebuild().whole
        assert pool.list() == ["stays"]
        assert pool.get("stays") == b"stays"


def test_a_readmit_that_is_cut_short_judges_as_strictly_the_next_time(tmp_path: Path) -> None:
    """Its horizon is the members' only once every file is judged: killed before any operation."""
    for crash_at in range(1000):
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        clock = FakeClock()
        harness = Harness(directory, data=2, parity=1, devices=4, clock=clock)
        gone = delete_while_away(harness, clock, 2 * HOUR)
        pool, _ = harness.open_crashing(crash_at)
        try:
            pool.readmit(gone)
            finished = True
        except SimulatedCrash:
            finished = False
        harness.restart()
        with harness.open() as pool:
            if not finished:
                pool.readmit(gone)
            assert pool.list() == ["stays"], f"crash before operation {crash_at}"
            pool.rebuild()
            assert pool.list() == ["stays"], f"crash before operation {crash_at}"
        if finished:
            assert crash_at > 0
            return


def test_a_device_is_not_taken_back_while_a_sweep_runs(tmp_path: Path) -> None:
    """Tombstones that go while its files are judged: it stays out, and is judged again."""
    clock, harness = make(tmp_path, devices=7)
    with harness.open() as pool:
        pool.put("k", b"x")
        pool.put("other", b"x")
        gone = harness.columns("k")[0][0]
        pool.evict(gone)
        pool.rebuild()

    def delete_and_sweep() -> None:
        with harness.open() as other:
            other.delete("k")
            clock.advance(2 * HOUR)
            assert other.scrub().swept

    # horizons are read of 6 at the open, of 7 before the files are judged, of 6 after that
    hook = Once("counter", 6 + 7, delete_and_sweep)
    with hooked(harness, hook) as pool, pytest.raises(MembershipError, match="were swept"):
        pool.readmit(gone)
    with harness.open() as pool:
        pool.readmit(gone)
        assert deleted(pool)


# --- horizons on devices, revisions --------------------------------------------------------------


def test_a_new_device_has_the_horizon_of_the_others(tmp_path: Path) -> None:
    """And one whose horizon is damaged is given it again at the next open."""
    clock, harness = make(tmp_path)
    with harness.open() as pool:
        pool.put("k", b"x")
        pool.delete("k")
        clock.advance(2 * HOUR)
        pool.rebuild()
        pool.add_device("memory://new")
    horizon = harness.devices["memory://d0"].counter(HORIZON)
    assert horizon > 0
    assert harness.devices["memory://new"].counter(HORIZON) == horizon
    harness.flip("memory://d0", HORIZON, 40)
    with harness.open() as pool:
        assert pool.metrics.snapshot()["horizon_damaged_total"] == 1
        pool.put("k", NEW)
    assert harness.devices["memory://d0"].counter(HORIZON) == horizon


@pytest.mark.parametrize("cut", [Harness.restart, Harness.power_cut])
def test_the_horizon_outlives_a_crash(tmp_path: Path, cut: Callable[[Harness], None]) -> None:
    """It is durable when raise_counter returns."""
    _, harness = make(tmp_path)
    harness.devices["memory://d0"].raise_counter(HORIZON, 77)
    cut(harness)
    assert harness.devices["memory://d0"].counter(HORIZON) == 77


def test_repairs_without_a_lock_never_give_two_layouts_one_name(tmp_path: Path) -> None:
    """Two hosts lay one object out at once: two whole revisions, of which the higher one stays."""
    _, harness = make(tmp_path, devices=7)
    harness.lose(["memory://d6"])
    with harness.open() as pool:
        pool.put("k", OLD)
    harness.bring_back()
    with harness.open() as pool:
        pool.evict(harness.urls[0])
        pool.evict(harness.urls[1])

    def other_host() -> None:
        with harness.open() as other:
            without_locks(other).rebuild()

    with hooked(harness, Once("publish", 2, other_host)) as pool:
        without_locks(pool).rebuild()
    revisions = {path.split("-")[2][:8] for _, path in harness.columns("k")}
    assert "00000001" not in revisions
    with harness.open() as pool:
        assert pool.rebuild().whole
        assert pool.get("k") == OLD
    here = [path for url, path in harness.columns("k") if url not in harness.urls[:2]]
    assert len({path.split("-")[2][:8] for path in here}) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_two_repairs_at_once_keep_the_same_one_of_a_doubled_column(
    tmp_path: Path, first: int
) -> None:
    """Opened with their devices in another order, and without a lock in common."""
    _, harness = make(tmp_path, devices=7)
    with harness.open() as pool:
        pool.put("k", OLD)
    url, path = harness.columns("k")[first]
    spare = next(u for u in harness.urls if u not in dict(harness.columns("k")))
    for files in ("files", "_durable_names"):
        getattr(harness.devices[spare], files)[path] = harness.devices[url].files[path]

    def other_host() -> None:
        with harness.open() as other:
            view = other._store.view
            mixed = dict(reversed(list(view.devices.items())))
            other._store.view = dataclasses.replace(view, devices=mixed)
            other._store.refresh = lambda: None
            without_locks(other).rebuild()

    with hooked(harness, Once("retire", 0, other_host)) as pool:
        without_locks(pool).rebuild()
    assert len({path for _, path in harness.columns("k")}) == 6


def without_locks(pool: Pool) -> Pool:
    """As a process on another host."""
    pool._store.key_lock = pool_without_locks
    pool.admin.registers.hold = pool_without_locks  # type: ignore[assignment, method-assign]
    return pool


def pool_without_locks(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    """As between hosts."""
    return contextlib.nullcontext()


def test_revisions_rise_and_differ() -> None:
    """255 of them leave half of the rest to each further one, down to the last."""
    version = Version(5, 6, 1)  # of an object that an earlier hpstore has laid out again
    assert version.revised() != version.revised()
    for _ in range(260):
        later = version.revised()
        assert later > version
        assert later.content == version.content
        assert Version.parse(str(later)) == later
        version = later
