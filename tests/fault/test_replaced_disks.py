"""`hpstore replace` of real disks: a new one at the mount point of the old one, and at its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import hpstore
from hpstore.cli import app
from hpstore.pool.replace_device import replace_device, wait_released
from hpstore.testing.loopfs import LoopFilesystem
from hpstore.testing.scratch import run
from hpstore.units import MIB
from tests.fault.common import Bench, MakeDisks, payload

pytestmark = [pytest.mark.fault, pytest.mark.root]
IDLE = """
import sys, hpstore
with hpstore.open(sys.argv[1]) as pool:
    print("open", flush=True)
    sys.stdin.readline()
"""
KEYS = [f"k/{number}" for number in range(6)]


def filled(bench: Bench, disks: list[LoopFilesystem]) -> hpstore.Pool:
    """A pool of 2+1 with the objects, which does not wait long for a disk that is gone."""
    pool = bench.create(disks, data=2, parity=1, open_deadline_seconds=3.0)
    for key in KEYS:
        pool.put(key, payload(key, 2 * MIB))
    return pool


def device_at(pool: hpstore.Pool, disk: LoopFilesystem) -> str:
    """The id of the device on a disk."""
    (found,) = (device for device, url in pool.admin.devices.places.items() if url == disk.path)
    return found


def check(pool: hpstore.Pool, gone: str, fresh: str) -> None:
    """The new disk is a member in the old one's place, and every object is whole with it."""
    status = pool.status()
    assert (status.degraded, status.unreadable, status.losses_tolerated) == (0, 0, 1)
    assert pool.admin.record.member(gone) is None
    assert pool.admin.record.member(fresh) is not None
    assert len(pool.admin.record.members) == 4
    assert all(pool.get(key) == payload(key, 2 * MIB) for key in KEYS)
    assert pool.scrub().clean


def test_a_dead_disk_that_was_swapped_at_its_mount_point(
    bench: Bench, make_disks: MakeDisks
) -> None:
    """The operator pulls the disk, puts a new one in, mounts it at the same path: one command."""
    disks = make_disks(5)
    with filled(bench, disks[:4]) as pool:
        old = device_at(pool, disks[1])
        disks[1].yank()
    if disks[1].mounted:
        disks[1].lazy_unmount()
    run("mount", "--bind", disks[4].path, disks[1].path)
    try:
        with bench.open() as pool:
            done = replace_device(pool, disks[1].path, disks[1].path)
            assert done.old.device_id == old
            assert done.report is not None
            assert done.report.whole
            check(pool, old, done.new)
            assert pool.admin.devices.places[done.new] == disks[1].path
        with hpstore.open(bench.toml) as pool:
            assert pool.admin.devices.places[done.new] == disks[1].path
            assert len(pool.config.devices) == 4
    finally:
        run("umount", "-l", disks[1].path)


def test_a_living_disk_is_replaced_by_one_at_another_path_and_can_be_unmounted(
    bench: Bench, make_disks: MakeDisks
) -> None:
    """It is drained, the pool lets it go, and `umount` is not busy; its domain is kept."""
    disks = make_disks(5)
    with filled(bench, disks[:4]) as pool:
        (old,) = (m for m in pool.admin.record.members if m.url == disks[2].path)
        done = replace_device(pool, disks[2].path, disks[4].path)
        assert done.report is None
        fresh = pool.admin.record.member(done.new)
        assert fresh is not None
        assert fresh.domain == old.domain
        check(pool, old.device_id, done.new)
        left = pool.admin.devices.find(old.device_id, returning=True)
        assert wait_released(pool, left, 5.0) == []
        disks[2].unmount()
        assert not disks[2].mounted
        check(pool, old.device_id, done.new)


def test_a_dead_disk_is_replaced_by_one_at_another_path(
    bench: Bench, make_disks: MakeDisks
) -> None:
    """A process that has the pool open while the disk dies."""
    disks = make_disks(5)
    with filled(bench, disks[:4]) as pool:
        old = device_at(pool, disks[0])
        disks[0].yank()
        done = replace_device(pool, disks[0].path, disks[4].path)
        assert done.report is not None
        check(pool, old, done.new)


def test_a_disk_in_maintenance_is_released_unmounted_and_taken_back(
    bench: Bench, make_disks: MakeDisks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`release` refused it, and `umount` was busy. Another process has the pool open, idle."""
    monkeypatch.setenv("HOME", str(bench.root))
    disks = make_disks(4)
    filled(bench, disks).close()
    idle = subprocess.Popen(
        [sys.executable, "-c", IDLE, str(bench.toml)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert idle.stdout is not None
    assert idle.stdout.readline() == "open\n"
    run_cli, toml, place = CliRunner(), str(bench.toml), disks[1].path
    try:
        refused = run_cli.invoke(app, ["release", toml, place])
        assert "hpstore health maintenance" in str(refused.exception)
        assert run_cli.invoke(app, ["health", "maintenance", toml, place]).exit_code == 0
        done = run_cli.invoke(app, ["release", toml, place])
        assert done.exit_code == 0, done.output
        disks[1].unmount()
        assert not disks[1].mounted
    finally:
        idle.communicate("end\n")
    with bench.open() as pool:
        assert len(pool.admin.devices.places) == 3
        pool.put("meanwhile", payload("meanwhile", 2 * MIB))
        assert pool.get(KEYS[0]) == payload(KEYS[0], 2 * MIB)
    disks[1].mount()
    with bench.open() as pool:
        assert len(pool.admin.devices.places) == 3  # until an operator says so
    assert run_cli.invoke(app, ["readmit", toml, place]).exit_code == 0
    with bench.open() as pool:
        assert len(pool.admin.devices.places) == 4
        pool.rebuild()
        assert pool.status().degraded == 0
        assert pool.get("meanwhile") == payload("meanwhile", 2 * MIB)
