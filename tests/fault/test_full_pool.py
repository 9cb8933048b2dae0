"""A pool that is full, by its own puts or by other programs, of bytes or of inodes.

Nothing is lost, what is deleted makes room again, and the membership can be changed.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.config import load_config
from hpstore.errors import DeviceFull, MembershipError, PoolFull, TooFewDevices
from hpstore.format.records import DeviceState
from hpstore.loaders import ingest, remove_orphans, unfinished_ingests, verify_dataset
from hpstore.pool.pool import Pool
from hpstore.testing.loopfs import LoopFilesystem
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, MakeDisks, attempt, exit_status, forked, payload, poll, value

pytestmark = [pytest.mark.fault, pytest.mark.root]
SIZES = (8 * MIB, 1 * MIB, 256 * KIB, 4 * KIB)
SHARDS: dict[str, Any] = {"shard_bytes": 2 * MIB, "unit_bytes": 256 * KIB, "shuffle": False}
LARGE = [{"x": np.full(MIB - 8, number, np.uint8)} for number in range(100)]


def test_a_pool_that_has_filled_itself_can_delete(bench: Bench, make_disks: MakeDisks) -> None:
    """PROTOCOL 3, 12: puts leave the reserve, small ones half of it; that is for tombstones."""
    disks = make_disks(3, 32 * MIB)
    with bench.create(disks, data=2, parity=1) as pool:
        for size in SIZES:
            for number in itertools.count():
                key = f"x/{size}/{number}"
                if not attempt(lambda key=key, size=size: pool.put(key, payload(key, size))):  # type: ignore[misc]
                    break
        assert not attempt(lambda: pool.put("y", b"small"))  # by now below the reserve
        keys = list(pool.list("x/"))
        assert all(pool.get(key) == payload(key, int(key.split("/")[1])) for key in keys)
        for key in keys:
            pool.delete(key)
        pool.put("y", payload("y", 8 * MIB))
        assert pool.get("y") == payload("y", 8 * MIB)


@pytest.fixture
def filled(bench: Bench, make_disks: MakeDisks) -> Iterator[Pool]:
    """An ingest of "d" has filled it, puts the rest of it: only tombstones fit."""
    with bench.create(make_disks(3, 32 * MIB), data=2, parity=1) as pool:
        with pytest.raises((TooFewDevices, DeviceFull)):
            ingest(pool, "d", LARGE, **SHARDS)
        for size in (256 * KIB, 4 * KIB):
            for number in itertools.count():
                key = f"x/{size}/{number}"
                if not attempt(lambda key=key, size=size: pool.put(key, bytes(size))):  # type: ignore[misc]
                    break
        yield pool


def test_an_ingest_begun_anew_makes_room_for_itself(filled: Pool) -> None:
    """What the earlier one has stored goes, journal and all. One that goes on changes nothing."""
    kept = unfinished_ingests(filled)["d"].rows
    assert kept > 0
    with pytest.raises(TooFewDevices):
        ingest(filled, "d", LARGE, **SHARDS)
    assert unfinished_ingests(filled)["d"].rows == kept
    report = ingest(filled, "d", LARGE[:3], resume=False, **SHARDS)
    assert (report.samples, report.resumed_samples) == (3, 0)
    assert verify_dataset(filled, "d").clean


def test_an_ingest_that_is_killed_as_it_makes_room_leaves_orphans(
    filled: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the journal and what it named: that is known as orphans, and removed as such."""
    plain, deleted = Pool.delete, list[str]()

    def dying(self: Pool, key: str) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(key)
        plain(self, key)

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "delete", dying)
        with pytest.raises(KeyboardInterrupt):
            ingest(filled, "d", LARGE[:3], resume=False, **SHARDS)
    assert unfinished_ingests(filled) == {}
    assert remove_orphans(filled, "d") > 0
    assert ingest(filled, "d", LARGE[:3], **SHARDS).samples == 3
    assert verify_dataset(filled, "d").clean


# --- filled by other programs ------------------------------------------------------------------

SMALL = {f"s/{number}": payload(str(number), 3_000) for number in range(40)}
BIG = payload("big", 4 * MIB)


class Others:
    """Programs that share the filesystems, and take whatever is free: bytes, inodes, or both."""

    def __init__(self, disks: list[LoopFilesystem], what: str) -> None:
        self.disks, self.what = disks, what
        for disk in disks:  # while there is room for the names
            Path(disk.path, ".ballast").touch()
            Path(disk.path, ".inodes").mkdir()

    def fill(self) -> None:
        for disk in self.disks:
            if "inodes" in self.what:
                disk.fill_inodes()
            if "bytes" in self.what:
                disk.fill()

    def release(self) -> None:
        for disk in self.disks:
            disk.release()


@pytest.fixture(params=["bytes", "inodes", "bytes and inodes"])
def others(request: pytest.FixtureRequest, bench: Bench, make_disks: MakeDisks) -> Others:
    """A pool of SMALL and BIG on four disks, which the others have filled."""
    disks = make_disks(4, 48 * MIB, inodes=1024)
    with bench.create(disks, data=2, parity=1, recycle_bytes=0) as pool:
        for key, body in SMALL.items():
            pool.put(key, body)
        pool.put("big", BIG)
    found = Others(disks, request.param)
    found.fill()
    return found


def leftovers(bench: Bench) -> list[str]:
    """Files in tmp/ of all devices."""
    return [name for path in bench.paths for name in os.listdir(f"{path}/tmp")]


@pytest.fixture
def much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps take every tombstone for old."""
    monkeypatch.setattr(
        "hpstore.maintenance.sweep.young_counter", lambda store: store.clock.wall_ms() + 60_000
    )


@pytest.mark.usefixtures("much_later")
def test_what_others_have_filled_can_be_read_and_deleted(bench: Bench, others: Others) -> None:
    """Small objects in a row, while each byte and inode that comes free is taken by others.

    A put is refused, and says why. When the others have gone, all is as ever.
    """
    with bench.open() as pool:
        with pytest.raises(PoolFull, match=r"Full: .* are free, of which .* are kept"):
            pool.put("new", b"x" * 100_000)
        assert leftovers(bench) == []
        assert pool.get("big") == BIG
        for key, body in SMALL.items():
            others.fill()
            assert pool.get(key) == body
            pool.delete(key)
        pool.delete("big")
        others.release()
        assert pool.list() == []
        assert pool.scrub().clean
        pool.put("big", BIG)
        assert pool.get("big") == BIG
        assert leftovers(bench) == []


def test_two_processes_delete_at_once_on_full_devices(bench: Bench, others: Others) -> None:
    """Even keys here, odd ones in a fork, of which the first is killed in the middle."""
    keys = list(SMALL)

    def delete_odd() -> None:
        with bench.open() as pool:
            for key in keys[1::2]:
                if value(pool, key) is not None:
                    pool.delete(key)

    with bench.open() as pool:
        with forked(delete_odd) as first:
            poll(20.0, lambda: value(pool, keys[5]) is None)
            os.kill(first, signal.SIGKILL)
        with forked(delete_odd) as second:
            for key in keys[::2]:
                pool.delete(key)
            assert exit_status(second, 60.0) == 0
        assert pool.list() == ["big"]
        assert pool.get("big") == BIG


def test_the_membership_changes_on_full_devices(
    bench: Bench, others: Others, tmp_path: Path
) -> None:
    """Add, evict, rebuild, readmit; a restart in between. What is refused leaves no trace."""
    (tmp_path / "more").mkdir()
    with bench.open() as pool:
        added = pool.add_device(str(tmp_path / "more"), allow_root_disk=True)
        pool.evict(bench.paths[0])
    with bench.open() as pool:
        assert [m.url for m in pool.admin.record.evicted] == [bench.paths[0]]
        assert pool.admin.record.member(added) is not None
        assert all(m.state is DeviceState.ONLINE for m in pool.admin.record.members)
        pool.readmit(bench.paths[0])
        pool.rebuild()
        assert {key: pool.get(key) for key in SMALL} == SMALL
        assert pool.get("big") == BIG
        assert len(pool.admin.record.members) == 5


def test_a_change_that_finds_no_room_for_records_changes_nothing(
    bench: Bench, others: Others, tmp_path: Path
) -> None:
    """No spare is left, as where an earlier release made the devices: evict, drain and add are
    refused with what is full; no device drains, the new place is as it was, settings too."""
    (tmp_path / "more").mkdir()
    settings = load_config(bench.toml)
    with bench.open() as pool:
        for path in bench.paths:
            for spare in Path(path, "ballast").iterdir():
                spare.rmdir() if spare.is_dir() else spare.unlink()
        others.fill()
        before = pool.admin.record
        for change in (
            lambda: pool.add_device(str(tmp_path / "more"), allow_root_disk=True),
            lambda: pool.evict(bench.paths[0]),
            lambda: pool.drain(bench.paths[0]),
        ):
            with pytest.raises(MembershipError, match=r"Nothing was changed.*Full"):
                change()
        pool.admin.refresh()
        assert pool.admin.record == before
        assert load_config(bench.toml) == settings
        assert not (tmp_path / "more" / "hpstore.json").exists()
        others.release()
        pool.add_device(str(tmp_path / "more"), allow_root_disk=True)
        pool.evict(bench.paths[0])
    with bench.open() as pool:
        assert len(pool.admin.record.members) == 4


@pytest.mark.usefixtures("much_later")
def test_small_objects_until_the_inodes_run_out(bench: Bench, make_disks: MakeDisks) -> None:
    """The error names inodes and devices; every object can be deleted, and a scrub that sweeps the
    tombstones makes room for as many again."""
    with bench.create(make_disks(3, 48 * MIB, inodes=256), data=2, parity=1) as pool:
        counts = []
        for _ in range(2):
            for number in itertools.count():
                if not attempt(lambda key=f"s/{number}": pool.put(key, b"x" * 100)):  # type: ignore[misc]
                    break
            with pytest.raises(PoolFull, match=r"\d+ of 256 inodes are free, of which \d+ are"):
                pool.put("s/more", b"x")
            counts.append(number)
            assert leftovers(bench) == []
            for key in pool.list():
                pool.delete(key)
            pool.scrub()
        assert counts[0] > 100
        assert counts[1] > counts[0] * 0.9


def test_a_drain_with_nowhere_to_go_is_refused(bench: Bench, make_disks: MakeDisks) -> None:
    """It would leave the device closed for new columns, and its objects where they are."""
    with bench.create(make_disks(3, 32 * MIB), data=2, parity=1) as pool:
        for size in SIZES:
            for number in itertools.count():
                key = f"x/{size}/{number}"
                if not attempt(lambda key=key, size=size: pool.put(key, bytes(size))):  # type: ignore[misc]
                    break
        with pytest.raises(MembershipError, match=r"nowhere to go.*Nothing was changed"):
            pool.drain(bench.paths[0])
        assert all(m.state is DeviceState.ONLINE for m in pool.admin.record.members)
