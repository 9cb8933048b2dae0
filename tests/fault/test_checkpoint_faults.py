"""Checkpoints on devices that are damaged, full, lost, added or evicted about a save.

Whatever happens, a step that was committed restores with the values that it was saved with, or the
error says which step is still good.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.checkpoint.save import after_commit
from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import HpstoreError, TooFewDevices, VersionConflict
from hpstore.objects.write import stripe_writer
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, MakeDisks, flip

pytestmark = pytest.mark.fault
T = TypeVar("T")
HEADER = 4 * KIB
FLOATS = 500_000


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Values that tell the step that they belong to."""
    return {"w": torch.full((FLOATS,), float(step)), "small": torch.full((5,), float(step))}


def checkpointer(pool: Pool, **options: Any) -> Checkpointer:
    """As all tests here have it: reading what is stored, not what is in memory."""
    return Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False), **options)


def save(pool: Pool, *steps: int) -> None:
    """Save steps one after the other."""
    with checkpointer(pool) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(step)).result()


def restored(pool: Pool, step: int | None = None) -> int:
    """Restore a step, by default the newest that can be; its values must be its own."""
    state = state_of(-1)
    with checkpointer(pool) as ckpt:
        found = ckpt.restore(state, step)
    assert found is not None
    wanted = state_of(found)
    assert all(torch.equal(state[name], wanted[name]) for name in wanted), f"step {found}"
    return found


def before_put(pool: Pool, word: str, act: Callable[[], object]) -> None:
    """Once, right before the pool puts a key with `word` in it."""
    original = pool.put

    def put(key: str, *args: Any, **options: Any) -> Any:
        if word in key:
            pool.put = original  # type: ignore[method-assign]
            act()
        return original(key, *args, **options)

    pool.put = put  # type: ignore[method-assign]


def segment(pool: Pool, step: int) -> str:
    """Key of the one segment of a step."""
    [found] = checkpointer(pool).steps.manifest(step).segments
    return found.key


# --- no space -------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("word", ["segment", "manifest"])
def test_disks_that_fill_up_in_a_save_cost_that_save_alone(
    bench: Bench, make_disks: MakeDisks, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC from ext4 in the middle of a save: the error names the step that is still good.

    When there is space again, the same step is saved; the next job finds what was left.
    """
    disks = make_disks(4, 32 * MIB)
    with bench.create(disks, data=2, parity=1) as pool, checkpointer(pool) as ckpt:
        ckpt.save(1, state_of(1)).result()

        def fill() -> None:
            for disk in disks:
                disk.fill()

        before_put(pool, word, fill)
        with pytest.raises(HpstoreError, match=r"step 2 .*step 1 is still current"):
            ckpt.save(2, state_of(2)).result()
        assert restored(pool) == 1
        for disk in disks:
            disk.release()
        ckpt.save(2, state_of(2), overwrite=True).result()
        assert restored(pool) == 2
        # the note of the failed save could not be removed either, and this process lives
        monkeypatch.setattr(
            "hpstore.checkpoint.catalog.step_catalog.attempt_lives", lambda *_: False
        )
        ckpt.steps.collect_garbage()
        assert len([key for key in pool.list("run") if "/segment-" in key]) == 2
        assert ckpt.verify(1).ok
        assert ckpt.verify(2).ok


# --- damage ---------------------------------------------------------------------------------


REGIONS: dict[str, Callable[[Path], int]] = {
    "header": lambda file: 300,
    "unit": lambda file: HEADER + 700,
    "last unit": lambda file: file.stat().st_size - 8 * KIB + 1,
    "table": lambda file: file.stat().st_size - 4 * KIB,
    "cut to a header": lambda file: -HEADER,
    "cut to nothing": lambda file: 0,
}


def damage(file: Path, region: str) -> None:
    """Flip a bit in a region of a column, or cut the file short."""
    at = REGIONS[region](file)
    if region.startswith("cut"):
        os.truncate(file, -at)
    else:
        flip(file, min(at, file.stat().st_size - 1))


@pytest.fixture
def two_steps(bench: Bench) -> Bench:
    """A 2+2 pool with steps 1 and 2."""
    with bench.create(4, data=2, parity=2) as pool:
        save(pool, 1, 2)
    return bench


@pytest.mark.parametrize("what", ["segment", "manifest"])
@pytest.mark.parametrize("region", REGIONS)
def test_damage_in_any_two_columns_is_read_round_and_mended(
    two_steps: Bench, what: str, region: str
) -> None:
    """Data and parity, header, table, cut files; of a segment and of a manifest."""
    with two_steps.open() as pool:
        key = segment(pool, 2) if what == "segment" else manifest_key("run", 2)
    for pair in itertools.combinations(range(len(two_steps.files(key))), 2):
        for column in pair:
            damage(two_steps.files(key)[column], region)
        with two_steps.open() as pool:
            assert restored(pool) == 2
            assert checkpointer(pool).verify(2).ok
            pool.scrub()
            assert pool.scrub().clean


@pytest.mark.parametrize("what", ["segment", "manifest"])
def test_damage_beyond_parity_names_the_step_that_is_still_good(
    two_steps: Bench, what: str
) -> None:
    """Three of four columns of the newest step: asked for, it raises; else the one before comes."""
    with two_steps.open() as pool:
        key = segment(pool, 2) if what == "segment" else manifest_key("run", 2)
    for file in two_steps.files(key)[:3]:
        flip(file, 300)
        flip(file, min(HEADER + 700, file.stat().st_size - 1))
    with two_steps.open() as pool, checkpointer(pool) as ckpt:
        with pytest.raises(HpstoreError, match=r"step 2 .*step 1 can be read"):
            restored(pool, 2)
        assert restored(pool) == 1
        assert ckpt.latest_valid() == 1
        ckpt.save(3, state_of(3)).result()
        assert restored(pool) == 3
    assert len(two_steps.files(key)) >= 3  # nothing was deleted


def test_columns_exchanged_between_segments_are_noticed(two_steps: Bench) -> None:
    """Files of two columns change places between steps of the same size: both restore right."""
    with two_steps.open() as pool:
        keys = [segment(pool, step) for step in (1, 2)]
    for a, b in list(zip(*map(two_steps.files, keys), strict=True))[:2]:
        aside = a.with_name("aside")
        os.rename(a, aside)
        os.rename(b, a)
        os.rename(aside, b)
    with two_steps.open() as pool:
        assert restored(pool, 1) == 1
        assert restored(pool, 2) == 2
        pool.scrub()
        assert pool.scrub().clean
        assert restored(pool, 1) == 1


@pytest.mark.parametrize("renamed", [False, True], ids=["beside the new", "in place of the new"])
def test_columns_of_an_older_version_never_come_back(bench: Bench, renamed: bool) -> None:
    """A step is overwritten; two columns of its old manifest reappear: the new one is read."""
    key = manifest_key("run", 2)
    with bench.create(4, data=2, parity=2) as pool, checkpointer(pool) as ckpt:
        ckpt.save(2, state_of(1)).result()
        old = [(file, file.read_bytes()) for file in bench.files(key)]
        ckpt.save(2, state_of(2), overwrite=True).result()
    for file, data in old[:2]:
        [new] = file.parent.glob("@*")
        (new if renamed else file).write_bytes(data)
    with bench.open() as pool:
        assert restored(pool) == 2
        pool.scrub()
        assert restored(pool) == 2


# --- lost devices ---------------------------------------------------------------------------


class Writes(DeviceWrapper):
    """Counts the writes of all devices and acts once, in the middle of them."""

    def __init__(self, inner: Device, count: list[int], act: Callable[[], None]) -> None:
        super().__init__(inner)
        self._count, self._act = count, act

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "write":
            self._count[0] -= 1
            if self._count[0] == 0:
                self._act()
        return call()


def error_of(call: Callable[[], object]) -> str:
    """What a call says went wrong; "" when nothing did."""
    try:
        call()
    except HpstoreError as error:
        return str(error)
    return ""


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """Six devices, 2+2, with step 1."""
    made = Harness(tmp_path, data=2, parity=2, devices=6)
    with made.open() as pool:
        save(pool, 1)
    return made


@pytest.mark.parametrize("count", [2, 3], ids=["m lost", "m + 1 lost"])
@pytest.mark.parametrize("when", ["before", "in the first write", "in the middle", "after"])
def test_devices_lost_about_a_save_cost_nothing_that_was_committed(
    harness: Harness, when: str, count: int
) -> None:
    """m: the save commits and restores. m + 1: it may fail, clearly. All is there on return."""
    lost = harness.urls[:count]
    writes = [{"in the first write": 1, "in the middle": 20}.get(when, -1)]
    with harness.open(lambda _, d: Writes(d, writes, lambda: harness.lose(lost))) as pool:
        ckpt = checkpointer(pool)
        if when == "before":
            harness.lose(lost)
        said = error_of(lambda: ckpt.save(2, state_of(2)).result())
        newest = 1 if said else 2
        assert not said or (count > 2 and said.startswith("step 2 ") and "before is unt" in said)
        harness.lose(lost)
        said = error_of(lambda: restored(pool))
        assert ("may be there unseen" in said) == (count > 2)
        assert said or restored(pool) == newest
    harness.bring_back()
    with harness.open() as pool:
        assert restored(pool) >= newest
        assert restored(pool, 1) == 1
        assert not pool.rebuild().unreadable
        save(pool, 3)
        assert restored(pool) == 3
        assert all(pool.stat(key).losses_tolerated == 2 for key in pool.list("run"))


def test_a_save_with_a_debt_keeps_the_step_before_until_it_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 19: one of four devices of 2+2 goes during a save with keep_last=1."""
    monkeypatch.setattr(stripe_writer, "ONE_CALL_BYTES", 0)  # as a larger segment: it leaves a debt
    monkeypatch.setattr(after_commit, "LEFT_BYTES", 0)  # retention at each save
    harness = Harness(tmp_path, data=2, parity=2, devices=4)
    writes = [-1]

    def wrap(_: str, device: Device) -> Device:
        return Writes(device, writes, lambda: harness.lose(harness.urls[:1]))

    with harness.open(wrap) as pool, checkpointer(pool, keep_last=1) as ckpt:
        ckpt.save(1, state_of(1)).result()
        ckpt.wait()
        before_put(pool, "segment", lambda: writes.__setitem__(0, 12))
        report = ckpt.save(2, state_of(2)).result()
        ckpt.wait()
        assert report.losses_tolerated == 1
        assert ckpt.steps() == [1, 2]
        assert restored(pool) == 2
        harness.bring_back()
        pool.rebuild()
        assert pool.stat(segment(pool, 2)).losses_tolerated == 2
        assert ckpt.save(3, state_of(3)).result().losses_tolerated == 2
        ckpt.wait()
        assert ckpt.steps() == [3]


def test_saves_go_on_with_m_members_away_and_say_that_no_more_may_go(tmp_path: Path) -> None:
    """PROTOCOL 14, 19: full parity on the four that are left is no debt, so retention works; but a
    pool opens with two away alone, so nothing more may go."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6)
    with harness.open() as pool, checkpointer(pool, keep_last=1) as ckpt:
        ckpt.save(1, state_of(1)).result()
        harness.lose(harness.urls[:2])
        ckpt.save(2, state_of(2)).result()
        report = ckpt.save(3, state_of(3)).result()
        ckpt.wait()
        assert (report.losses_tolerated, report.spare_columns) == (0, 2)
        assert ckpt.steps() == [3]
        assert restored(pool) == 3


@pytest.mark.parametrize("word", ["segment", "manifest"])
@pytest.mark.parametrize("change", ["grow", "shrink"])
def test_the_pool_may_grow_and_shrink_during_a_save(bench: Bench, change: str, word: str) -> None:
    """Another process adds or evicts a device in the middle; the step is whole afterwards."""
    with bench.create(5, data=2, parity=2) as pool, checkpointer(pool) as ckpt:
        ckpt.save(1, state_of(1)).result()

        def act() -> None:
            with bench.open() as other:
                if change == "grow":
                    other.add_device(str(bench.root / "d9"))
                else:
                    other.evict(bench.paths[0])

        before_put(pool, word, act)
        ckpt.save(2, state_of(2)).result()
        assert restored(pool) == 2
    with bench.open() as pool:
        assert not pool.rebuild().unreadable
        assert restored(pool) == 2
        assert restored(pool, 1) == 1
        assert all(pool.stat(key).losses_tolerated == 2 for key in pool.list("run"))


# --- where and what -------------------------------------------------------------------------


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A directory on a filesystem in memory, which has no O_DIRECT."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("needs a tmpfs at /dev/shm")
    directory = tempfile.mkdtemp(prefix="hpstore-test-", dir="/dev/shm")
    yield Path(directory)
    shutil.rmtree(directory)


def test_checkpoints_on_a_tmpfs(tmpfs: Path) -> None:
    """Devices without O_DIRECT: saved, restored, verified, two of them lost."""
    bench = Bench(tmpfs)
    with bench.create(5, data=2, parity=2) as pool:
        save(pool, 1, 2)
    for path in bench.paths[:2]:
        shutil.rmtree(path)
    with bench.open() as pool:
        assert restored(pool) == 2
        assert checkpointer(pool).verify(2).ok
        save(pool, 3)
        assert restored(pool) == 3


def test_the_same_step_twice_is_refused_whoever_saves_it(bench: Bench) -> None:
    """By the same run, by its successor, and by one that was overtaken: the first one stays."""
    with bench.create(4, data=2, parity=1) as pool, bench.open() as other:
        first, second = checkpointer(pool), checkpointer(other)
        first.save(1, state_of(1)).result()
        for again in (first, second):
            with pytest.raises(VersionConflict, match=r"step 1 .*committed already"):
                again.save(1, state_of(9)).result()
        with pytest.raises(VersionConflict, match="another checkpointer"):
            first.save(2, state_of(9)).result()
        second.save(2, state_of(2)).result()
        assert [restored(pool, step) for step in (1, 2)] == [1, 2]
        for ckpt in (first, second):
            ckpt.close()
        assert len([key for key in pool.list("run") if "/segment-" in key]) == 2


@pytest.mark.parametrize("lost", [2, 3, 4])
def test_what_cannot_be_seen_is_neither_absent_nor_garbage(tmp_path: Path, lost: int) -> None:
    """More than m devices are away, among them all that hold the newest manifest.

    A restore must not begin anew or go back, and what the manifest names must not be collected.
    """
    harness = Harness(tmp_path, data=2, parity=1, devices=6)
    with harness.open() as pool:
        save(pool, 1, 2)
        holders = {url for url, _ in harness.columns(manifest_key("run", 2))}
        others = [url for url in harness.urls if url not in holders]
        harness.lose([*holders, *others][:lost])
        ckpt = checkpointer(pool, keep_last=1)  # which collects garbage
        assert ckpt.steps.collect_garbage() == 0
        for find in (lambda: ckpt.restore(state_of(-1)), ckpt.steps, ckpt.latest_valid):
            with pytest.raises(TooFewDevices, match="may be there unseen"):
                find()
        harness.bring_back()
        assert restored(pool) == 2
        assert restored(pool, 1) == 1
        assert ckpt.verify(2).ok
