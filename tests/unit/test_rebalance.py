"""Evening out how full devices are: what is moved where, and nothing is ever short of a column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.agent import AgentConfig
from hpstore.agent.background_jobs import JobKind
from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper, SimulatedCrash
from hpstore.errors import ConfigError
from hpstore.format.keys import ColumnName, Kind, Version, parse_column_name
from hpstore.format.placement import domain_cap
from hpstore.maintenance.move_column import move_column
from hpstore.maintenance.rebalance import DeviceFill, evens_out, fills_of, plan_move, spread_of
from hpstore.maintenance.rebuild import Progress
from hpstore.maintenance.rebuild_columns import rebuild_columns
from hpstore.objects.survey import ColumnFile, Layout
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.units import KIB, MIB
from tests.thorough import LONG
from tests.unit.tended import Tended

T = TypeVar("T")
VERSION = Version(1, 1)


def fill(
    device: str, used: int, *, domain: str = "", total: int = 100, takes: bool = True
) -> DeviceFill:
    return DeviceFill(
        device=device, domain=domain or device, total_bytes=total, used_bytes=used, takes=takes
    )


def layout(devices: list[str], *, data: int) -> Layout:
    """One column on each device."""
    parity = len(devices) - data
    files = tuple(
        ColumnFile(
            d, ColumnName(version=VERSION, kind=Kind.COLUMN, column=i, data=data, parity=parity)
        )
        for i, d in enumerate(devices)
    )
    return Layout(version=VERSION, kind=Kind.COLUMN, data=data, parity=parity, files=files)


# --- what is moved: pure ---------------------------------------------------------------------


def test_a_column_goes_from_the_fullest_to_the_emptiest_device() -> None:
    """Of those that have one to those that have none; none is moved for less than is asked."""
    fills = {f.device: f for f in (fill("a", 60), fill("b", 90), fill("c", 10), fill("d", 30))}
    found = plan_move(layout(["a", "b"], data=1), fills, parity=1, least=0.05)
    assert found is not None
    assert (found.source, found.target) == ("b", "c")
    assert plan_move(layout(["a", "b"], data=1), fills, parity=1, least=0.8) is None
    assert plan_move(layout(["a", "b", "c", "d"], data=2), fills, parity=2, least=0.05) is None


def test_nothing_goes_to_a_device_that_takes_no_columns() -> None:
    """Full, slow, or given up: the next one is taken, or none."""
    fills = {f.device: f for f in (fill("a", 90), fill("c", 1, takes=False), fill("d", 80))}
    assert plan_move(layout(["a"], data=1), fills, parity=1, least=0.2) is None
    found = plan_move(layout(["a"], data=1), fills, parity=1, least=0.05)
    assert found is not None
    assert found.target == "d"


def test_a_move_that_turns_the_tables_is_not_worth_it() -> None:
    """Twenty bytes from 60 to 50 of a hundred: the target would be the fuller one."""
    assert evens_out(fill("a", 60), fill("b", 50), 5)
    assert not evens_out(fill("a", 60), fill("b", 50), 20)


def test_spread_is_between_the_fullest_and_the_emptiest_that_takes_columns() -> None:
    found = spread_of([fill("a", 90), fill("b", 20), fill("c", 0, takes=False)])
    assert found == pytest.approx(0.7)
    assert spread_of([fill("a", 90, takes=False)]) == 0.0
    assert spread_of([]) == 0.0


@given(st.data())
def test_no_move_breaks_the_cap_of_a_failure_domain_rule_3(data: st.DataObject) -> None:
    """PROTOCOL 3, for any fills, domains and stripe: a domain that was within its cap stays so, and
    the column goes outside its stripe to a device that is emptier by what is asked."""
    count = data.draw(st.integers(2, 9))
    width = data.draw(st.integers(2, count))
    parity = data.draw(st.integers(1, width - 1))
    least = data.draw(st.floats(0.0, 0.5))
    fills = {
        str(i): fill(
            str(i),
            data.draw(st.integers(0, 100)),
            takes=data.draw(st.booleans()),
            domain=f"h{data.draw(st.integers(0, 3))}",
        )
        for i in range(count)
    }
    stripe = data.draw(st.permutations(sorted(fills)))[:width]
    found = plan_move(layout(stripe, data=width - parity), fills, parity=parity, least=least)
    if found is None:
        return
    assert found.source in stripe
    assert found.target not in stripe
    source, target = fills[found.source], fills[found.target]
    assert target.takes
    assert source.share - target.share > least
    before = Counter(fills[d].domain for d in stripe)
    after = Counter(fills[d].domain for d in [*set(stripe) - {found.source}, found.target])
    cap = domain_cap(width, len({f.domain for f in fills.values()}), parity)
    assert all(after[d] <= max(cap, before[d]) for d in after)


# --- moving ----------------------------------------------------------------------------------


class Filled:
    """2+1 on four devices of 4 MiB, half full; then a fifth one that is empty."""

    def __init__(self, directory: Path, *, objects: int = 24) -> None:
        self.clock = FakeClock()
        self.harness = Harness(directory, data=2, parity=1, devices=4, clock=self.clock)
        self.bodies = {f"k/{i}": bytes([i + 1]) * 150_000 for i in range(objects)}
        with self.harness.open() as pool:
            for key, body in self.bodies.items():
                pool.put(key, body)
            pool.add_device("memory://d4")
        for device in self.harness.devices.values():
            device.capacity_bytes = 4 * MIB

    def check(self, pool: Pool) -> None:
        """Every object has its bytes and all its columns."""
        assert {key: pool.get(key) for key in self.bodies} == self.bodies
        assert pool.status().degraded == 0

    def once_each(self) -> bool:
        """Whether every object has three files, one a column."""
        for files in map(self.harness.columns, self.bodies):
            names = [parse_column_name(path.rpartition("/")[2]) for _, path in files]
            if len(names) != 3 or {name.column for name in names if name is not None} != {0, 1, 2}:
                return False
        return True


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path)


def shares(pool: Pool) -> list[float]:
    return sorted(f.share for f in fills_of(pool._store).values())


def test_a_device_that_was_added_is_filled(filled: Filled) -> None:
    """To within half of the spread; every object is whole, each column is there once."""
    with filled.harness.open() as pool:
        before = shares(pool)
        report = pool.admin.rebalance(spread=0.1)
        assert report.columns_moved > 0
        assert report.bytes > report.columns_moved * 75_000
        assert report.spread_before == pytest.approx(before[-1] - before[0])
        assert report.spread_after <= 0.1
        after = shares(pool)
        assert after[-1] - after[0] == pytest.approx(report.spread_after, abs=0.01)
        filled.check(pool)
        assert pool.scrub().clean
        assert not pool.admin.rebalance(spread=0.1).columns_moved
    assert filled.once_each()


class Watched(DeviceWrapper):
    """Calls `before(operation)` before each operation."""

    def __init__(self, inner: Device, before: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._before = before

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        self._before(operation)
        return call()


def test_no_object_is_short_of_a_column_at_any_moment(filled: Filled) -> None:
    """Before each operation on any device: what is durable under its name holds every column."""

    def check(_: str) -> None:
        for key in filled.bodies:
            held = {
                path.rpartition("/")[2]
                for url, path in filled.harness.columns(key)
                if path in filled.harness.devices[url]._durable_names
            }
            assert len(held) == 3

    with filled.harness.open(lambda _, device: Watched(device, check)) as pool:
        assert pool.admin.rebalance(spread=0.3).columns_moved > 1


def test_a_rebalance_that_dies_anywhere_leaves_every_object_whole_rule_10(tmp_path: Path) -> None:
    """PROTOCOL 10: dead before operation 0, 1, 2 ... and without power; what is left twice goes."""
    for crash_at in range(0, 10_000, 1 if LONG else 31):
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        filled = Filled(directory, objects=4)
        for device in filled.harness.devices.values():
            device.capacity_bytes = 600 * KIB
        pool, _ = filled.harness.open_crashing(crash_at)
        try:
            finished = pool.admin.rebalance(spread=0.2).columns_moved > 0
        except SimulatedCrash:
            finished = False
        filled.harness.power_cut()
        with filled.harness.open() as after:
            filled.check(after)
            assert after.rebuild().whole
            assert filled.once_each()
            filled.check(after)
        if finished:
            assert crash_at > 20
            return
    raise AssertionError("it never ends")


class Few:
    """A pace that stops after so many objects."""

    def __init__(self, objects: int) -> None:
        self.left, self.bytes = objects, 0

    def __call__(self, nbytes: int) -> None:
        self.bytes += nbytes

    def go_on(self) -> bool:
        self.left -= 1
        return self.left >= 0


def test_stopped_it_goes_on_where_it_was(filled: Filled) -> None:
    """What was moved stays: the second run begins with what the first has reached."""
    with filled.harness.open() as pool:
        first = pool.admin.rebalance(spread=0.1, pace=Few(6))
        assert first.stopped
        assert first.columns_moved > 0
        there = {path for url, path in map_columns(filled) if url == "memory://d4"}
        seen: list[Progress] = []
        second = pool.admin.rebalance(spread=0.1, progress=seen.append)
        assert not second.stopped
        assert seen[-1].bytes == second.bytes
        assert second.spread_before == pytest.approx(first.spread_after, abs=0.01)
        assert there <= {path for url, path in map_columns(filled) if url == "memory://d4"}
        filled.check(pool)


def test_every_byte_that_is_moved_passes_the_pace(filled: Filled) -> None:
    """Throttled as a rebuild is."""
    pace = Few(10**6)
    with filled.harness.open() as pool:
        report = pool.admin.rebalance(spread=0.1, pace=pace)
    headers = report.columns_moved * 16 * KIB
    assert report.bytes - headers <= pace.bytes <= report.bytes


def test_only_whole_objects_are_moved(filled: Filled) -> None:
    """One that lacks a column is a rebuild's; of one with a damaged column a good one is made."""
    short, damaged = "k/0", "k/1"
    (url, path) = filled.harness.columns(short)[0]
    del filled.harness.devices[url].files[path]
    (url, path) = filled.harness.columns(damaged)[0]
    filled.harness.flip(url, path, 40_000)
    before = filled.harness.columns(short)
    with filled.harness.open() as pool:
        assert pool.admin.rebalance(spread=0.02).columns_moved > 10
        assert filled.harness.columns(short) == before
        assert pool.rebuild().whole
        pool.scrub()
        filled.check(pool)


def test_read_only_and_draining_devices_neither_give_nor_take(filled: Filled) -> None:
    """A read-only one could not give its file up; a draining one is emptied by a rebuild."""
    filled.harness.devices["memory://d0"].read_only = True
    with filled.harness.open() as pool:
        pool.admin.devices.begin_drain("memory://d1")
        on = {u: {p for v, p in map_columns(filled) if v == u} for u in filled.harness.urls}
        pool.admin.rebalance(spread=0.05)
        for url in ("memory://d0", "memory://d1"):
            assert {p for v, p in map_columns(filled) if v == url} == on[url]


def map_columns(filled: Filled) -> list[tuple[str, str]]:
    return [row for key in filled.bodies for row in filled.harness.columns(key)]


def test_a_device_that_cannot_be_written_is_given_up(filled: Filled) -> None:
    """Told, once; the object is as it was, and other devices still take columns."""
    failing = {"memory://d4"}

    def before(url: str) -> Callable[[str], None]:
        def check(operation: str) -> None:
            if url in failing and operation == "create":
                raise OSError(5, "input/output error")

        return check

    with filled.harness.open(lambda url, device: Watched(device, before(url))) as pool:
        report = pool.admin.rebalance(spread=0.1)
        assert len(report.failed) == 1
        assert not any(url == "memory://d4" for url, _ in map_columns(filled))
        filled.check(pool)
        assert pool.metrics.snapshot()["column_move_error_total"] == 1


def test_an_object_that_has_changed_meanwhile_is_left_alone(filled: Filled) -> None:
    """Deleted, overwritten, moved by another: nothing is copied, nothing removed."""
    with filled.harness.open() as pool:
        store, (source, path) = pool._store, filled.harness.columns("k/0")[0]
        ids = {url: device for device, url in pool.admin.devices.places.items()}

        def move(key: str, where: str = source) -> int:
            return move_column(
                store, key, ids[where], ids["memory://d4"], lambda _: None, worth=lambda _: True
            )

        other = next(
            u for u in filled.harness.urls if u not in {v for v, _ in filled.harness.columns("k/0")}
        )
        assert not move("k/0", other)
        assert not move("never")
        pool.delete("k/1")
        assert not move("k/1", "memory://d0")
        assert move("k/0") > 75_000
        assert (source, path) not in filled.harness.columns("k/0")
        assert not move("k/0")


def test_with_a_newer_membership_both_copies_stay_rule_4(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 4: between copy and removal somebody changes the pool; a rebuild clears it up."""
    with filled.harness.open() as pool:
        store, (source, _) = pool._store, filled.harness.columns("k/0")[0]
        ids = {url: device for device, url in pool.admin.devices.places.items()}
        copied = rebuild_columns

        def then_change(*words: object) -> None:
            copied(*words)  # type: ignore[arg-type]
            with filled.harness.open() as other:
                other.admin.devices.begin_drain(
                    "memory://d3" if source != "memory://d3" else "memory://d2"
                )

        monkeypatch.setattr("hpstore.maintenance.move_column.rebuild_columns", then_change)
        move_column(
            store, "k/0", ids[source], ids["memory://d4"], lambda _: None, worth=lambda _: True
        )
        assert len(filled.harness.columns("k/0")) == 4
        monkeypatch.undo()
        pool.admin.refresh()
        assert pool.rebuild().whole
        assert len(filled.harness.columns("k/0")) == 3


def test_a_spread_that_is_no_share_is_refused(filled: Filled) -> None:
    """In one line."""
    with filled.harness.open() as pool:
        for spread in (0.0, -1.0, 1.5, float("nan")):
            with pytest.raises(ConfigError, match="is not a share"):
                pool.admin.rebalance(spread=spread)


# --- the agent -------------------------------------------------------------------------------


def jobs_done(tended: Tended) -> list[str]:
    return [e.text for e in tended.agent.jobs.events() if e.text.startswith("rebalance")]


def emptied(directory: Path, **words: object) -> Tended:
    """An agent over devices of 2 MiB, one of which has been added."""
    config = AgentConfig(scrub_days=0.0, smart_hours=0.0, **words)  # type: ignore[arg-type]
    tended = Tended(directory, data=2, parity=1, devices=4, config=config)
    for number in range(6):
        key, body = f"m/{number}", bytes([number]) * 200_000
        tended.pool.put(key, body)
        tended.content[key] = body
    tended.pool.add_device("memory://d4")
    for device in tended.harness.devices.values():
        device.capacity_bytes = 2 * MIB
    return tended


def test_agent_evens_out_when_all_is_whole(tmp_path: Path) -> None:
    """Told with its figures; it ends, and is not begun again at each round."""
    tended = emptied(tmp_path)
    tended.rounds(60)
    assert len(jobs_done(tended)) == 1
    assert "columns moved" in jobs_done(tended)[0]
    assert any(url == "memory://d4" for k in tended.content for url, _ in tended.harness.columns(k))
    assert tended.whole()
    tended.rounds(600, step=20)
    assert len(jobs_done(tended)) <= 2
    tended.stop()


def test_agent_evens_nothing_out_while_a_device_is_away_or_it_is_not_wanted(tmp_path: Path) -> None:
    """Healing comes first; 0 means never."""
    tended = emptied(tmp_path)
    tended.harness.lose(["memory://d0"])
    tended.rounds(300, step=20)
    assert jobs_done(tended) == []
    tended.stop()
    (tmp_path / "never").mkdir()
    tended = emptied(tmp_path / "never", rebalance_spread=0.0)
    tended.rounds(300, step=20)
    assert jobs_done(tended) == []
    tended.stop()


def test_a_rebalance_stops_for_a_rebuild_and_holds_no_removal_up(tmp_path: Path) -> None:
    """It is less urgent than any healing; the guards do not take it for one."""
    from hpstore.agent.background_jobs import BackgroundJob

    tended = emptied(tmp_path)
    jobs = tended.agent.jobs
    jobs.submit(BackgroundJob(kind=JobKind.REBALANCE))
    assert jobs.busy() == ""
    jobs.submit(BackgroundJob(kind=JobKind.SCRUB))
    jobs.submit(BackgroundJob(kind=JobKind.REBUILD))
    assert [job.kind for job in jobs.waiting()] == [
        JobKind.REBUILD,
        JobKind.REBALANCE,
        JobKind.SCRUB,
    ]
    assert jobs.busy() == "a rebuild"
    tended.stop()
