"""Calls of a pool beside its straight path: forks, copies at once, threads that cannot be started,
files and links of others, numbers of numpy, errors of whole batches."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.config import Settings
from hpstore.errors import BudgetExceeded, SomeFailed, ThreadsExhausted, TooManyErasures
from hpstore.loaders import DatasetWriter, Field, add_field
from hpstore.loaders.writer import dataset_changes, dataset_writer
from hpstore.maintenance import sweep
from hpstore.objects.write.stripe_writer import StripeWriter
from hpstore.pool import many_objects
from hpstore.pool.pool import Pool
from hpstore.runtime.budget import ByteBudget, inside_a_lease
from hpstore.runtime.scheduler import Scheduler
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB, MIB
from tests.fault.common import exit_status, forked, poll

PATIENCE = 60.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    with harness.open(threads=True) as made:
        yield made


def disk_pool(directory: Path, **settings: Any) -> Pool:
    return hpstore.create(
        [directory / f"d{n}" for n in range(4)],
        data=2,
        parity=1,
        config=directory / "pool.toml",
        settings=Settings(run_directory=str(directory / "run"), **settings),
    )


def used(pool: Pool) -> int:
    return pool._store.buffers.budget.used_bytes


@pytest.mark.parametrize("mode", ["w+b", "r+b", "named"])
def test_a_file_that_is_being_written_is_stored_whole(
    pool: Pool, tmp_path: Path, mode: str
) -> None:
    """What Python still has of it is a part of its bytes."""
    payload = os.urandom(100_000)
    (tmp_path / "f").write_bytes(b"")
    with tempfile.NamedTemporaryFile() if mode == "named" else (tmp_path / "f").open(mode) as file:
        file.write(payload)
        assert pool.put("k", file).size == len(payload)
        pool.put_many({"l": file, "m": b"1"})
    assert pool.get("k") == pool.get("l") == payload


def test_a_child_forked_while_a_thread_looks_at_devices_can_look_itself(tmp_path: Path) -> None:
    """The lock of that look is held for ever in the child."""
    with disk_pool(tmp_path) as pool:
        pool.put("k", b"1")

        def child() -> None:
            store = pool._store
            store.look_again(store.view)
            assert pool.get("k") == b"1"

        with pool._store.looking, forked(child) as pid:
            assert exit_status(pid, PATIENCE) == 0


def test_many_copies_within_one_pool_at_once_end(tmp_path: Path) -> None:
    """Each holds memory for what it writes while it takes some for what it reads."""
    payload = os.urandom(8 * MIB)
    with disk_pool(tmp_path, memory_bytes=16 * MIB, device_deadline_seconds=5.0) as pool:
        pool.put("k", payload)
        version = pool.stat("k").version

        def copy(number: int) -> None:
            with pool.open("k", version=version) as opened:
                pool.put(f"copy/{number}", opened)

        with ThreadPoolExecutor(12) as threads:
            list(threads.map(copy, range(12)))
        assert all(pool.get(key) == payload for key in pool.list("copy/"))
        poll(PATIENCE, lambda: used(pool) == 0)


def test_who_holds_a_lease_waits_for_room_and_for_no_turn() -> None:
    """Another one at the head of the queue waits for more than there is, perhaps for that lease;
    `spare` leaves room."""
    budget = ByteBudget(10)
    budget.acquire(6)
    waiting = threading.Thread(target=budget.acquire, args=(8, 5.0))
    waiting.start()
    while not budget._queue:
        threading.Event().wait(0.001)
    with pytest.raises(BudgetExceeded):
        budget.acquire(2, 0.0)
    with inside_a_lease():
        budget.acquire(2, 0.0)
    budget.release(8)
    waiting.join()
    budget.release(8)
    budget.acquire(4, 0.0, spare=4)
    with pytest.raises(BudgetExceeded):
        budget.acquire(4, 0.0, spare=4)
    budget.acquire(4, 0.0, spare=2)


def test_a_lane_that_cannot_be_started_keeps_no_memory(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more threads: the read fails, and gives back what it had taken."""
    pool.put("k", os.urandom(3 * MIB))
    plain, left = Scheduler.submit, [0]

    def submit(self: Scheduler, *args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ThreadsExhausted("no more threads")
        return plain(self, *args, **options)

    for calls in range(12):
        left[0] = calls
        with monkeypatch.context() as patched:
            patched.setattr(Scheduler, "submit", submit)
            with suppress(ThreadsExhausted):
                pool.get("k", 0, 2 * MIB)
        poll(PATIENCE, lambda: used(pool) == 0)  # when those that had begun have ended


def test_a_put_of_many_that_is_broken_off_keeps_no_memory(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the files are filled: calls that had not begun hold nothing."""
    plain, left = StripeWriter.fill, [0]

    def fill(self: Any, *args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(StripeWriter, "fill", fill)
    for calls in range(3):
        left[0] = calls
        with pytest.raises(KeyboardInterrupt):
            pool.put_many({f"k{n}": b"x" * 1000 for n in range(6)})
        poll(PATIENCE, lambda: used(pool) == 0)


def test_an_error_of_a_whole_batch_is_one_of_its_keys(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is durable, and what is not known to be, is said; deletions alike."""
    plain, number = many_objects._put_batch, [0]

    def failing(*args: Any) -> Any:
        number[0] += 1
        if number[0] == 2:
            raise BudgetExceeded("no memory")
        return plain(*args)

    monkeypatch.setattr(many_objects, "_put_batch", failing)
    monkeypatch.setattr(many_objects, "BATCHES", 1)
    objects = {f"k{n}": os.urandom(300 * KIB) for n in range(10)}
    with pytest.raises(SomeFailed, match="not stored for certain") as raised:
        pool.put_many(objects)
    error = raised.value
    assert {*error.done, *error.failed} == set(objects)
    assert error.failed
    assert error.done
    assert error.maybe_visible
    assert all(pool.get(key) == objects[key] for key in error.done)

    def refused(*_: Any) -> Any:
        raise BudgetExceeded("no memory")

    monkeypatch.setattr(many_objects, "_delete_batch", refused)
    with pytest.raises(SomeFailed, match="not deleted for certain"):
        pool.delete_many(list(error.done))


def test_a_link_outside_keeps_its_bytes(tmp_path: Path) -> None:
    """A backup made by links (cp -al): deleting recycles no file that has another name."""
    with disk_pool(tmp_path) as pool:
        pool.put("k", os.urandom(8 * MIB))
        files = sorted(tmp_path.glob("d[0-9]/objects/**/@*"))
        before = {}
        for place, path in enumerate(files):
            os.link(path, tmp_path / f"link{place}")
            before[place] = path.read_bytes()
        assert sum(map(len, before.values())) > MIB
        pool.delete("k")
        pool.put("l", os.urandom(8 * MIB))
    assert all((tmp_path / f"link{place}").read_bytes() == raw for place, raw in before.items())


def test_numbers_of_numpy_are_places_in_an_object(pool: Pool) -> None:
    """Their products would wrap: an int8 of 100 times a stripe is no place."""
    payload = os.urandom(3 * MIB)
    pool.put("k", payload)
    kinds: tuple[Any, ...] = (np.int8, np.uint8, np.int16)
    for kind in kinds:
        low, high = kind(50), kind(100)
        assert pool.get("k", low, high) == payload[50:100]
        out = bytearray(1000)
        assert pool.read_into("k", out, high) == 1000
        assert out == payload[100:1100]
        with pool.open("k") as opened:
            assert opened.read_into(out, low) == 1000
            found = bytearray(50)

            def deliver(offset: int, piece: Any, found: bytearray = found) -> None:
                found[offset - 50 : offset - 50 + len(piece)] = bytes(piece)

            opened.read_ranges([(low, high)], deliver)
            assert found == payload[50:100]
    with pytest.raises(TypeError):
        pool.get("k", 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["append", "field"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TooManyErasures])
def test_a_change_of_a_dataset_that_fails_before_its_put_leaves_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, what: str, error: type[BaseException]
) -> None:
    """What is looked up of the newest version cannot be read: nothing may become visible later, and
    what was written goes."""
    fields = {"x": Field("int64"), "y": Field("float32", (1000,))}
    row = {"x": 1, "y": np.zeros(1000, np.float32)}
    with DatasetWriter(pool, "t", fields) as writer:
        writer.write(row)
    before = pool.list()

    def broken(*_: Any) -> Any:
        raise error("unreadable")

    for module in (dataset_writer, dataset_changes):
        monkeypatch.setattr(module, "joined_content", broken)

    def change() -> None:
        if what == "append":
            with DatasetWriter(pool, "t", fields, append=True) as writer:
                writer.write(row)
        else:
            add_field(
                pool, "t", "z", Field("float32", (2000,)), lambda _: np.ones((1, 2000), np.float32)
            )

    with pytest.raises(error):
        change()
    assert pool.list() == before


def test_a_sweep_that_fails_is_no_failure_of_a_delete(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old tombstones cannot be swept: what was deleted just now is deleted, and says so."""

    def failing(*_: Any) -> int:
        raise BudgetExceeded("no memory")

    monkeypatch.setattr(sweep, "DUE_DELETES", 1)
    monkeypatch.setattr(sweep, "young_counter", lambda _: 1 << 62)
    monkeypatch.setattr(sweep, "sweep_keys", failing)
    for key in "abcd":
        pool.put(key, b"1")
    pool.delete("a")
    pool.delete_many(["b", "c"])
    assert pool.list() == ["d"]
    assert pool.metrics.value("cleanup_postponed_total") == 2
