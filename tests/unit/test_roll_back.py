"""A put that failed takes its columns back only while no other process can have completed them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from hpstore.devices.base import Device
from hpstore.devices.horizon_guard import HORIZON
from hpstore.devices.wrappers import DeviceWrapper, SimulatedCrash
from hpstore.errors import DeviceError, HpstoreError, ObjectNotFound, TooFewDevices
from hpstore.maintenance.move_column import move_column
from hpstore.maintenance.repair_object import no_throttle
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness

T = TypeVar("T")
OLD, NEW = (np.random.default_rng(seed).bytes(300_000 + seed) for seed in (1, 2))
Hook = Callable[[str, str], None]


class Hooked(DeviceWrapper):
    """Calls `before` and `after` each operation with its name and the device's URL."""

    def __init__(self, inner: Device, before: Hook, after: Hook) -> None:
        super().__init__(inner)
        self._before, self._after = before, after

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        self._before(operation, self.url)
        result = call()
        self._after(operation, self.url)
        return result


def nothing(operation: str, url: str) -> None:
    """A hook that does nothing."""


class Failing:
    """Lets `count` columns have their name, then fails every publish while `armed`; `meanwhile`
    runs once before the first failure."""

    def __init__(self, count: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.count, self.meanwhile, self.armed, self.failed = count, meanwhile, True, 0

    def __call__(self, operation: str, url: str) -> None:
        if operation != "publish" or not self.armed:
            return
        self.count -= 1
        if self.count < 0:
            self.failed += 1
            if self.failed == 1:
                self.meanwhile()
            raise DeviceError(f"publish failed on device {url}", device=url)


def writer(harness: Harness, before: Hook = nothing, after: Hook = nothing) -> Pool:
    return harness.open(lambda _, device: Hooked(device, before, after))


def versions(harness: Harness, key: str = "k") -> set[str]:
    return {path.rsplit("@", 1)[1].split(".")[0] for _, path in harness.columns(key)}


@pytest.mark.parametrize("change", ["drain", "evict", "add"])
def test_a_version_that_a_rebuild_has_completed_is_not_rolled_back_r01(
    tmp_path: Path, change: str
) -> None:
    """r01, rules 4 and 8: the membership moves when every column has its name, a rebuild removes
    the old version, and the writer dies in its second try."""
    harness = Harness(tmp_path, data=2, parity=2, devices=6)
    other = harness.open()
    other.put("k", OLD)
    outside = next(u for u in harness.urls if u not in dict(harness.columns("k")))
    published: list[str] = []

    def after(operation: str, url: str) -> None:
        if operation != "publish":
            return
        published.append(url)
        if len(published) == 4:
            changes: dict[str, Callable[[], object]] = {
                "drain": lambda: other.admin.devices.begin_drain(outside),
                "evict": lambda: other.evict(outside),
                "add": lambda: other.add_device("memory://new"),
            }
            changes[change]()
            assert other.rebuild().whole
            assert other.get("k") == NEW

    def before(operation: str, url: str) -> None:
        if operation == "create" and len(published) == 4:
            raise SimulatedCrash("in the second try")

    with pytest.raises(SimulatedCrash) as caught:
        writer(harness, before, after).put("k", NEW)
    assert "may have been stored" in "".join(caught.value.__notes__)
    harness.restart()
    with harness.open() as pool:
        assert pool.get("k") == NEW


def test_an_interrupted_second_try_leaves_the_completed_first_one_r01c(tmp_path: Path) -> None:
    """r01c: two devices fail at publish, a rebuild completes the version elsewhere, and Ctrl-C
    ends the second try. What put raises says that the bytes may be stored."""
    harness = Harness(tmp_path, data=4, parity=2, devices=8)
    other = harness.open()
    other.put("k", OLD)
    failing = Failing(4, other.rebuild)
    tries: list[int] = []

    def progress(count: int) -> None:
        tries.append(count)
        failing.armed = not failing.failed
        if failing.failed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        writer(harness, failing).put("k", NEW, progress=progress)
    assert "may have been stored" in "".join(caught.value.__notes__)
    with harness.open() as pool:
        assert pool.get("k") == NEW


@pytest.mark.parametrize("count", range(7))
@pytest.mark.parametrize("size", [1_000, 300_000])
def test_a_failed_put_leaves_old_or_new_however_many_columns_it_published(
    tmp_path: Path, count: int, size: int
) -> None:
    """However it ended, what is read afterwards is whole, and the error does not deny it. Copies
    are complete with one; a publish that raised may have worked."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6)
    old, new = OLD[:size], NEW[:size]
    with harness.open() as pool:
        pool.put("k", old)
    needed = 1 if size == 1_000 else 4
    text = ""
    with writer(harness, Failing(count)) as pool:
        try:
            pool.put("k", new)
        except TooFewDevices as error:
            text = str(error)
    harness.restart()
    with harness.open() as pool:
        assert pool.rebuild().whole
        assert pool.get("k") == (new if count >= needed else old)
    assert not text or "may have been stored" in text
    assert "unchanged" not in text


def test_fewer_than_k_columns_are_taken_back(tmp_path: Path) -> None:
    """No repair can have completed them: they would only be in the way."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6)
    other = harness.open()
    other.put("k", OLD)
    published: list[str] = []

    def after(operation: str, url: str) -> None:
        if operation == "publish":
            published.append(url)
            if len(published) == 3:
                other.add_device("memory://new")

    def before(operation: str, url: str) -> None:
        if operation == "create" and len(published) == 3:
            raise KeyboardInterrupt

    with writer(harness, before, after) as pool, pytest.raises(KeyboardInterrupt) as caught:
        pool.put("k", NEW)
    assert not hasattr(caught.value, "__notes__")
    assert len(versions(harness)) == 1
    assert other.get("k") == OLD


def test_a_publish_without_an_answer_counts_as_one_that_worked(tmp_path: Path) -> None:
    """The device renames, then reports an error: with three columns and such a fourth, k' may be
    there, so nothing is taken back; a repair may be at work with them already."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6)
    with harness.open() as pool:
        pool.put("k", OLD)
    published: list[str] = []

    def after(operation: str, url: str) -> None:
        if operation == "publish":
            published.append(url)
            if len(published) >= 4:
                raise DeviceError(f"publish on device {url}: I/O error", device=url)

    with writer(harness, after=after) as pool, pytest.raises(HpstoreError, match="may have been"):
        pool.put("k", NEW)
    assert len(versions(harness)) > 1
    with harness.open() as pool:
        assert pool.get("k") == NEW


def test_a_delete_that_failed_says_that_it_may_have_happened(tmp_path: Path) -> None:
    """One tombstone stands for the delete (rule 12): it is not taken back either."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6)
    with harness.open() as pool:
        pool.put("k", OLD)
    with writer(harness, Failing(1)) as pool, pytest.raises(TooFewDevices, match="been deleted"):
        pool.delete("k")
    with harness.open() as pool:
        pool.rebuild()
        with pytest.raises(ObjectNotFound):
            pool.get("k")
        assert not [path for _, path in harness.columns("k") if "0.c0" in path]


@pytest.mark.parametrize("again", ["delete", "rebuild"])
def test_a_half_done_delete_has_its_tombstones_before_anything_is_removed(
    tmp_path: Path, again: str
) -> None:
    """Rule 8 for deletes: one tombstone was written. With two copies away the rest is removed; that
    tombstone's device dies, and the copies come back."""
    harness = Harness(tmp_path, data=4, parity=2, devices=7)
    with harness.open() as pool:
        pool.put("k", b"x")
    copies = [url for url, _ in harness.columns("k")]

    def dies(operation: str, url: str) -> None:
        if operation == "publish":
            raise SimulatedCrash("after one tombstone")

    with pytest.raises(SimulatedCrash):
        writer(harness, after=dies).delete("k")
    harness.restart()
    (tombstone,) = [url for url, path in harness.columns("k") if ".t" in path]
    harness.lose([url for url in copies if url != tombstone][:2])
    with harness.open() as pool:
        if again == "rebuild":
            pool.rebuild()
        else:
            with pytest.raises(ObjectNotFound):
                pool.delete("k")
    harness.bring_back()
    harness.lose([tombstone])
    with harness.open() as pool, pytest.raises(ObjectNotFound):
        pool.get("k")


@pytest.mark.parametrize("many", [False, True])
def test_a_half_done_delete_that_cannot_be_finished_is_none(tmp_path: Path, many: bool) -> None:
    """Sweeps passed each of its tombstones: it said "no object", or counted as done, with one
    tombstone on one device."""
    harness = Harness(tmp_path, data=4, parity=2, devices=7)
    with harness.open() as pool:
        pool.put("k", b"x")

    def dies(operation: str, url: str) -> None:
        if operation == "publish":
            raise SimulatedCrash("after one tombstone")

    def sweeps(operation: str, url: str) -> None:
        if operation == "publish":
            device, key = harness.devices[url], harness.config.key
            device.raise_counter(HORIZON, max(device.counter(HORIZON, key), 1 << 42) + 1, key)

    with pytest.raises(SimulatedCrash):
        writer(harness, after=dies).delete("k")
    harness.restart()
    with writer(harness, before=sweeps) as pool:
        call = partial(pool.delete_many, ["k"]) if many else partial(pool.delete, "k")
        with pytest.raises(HpstoreError, match="could not be finished 6 times"):
            call()
    with harness.open() as pool, pytest.raises(ObjectNotFound):
        pool.delete("k")
    assert len([path for _, path in harness.columns("k") if ".t" in path]) == 3


def test_to_finish_a_half_done_delete_deletes_no_put_that_came_meanwhile(tmp_path: Path) -> None:
    """delete() says that there is no object, so it must not be later than a put beside it."""
    harness = Harness(tmp_path, data=4, parity=2, devices=7)
    with harness.open() as pool:
        pool.put("k", b"x")
    dead: list[str] = []

    def dies(operation: str, url: str) -> None:
        if operation == "publish":
            raise SimulatedCrash("after one tombstone")

    def finish(operation: str, url: str) -> None:
        if operation == "publish" and not dead:
            dead.append(url)
            with harness.open() as other, pytest.raises(ObjectNotFound):
                other.delete("k")

    with pytest.raises(SimulatedCrash):
        writer(harness, after=dies).delete("k")
    harness.restart()
    with writer(harness, before=finish) as pool:
        pool.put("k", b"new")
        assert pool.get("k") == b"new"
    assert dead


def test_a_second_try_removes_what_the_first_one_left(tmp_path: Path) -> None:
    """The version that was left is superseded, not deleted before the new one is whole."""
    harness = Harness(tmp_path, data=4, parity=2, devices=8)
    with harness.open() as pool:
        pool.put("k", OLD)
    failing = Failing(4)
    seen: list[int] = []

    def before(operation: str, url: str) -> None:
        failing(operation, url)

    def progress(count: int) -> None:
        failing.armed = not failing.failed
        if failing.failed:
            seen.append(len(versions(harness)))

    with writer(harness, before) as pool:
        pool.put("k", NEW, progress=progress)
    assert set(seen) == {2}
    assert len(versions(harness)) == 1
    with harness.open() as pool:
        assert pool.get("k") == NEW


def test_a_moved_column_is_removed_only_while_its_copy_is_there(tmp_path: Path) -> None:
    """Rule 8: another process that took the copy for the one too many has removed it."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    with harness.open() as pool:
        pool.put("k", OLD)
    source = harness.columns("k")[0][0]
    target = next(u for u in harness.urls if u not in dict(harness.columns("k")))

    def after(operation: str, url: str) -> None:
        if operation == "sync_directory" and url == target:
            for _, path in [row for row in harness.columns("k") if row[0] == target]:
                harness.devices[target].delete(path)

    with writer(harness, after=after) as pool:
        ids = {device.url: name for name, device in pool._store.view.devices.items()}
        with contextlib.suppress(HpstoreError):
            move_column(
                pool._store, "k", ids[source], ids[target], no_throttle, worth=lambda _: True
            )
    assert source in dict(harness.columns("k"))
