"""Devices that hang where a pool is opened or changed: nothing is left behind, nobody waits long.

Hangs are released by the tests; deadlines are half a second, in which a busy machine too writes and
syncs a membership record.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from hpstore.config import load_config
from hpstore.devices.local import LocalDevice
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import ConfigError, DeviceMissing
from hpstore.format.records import IDENTITY_FILE
from hpstore.pool.pool import Pool
from hpstore.pool.session import PoolSession
from hpstore.runtime.scheduler import Scheduler
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, Gates, attempt, payload, poll, within, wrapping

T = TypeVar("T")
LIMIT, SIZE = 20.0, 300 * KIB


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def gates(bench: Bench) -> Iterator[Gates]:
    """A 2+1 pool of four directories with an object; nothing hangs yet."""
    with bench.create(
        4, data=2, parity=1, device_deadline_seconds=0.5, open_deadline_seconds=0.5
    ) as pool:
        pool.put("x", payload("x", SIZE))
    made = Gates()
    yield made
    made.let_go()


def open_files(path: str) -> int:
    """Descriptors of this process on a device's root, and below it."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # of the listing itself
            continue
        found += target == path or target.startswith(f"{path}/")
    return found


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("hpstore-")}


@pytest.mark.parametrize("operation", ["read_small", "probe"])
def test_a_mount_that_hangs_costs_the_same_threads_however_often_it_is_tried(
    bench: Bench, gates: Gates, operation: str
) -> None:
    """PROTOCOL 15: at the first look for it or at the proof that it works. When it answers, what
    was opened for those who gave up is closed, and it is a member like the others."""
    path = bench.paths[1]
    gates.shut = {(path, operation)}
    others = threads()  # of pools that other tests have left: some may end meanwhile
    with bench.open(wrap=gates.wrap) as pool:
        pool.admin.refresh()
        assert gates.waiting == 1
        before = len(threads() - others)
        for _ in range(4):
            pool.admin.refresh()
        assert gates.waiting == 1
        assert len(threads() - others) == before
        assert open_files(path) <= 1
        gates.let_go()
        poll(LIMIT, lambda: open_files(path) == 0)
        pool.admin.refresh()
        assert path in pool.admin.devices.places.values()
        assert pool.get("x") == payload("x", SIZE)
    assert open_files(path) == 0


def test_a_column_that_is_opened_too_late_is_closed_again(bench: Bench, gates: Gates) -> None:
    """The object is read without it; its descriptor would hold its lock against recycling."""
    with bench.open(wrap=gates.wrap) as pool:
        with pool.open("x") as reader:
            path = reader._reader.columns[0].url
        roots = open_files(path)
        gates.shut = {(path, "open")}
        assert within(LIMIT, lambda: pool.get("x")) == payload("x", SIZE)
        assert gates.waiting == 1
        gates.let_go()
        poll(LIMIT, lambda: pool._store.scheduler.queued(device_at(pool, path)) == 0)
        poll(LIMIT, lambda: open_files(path) == roots)  # the call's end is not yet the file's


def device_at(pool: Pool, path: str) -> str:
    return next(device for device, url in pool.admin.devices.places.items() if url == path)


def test_a_pool_that_cannot_be_opened_leaves_nothing_open(bench: Bench) -> None:
    """Too little memory for a stripe is found when its devices are open already."""
    bench.create(9, data=7, parity=2).close()
    config = load_config(bench.toml)
    before = threads()
    with pytest.raises(ConfigError, match="a stripe of 9 units"):
        Pool(replace(config, settings=replace(config.settings, memory_bytes=16 * MIB)))
    assert [open_files(path) for path in bench.paths] == [0] * 9
    poll(LIMIT, lambda: threads() <= before)


def test_an_open_that_fails_half_way_closes_what_it_opened(
    bench: Bench, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every writing open does first raises: no device and no thread is left."""

    def fail(_: PoolSession) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(PoolSession, "_recover", fail)
    before = threads()
    config = load_config(bench.toml)
    with pytest.raises(ZeroDivisionError):
        Pool(config, opener=wrapping(config, gates.wrap))
    assert [open_files(path) for path in bench.paths] == [0] * 4
    poll(LIMIT, lambda: threads() <= before)


def test_a_device_whose_call_hangs_when_its_pool_is_closed_is_closed_after_it(
    bench: Bench, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that goes on after close() opens the device's root again: nobody would close that."""
    plain, path = Scheduler.close, bench.paths[1]
    monkeypatch.setattr(Scheduler, "close", lambda self, **more: plain(self, 0.05, **more))
    pool = bench.open(wrap=gates.wrap)
    gates.shut = {(path, "stamp")}
    assert within(LIMIT, lambda: pool.get("x")) == payload("x", SIZE)
    assert gates.waiting > 0
    pool.close()
    assert [open_files(p) for p in bench.paths] == [0, 1, 0, 0]
    gates.let_go()
    poll(LIMIT, lambda: open_files(path) == 0)


def test_a_read_that_meets_damage_does_not_wait_for_a_look_at_the_membership(
    bench: Bench, gates: Gates
) -> None:
    """One who looks waits for a device that hangs; the repair that the read asks for begins."""
    with bench.open(wrap=gates.wrap) as pool:
        holding, done = threading.Event(), threading.Event()

        def look() -> None:
            with pool._session._renew:
                holding.set()
                done.wait(LIMIT)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        assert holding.wait(LIMIT)
        try:
            within(LIMIT, lambda: pool._session._damage("x"))
            poll(LIMIT, lambda: pool.metrics.value("read_repair_total") == 1)
        finally:
            done.set()
            thread.join(LIMIT)


def test_a_device_that_is_told_to_sit_out_during_a_look_at_the_membership_does(
    bench: Bench, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look began before; its end must not take the word back. Nor do two words at once."""
    with bench.open(wrap=gates.wrap) as pool:
        one, other = sorted(pool.admin.devices.places)[:2]
        each = pool._store.each

        def meanwhile(*arguments: object, **options: object) -> object:
            if not pool._store.view.sitting_out:
                pool.sit_out(one)
            return each(*arguments, **options)  # type: ignore[arg-type]  # passed on

        monkeypatch.setattr(type(pool._store), "each", lambda _, *a, **o: meanwhile(*a, **o))
        pool.admin.refresh()
        monkeypatch.undo()
        assert pool._store.view.sitting_out == {one}
        assert not attempt(lambda: pool.sit_out(other))  # parity replaces one
        pool.readmit(one)
        assert not pool._store.view.sitting_out


def test_a_drain_waits_no_longer_than_the_deadline_for_a_device_that_hangs_at_its_end(
    bench: Bench, gates: Gates
) -> None:
    """PROTOCOL 15: it holds the change lock, which the device's own eviction needs."""
    with bench.open(wrap=gates.wrap) as pool:
        pool.put("small", b"x")
        pool.delete("small")
        tombstone = bench.files("small")[0]
        path = next(p for p in bench.paths if not Path(p, "objects", "small").exists())
        shutil.copytree(tombstone.parent, f"{path}/objects/small")  # one copy more than it needs
        gates.shut = {(path, "delete")}
        assert not within(LIMIT / 2, lambda: attempt(lambda: pool.drain(path)))
        assert gates.waiting > 0
        within(LIMIT / 2, lambda: pool.evict(path))
        assert path not in pool.admin.devices.places.values()
        gates.let_go()


@pytest.mark.parametrize("operation", ["read_small", "write_small"])
def test_a_place_that_hangs_while_it_is_added_blocks_no_other_change(
    bench: Bench, gates: Gates, operation: str
) -> None:
    """PROTOCOL 15: it is refused after the deadline, and the change lock is free. When it answers
    it can be added."""
    new = f"{bench.root}/new"
    os.mkdir(new)
    LocalDevice(new).prepare()  # what is wrapped is not told apart from a store
    gates.shut = {(new, operation)}
    with bench.open(wrap=gates.wrap) as pool:
        assert not within(LIMIT / 2, lambda: attempt(lambda: pool.add_device(new)))
        assert gates.waiting == 1
        within(LIMIT / 2, lambda: pool.evict(bench.paths[1]))
        gates.let_go()
        poll(LIMIT, lambda: attempt(lambda: pool.add_device(new)))
        assert new in pool.admin.devices.places.values()


def test_a_place_that_goes_away_while_it_is_added_stays_in_the_settings(bench: Bench) -> None:
    """It may be a member by then, of a host that restarts: without its place it would be lost."""
    new = f"{bench.root}/new"
    bench.create(4, data=2, parity=1).close()
    os.mkdir(new)
    LocalDevice(new).prepare()

    class Leaving(DeviceWrapper):
        """Is not there any more once it holds what makes it a device."""

        written = False

        def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
            if self.written:
                raise DeviceMissing(f"device {self.url}: connection refused", device=self.url)
            return call()

        def write_small(self, path: str, data: bytes) -> None:
            super().write_small(path, data)
            self.written = self.url == new and path == IDENTITY_FILE

    with bench.open(wrap=lambda _, device: Leaving(device)) as pool:
        with pytest.raises(DeviceMissing):
            pool.add_device(new)
        assert new in pool._session.config.devices
    with bench.open() as pool:
        attempt(lambda: pool.add_device(new))
        pool.put("y", payload("y", SIZE))
        assert len(pool.status().devices) == 5
