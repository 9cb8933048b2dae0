"""Several processes on one pool: fork and spawn with it open, races, membership seen elsewhere."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

import hpstore
from hpstore.config import PoolConfig
from hpstore.devices.base import Device
from hpstore.devices.local import LocalDevice
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import HpstoreError, VersionConflict
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, Call, exit_status, forked, payload, poll, value

pytestmark = pytest.mark.fault
T = TypeVar("T")
PATIENCE = 60.0  # seconds until a child that does not end is a failure


def check(condition: bool, what: str) -> None:
    """An assertion for child processes, where pytest rewrites nothing."""
    if not condition:
        raise AssertionError(what)


def read_and_write(pool: Pool, who: str, turns: int) -> None:
    """Read what is shared, put and read back what is one's own."""
    for turn in range(turns):
        check(pool.get("shared") == payload("shared", 300 * KIB), f"{who} reads other bytes")
        for size in (1 * KIB, 200 * KIB, 2 * MIB):
            key = f"{who}/{turn % 3}/{size}"
            data = payload(f"{key} {turn}", size)
            pool.put(key, data)
            check(pool.get(key) == data, f"{who} does not read back {key}")


def everything_of(pool: Pool, who: str, turns: int) -> None:
    """What read_and_write left is there."""
    for slot in range(3):
        turn = max(t for t in range(turns) if t % 3 == slot)
        for size in (1 * KIB, 200 * KIB, 2 * MIB):
            key = f"{who}/{slot}/{size}"
            assert pool.get(key) == payload(f"{key} {turn}", size)


# --- fork, spawn, pickle --------------------------------------------------------------------


def test_forked_child_and_parent_use_one_open_pool_at_the_same_time(bench: Bench) -> None:
    """Fork with the pool open and its threads started; both sides read and put."""
    with bench.create(4, data=2, parity=1) as pool:
        pool.put("shared", payload("shared", 300 * KIB))
        with forked(lambda: read_and_write(pool, "child", 6)) as child:
            read_and_write(pool, "parent", 6)
            assert exit_status(child, PATIENCE) == 0
        everything_of(pool, "child", 6)
        everything_of(pool, "parent", 6)
        assert pool.scrub().clean


def test_threads_of_a_forked_child_start_on_an_open_pool_at_once(bench: Bench) -> None:
    """Eight threads of the child make their first call together; every one reads right."""

    def child(pool: Pool) -> None:
        together = threading.Barrier(8)
        problems: list[str] = []

        def work(number: int) -> None:
            together.wait(PATIENCE)
            try:
                key = f"thread/{number}"
                pool.put(key, payload(key, 4 * KIB))
                check(pool.get(key) == payload(key, 4 * KIB), "other bytes")
                check(pool.get("shared") == payload("shared", 300 * KIB), "other bytes")
            except BaseException as error:  # noqa: BLE001 (reported by the main thread)
                problems.append(repr(error))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        check(not problems, "; ".join(problems))

    with bench.create(4, data=2, parity=1) as pool:
        pool.put("shared", payload("shared", 300 * KIB))
        for _ in range(15):
            with forked(lambda: child(pool)) as pid:
                assert exit_status(pid, PATIENCE) == 0


def test_roots_are_opened_once_by_racing_threads_of_a_forked_child(tmp_path: Path) -> None:
    """Threads that race for the first root descriptor after a fork all get a live one."""
    device = LocalDevice(str(tmp_path), direct=False)
    device.prepare()
    device.write_small("pool.json", b"here")

    def child() -> None:
        together = threading.Barrier(8)
        problems: list[str] = []

        def work() -> None:
            together.wait(PATIENCE)
            try:
                for _ in range(20):
                    check(device.read_small("pool.json", 100) == b"here", "other bytes")
            except BaseException as error:  # noqa: BLE001 (reported by the main thread)
                problems.append(repr(error))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        check(not problems, "; ".join(problems))

    for _ in range(60):
        with forked(child) as pid:
            assert exit_status(pid, PATIENCE) == 0
    device.close()


def spawned(pool: Pool, who: str, turns: int) -> None:
    """Main function of a spawned process: the pool comes pickled."""
    with pool:
        read_and_write(pool, who, turns)


def test_spawned_child_and_parent_use_one_pool_at_the_same_time(bench: Bench) -> None:
    """Hand an open pool to a spawned process; both sides read and put."""
    with bench.create(4, data=2, parity=1) as pool:
        pool.put("shared", payload("shared", 300 * KIB))
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=spawned, args=(pool, "child", 4))
        child.start()
        try:
            read_and_write(pool, "parent", 4)
            child.join(PATIENCE)
            assert child.exitcode == 0
        finally:
            child.kill()
            child.join(PATIENCE)
        everything_of(pool, "child", 4)


@pytest.mark.parametrize("read_only", [False, True])
def test_pickled_pool_is_the_same_pool(bench: Bench, read_only: bool) -> None:
    """Pickle and unpickle an open pool; the copy reads the same and keeps its mode."""
    bench.create(3, data=2, parity=1).close()
    with bench.open() as writer:
        writer.put("x", payload("x", 300 * KIB))
    with (
        hpstore.open(bench.toml, read_only=read_only) as pool,
        pickle.loads(pickle.dumps(pool)) as copy,
    ):
        assert copy.get("x") == payload("x", 300 * KIB)
        assert copy.status().pool_id == pool.status().pool_id
        assert copy.read_only == read_only


class PausedPublish(DeviceWrapper):
    """Stops before the first publish until the test lets it go on."""

    def __init__(self, inner: Device, reached: threading.Event, go_on: threading.Event) -> None:
        super().__init__(inner)
        self._reached, self._go_on = reached, go_on

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "publish":
            self._reached.set()
            self._go_on.wait(PATIENCE)
        return call()


@pytest.mark.parametrize("size", [1 * KIB, 3 * MIB], ids=["copies", "striped"])
def test_fork_during_a_put_leaves_its_object_readable(bench: Bench, size: int) -> None:
    """Fork while a thread is about to publish, as data loaders do while a checkpoint is saved.

    The child only lives on. What the parent acknowledges then can be read by everybody.
    """
    bench.create(3, data=2, parity=1).close()
    reached, go_on = threading.Event(), threading.Event()
    with (
        bench.open(wrap=lambda _, device: PausedPublish(device, reached, go_on)) as pool,
        bench.open() as other,
    ):
        putting = Call(lambda: pool.put("x", payload("x", size)))
        assert reached.wait(PATIENCE)
        with forked(lambda: threading.Event().wait(PATIENCE)):
            go_on.set()
            assert putting.ended(PATIENCE)
            putting.result()
            assert other.get("x") == payload("x", size)
            assert pool.get("x") == payload("x", size)


def test_fork_under_a_lock_does_not_keep_it(bench: Bench) -> None:
    """Fork while a thread scrubs; the child only lives on, and the next scrub gets the lock."""
    with bench.create(3, data=2, parity=1, lock_deadline_seconds=1.0) as pool:
        pool.put("x", payload("x", 1 * KIB))
        inside, go_on = threading.Event(), threading.Event()

        def stop(_: hpstore.Progress) -> None:
            inside.set()
            go_on.wait(PATIENCE)

        scrub = Call(lambda: pool.scrub(progress=stop))
        assert inside.wait(PATIENCE)
        with forked(lambda: threading.Event().wait(PATIENCE)):
            go_on.set()
            assert scrub.ended(PATIENCE)
            scrub.result()
            assert pool.scrub().clean


def test_reader_is_served_while_a_writer_stands_still_after_its_rename(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop a put after its renames, as SIGSTOP does; others read the old or the new value."""
    bench.create(3, data=2, parity=1).close()
    reached, go_on = threading.Event(), threading.Event()
    rename = LocalDevice.rename_into_place

    def stop_after(self: LocalDevice, old: str, new: str) -> None:
        rename(self, old, new)
        if new.startswith("objects/"):
            reached.set()
            go_on.wait(PATIENCE)

    with bench.open() as pool, bench.open() as other:
        pool.put("x", payload("old", 3 * KIB))
        monkeypatch.setattr(LocalDevice, "rename_into_place", stop_after)
        putting = Call(lambda: pool.put("x", payload("new", 3 * KIB)))
        try:
            assert reached.wait(PATIENCE)
            assert other.get("x") in (payload("old", 3 * KIB), payload("new", 3 * KIB))
        finally:
            go_on.set()
        assert putting.ended(PATIENCE)
        putting.result()
        assert other.get("x") == payload("new", 3 * KIB)


# --- races ----------------------------------------------------------------------------------


def all_end_well(children: list[Callable[[], object]]) -> None:
    """Run children side by side, started together; all must succeed."""
    start, go = os.pipe()

    def child(work: Callable[[], object]) -> None:
        os.close(go)
        os.read(start, 1)  # returns when the parent closes its end
        work()

    pids = []
    try:
        for work in children:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    child(work)
                    status = 0
                except BaseException as error:  # noqa: BLE001 (the child must end here)
                    os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
                finally:
                    os._exit(status)
            pids.append(pid)
    finally:
        os.close(start)
        os.close(go)
    assert [exit_status(pid, PATIENCE) for pid in pids] == [0] * len(pids)


@pytest.mark.parametrize("size", [1 * KIB, 300 * KIB, 3 * MIB])
def test_two_processes_putting_one_key_leave_one_whole_winner(bench: Bench, size: int) -> None:
    """Two processes overwrite one key; readers meet whole values only, and one stays."""
    with bench.create(3, data=2, parity=1) as pool:
        pool.put("x", payload("0 0", size))
        whole = {payload(f"{who} {turn}", size) for who in range(2) for turn in range(12)}

        def put(who: int) -> None:
            for turn in range(12):
                pool.put("x", payload(f"{who} {turn}", size))

        def read() -> None:
            for _ in range(40):
                check(pool.get("x") in whole, "a reader met a mixture")

        all_end_well([lambda: put(0), lambda: put(1), read])
        assert pool.get("x") in {payload(f"{who} 11", size) for who in range(2)}
        assert pool.scrub().clean
        assert pool.get("x") in {payload(f"{who} 11", size) for who in range(2)}


def test_readers_meet_no_error_while_a_key_is_overwritten(bench: Bench) -> None:
    """One process overwrites a key 150 times; three read it all the while."""
    with bench.create(3, data=2, parity=1) as pool:
        pool.put("x", payload("0", 2 * KIB))
        whole = {payload(str(turn), 2 * KIB) for turn in range(150)}

        def put() -> None:
            for turn in range(150):
                pool.put("x", payload(str(turn), 2 * KIB))

        def read() -> None:
            for _ in range(250):
                check(pool.get("x") in whole, "a reader met a mixture")

        all_end_well([put, read, read, read])
        assert pool.get("x") == payload("149", 2 * KIB)


def test_four_processes_put_different_keys_and_none_is_lost(bench: Bench) -> None:
    """Four processes put into the same directories; all keys are there, whole."""
    with bench.create(4, data=2, parity=2) as pool:

        def put(who: int) -> None:
            for number in range(15):
                key = f"run/{number}/rank-{who}"
                pool.put(key, payload(key, 200 * KIB if number % 3 else 1 * KIB))
                if number % 4 == 3:
                    pool.delete(key)

        all_end_well([lambda who=who: put(who) for who in range(4)])  # type: ignore[misc]
        kept = [f"run/{n}/rank-{w}" for n in range(15) for w in range(4) if n % 4 != 3]
        assert pool.list() == sorted(kept)
        for key in kept:
            size = 200 * KIB if int(key.split("/")[1]) % 3 else 1 * KIB
            assert pool.get(key) == payload(key, size)


@pytest.mark.parametrize("size", [1 * KIB, 300 * KIB])
def test_if_absent_is_won_by_exactly_one_of_eight_processes(bench: Bench, size: int) -> None:
    """Eight processes put the same new key with if_absent; one wins, its bytes stay."""
    with bench.create(3, data=2, parity=1) as pool:
        won = bench.root / "won"
        won.mkdir()

        def put(who: int) -> None:
            for turn in range(4):
                try:
                    pool.put(f"lock/{turn}", payload(f"{who}", size), if_absent=True)
                except VersionConflict:
                    continue
                (won / f"{turn}-{who}").touch()

        all_end_well([lambda who=who: put(who) for who in range(8)])  # type: ignore[misc]
        for turn in range(4):
            winners = [path.name.split("-")[1] for path in won.glob(f"{turn}-*")]
            assert len(winners) == 1
            assert pool.get(f"lock/{turn}") == payload(winners[0], size)


# --- membership -----------------------------------------------------------------------------


def test_added_device_is_seen_by_a_process_that_has_the_pool_open(bench: Bench) -> None:
    """Add a device and put over it in one process; an open one reads, and puts over it too."""
    bench.create(3, data=2, parity=1).close()
    added = str(bench.root / "d3")
    with bench.open() as here, bench.open() as there:
        there.put("warm", payload("warm", 300 * KIB))

        def change() -> None:
            here.add_device(added)
            for number in range(12):
                here.put(f"new/{number}", payload(f"new/{number}", 300 * KIB))

        with forked(change) as child:
            assert exit_status(child, PATIENCE) == 0
        for number in range(12):
            assert there.get(f"new/{number}") == payload(f"new/{number}", 300 * KIB)
        for number in range(12):
            there.put(f"own/{number}", payload(f"own/{number}", 300 * KIB))
        bench.paths.append(added)
        assert any(added in str(f) for n in range(12) for f in bench.files(f"own/{n}"))


def test_evict_during_puts_of_another_process_loses_nothing_acknowledged(bench: Bench) -> None:
    """One process evicts a device while another puts; what that one acknowledged is whole."""
    bench.create(5, data=2, parity=2).close()
    done = bench.root / "done"
    done.mkdir()
    config: PoolConfig = bench.open().config

    def put() -> None:
        with Pool(config) as pool:
            for number in range(120):
                size = (1 * KIB, 200 * KIB, 1 * MIB)[number % 3]
                pool.put(f"k/{number}", payload(f"k/{number}", size))
                (done / str(number)).touch()

    with bench.open() as pool:
        with forked(put) as child:
            poll(PATIENCE, lambda: len(list(done.iterdir())) >= 10)
            pool.evict(bench.paths[0])
            so_far = len(list(done.iterdir()))
            assert exit_status(child, PATIENCE) == 0
        assert so_far < 120, "the puts were over before the eviction"
        for number in range(120):
            size = (1 * KIB, 200 * KIB, 1 * MIB)[number % 3]
            assert value(pool, f"k/{number}") == payload(f"k/{number}", size)
        report = pool.rebuild()
        assert not report.unreadable
        assert pool.status().losses_tolerated == 2


def test_device_added_and_evicted_in_turns_while_others_put_loses_nothing(bench: Bench) -> None:
    """Members come and go under two writers; every acknowledged key stays whole."""
    bench.create(5, data=2, parity=2).close()
    done = bench.root / "done"
    done.mkdir()

    def put(who: int) -> None:
        with bench.open() as pool:
            for number in range(60):
                key = f"{who}/{number}"
                try:
                    pool.put(key, payload(key, 150 * KIB))
                except HpstoreError:
                    continue  # not acknowledged
                (done / key.replace("/", "-")).touch()

    def change() -> None:
        with bench.open() as pool:
            for turn in range(3):
                pool.evict(bench.paths[turn])
                pool.rebuild()
                pool.readmit(bench.paths[turn])

    all_end_well([lambda: put(0), lambda: put(1), change])
    with bench.open() as pool:
        names = [path.name.replace("-", "/") for path in done.iterdir()]
        assert len(names) > 60
        for key in names:
            assert value(pool, key) == payload(key, 150 * KIB)
