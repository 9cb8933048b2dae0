"""Writers, readers and membership changes that meet: every interleaving that matters."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

import hpstore
from hpstore.config import Settings
from hpstore.devices.base import Device
from hpstore.devices.local import LocalDevice
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import ObjectNotFound
from hpstore.objects.read.object_reader import Changed
from hpstore.testing.memory_pool import Harness
from hpstore.units import MIB
from tests.thorough import crash_points

T = TypeVar("T")
OLD = b"o" * 300_000


def payload(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


class Turns:
    """Lets threads pass one at a time, in the order of a script of their names."""

    def __init__(self, script: str) -> None:
        self._script, self._at = script, 0
        self._turn = threading.Condition()

    def take(self, name: str) -> None:
        with self._turn:
            arrived = self._turn.wait_for(
                lambda: self._at >= len(self._script) or self._script[self._at] == name, 20
            )
            assert arrived, f"{name} never got its turn at {self._at} of {self._script}"
            self._at += 1
            self._turn.notify_all()

    def leave(self, name: str) -> None:
        """Nobody waits for a thread that is done."""
        with self._turn:
            rest = self._script[self._at :].replace(name, "")
            self._script = self._script[: self._at] + rest
            self._turn.notify_all()


class GatedDevice(DeviceWrapper):
    """Waits for its writer's turn before each rename."""

    def __init__(self, inner: Device, turns: Turns, name: str) -> None:
        super().__init__(inner)
        self._turns, self._name = turns, name

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "publish":
            self._turns.take(self._name)
        return call()


@pytest.mark.parametrize("script", sorted(set(map("".join, itertools.permutations("AAABBB")))))
def test_two_writers_of_one_key_leave_one_whole_winner(tmp_path: Path, script: str) -> None:
    """PROTOCOL 1: every interleaving of two puts' renames; a reader never sees a mixture."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool:
        pool.put("k", OLD)
    turns = Turns(script)
    values = {"A": b"A" * 300_000, "B": b"B" * 310_000}
    pools = {n: harness.open(lambda _, d, n=n: GatedDevice(d, turns, n)) for n in values}  # type: ignore[misc]
    errors: list[BaseException] = []
    seen: set[bytes] = set()

    def put(name: str) -> None:
        try:
            pools[name].put("k", values[name])
        except BaseException as error:  # noqa: BLE001 (asserted on below)
            errors.append(error)
        finally:
            turns.leave(name)

    threads = [threading.Thread(target=put, args=(name,)) for name in values]
    for thread in threads:
        thread.start()
    with harness.open(read_only=True) as reader:
        while any(thread.is_alive() for thread in threads):
            seen.add(reader.get("k"))
        seen.add(reader.get("k"))
        for thread in threads:
            thread.join()
        assert not errors
        assert seen <= {OLD, *values.values()}
        winner = reader.get("k")
        assert winner in values.values()
    with harness.open() as pool:
        pool.rebuild()
        assert pool.get("k") == winner
        assert pool.scrub().clean
    assert len(harness.columns("k")) == 3


@pytest.fixture
def local_pool(tmp_path: Path) -> hpstore.Pool:
    return hpstore.create(
        [tmp_path / f"d{i}" for i in range(4)],
        data=2,
        parity=2,
        config=tmp_path / "pool.toml",
        settings=Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run")),
    )


def recycled(tmp_path: Path) -> int:
    return sum(len(list((tmp_path / f"d{i}" / "recycle").iterdir())) for i in range(4))


def test_deleted_files_are_recycled_and_overwritten(
    local_pool: hpstore.Pool, tmp_path: Path
) -> None:
    """PROTOCOL 11: the files of a deleted object become those of the next one of any size."""
    with local_pool as pool:
        pool.put("a", payload(8 * MIB, 1))
        pool.delete("a")
        assert recycled(tmp_path) == 4
        for size in (8 * MIB, 5 * MIB, 11 * MIB):
            pool.put("b", payload(size, size))
            assert pool.get("b") == payload(size, size)
            pool.delete("b")
        assert pool.list() == []
        assert pool.scrub().clean


def test_a_reader_of_a_recycled_object_never_sees_the_new_one(
    local_pool: hpstore.Pool, tmp_path: Path
) -> None:
    """PROTOCOL 10, 11: it reads the old bytes to the end, blames nobody and repairs nothing."""
    old, new = payload(8 * MIB, 1), payload(8 * MIB, 2)
    with local_pool as pool:
        pool.put("a", old)
        with pool.open("a") as reader:
            half = bytearray(4 * MIB)
            reader.read_into(half, 0)
            pool.delete("a")
            assert recycled(tmp_path) == 2  # not the two columns that the reader holds
            pool.put("b", new)
            reader.read_into(half, 4 * MIB)
            assert bytes(half) == old[4 * MIB :]
        assert pool.get("b") == new
        assert pool._store.metrics.value("column_mismatch_total") == 0


def test_a_lock_taken_after_recycling_is_noticed(
    local_pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 11: a reader that found a file just before it was recycled resolves again."""
    original = LocalDevice.open
    calls: list[str] = []

    def open_late(device: LocalDevice, path: str) -> object:
        if not calls:
            calls.append(path)
            local_pool.delete("a")  # between the reader's survey and its lock
            local_pool.put("a", payload(8 * MIB, 2))
        return original(device, path)

    with local_pool as pool:
        pool.put("a", payload(8 * MIB, 1))
        monkeypatch.setattr(LocalDevice, "open", open_late)
        assert pool.get("a") == payload(8 * MIB, 2)
        assert len(calls) == 1
        assert pool._store.metrics.value("column_mismatch_total") == 0


def test_readers_during_overwrites_see_whole_versions(local_pool: hpstore.Pool) -> None:
    """Gets that run against a stream of overwrites return one version, whole."""
    versions = [bytes([i]) * (3 * MIB + i) for i in range(12)]
    with local_pool as pool:
        pool.put("k", versions[0])
        done = threading.Event()
        bad: list[object] = []

        def read() -> None:
            while not done.is_set():
                found = pool.get("k")
                if found not in versions:
                    bad.append(len(found))

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for version in versions[1:]:
            pool.put("k", version)
        done.set()
        for thread in threads:
            thread.join()
        assert not bad
        assert pool.get("k") == versions[-1]


class Interrupt(DeviceWrapper):
    """Runs an action once, before operation number `at` of the pool it stands in."""

    def __init__(self, inner: Device, state: dict[str, int], at: int, act: Callable[[], None]):
        super().__init__(inner)
        self._state, self._interrupt_at, self._act = state, at, act

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        number = self._state["n"]
        self._state["n"] += 1
        if number == self._interrupt_at:
            self._act()
        return call()


CHANGES: dict[str, Callable[[hpstore.Pool, Harness], None]] = {
    "evict": lambda pool, harness: pool.evict(harness.urls[0]),
    "drain": lambda pool, harness: drop(pool.drain(harness.urls[0])),
    "add": lambda pool, harness: drop(pool.add_device("memory://new")),
    "delete": lambda pool, harness: pool.delete("k"),
    "overwrite": lambda pool, harness: drop(pool.put("k", b"other" * 60_000)),
    "rebuild": lambda pool, harness: drop(pool.rebuild()),
}


def drop(_: object) -> None:
    """Ignore a result."""


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_put_that_meets_a_change_is_whole(tmp_path: Path, change: str) -> None:
    """PROTOCOL 4, 16: a change at every step of a put; what is acknowledged survives m losses."""
    new = b"n" * 310_000
    for at in crash_points():
        directory = tmp_path / str(at)
        directory.mkdir()
        harness = Harness(directory, data=2, parity=2, devices=6)
        with harness.open() as other:
            other.put("k", OLD)
            state = {"n": -(10**9)}

            def act(other: hpstore.Pool = other, harness: Harness = harness) -> None:
                CHANGES[change](other, harness)

            pool = harness.open(
                lambda _, d, s=state, a=at, f=act: Interrupt(d, s, a, f)  # type: ignore[misc]
            )
            state["n"] = 0
            pool.put("k", new)
            finished = state["n"] <= at
            other.admin.refresh()
            try:
                found = other.get("k")
            except ObjectNotFound:
                assert change == "delete"
                found = b""
            allowed = {new} | ({b""} if change == "delete" else set())
            allowed |= {b"other" * 60_000} if change == "overwrite" else set()
            assert found in allowed
            if change == "drain":  # nothing that was acknowledged is left on what was drained
                assert other.stat("k").losses_tolerated == 2
            if found:
                other.rebuild()
                assert other.get("k") == found
                assert other.stat("k").losses_tolerated == 2
        if finished:
            assert at > 10
            return


def test_an_object_that_never_stays_still_is_an_error_not_a_hang(tmp_path: Path) -> None:
    """Resolving a key that changes each time ends after a bounded number of tries."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool:
        pool.put("k", OLD)
        with pool.open("k") as reader:
            calls: list[int] = []

            def changed(*_: object) -> None:
                calls.append(1)
                raise Changed("k")

            reader._reader.read_into = changed  # type: ignore[method-assign, assignment]
            reader.read_into(bytearray(10))
            assert calls == [1]


def test_batches_of_one_copy_go_into_one_file(tmp_path: Path) -> None:
    """A copy of two blocks is written in two batches, by two threads of a device at once."""
    for i in range(3):
        (tmp_path / f"d{i}").mkdir()
    with hpstore.create(
        [str(tmp_path / f"d{i}") for i in range(3)],
        data=1,
        parity=2,
        unit_bytes=65_536,
        config=tmp_path / "pool.toml",
        settings=Settings(run_directory=str(tmp_path / "run")),
    ) as pool:
        for n in range(150):
            pool.put(f"k/{n}", payload(65_536 + 100 * n, n))
        assert pool.scrub().damaged_columns == 0
        assert all(pool.get(f"k/{n}") == payload(65_536 + 100 * n, n) for n in range(150))
