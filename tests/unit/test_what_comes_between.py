"""What happens between a look and the act on it: a put, an eviction, a listing of no moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from hpstore.agreement.claims import KeyClaim
from hpstore.devices.base import Device, DirectoryEntry
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import (
    MembershipError,
    ObjectNotFound,
    RegistersForeign,
    RegistersUnavailable,
    VersionConflict,
)
from hpstore.format.keys import object_directory
from hpstore.format.records import POOL_FILE, DeviceState
from hpstore.maintenance.rebuild import Progress
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness

T = TypeVar("T")
HORIZON = 3600.0  # Settings.tombstone_seconds


class Between(DeviceWrapper):
    """Does something once, before the first operation of a kind."""

    def __init__(self, inner: Device, operation: str, do: list[Callable[[], object]]) -> None:
        super().__init__(inner)
        self._operation, self._do = operation, do

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == self._operation and self._do:
            self._do.pop()()
        return call()


class NothingOnce(DeviceWrapper):
    """Lists nothing of a key's directory the first time: the old version had gone from here when
    it was asked, and the new one had not come yet where the others were asked."""

    def __init__(self, inner: Device, asked: set[str]) -> None:
        super().__init__(inner)
        self._asked = asked

    def entries(self, path: str) -> list[DirectoryEntry]:
        if path == object_directory("k") and self.url not in self._asked:
            self._asked.add(self.url)
            return []
        return super().entries(path)


def test_a_put_whose_acknowledgement_is_refused_does_not_say_that_nothing_was_changed_rule_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rights in the registers that end during a put: its columns are there by then."""

    def refused(_: KeyClaim) -> None:
        raise RegistersForeign("the certificate has ended. Nothing was changed.")

    with Harness(tmp_path, data=2, parity=1, devices=4).open() as pool:
        monkeypatch.setattr(KeyClaim, "give_back", refused)
        with pytest.raises(RegistersUnavailable, match="may have been stored") as told:
            pool.put("k", b"x", if_absent=True)
        assert told.value.maybe_visible
        assert "Nothing was changed" not in str(told.value)
        assert bytes(pool.get("k")) == b"x"


def test_a_delete_that_is_finished_does_not_beat_a_put_that_came_meanwhile_rule_1(
    tmp_path: Path,
) -> None:
    """PROTOCOL 1, 12: a repair writes the tombstone anew, where a device had missed it, after an
    acknowledged put it has not seen."""
    for number in range(12):  # of two versions with one counter the nonce, which is chance, decides
        finish_a_delete_during_a_put(tmp_path / str(number))


def finish_a_delete_during_a_put(directory: Path) -> None:
    directory.mkdir()
    harness = Harness(directory, data=2, parity=1, devices=4)
    with harness.open() as pool:
        pool.put("k", b"o" * 300_000)
        pool.delete("k")
    stones = harness.columns("k")
    for url, path in stones[1:]:  # one copy of it is left: the repair makes more
        harness.devices[url].delete(path)
    with harness.open() as writer:
        put: list[Callable[[], object]] = [lambda: writer.put("k", b"n" * 300_000)]
        with harness.open(lambda _, device: Between(device, "create", put)) as pool:
            pool.rebuild()
            assert put == []
    with harness.open() as pool:
        assert pool.get("k") == b"n" * 300_000
        pool.rebuild()
        assert pool.get("k") == b"n" * 300_000


@pytest.fixture
def stored(tmp_path: Path) -> Harness:
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    with harness.open() as pool:
        pool.put("k", b"o" * 300_000)
    return harness


def seen_as_absent(harness: Harness) -> Pool:
    """Opened, and the first look at "k" sees nothing on any device."""
    asked: set[str] = set()
    return harness.open(lambda _, device: NothingOnce(device, asked))


def test_one_look_that_sees_nothing_is_no_absence(stored: Harness) -> None:
    """Asked one after the other, devices can all say "not here" of a key that always was there."""
    with seen_as_absent(stored) as pool:
        assert pool.get("k") == b"o" * 300_000
    with seen_as_absent(stored) as pool, pytest.raises(VersionConflict):
        pool.put("k", b"n", if_absent=True)
    with seen_as_absent(stored) as pool:
        pool.delete("k")
    with stored.open() as pool, pytest.raises(ObjectNotFound):
        pool.get("k")


def test_a_rebuild_makes_up_for_no_device_that_was_evicted_during_it_rule_16(
    tmp_path: Path,
) -> None:
    """PROTOCOL 16: what it walked past already is not whole again for that device."""
    harness = Harness(tmp_path, data=2, parity=2, devices=6)
    with harness.open() as pool:
        for number in range(4):
            pool.put(f"k{number}", bytes([number]) * 300_000)
        held = [url for url, _ in harness.columns("k0")]
        first, second = (m.device_id for m in pool.admin.record.members if m.url in held[:2])
        pool.evict(first)

    def evict(progress: Progress) -> None:
        if progress.done == progress.total:  # all has been walked past
            with harness.open() as other:
                if other.admin.record.member(second) is not None:
                    other.evict(second)

    with harness.open() as pool:
        assert pool.rebuild(progress=evict).whole
        assert pool.admin.record.unhealed() == {second}
        assert pool.rebuild().whole
        assert pool.admin.record.unhealed() == set()


def test_a_rebuild_makes_up_for_no_second_loss_of_a_device_rule_16(tmp_path: Path) -> None:
    """PROTOCOL 16: it came back while the rebuild went on, took columns, and left again."""
    harness = Harness(tmp_path, data=2, parity=2, devices=6)
    with harness.open() as pool:
        for number in range(4):
            pool.put(f"k{number}", bytes([number]) * 300_000)
        gone = pool.admin.record.members[0].device_id
        pool.evict(gone)
    left: list[str] = []

    def leave_again(progress: Progress) -> None:
        if progress.done == progress.total and not left:
            with harness.open() as other:
                other.readmit(gone)
                other.evict(gone)
                left.append(gone)

    with harness.open() as pool:
        assert pool.rebuild(progress=leave_again).whole
        assert left
        assert pool.admin.record.unhealed() == {gone}
        assert pool.rebuild().whole
        assert pool.admin.record.unhealed() == set()


def test_what_was_rebuilt_is_told_though_a_change_is_under_way(tmp_path: Path) -> None:
    """Hours of work: its report is not lost to the lock that the last mark needs."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5, clock=FakeClock())
    with harness.open() as pool:
        pool.put("k", b"o" * 300_000)
        gone = pool.admin.record.members[0].device_id
        pool.evict(gone)
        with pool._session.change():
            assert pool.rebuild().whole
        assert pool.admin.record.unhealed() == {gone}
        assert pool.metrics.value("healed_not_marked_total") == 1
        assert pool.rebuild().whole
        assert pool.admin.record.unhealed() == set()


def test_another_device_can_be_evicted_during_a_drain_rule_15(tmp_path: Path) -> None:
    """PROTOCOL 15: a drain takes hours; a device that dies meanwhile does not wait for it."""
    harness = Harness(tmp_path, data=2, parity=1, devices=6, clock=FakeClock())
    with harness.open() as pool:
        for number in range(6):
            pool.put(f"k{number}", bytes([number]) * 300_000)
        holder = harness.columns("k0")[0][0]  # some devices hold none of the six objects
        first = next(m.device_id for m in pool.admin.record.members if m.url == holder)
        second = next(m.device_id for m in pool.admin.record.members if m.url != holder)
        evicted = []

        def meanwhile(progress: Progress) -> None:
            if progress.done == 1:
                with harness.open() as other:
                    other.admin.devices.begin_drain(second)
                    evicted.append(second)

        pool.drain(first, progress=meanwhile)
        assert evicted == [second]
        assert pool.admin.record.member(first) is None
        assert {
            m.device_id for m in pool.admin.record.members if m.state is DeviceState.DRAINING
        } == {second}
        for number in range(6):
            assert pool.get(f"k{number}") == bytes([number]) * 300_000


def test_a_device_that_is_taken_back_in_mid_drain_stays(tmp_path: Path) -> None:
    """The word of an operator, given after the drain began, counts."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5)
    with harness.open() as pool:
        for number in range(4):
            pool.put(f"k{number}", bytes([number]) * 300_000)
        first = next(
            m.device_id for m in pool.admin.record.members if harness.columns("k0")[0][0] == m.url
        )

        def meanwhile(progress: Progress) -> None:
            with harness.open() as other:
                other.readmit(first)

        with pytest.raises(MembershipError, match="was taken back or evicted while it was drained"):
            pool.drain(first, progress=meanwhile)
        member = pool.admin.record.member(first)
        assert member is not None
        assert member.state is DeviceState.ONLINE


def test_ctrl_c_between_the_two_memberships_of_an_eviction_leaves_the_device_as_it_was(
    tmp_path: Path,
) -> None:
    """The look at what depends on it takes minutes; closed for new columns, it would stay so."""
    asked = [0]

    def stopped() -> None:
        asked[0] += 1
        if asked[0] == 2:
            raise KeyboardInterrupt

    with Harness(tmp_path, data=2, parity=1, devices=5).open() as pool:
        member = pool.admin.record.members[0]
        with pytest.raises(KeyboardInterrupt):
            pool.admin.devices.evict(member.device_id, confirm=stopped)
        assert pool.admin.record.member(member.device_id) == member
        pool.admin.devices.evict(member.device_id)
        assert pool.admin.record.member(member.device_id) is None


def test_a_drain_takes_what_can_leave_past_what_cannot(tmp_path: Path) -> None:
    """One object that is beyond repair keeps the device draining, not the others on it."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5)
    with harness.open() as pool:
        for number in range(8):
            pool.put(f"k{number}", bytes([number]) * 300_000)
        lost = harness.columns("k0")
        leaving = lost[0][0]
        for url, path in lost:
            size = len(harness.devices[url].files[path].bytes)
            for offset in range(0, size, 512):
                harness.flip(url, path, offset)
        with pytest.raises(MembershipError, match=r"1 objects cannot leave .*k0") as told:
            pool.drain(leaving)
        assert "TooManyErasures" not in str(told.value)
        left = [n for n in range(8) if leaving in {url for url, _ in harness.columns(f"k{n}")}]
        assert left == [0]
        for number in range(1, 8):
            assert pool.get(f"k{number}") == bytes([number]) * 300_000


def test_a_sweep_takes_no_columns_of_a_put_that_lasts_rule_12(tmp_path: Path) -> None:
    """PROTOCOL 12: a put began longer ago than a tombstone lives, or the clock was set meanwhile,
    and a scrub comes between its renames. What is acknowledged is there."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=clock)
    with harness.open() as other:
        nothing: Callable[[], object] = lambda: None  # noqa: E731
        late: list[Callable[[], object]] = [other.scrub, *[nothing] * 3]  # from the end
        passes: list[Callable[[], object]] = [lambda: clock.advance(HORIZON + 1)]
        with harness.open(
            lambda _, device: Between(Between(device, "publish", late), "write", passes)
        ) as pool:
            pool.put("k", b"n" * 300_000)
        assert late == []
        assert other.get("k") == b"n" * 300_000
        assert len(harness.columns("k")) == 6


class WhileWaiting(FakeClock):
    """What others do while somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.do: list[Callable[[], object]] = []

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        if seconds and self.do:
            self.do.pop()()


@pytest.mark.parametrize("ends", [True, False])
def test_a_put_under_way_does_not_keep_a_device_from_leaving_rule_16(
    tmp_path: Path, ends: bool
) -> None:
    """PROTOCOL 16: evict looks again at an object of which it saw k columns; a put that goes on
    has made more of them meanwhile, elsewhere. One that does not go on is refused in seconds."""
    clock = WhileWaiting()
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=clock)
    reached, go = threading.Event(), threading.Event()

    def stop() -> None:
        reached.set()
        assert go.wait(60)

    def goes_on() -> None:
        go.set()
        put.result(60)

    nothing: Callable[[], object] = lambda: None  # noqa: E731
    stops: list[Callable[[], object]] = [
        stop,
        nothing,
        nothing,
    ]  # from the end: before the third column
    with (
        harness.open(lambda _, device: Between(device, "publish", stops)) as writer,
        harness.open() as pool,
        ThreadPoolExecutor(1) as thread,
    ):
        put = thread.submit(writer.put, "k", b"n" * 300_000)
        assert reached.wait(60)
        leaving = harness.columns("k")[0][0]
        if ends:
            clock.do = [goes_on]
            pool.evict(leaving)
            assert leaving not in {member.url for member in pool.admin.record.members}
        else:
            with pytest.raises(MembershipError, match=r"need .* to be readable, among them k"):
                pool.evict(leaving)
            assert {member.state for member in pool.admin.record.members} == {DeviceState.ONLINE}
            assert clock.elapsed < 5
            go.set()
        put.result(60)
        assert pool.get("k") == b"n" * 300_000


# --- two changes of one generation --------------------------------------------------------------


class Deaf(DeviceWrapper):
    """Takes no membership record."""

    def write_small(self, path: str, data: bytes) -> None:
        raise OSError(5, f"no {path} here")


@pytest.mark.parametrize("number", range(8))  # the nonces of the two are chance
def test_a_change_that_died_does_not_beat_the_one_that_was_made_instead_rule_14(
    tmp_path: Path, number: int
) -> None:
    """PROTOCOL 14: the first reached one device, which then was away while the second was made."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5)
    first = harness.urls[0]
    with (
        harness.open(lambda url, device: device if url == first else Deaf(device)) as pool,
        pytest.raises(MembershipError, match="reached 1 of 5 devices"),
    ):
        pool.drain(harness.urls[4])
    harness.lose([first])
    with harness.open() as pool:
        new = pool.add_device("memory://d5")
        harness.bring_back()
        for _ in range(2):  # it comes back, and what it holds is seen
            pool.admin.refresh()
        assert pool.admin.record.member(new) is not None
    with harness.open() as pool:
        assert pool.admin.record.member(new) is not None
        assert {m.state for m in pool.admin.record.members} == {DeviceState.ONLINE}
    assert len({bytes(device.files[POOL_FILE].bytes) for device in harness.devices.values()}) == 1


# --- which device is meant by a place -----------------------------------------------------------


def test_a_place_means_the_device_that_is_there_now(tmp_path: Path) -> None:
    """A disk was replaced at its mount point: the place means the new one, not the evicted."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5)
    with harness.open() as pool:
        old = pool.admin.record.members[0]
        pool.evict(old.url)
    harness.wipe(old.url)
    with harness.open() as pool:
        new = pool.add_device(old.url)
        assert new != old.device_id
        pool.drain(old.url)
        assert pool.admin.record.member(new) is None


def test_devices_that_changed_places_are_named_by_where_they_are(tmp_path: Path) -> None:
    """Two disks came back at each other's mount points: who names a place means what is there."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5)
    with harness.open() as pool:
        first, second = pool.admin.record.members[:2]
    disks = harness.devices
    disks[first.url], disks[second.url] = disks[second.url], disks[first.url]
    for url in (first.url, second.url):
        disks[url].url = url
    with harness.open() as pool:
        pool.evict(first.url)
        assert pool.admin.record.member(second.device_id) is None
        assert pool.admin.record.member(first.device_id) is not None
