"""Registers on the devices of a pool: one at a time, nothing acknowledged lost (PROTOCOL 15)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hpstore.agreement.register_slots import SlotEntry, decode_entry, encode_entry, merge, range_of
from hpstore.agreement.registers import AGENT, HOLDS, MEMBERSHIP, REPAIR, Register, key_register
from hpstore.devices.base import REGISTERS_BYTES, Device
from hpstore.devices.wrappers import DeviceWrapper, FaultyDevice, SimulatedCrash
from hpstore.errors import LockTimeout, MembershipError, RegistersUnavailable
from hpstore.format.records import DeviceState
from hpstore.maintenance import dependents
from hpstore.membership import changes, members
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from tests.thorough import LONG

T = TypeVar("T")
NAME = "key-0007"


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path, data=3, parity=2, devices=6, clock=FakeClock())


def add_one(pool: Pool) -> int:
    """Count in a record; the number that this call has made."""

    def change(register: Register) -> bytes:
        return b"%d" % (int(register.value or b"0") + 1)

    value = pool.admin.registers.update(NAME, change, what="a test").value
    return int(value or b"0")


def read(pool: Pool) -> int:
    value = pool.admin.registers.update(NAME, lambda _: None, what="a test").value
    return int(value or b"0")


class Dying(DeviceWrapper):
    """The process dies before it has written a register on more than `writes` devices."""

    def __init__(self, inner: Device, writes: list[int]) -> None:
        super().__init__(inner)
        self._writes = writes

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "register":
            if self._writes[0] == 0:
                raise SimulatedCrash(operation)
            self._writes[0] -= 1
        return call()


def test_every_record_has_its_place_and_comes_back_whole() -> None:
    """No two names share bytes; a value that was torn gives way to the one before."""
    places = {range_of(name)[0] for name in (*HOLDS, "key-0000", "key-4095", "repair-0000")}
    assert len(places) == len(HOLDS) + 3
    assert all(range_of(name)[0] + 512 <= REGISTERS_BYTES for name in (*HOLDS, "key-4095"))
    assert key_register("a") != key_register("b")
    slot, entry = bytearray(512), SlotEntry()
    for number in range(1, 6):
        made = SlotEntry(promised=1, order=(1, number), value=b"v%d" % number, copy=entry.copy)
        offset, copy = encode_entry(made)
        torn = bytearray(slot)
        torn[offset : offset + 40] = copy[:40]
        assert decode_entry(bytes(torn)).value == entry.value
        slot[offset : offset + len(copy)] = copy
        entry = decode_entry(bytes(slot))
        assert (entry.order, entry.value) == (made.order, made.value)


def test_a_record_survives_the_end_of_its_process_and_any_losses(harness: Harness) -> None:
    """Two devices are away in turn; each change is built on the one before."""
    expected = 0
    for away in (["d0", "d1"], ["d2", "d3"], [], ["d4", "d5"], ["d0", "d5"]):
        harness.bring_back()
        harness.lose(f"memory://{name}" for name in away)
        with harness.open() as pool:
            expected += 1
            assert add_one(pool) == expected
        harness.restart()
    harness.bring_back()
    harness.power_cut()
    with harness.open() as pool:
        assert read(pool) == expected


@hypothesis_settings(
    max_examples=150 if LONG else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sets(st.integers(0, 5), max_size=2)),
        min_size=1,
        max_size=8,
    )
)
def test_what_was_acknowledged_is_never_lost_wherever_writers_die_rule_15(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[int, set[int]]]
) -> None:
    """Each writer dies after some writes of registers, with other devices away: a count may rise
    once more than was acknowledged for each that died, and never falls below."""
    path = tmp_path_factory.mktemp("dying")
    harness = Harness(path, data=3, parity=2, devices=6, clock=FakeClock())
    least = most = 0
    for writes, away in turns:
        harness.bring_back()
        harness.lose(f"memory://d{number}" for number in away)
        left = [1 << 30]
        pool = harness.open(lambda _, device, left=left: Dying(device, left))  # type: ignore[misc]
        left[0] = writes
        try:
            found = add_one(pool)
        except SimulatedCrash:
            most += 1
        else:
            assert least < found <= most + 1
            least = most = found
        left[0] = 1 << 30
        pool.close()
    harness.bring_back()
    with harness.open() as pool:
        first = read(pool)
        assert least <= first <= most
    harness.lose(["memory://d0", "memory://d1"])
    with harness.open() as pool:
        assert read(pool) == first


@pytest.mark.parametrize("number", range(8))
def test_what_a_dead_writer_left_unseen_does_not_come_out_as_newer_rule_15(
    tmp_path: Path, number: int
) -> None:
    """It wrote on two devices, which are away when the next one is acknowledged; when they are back
    two of those that know better are away. Without rounds both records have one sequence number."""
    harness = Harness(tmp_path, data=3, parity=2, devices=6, clock=FakeClock())

    def write(pool: Pool, value: bytes) -> None:
        pool.admin.registers.update(NAME, lambda _: value, what="a test")

    with harness.open() as pool:
        write(pool, b"first")
    before = {url: bytes(device.registers) for url, device in harness.devices.items()}
    left = [1 << 30]
    dying = harness.open(lambda _, device: Dying(device, left))
    left[0] = 2
    with pytest.raises(SimulatedCrash):
        write(dying, b"unseen")
    offset, nbytes = range_of(NAME)
    seen = [
        url
        for url, device in harness.devices.items()
        if device.registers[offset : offset + nbytes] != before[url][offset : offset + nbytes]
    ]
    assert len(seen) == 2
    left[0] = 1 << 30
    dying.close()
    with harness.open() as pool:
        harness.lose(seen)
        write(pool, b"acknowledged")
    harness.bring_back()
    with harness.open() as pool:
        harness.lose([url for url in harness.urls if url not in seen][number % 3 : number % 3 + 2])
        found = pool.admin.registers.update(NAME, lambda _: None, what="a test")
    assert found.value == b"acknowledged"


def test_records_are_taken_along_when_members_come_and_go_rule_15(harness: Harness) -> None:
    """One disk after another is replaced until none of the first is left: no count is lost."""
    with harness.open() as pool:
        pool.put("a", b"x")
        harness.lose(["memory://d4", "memory://d5"])
        assert add_one(pool) == 1
        harness.bring_back()
        for number in range(6):
            pool.add_device(f"memory://e{number}")
            pool.evict(f"memory://d{number}")
            pool.rebuild()
        assert {m.url for m in pool.admin.record.members} == {f"memory://e{n}" for n in range(6)}
        assert add_one(pool) == 2
    harness.lose(["memory://e0", "memory://e1"])
    with harness.open() as pool:
        assert read(pool) == 2


def test_two_processes_never_store_two_successors_of_one_generation_rule_14(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process was stopped just before it stored its change, its locks went with unplugged disks,
    and another one has evicted: the first is refused, and its eviction has not happened."""
    a, b = harness.open(), harness.open()
    a.put("k", bytes(300_000))
    plain = members.commit_record

    def stopped(store: object, new: object, extra: object, *, force: bool) -> None:
        monkeypatch.undo()
        for device in harness.devices.values():
            device.restart()  # all holds are gone
        b.evict("memory://d1")
        plain(store, new, extra, force=force)  # type: ignore[arg-type]

    monkeypatch.setattr("hpstore.membership.changes.commit_record", stopped)
    with pytest.raises(MembershipError, match="another process has changed it"):
        a.evict("memory://d0")
    a.admin.refresh()
    assert [m.url for m in a.admin.record.evicted] == ["memory://d1"]
    assert all(m.state is DeviceState.ONLINE for m in a.admin.record.members)
    a.evict("memory://d0")
    a.close()
    b.close()


def test_an_eviction_judged_on_an_older_membership_is_refused_rule_16(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process evicts while the first looks at what would be lost."""
    a, b = harness.open(), harness.open()
    plain = dependents.endangered

    def slow(*arguments: object, **options: object) -> list[str]:
        found = plain(*arguments, **options)  # type: ignore[arg-type]
        monkeypatch.undo()
        for device in harness.devices.values():
            device.restart()
        b.evict("memory://d1")
        a.admin.refresh()  # as a survey does that meets a newer membership
        return found

    monkeypatch.setattr(changes, "endangered", slow)
    with pytest.raises(MembershipError, match="Nothing was changed"):
        a.evict("memory://d0")
    a.close()
    b.close()


def test_a_hold_excludes_other_processes_and_says_who_has_it_rule_15(harness: Harness) -> None:
    """Also with two devices away; it is free when its process has died."""
    a, b = harness.open(), harness.open()
    for name in (MEMBERSHIP, REPAIR, AGENT, "repair-0001"):
        with a.admin.registers.hold(name, "first"):
            harness.lose(["memory://d0", "memory://d1"])
            with (
                pytest.raises(LockTimeout, match=r"second: .* on memory://d\d for .*Nothing was"),
                b.admin.registers.hold(name, "second", deadline_seconds=1.0),
            ):
                pass
            harness.bring_back()
        with b.admin.registers.hold(name, "second", deadline_seconds=0.0):
            pass
    with a.admin.registers.hold(REPAIR, "first"):
        with (
            pytest.raises(LockTimeout, match=r"process \d+ on .* \(first\)"),
            b.admin.registers.hold(REPAIR, "second", deadline_seconds=0.1),
        ):
            pass
        harness.restart()
        with b.admin.registers.hold(REPAIR, "second", deadline_seconds=0.0):
            pass
    a.close()
    b.close()


def test_without_a_majority_nothing_is_claimed_and_the_error_says_why(harness: Harness) -> None:
    """Conditional puts are refused; plain ones and reads need fewer devices and go on."""
    with harness.open() as pool:
        harness.lose(["memory://d0", "memory://d1", "memory://d2"])
        with pytest.raises(
            RegistersUnavailable, match="3 of 6 devices can be locked, 4 are needed"
        ):
            pool.put("k", b"x", if_absent=True)


def test_a_device_that_hangs_costs_its_grace_once_rule_15(tmp_path: Path) -> None:
    """Its lock and its write are not waited for when a majority has answered; it is not asked again
    before it answers, and what it then has of the lock is let go."""
    harness = Harness(tmp_path, data=3, parity=2, devices=6)
    faulty: dict[str, FaultyDevice] = {}

    def wrap(url: str, device: Device) -> Device:
        return faulty.setdefault(url, FaultyDevice(device))

    with harness.open(wrap, threads=True) as pool:
        assert add_one(pool) == 1
        sick = min(pool.admin.devices.places, key=lambda d: d)
        hung = faulty[pool.admin.devices.places[sick]]
        hung.plan = "H"
        try:
            assert add_one(pool) == 2
            late = pool.metrics.snapshot()["register_device_late_total"]
            for expected in (3, 4, 5):
                assert add_one(pool) == expected
            assert pool.metrics.snapshot()["register_device_late_total"] == late
        finally:
            hung.released.set()
    with harness.open() as pool:
        assert read(pool) == 5
        with pool.admin.registers.exchange(
            {}, [m.device_id for m in pool.admin.record.members], force=False
        ):
            pass  # nothing is held by the call that was late


def test_a_process_that_is_stopped_within_a_lock_is_waited_for_and_named_by_its_devices_rule_15(
    harness: Harness,
) -> None:
    """Conditional puts and changes end with LockTimeout, plain puts go on; with its end all do."""
    with harness.open() as pool:
        stopped = [device.hold(0, 4096 * 512) for device in harness.devices.values()]
        with pytest.raises(LockTimeout, match=r"holds its lock on memory://d\d .* end it"):
            pool.put("k", b"x", if_absent=True)
        with pytest.raises(LockTimeout, match="end it"):
            pool.evict("memory://d0")
        pool.put("plain", b"x")
        for hold in stopped:
            hold.release()
        pool.put("k", b"x", if_absent=True)
        pool.evict("memory://d0")
        assert [m.state for m in pool.admin.record.members] == [DeviceState.ONLINE] * 5


def test_threads_and_pools_count_without_losing_any(tmp_path: Path) -> None:
    """Two pools with four threads each, over one set of devices."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    pools = [harness.open(threads=True) for _ in range(2)]
    made: list[int] = []

    def work(pool: Pool) -> None:
        for _ in range(5):
            made.append(add_one(pool))

    threads = [threading.Thread(target=work, args=(pools[i % 2],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(1, 41))
    for pool in pools:
        pool.close()


def test_merging_takes_the_newest_of_each_record() -> None:
    """And says what each device lacks, no more."""
    images = {"a": bytearray(1024), "b": bytearray(1024), "c": bytearray(1024)}
    for device, slot, order in (("a", 0, (0, 3)), ("b", 0, (1, 1)), ("a", 1, (0, 1))):
        offset, copy = encode_entry(
            SlotEntry(promised=order[0], order=order, value=device.encode())
        )
        images[device][512 * slot + offset : 512 * slot + offset + 256] = copy
    lacking = merge({d: bytes(image) for d, image in images.items()})
    assert {d: {o: e.value for o, e in found.items()} for d, found in lacking.items()} == {
        "a": {0: b"b"},
        "b": {512: b"a"},
        "c": {0: b"b", 512: b"a"},
    }


def test_a_hold_that_another_process_has_by_now_does_not_say_that_nothing_was_changed(
    harness: Harness,
) -> None:
    """An agent that was stopped finds another one at work: what it did before stands."""
    with harness.open() as a, harness.open() as b, a.admin.registers.hold(AGENT, "one") as held:
        held.keep()
        harness.restart()  # its locks are gone
        with (
            b.admin.registers.hold(AGENT, "another", deadline_seconds=0.0),
            pytest.raises(LockTimeout, match=r"another.* Its earlier work is kept") as said,
        ):
            held.keep()
        assert "Nothing was changed" not in str(said.value)
