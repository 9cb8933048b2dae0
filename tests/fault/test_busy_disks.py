"""Disks that are let go: nothing keeps them busy, mounted or open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from hpstore.errors import TooFewDevices
from hpstore.testing.loopfs import LoopFilesystem
from hpstore.testing.scratch import loops, mount_points
from tests.fault.common import Bench, MakeDisks, old_is_whole, put_old

pytestmark = [pytest.mark.fault, pytest.mark.root]


def test_evicted_disk_can_be_unmounted_while_the_pool_stays_open(
    bench: Bench, make_disks: MakeDisks
) -> None:
    """Evict a disk, or drain it, and take it out of the machine without stopping anything."""
    disks = make_disks(5)
    with bench.create(disks, data=2, parity=1) as pool, bench.open() as other:
        put_old(pool)
        pool.evict(disks[0].path)
        pool.rebuild()
        pool.drain(disks[1].path)
        assert old_is_whole(other)
        for disk in disks[:2]:
            disk.unmount()
            assert os.listdir(disk.path) == []
        assert old_is_whole(pool)


def test_closed_pool_keeps_no_disk_busy(bench: Bench, make_disks: MakeDisks) -> None:
    """Add, drain, evict and readmit disks, close the pool: all can be unmounted."""
    disks = make_disks(6)
    with bench.create(disks[:4], data=2, parity=1) as pool:
        put_old(pool)
        pool.add_device(disks[4].path)
        pool.drain(disks[0].path)
        pool.readmit(disks[0].path)
        pool.evict(disks[1].path)
        pool.status()
    busy = []
    for number, disk in enumerate(disks):
        try:
            disk.unmount()
        except OSError:
            busy.append(number)
    assert busy == []


@pytest.mark.parametrize("lost", [1, 2])
def test_polling_with_broken_disks_leaks_no_descriptors(
    bench: Bench, make_disks: MakeDisks, lost: int
) -> None:
    """Open (in vain with two lost) and ask for the status again and again, as an agent does.

    A descriptor left behind keeps the broken disk busy; in time all descriptors are used up.
    """
    disks = make_disks(3)
    with bench.create(disks, data=2, parity=1) as pool:
        put_old(pool)
    for disk in disks[:lost]:
        disk.shutdown()

    def poll() -> None:
        for _ in range(5):
            with contextlib.suppress(TooFewDevices), bench.open() as pool:
                for _ in range(5):
                    pool.status()

    poll()
    before = len(os.listdir("/proc/self/fd"))
    poll()
    assert len(os.listdir("/proc/self/fd")) == before
    for disk in disks[:lost]:
        disk.remount()
    with bench.open() as pool:
        assert old_is_whole(pool)


def test_a_loop_filesystem_in_a_relative_directory_leaves_nothing(
    loop_mounts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not found among the mounts, by a path that begins nowhere: mount and device stayed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    for directory in (".", "link"):
        with LoopFilesystem(directory) as disk:
            assert disk.mounted
        assert not any(str(tmp_path) in path for path in mount_points())
        assert not any(str(tmp_path) in image for image in loops().values())
