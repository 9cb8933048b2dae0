"""Disks that fill up, turn read-only, are unmounted or vanish, on real ext4 loop filesystems."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

import hpstore
from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import PoolFull, RedundancyError, TooFewDevices
from hpstore.pool.pool import Pool
from hpstore.testing.loopfs import LoopFilesystem
from hpstore.testing.scratch import run
from hpstore.units import KIB, MIB
from tests.fault.common import (
    OLD,
    Bench,
    MakeDisks,
    attempt,
    exit_status,
    forked,
    old_is_whole,
    payload,
    put_old,
    tree,
    value,
)

pytestmark = [pytest.mark.fault, pytest.mark.root]
T = TypeVar("T")


def on_disk(bench: Bench, key: str, disk: LoopFilesystem) -> bool:
    """Whether a column of an object lies on a disk."""
    return any(str(file).startswith(disk.path) for file in bench.files(key))


class Before(DeviceWrapper):
    """Does something once, right before the first operation of a kind."""

    def __init__(self, inner: Device, operation: str, act: Callable[[], None]) -> None:
        super().__init__(inner)
        self._operation, self._act = operation, act
        self.armed = True

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == self._operation and self.armed:
            self.armed = False
            self._act()
        return call()


# --- full -----------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["create", "write", "sync", "publish", "sync_directory"])
@pytest.mark.parametrize("size", [2 * KIB, 6 * MIB], ids=["copies", "striped"])
def test_disk_that_fills_up_during_a_put_costs_nothing(
    bench: Bench, make_disks: MakeDisks, operation: str, size: int
) -> None:
    """Fill one disk before a step of a put; the put is whole, all old data reads."""
    disks = make_disks(5, 32 * MIB)
    with bench.create(disks, data=2, parity=2) as pool:
        put_old(pool)
        pool.put("x", payload("x old", size))
        full = next(disk for disk in disks if on_disk(bench, "x", disk))
    wrap = lambda url, device: (  # noqa: E731 (one use)
        Before(device, operation, full.fill) if url == full.path else device
    )
    with bench.open(wrap=wrap) as pool:
        info = pool.put("x", payload("x new", size))
        assert info.losses_tolerated >= 1
        assert pool.get("x") == payload("x new", size)
        assert old_is_whole(pool)
    full.release()
    with bench.open() as pool:
        assert pool.rebuild().clean or pool.rebuild().clean
        assert pool.stat("x").losses_tolerated == 2
        assert pool.get("x") == payload("x new", size)
        assert old_is_whole(pool)
        assert pool.scrub().clean


@pytest.mark.parametrize("size", [2 * KIB, 6 * MIB], ids=["copies", "striped"])
def test_put_goes_elsewhere_with_full_parity_when_a_disk_is_full(
    bench: Bench, make_disks: MakeDisks, size: int
) -> None:
    """A disk is full before the put; its columns go to the others, all of them."""
    disks = make_disks(4, 64 * MIB)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
        for index, disk in enumerate(disks):
            disk.fill()
            for number in range(2):
                key, value = f"x/{index}/{number}", payload(f"{index} {number}", size)
                info = pool.put(key, value)
                assert info.losses_tolerated == 1
                assert not on_disk(bench, key, disk)
                assert pool.get(key) == value
            assert old_is_whole(pool)
            disk.release()


@pytest.mark.parametrize("keep_bytes", [0, 64 * KIB, 700 * KIB])
def test_put_on_full_disks_fails_clearly_and_keeps_the_old_version(
    bench: Bench, make_disks: MakeDisks, keep_bytes: int
) -> None:
    """All disks are full: the error says so, the old version reads; later the put works."""
    disks = make_disks(4, 32 * MIB)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
        pool.put("x", payload("x old", 3 * MIB))
        for disk in disks:
            disk.fill(keep_bytes)
        with pytest.raises(PoolFull, match=r"Full: .* are free, of which .* Delete objects"):
            pool.put("x", payload("x new", 9 * MIB))
        assert pool.get("x") == payload("x old", 3 * MIB)
        assert old_is_whole(pool)
        for disk in disks:
            disk.release()
        pool.put("x", payload("x new", 9 * MIB))
        assert pool.get("x") == payload("x new", 9 * MIB)
        assert old_is_whole(pool)


def test_delete_frees_space_on_full_disks(bench: Bench, make_disks: MakeDisks) -> None:
    """All disks are full; deleting either works, or fails and keeps the object: never half."""
    disks = make_disks(3, 32 * MIB)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
        for disk in disks:
            disk.fill()
        deleted = attempt(lambda: pool.delete("old/large"))
        found = value(pool, "old/large")
        assert found == (None if deleted else payload("old/large", OLD["old/large"]))
        assert value(pool, "old/small") == payload("old/small", OLD["old/small"])
        for disk in disks:
            disk.release()
        if not deleted:
            pool.delete("old/large")
        assert value(pool, "old/large") is None


@pytest.mark.parametrize("keep_bytes", [1 * MIB, 0], ids=["1 MiB free", "nothing free"])
def test_recycled_files_are_given_up_when_space_is_short(
    bench: Bench, make_disks: MakeDisks, keep_bytes: int
) -> None:
    """Deleted objects leave files for reuse; a put that needs their space gets it."""
    disks = make_disks(3, 48 * MIB)
    with bench.create(disks, data=2, parity=1) as pool:
        for number in range(4):
            pool.put(f"x/{number}", payload(f"x/{number}", 8 * MIB))
        for number in range(4):
            pool.delete(f"x/{number}")
        for disk in disks:
            disk.fill(keep_bytes)
        pool.put("y", payload("y", 20 * MIB))
        assert pool.get("y") == payload("y", 20 * MIB)


# --- read-only ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2 * KIB, 2 * MIB], ids=["copies", "striped"])
def test_disk_that_turns_read_only_is_read_and_not_written(
    bench: Bench, make_disks: MakeDisks, size: int
) -> None:
    """The kernel turns a disk read-only under an open pool; puts go elsewhere, reads go on."""
    disks = make_disks(4)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
        disks[0].read_only()
        for number in range(4):
            info = pool.put(f"x/{number}", payload(f"x/{number}", size))
            assert info.losses_tolerated == 1
            assert not on_disk(bench, f"x/{number}", disks[0])
            assert pool.get(f"x/{number}") == payload(f"x/{number}", size)
        pool.put("old/large", payload("over it", 2 * MIB))
        assert pool.get("old/large") == payload("over it", 2 * MIB)
        pool.delete("old/small")
        assert value(pool, "old/small") is None
    disks[0].remount()
    with bench.open() as pool:
        assert value(pool, "old/small") is None
        assert pool.get("old/large") == payload("over it", 2 * MIB)


@pytest.mark.parametrize("how", ["error", "mount"])
def test_pool_opens_with_a_disk_that_is_read_only(
    bench: Bench, make_disks: MakeDisks, how: str
) -> None:
    """Before the open, by an error or by a mount: it is a member, read, shown, and not written.

    Of 2+1 another disk is lost then: what is left needs the read-only one.
    """
    disks = make_disks(4)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
    if how == "error":
        disks[0].read_only()
    else:
        run("mount", "-o", "remount,ro", disks[0].path)
    with bench.open() as pool:
        assert states(pool, disks) == ["read-only", "online", "online", "online"]
        assert old_is_whole(pool)
        assert pool.put("x", payload("x", 2 * MIB)).losses_tolerated == 1
        assert not on_disk(bench, "x", disks[0])
        assert pool.get("x") == payload("x", 2 * MIB)
    disks[1].unmount()
    with bench.open() as pool:
        assert states(pool, disks) == ["read-only", "missing", "online", "online"]
        assert old_is_whole(pool)
        assert pool.get("x") == payload("x", 2 * MIB)


def states(pool: Pool, disks: list[LoopFilesystem]) -> list[str]:
    """What the status says of each disk."""
    found = {device.url: device.state for device in pool.status().devices}
    return [found[disk.path] for disk in disks]


@pytest.mark.parametrize("how", ["error", "mount"])
def test_disk_that_is_read_only_is_drained(bench: Bench, make_disks: MakeDisks, how: str) -> None:
    """What it holds is copied off though nothing can be removed there; the pool goes on without.

    Mounted anew it may come back: what it still held is judged by what the pool knows.
    """
    disks = make_disks(5)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
        pool.put("gone", payload("gone", 2 * KIB))
    if how == "error":
        disks[0].read_only()
    else:
        run("mount", "-o", "remount,ro", disks[0].path)
    with bench.open() as pool:
        pool.delete("gone")
        before = tree(disks[0].path)
        pool.drain(disks[0].path)
        assert tree(disks[0].path) == before
        assert states(pool, disks) == ["evicted", *["online"] * 4]
        assert pool.status().degraded == 0
        assert pool.scrub().whole
        assert old_is_whole(pool)
    disks[0].remount()
    with bench.open() as pool:
        pool.readmit(disks[0].path)
        assert states(pool, disks) == ["online"] * 5
        assert value(pool, "gone") is None
        assert old_is_whole(pool)
        assert pool.rebuild().whole


def test_read_only_open_reads_from_read_only_disks(bench: Bench, make_disks: MakeDisks) -> None:
    """All disks are read-only; a pool opened read-only serves everything."""
    disks = make_disks(3)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
    for disk in disks:
        disk.read_only()
    with hpstore.open(bench.toml, read_only=True) as pool:
        assert old_is_whole(pool)
        assert pool.status().objects == len(OLD)
    with bench.open() as pool:
        assert old_is_whole(pool)
        with pytest.raises(TooFewDevices, match="reading goes on"):
            pool.put("x", b"x")


# --- gone -----------------------------------------------------------------------------------


def test_lazy_unmount_under_an_open_pool_writes_nothing_to_the_parent_filesystem(
    bench: Bench, make_disks: MakeDisks
) -> None:
    """Detach a disk while the pool is open; the empty directory under it stays empty."""
    disks = make_disks(4)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
        disks[0].lazy_unmount()
        assert old_is_whole(pool)
        for number in range(8):
            pool.put(f"x/{number}", payload(f"x/{number}", 300 * KIB))
            assert pool.get(f"x/{number}") == payload(f"x/{number}", 300 * KIB)
        pool.delete("x/0")
        attempt(pool.status)
        attempt(pool.scrub)
        assert os.listdir(disks[0].path) == []
        assert old_is_whole(pool)
    assert os.listdir(disks[0].path) == []
    disks[0].mount()
    with bench.open() as pool:
        assert old_is_whole(pool)
        assert value(pool, "x/0") is None
        for number in range(1, 8):
            assert pool.get(f"x/{number}") == payload(f"x/{number}", 300 * KIB)


@pytest.mark.parametrize("over", ["nothing", "another filesystem"])
def test_disk_that_is_not_mounted_at_open_is_missing_and_untouched(
    bench: Bench, make_disks: MakeDisks, over: str
) -> None:
    """The path is there, another filesystem under it: told so, served, nothing written there."""
    disks, (other,) = make_disks(4), make_disks(1)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
    disks[1].unmount()
    if over != "nothing":
        disks[1].loop, other.loop = other.loop, disks[1].loop
        other.unmount()
        disks[1].mount()
    before = tree(disks[1].path)
    with bench.open() as pool:
        assert old_is_whole(pool)
        pool.put("x", payload("x", 300 * KIB))
        row = next(d for d in pool.status().devices if d.url == disks[1].path)
        assert row.state == "missing"
        assert "not mounted" in row.problem
        assert old_is_whole(pool)
        assert pool.get("x") == payload("x", 300 * KIB)
    assert tree(disks[1].path) == before


@pytest.mark.parametrize("fault", ["yank", "shutdown"])
def test_disks_that_vanish_under_an_open_pool_are_read_round(
    bench: Bench, make_disks: MakeDisks, fault: str
) -> None:
    """m disks give EIO on everything; reads are decoded, puts go to the rest, and at open too."""
    disks = make_disks(6)
    with bench.create(disks, data=2, parity=2) as pool:
        put_old(pool)
        for disk in disks[:2]:
            disk.yank() if fault == "yank" else disk.shutdown()
        assert old_is_whole(pool)
        for number in range(4):
            info = pool.put(f"x/{number}", payload(f"x/{number}", 2 * MIB))
            assert info.losses_tolerated >= 1
            assert pool.get(f"x/{number}") == payload(f"x/{number}", 2 * MIB)
        pool.delete("x/0")
        assert value(pool, "x/0") is None
    with bench.open() as pool:
        assert old_is_whole(pool)
        assert pool.rebuild(include_missing=True).unreadable == {}
        # all objects survive two losses; the pool opens with two members away. A yanked disk may
        # have become a read-only file system: that opens, and is a member that is read
        assert pool.stat("x/1").spare_columns == 2
        status = pool.status()
        away = sum(device.state == "missing" for device in status.devices)
        assert status.losses_tolerated == 2 - away
        read_only = sum(device.state == "read-only" for device in status.devices)
        assert away + read_only == 2
        assert away == 2 or fault == "yank"
        assert old_is_whole(pool)


def test_more_disks_lost_than_parity_is_said_deletes_nothing_and_is_undone_by_their_return(
    bench: Bench, make_disks: MakeDisks
) -> None:
    """m + 1 disks stop: errors name what is missing, other objects read; back, all reads."""
    disks = make_disks(6)
    keys = [f"x/{number}" for number in range(12)]
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
        for key in keys:
            pool.put(key, payload(key, 300 * KIB))
        held = {key: [d for d in disks if on_disk(bench, key, d)] for key in keys}
        lost = disks[:2]
        for disk in lost:
            disk.shutdown()
        for key in keys:
            if len(set(map(id, held[key])) & set(map(id, lost))) < 2:
                assert pool.get(key) == payload(key, 300 * KIB)
                continue
            with pytest.raises(RedundancyError) as caught:
                pool.get(key)
            assert key in str(caught.value)
            assert "Nothing was deleted" in str(caught.value)
        attempt(pool.rebuild)
        attempt(pool.scrub)

    def refused() -> None:
        try:
            bench.open()
        except TooFewDevices as error:
            if all(disk.path in str(error) for disk in lost):
                return
        raise AssertionError("the pool opened, or the error does not name what is missing")

    with forked(refused) as child:
        assert exit_status(child, 30.0) == 0
    for disk in disks:
        disk.remount()
    with bench.open() as pool:
        assert old_is_whole(pool)
        for key in keys:
            assert pool.get(key) == payload(key, 300 * KIB)
        assert pool.rebuild().unreadable == {}
        assert pool.scrub().clean


def test_disk_with_no_inodes_left_costs_nothing(bench: Bench, make_disks: MakeDisks) -> None:
    """A disk has space but no inodes; puts of new keys go elsewhere, old data reads."""
    disks = make_disks(4, 16 * MIB)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
        clutter = Path(disks[0].path, "clutter")
        clutter.mkdir()
        made = 0
        try:
            while True:
                (clutter / str(made)).touch()
                made += 1
        except OSError:
            pass
        for number in range(4):
            pool.put(f"new/{number}", payload(f"new/{number}", 300 * KIB))
            assert pool.get(f"new/{number}") == payload(f"new/{number}", 300 * KIB)
        assert old_is_whole(pool)
        shutil.rmtree(clutter)
        pool.rebuild()
        assert pool.scrub().clean
