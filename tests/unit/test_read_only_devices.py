"""Devices that refuse writes: read and counted, given nothing new, drained without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from hpstore.devices.base import Device, Usage
from hpstore.devices.local import LocalDevice
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import DeviceReadOnly, MembershipError, ObjectNotFound, TooFewDevices
from hpstore.format.keys import ColumnName, Kind, Version
from hpstore.format.records import DeviceState
from hpstore.health import HealthState
from hpstore.health.policy.states import ActionKind, PolicyConfig, Role
from hpstore.maintenance.dependents import depends_on
from hpstore.objects.survey import ColumnFile, Survey
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.units import KIB
from tests.unit.health_rounds import Policy
from tests.unit.tended import Tended
from tests.unit.test_return_and_rebuild_plans import view

T = TypeVar("T")
S = HealthState
HEADER_BYTES = 4 * KIB
FIXED = "memory://d0"
BODIES = {
    "small": b"s" * 3_000,
    "large": b"l" * 900_000,
    **{f"a/{i}": bytes([i]) * (200_001 + i) for i in range(6)},
}


class Counted(DeviceWrapper):
    """Remembers the sizes of reads, and how many files were begun."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.reads: list[int] = []
        self.created = 0

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "read":
            self.reads.append(nbytes)
        self.created += operation == "create"
        return call()


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """2+1 on four devices, filled."""
    made = Harness(tmp_path, data=2, parity=1, devices=4, clock=FakeClock())
    with made.open() as pool:
        for key, body in BODIES.items():
            pool.put(key, body)
    return made


def fix(harness: Harness, *urls: str) -> None:
    """Their filesystems refuse writes from now on."""
    for url in urls or (FIXED,):
        harness.devices[url].read_only = True


def state_of(pool: Pool, url: str) -> str:
    return next(device.state for device in pool.status().devices if device.url == url)


def test_a_pool_opens_with_a_read_only_device_and_counts_it(harness: Harness) -> None:
    """It answers: the pool may lose one more, and the status says what is wrong with it."""
    fix(harness)
    with harness.open() as pool:
        status = pool.status()
        assert state_of(pool, FIXED) == "read-only"
        assert "read-only" in next(d.problem for d in status.devices if d.url == FIXED)
        assert (status.losses_tolerated, status.degraded) == (1, 0)
        assert status.counters["device_read_only_total"] == 1
        assert status.effective_data == 2
        assert status.can_shrink_by == 1


def test_what_a_read_only_device_holds_is_read(harness: Harness) -> None:
    """With another device lost every object needs it."""
    fix(harness)
    harness.lose(["memory://d1"])
    with harness.open() as pool:
        assert {key: pool.get(key) for key in BODIES} == BODIES
        assert FIXED in pool.admin.devices.places.values()


def test_a_read_only_device_takes_no_new_columns_rule_3(harness: Harness) -> None:
    """PROTOCOL 3: not those of a put, nor is one tried there; deletes go on, too."""
    fix(harness)
    with harness.open() as pool:
        for number in range(8):
            assert pool.put(f"n/{number}", b"n" * 200_000).losses_tolerated == 1
            assert FIXED not in {url for url, _ in harness.columns(f"n/{number}")}
        assert "put_retried_total" not in pool.metrics.snapshot()
        pool.delete("small")
        with pytest.raises(ObjectNotFound):
            pool.get("small")


def test_a_device_that_turns_read_only_is_tried_once_and_used_again_when_it_can_be_written(
    harness: Harness,
) -> None:
    """Under an open pool: the first put meets it and goes elsewhere, the next ones know."""
    with harness.open() as pool:
        fix(harness)
        for number in range(8):
            pool.put(f"n/{number}", b"n" * 200_000)
        assert pool.metrics.snapshot()["put_retried_total"] == 1
        harness.devices[FIXED].read_only = False
        for number in range(8):
            pool.put(f"m/{number}", b"m" * 200_000)
        assert any(url == FIXED for n in range(8) for url, _ in harness.columns(f"m/{n}"))
        assert state_of(pool, FIXED) == "online"


def test_with_all_devices_read_only_everything_is_read_and_nothing_changed(
    harness: Harness,
) -> None:
    """A put and a change of the membership are refused before anything is written."""
    fix(harness, *harness.urls)
    with harness.open() as pool:
        assert {key: pool.get(key) for key in BODIES} == BODIES
        with pytest.raises(TooFewDevices, match="reading goes on"):
            pool.put("new", b"x")
        with pytest.raises(MembershipError, match="Nothing was changed"):
            pool.evict(FIXED)
        assert pool.status().effective_data == 0


def test_a_change_is_not_begun_on_devices_that_cannot_take_it_rule_14(harness: Harness) -> None:
    """PROTOCOL 14: two of four can be written, three are needed; no device has a new record."""
    fix(harness, FIXED, "memory://d1")
    with harness.open() as pool:
        with pytest.raises(MembershipError, match="2 devices can be written"):
            pool.drain("memory://d2")
        assert pool.admin.record.generation == 1
    with harness.open() as pool:
        assert pool.admin.record.generation == 1


def test_a_read_only_device_is_drained_by_reading_it_not_the_others(harness: Harness) -> None:
    """Each of its columns is copied once; of the others only headers are read."""
    fix(harness)
    counted: dict[str, Counted] = {}
    before = dict(harness.devices[FIXED].files)
    with harness.open(lambda url, device: counted.setdefault(url, Counted(device))) as pool:
        mine = [key for key in BODIES if FIXED in {url for url, _ in harness.columns(key)}]
        assert pool.drain(FIXED) == len(mine) > 0
        assert sum(device.created for device in counted.values()) == len(mine)
        others = [n for url, x in counted.items() if url != FIXED for n in x.reads]
        assert max(others) <= HEADER_BYTES
        assert max(counted[FIXED].reads) > HEADER_BYTES
        (left,) = pool.admin.record.evicted
        assert (left.url, left.state) == (FIXED, DeviceState.HEALED)
        assert pool.status().losses_tolerated == 1
        assert {key: pool.get(key) for key in BODIES} == BODIES
    assert harness.devices[FIXED].files == before


def test_a_rebuild_does_not_copy_again_what_cannot_be_removed(harness: Harness) -> None:
    """The files stay on the device that leaves; the copies on those that stay are found."""
    fix(harness)
    with harness.open() as pool:
        pool.admin.devices.begin_drain(FIXED)
        first = pool.rebuild()
        assert first.columns_written > 0
        columns = {key: harness.columns(key) for key in BODIES}
        for again in (pool.rebuild(), pool.rebuild()):
            assert again.whole
            assert not again.columns_written
        assert {key: harness.columns(key) for key in BODIES} == columns
        assert pool.admin.devices.end_drain(FIXED)
        assert pool.status().losses_tolerated == 1


def test_a_pool_that_is_opened_read_only_learns_it_from_the_mount_rule_23(
    harness: Harness,
) -> None:
    """PROTOCOL 23: without writing; the device is no place for new columns."""

    class Mounted(DeviceWrapper):
        def usage(self) -> Usage:
            return replace(self.inner.usage(), read_only=True)

    def wrap(url: str, device: Device) -> Device:
        return Mounted(device) if url in (FIXED, "memory://d1") else device

    with harness.open(wrap, read_only=True) as pool:
        assert state_of(pool, FIXED) == "read-only"
        assert pool.status().effective_data == 1
        assert pool.status().losses_tolerated == 1


def test_what_a_drained_read_only_device_still_holds_does_not_come_back_rule_12(
    harness: Harness,
) -> None:
    """PROTOCOL 12: deleted and overwritten while it could not be cleared, then taken back."""
    fix(harness)
    with harness.open() as pool:
        pool.delete("small")
        pool.put("large", b"new" * 100_000)
        pool.drain(FIXED)
        harness.devices[FIXED].read_only = False
        found = pool.readmit(FIXED)
        assert found is not None
        assert (found.kept, found.quarantined) == (0, 0)
        with pytest.raises(ObjectNotFound):
            pool.get("small")
        assert pool.get("large") == b"new" * 100_000
        assert pool.get("a/1") == BODIES["a/1"]


def test_a_read_only_device_that_holds_a_last_column_stays(harness: Harness) -> None:
    """Three devices for 2+1: nothing can take its columns at full parity but a narrower layout."""
    with harness.open() as pool:
        pool.evict("memory://d3")
        assert pool.rebuild().whole
    fix(harness)
    full = harness.devices["memory://d1"]
    full.capacity_bytes -= full.usage().free - 8 * KIB  # room for records, below its reserve
    with harness.open() as pool:
        with pytest.raises(MembershipError, match="cannot leave"):
            pool.drain(FIXED)
        assert pool.admin.record.member(pool.admin.devices.find(FIXED).device_id) is not None
        assert pool.status().losses_tolerated >= 0
        assert {key: pool.get(key) for key in BODIES} == BODIES


def test_a_full_device_is_not_shown_as_missing(harness: Harness) -> None:
    """It answers, and may be lost like any other; its problem is told."""
    harness.devices[FIXED].capacity_bytes = 1

    class Full(DeviceWrapper):
        def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
            if operation == "probe":
                self.inner.write_small("tmp/probe", b"xx")
            return call()

    with harness.open(lambda url, x: Full(x) if url == FIXED else x) as pool:
        status = pool.status()
        assert state_of(pool, FIXED) == "online"
        assert "full" in next(d.problem for d in status.devices if d.url == FIXED)
        assert status.losses_tolerated == 1


# --- what depends on a device, by names ----------------------------------------------------------

OLD, NEW = Version(1, 1), Version(2, 1)


def survey(*rows: tuple[Version, int, str], kind: Kind = Kind.COLUMN, data: int = 4) -> Survey:
    """Files of one key: version, column, device."""
    files = tuple(
        ColumnFile(
            device, ColumnName(version=version, kind=kind, column=column, data=data, parity=2)
        )
        for version, column, device in rows
    )
    return Survey(key="k", files=files, unknown=frozenset())


def stripe(version: Version, columns: Iterable[int]) -> Iterator[tuple[Version, int, str]]:
    """Column c on device c."""
    return ((version, column, str(column)) for column in columns)


def test_a_column_that_another_staying_device_has_is_not_needed_here() -> None:
    """Pure: also not when another column is missing; but one on a device that leaves counts not."""
    pool = view(8)
    assert depends_on(pool, survey(*stripe(NEW, range(6))), "0")
    assert not depends_on(pool, survey(*stripe(NEW, range(6)), (NEW, 0, "7")), "0")
    assert not depends_on(pool, survey(*stripe(NEW, range(5)), (NEW, 0, "7")), "0")
    leaving = view(8, draining=["7"])
    assert depends_on(leaving, survey(*stripe(NEW, range(6)), (NEW, 0, "7")), "0")


def test_an_older_version_is_needed_until_the_newer_is_whole_without_the_device_rule_8() -> None:
    """PROTOCOL 8, pure."""
    pool = view(8)
    whole = survey(*((NEW, c, str(c + 1)) for c in range(6)), (OLD, 0, "0"))
    short = survey(*((NEW, c, str(c + 1)) for c in range(5)), (OLD, 0, "0"))
    assert not depends_on(pool, whole, "0")
    assert depends_on(pool, short, "0")


def test_a_tombstone_needs_its_copies_elsewhere_rule_12() -> None:
    """PROTOCOL 12, pure: m + 1 of them on devices that stay."""
    pool = view(8)

    def tombstone(*devices: str) -> Survey:
        rows = ((NEW, i, device) for i, device in enumerate(devices))
        return survey(*rows, kind=Kind.TOMBSTONE, data=1)

    assert depends_on(pool, tombstone("0", "1", "2"), "0")
    assert not depends_on(pool, tombstone("0", "1", "2", "3"), "0")


# --- the policy and the agent ----------------------------------------------------------------


def test_policy_waits_for_a_remount_then_drains_whatever_parity_says() -> None:
    """With m = 1 nothing is removed by choice; a read-only device takes nothing away."""
    policy = Policy(PolicyConfig(role=Role.AGENT), count=8, parity=1)
    policy.fact("d0", read_only=True)
    assert policy.round().states() == {"d0": S.READ_ONLY}
    assert policy.round(after=800).states() == {"d0": S.READ_ONLY}
    assert not policy.actions
    policy.round(after=100)
    assert policy.states() == {"d0": S.DRAINING}
    assert policy.asked() == [(ActionKind.DRAIN, "d0")]


def test_policy_takes_a_device_back_that_can_be_written_again() -> None:
    """Nothing has happened to it."""
    policy = Policy(PolicyConfig(role=Role.AGENT))
    policy.fact("d0", read_only=True)
    policy.round().round(after=800)
    policy.fact("d0", read_only=False)
    assert policy.round().states() == {}
    assert not policy.round(after=1000).actions


def test_policy_drains_none_when_many_are_read_only_and_one_at_a_time_else() -> None:
    """Three of eight: a shared cause, an alarm. Two: ten minutes apart."""
    policy = Policy(PolicyConfig(role=Role.AGENT))
    for device in ("d0", "d1", "d2"):
        policy.fact(device, read_only=True)
    policy.round()
    assert (ActionKind.ALARM, "") in policy.asked()
    policy.round(after=2000)
    assert set(policy.states().values()) == {S.READ_ONLY}
    assert "are bad" in policy.health("d0").refused
    policy.fact("d2", read_only=False)
    policy.round()
    policy.round()
    assert sorted(policy.states().values()) == [S.DRAINING, S.READ_ONLY]


def test_policy_leaves_a_process_and_an_operators_sit_out_alone() -> None:
    """A process drains nothing; a device that an operator has taken out stays as he left it."""
    policy = Policy()
    policy.fact("d0", read_only=True)
    policy.round().round(after=2000)
    assert not policy.actions


def test_agent_drains_a_read_only_device_after_its_grace(tmp_path: Path) -> None:
    """Seen at once; no column is moved for fifteen minutes; then it leaves, every object whole."""
    tended = Tended(tmp_path, data=3, parity=1, devices=6)
    tended.rounds(10)
    device = tended.harness.devices["memory://d2"]
    device.read_only = True
    tended.rounds(60)
    assert tended.states() == {2: S.READ_ONLY}
    assert tended.status is not None
    row = next(d for d in tended.status.devices if d.device == tended.device(2))
    assert (row.state, row.present, row.total_bytes > 0) == ("read-only", True, True)
    assert "read-only" in row.problem
    before = dict(device.files)
    tended.rounds(800, step=20)
    assert 2 in tended.members()
    tended.rounds(200, step=20)
    assert 2 not in tended.members()
    assert tended.states() == {2: S.EVICTED}
    assert tended.whole()
    assert device.files == before
    tended.stop()


def test_agent_keeps_a_read_only_device_that_is_mounted_anew(tmp_path: Path) -> None:
    """Within its grace; nothing was moved, the membership is as it was."""
    tended = Tended(tmp_path)
    tended.rounds(10)
    tended.harness.devices["memory://d2"].read_only = True
    tended.rounds(600, step=60)
    tended.harness.devices["memory://d2"].read_only = False
    tended.rounds(1200, step=60)
    assert tended.states() == {}
    assert tended.pool.admin.record.generation == 1
    tended.stop()


def test_local_device_tells_a_read_only_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By statvfs: a pool that is opened read-only finds out without writing."""
    import os

    device = LocalDevice(str(tmp_path))
    assert not device.usage().read_only
    real = os.fstatvfs

    class Flagged:
        def __init__(self, fd: int) -> None:
            self._found = real(fd)
            self.f_flag = self._found.f_flag | os.ST_RDONLY

        def __getattr__(self, name: str) -> object:
            return getattr(self._found, name)

    monkeypatch.setattr("hpstore.devices.local.os.fstatvfs", Flagged)
    assert device.usage().read_only
    device.close()


def test_read_only_memory_device_answers_as_a_disk_does() -> None:
    """Every kind of write is refused; reads go on."""
    from hpstore.devices.memory import MemoryDevice

    device = MemoryDevice("memory://x")
    device.write_small("hpstore.json", b"x")
    device.read_only = True
    writes: list[Callable[[], object]] = [
        lambda: device.create(4096),
        lambda: device.write_small("a", b""),
        lambda: device.delete("hpstore.json"),
        lambda: device.retire("hpstore.json"),
        lambda: device.quarantine("hpstore.json"),
        device.sweep,
        lambda: device.probe(write=True),
    ]
    for write in writes:
        with pytest.raises(DeviceReadOnly):
            write()
    device.probe(write=False)
    assert device.read_small("hpstore.json", 10) == b"x"
