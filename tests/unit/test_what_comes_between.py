"""What happens between a look and the act on it: a put, an eviction, a listing of no moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from hpstore.devices.base import Device, Entry
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import MembershipError, ObjectNotFound, VersionConflict
from hpstore.keys import object_directory
from hpstore.pool import Pool
from hpstore.rebuild import Progress
from hpstore.testing.harness import Harness

T = TypeVar("T")


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

    def entries(self, path: str) -> list[Entry]:
        if path == object_directory("k") and self.url not in self._asked:
            self._asked.add(self.url)
            return []
        return super().entries(path)


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
        first, second = (m.device_id for m in pool.record.members[:2])
        pool.evict(first)

    def evict(progress: Progress) -> None:
        if progress.done == progress.total:  # all has been walked past
            with harness.open() as other:
                if other.record.member(second) is not None:
                    other.evict(second)

    with harness.open() as pool:
        assert pool.rebuild(progress=evict).whole
        assert pool.record.unhealed() == {second}
        assert pool.rebuild().whole
        assert pool.record.unhealed() == set()


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


# --- which device is meant by a place -----------------------------------------------------------


def test_a_place_means_the_device_that_is_there_now(tmp_path: Path) -> None:
    """A disk was replaced at its mount point: the place means the new one, not the evicted."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5)
    with harness.open() as pool:
        old = pool.record.members[0]
        pool.evict(old.url)
    harness.wipe(old.url)
    with harness.open() as pool:
        new = pool.add_device(old.url)
        assert new != old.device_id
        pool.drain(old.url)
        assert pool.record.member(new) is None


def test_devices_that_changed_places_are_named_by_where_they_are(tmp_path: Path) -> None:
    """Two disks came back at each other's mount points: who names a place means what is there."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5)
    with harness.open() as pool:
        first, second = pool.record.members[:2]
    disks = harness.devices
    disks[first.url], disks[second.url] = disks[second.url], disks[first.url]
    for url in (first.url, second.url):
        disks[url].url = url
    with harness.open() as pool:
        pool.evict(first.url)
        assert pool.record.member(second.device_id) is None
        assert pool.record.member(first.device_id) is not None
