"""A process that may start no more threads (a container's pids.max): its calls work or say so, lose
nothing, and work again when there are threads."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, Tier
from hpstore.config import Settings
from hpstore.errors import AlreadyClosed, HpstoreError, ThreadsExhausted
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.runtime.scheduler import Scheduler
from hpstore.runtime.threads import WorkerThreads, start_some

Call = Callable[[hpstore.Pool], object]
BIG, SMALL = bytes(range(256)) * 20_000, b"small" * 100
REFUSED = "can't start new thread"


class Allowance:
    """So many threads may be started; `wanted` were asked for."""

    def __init__(self, threads: int) -> None:
        self.left, self.wanted = threads, 0


@contextmanager
def threads_left(count: int) -> Iterator[Allowance]:
    """Inside, so many threads can be started and no more."""
    allowance, start = Allowance(count), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        allowance.wanted += 1
        if allowance.left <= 0:
            raise RuntimeError(REFUSED)
        allowance.left -= 1
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        yield allowance


def save(pool: hpstore.Pool) -> object:
    with Checkpointer(pool, "run", rng=False) as ckpt:
        step = (ckpt.steps.latest() or 0) + 1
        return ckpt.save(step, {"w": torch.full((70_000,), float(step))}).result().step


def restore(pool: hpstore.Pool) -> object:
    with Checkpointer(pool, "run", rng=False) as ckpt:
        state = {"w": torch.zeros(70_000)}
        step = ckpt.restore(state)
        assert step is not None
        assert state["w"].eq(float(step)).all()
    return step


def load(pool: hpstore.Pool) -> object:
    loader = DataLoader(Dataset(pool, "data"), batch_size=16, shuffle=True, seed=1)
    try:
        return sorted(int(x) for batch in loader for x in batch["x"][:, 0])
    finally:
        loader.close()


def write(pool: hpstore.Pool) -> object:
    with DatasetWriter(pool, "more", {"x": Field("int64", (8,))}) as writer:
        writer.write_batch({"x": np.zeros((50, 8), np.int64)})
    pool.delete_many(pool.list("data/more/"))
    return None


CALLS: dict[str, Call] = {
    "get": lambda pool: bytes(pool.get("big")),
    "put": lambda pool: pool.put("new", BIG).size,
    "put small": lambda pool: pool.put("tiny", SMALL).size,
    "put_many": lambda pool: len(pool.put_many({f"many/{i}": SMALL for i in range(40)})),
    "open_many": lambda pool: len(pool.open_many([f"some/{i}" for i in range(40)])),
    "list": lambda pool: len(pool.list("some/")),
    "status": lambda pool: pool.status().losses_tolerated,
    "scrub": lambda pool: pool.scrub(resume=False).damaged_columns,
    "rebuild": lambda pool: pool.rebuild(everything=True).stuck,
    "save": save,
    "restore": restore,
    "load": load,
    "write a data set": write,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    made = tmp_path / "pool.toml"
    settings = Settings(run_directory=str(tmp_path / "run"), direct=False)
    with hpstore.create(
        [tmp_path / f"d{i}" for i in range(6)], scheme="4+2", config=made, settings=settings
    ) as pool:
        pool.put("big", BIG)
        pool.put_many({f"some/{i}": SMALL for i in range(40)})
        with DatasetWriter(pool, "data", {"x": Field("int64", (8,))}) as writer:
            writer.write_batch({"x": np.arange(100)[:, None].repeat(8, 1)})
        save(pool)
    return made


@pytest.mark.parametrize("name", CALLS)
def test_a_call_works_or_says_that_there_are_no_threads(config: Path, name: str) -> None:
    """Whichever thread is the first that cannot be had: no other error, no hang, nothing lost."""
    call, whole, refusals = CALLS[name], 0, list[str]()
    for count in itertools.count():
        with hpstore.open(config) as pool:
            with threads_left(count) as allowance:
                try:
                    call(pool)
                    whole += 1
                except HpstoreError as error:
                    refusals.append(str(error))
            call(pool)  # there are threads again
            assert pool.get("big") == BIG
            assert pool.status().losses_tolerated == 2
        if allowance.wanted <= count:
            break
    assert whole
    assert all("start no more" in refusal for refusal in refusals)


def test_a_pool_opens_or_says_that_there_are_no_threads(config: Path) -> None:
    """Its lanes work with the threads that they get. No descriptor or lock of a try is left."""
    for count in itertools.count():
        with threads_left(count) as allowance:
            try:
                with hpstore.open(config) as pool:
                    assert pool.get("big") == BIG
            except ThreadsExhausted:
                pass
        if allowance.wanted <= count:
            break
    assert count > 6
    with hpstore.open(config) as pool:
        pool.put("big", BIG[::-1])
        assert pool.get("big") == BIG[::-1]


def test_work_that_a_pool_of_threads_refused_is_done_by_the_caller() -> None:
    """None of it stays queued, to run on buffers that another has by then."""
    ran: list[int] = []
    with WorkerThreads(2, "test") as threads:
        with threads_left(0):
            futures = [threads.submit(ran.append, n) for n in range(3)]
            assert ran == [0, 1, 2]
            assert all(future.done() for future in futures)
        assert list(threads.map(abs, [-4, -5])) == [4, 5]
    assert ran == [0, 1, 2]
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(ran.append, 4)


def test_a_call_that_one_thread_will_take_is_left_to_it() -> None:
    """And a cancelled one is cancelled for whoever waits."""
    begun, go = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go.wait(30)

    threads = WorkerThreads(2, "test")
    threads.submit(first)
    assert begun.wait(30)
    with threads_left(0):
        second, third = threads.submit(abs, -2), threads.submit(abs, -3)
        assert not second.done()
    assert third.cancel()
    threads.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    go.set()


def test_threads_of_one_queue_are_as_many_as_there_can_be() -> None:
    """At least one."""
    made = [threading.Thread(target=int) for _ in range(4)]
    with threads_left(2):
        assert len(start_some(made)) == 2
        with pytest.raises(ThreadsExhausted, match="ulimit -u"):
            start_some(made[2:])


def test_a_scheduler_that_closes_meanwhile_says_that_it_is_closed() -> None:
    scheduler = Scheduler(workers_per_device=1, queue_depth=4, compute_threads=1, threads=True)
    scheduler.compute(int).result()
    scheduler.close()
    with pytest.raises(AlreadyClosed):
        scheduler.compute(int)


def test_what_was_done_without_a_thread_is_kept_by_nobody() -> None:
    """A process that gets none for hours does not fill its memory with what it wrote."""

    class Data:
        pass

    threads = WorkerThreads(2, "test")
    data = Data()
    gone = weakref.ref(data)
    with threads_left(0):
        assert threads.submit(id, data).result() == id(data)
        del data
        gc.collect()
        assert gone() is None
    threads.shutdown()


def test_health_is_watched_as_soon_as_there_is_a_thread(config: Path) -> None:
    """The first call of a process that found none must not be the only one that tries."""
    with hpstore.open(config) as pool:
        pool.get("big")
        monitor = pool.admin.health
        monitor.pause()
        monitor._automatic = True
        for meter in monitor._meters.values():
            meter.asleep = True
        with threads_left(0):
            assert pool.get("big") == BIG
            assert monitor._thread is None
        pool.get("big")
        assert monitor._thread is not None


def test_a_copy_into_a_tier_waits_for_a_thread(config: Path, tmp_path: Path) -> None:
    """wait() does not say that a step is copied which no thread was there for, and tries again."""
    places = [tmp_path / f"c{i}" for i in range(2)]
    cold = hpstore.create(places, data=1, parity=1, config=tmp_path / "cold.toml")
    with (
        cold,
        hpstore.open(config) as pool,
        Checkpointer(pool, "copied", rng=False, tiers=[Tier(pool=cold)]) as ckpt,
    ):
        (copier,) = ckpt.saver.tiers.copiers
        ckpt.save(1, {"w": torch.ones(9)}).result()
        assert ckpt.tiers.wait(60)
        with threads_left(0):
            copier.enqueue(2)
            assert not ckpt.tiers.wait(60)
            assert copier.held == (2,)
        ckpt.save(2, {"w": torch.ones(9)}).result()
        assert ckpt.tiers.wait(60)
        assert not copier.held
        assert copier.catalog.all() == [1, 2]
