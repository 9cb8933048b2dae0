"""Processes, threads and loaders that come and go around a cache, without a word to it."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.loaders import DataLoader, Dataset
from hpstore.loaders.batching import cached_reads
from hpstore.loaders.cache import Cache, SharedAttached
from hpstore.loaders.cache.messages import connect
from hpstore.loaders.cache.source_state import MOST_JOBS
from hpstore.loaders.sampling.sampler_replay import foretell_own
from tests.fault.common import exit_status, forked, poll
from tests.fault.shared_cache import COUNT, PATIENCE, SIZE, said
from tests.integration.cache_sources import NumberedSource, read_checked, read_epoch
from tests.integration.data_sets import make_pool, write_samples

BLOCKS = np.arange(COUNT)


@pytest.mark.parametrize("shared", [False, True])
def test_a_fork_of_the_owner_takes_no_part_of_its_memory(shared: bool) -> None:
    """It attaches another reader, reads all, and the parent's bytes are what they were. Without
    `share` it passes the cache by, also where the parent's locks were held when it was forked."""
    name = f"test-{os.getpid()}-fork" if shared else None
    source = NumberedSource(COUNT, SIZE)

    def child() -> None:
        ours = NumberedSource(COUNT, SIZE, version=7)  # it is what the child would write
        with cache.attach(ours, batch_blocks=10) as again:
            assert isinstance(again, SharedAttached) == shared
            read_epoch(again, ours, BLOCKS, 10)
        assert cache.stats().get("passed_by_total", 0) == (0 if shared else 1)
        cache.flush()
        cache.close()

    with Cache(COUNT * SIZE // 2, share=name) as cache:
        reader = cache.attach(source, batch_blocks=10)
        read_epoch(reader, source, BLOCKS, 10)
        assert cache._owned is not None
        core, division = cache._owned.core, cache._owned.division
        if shared:
            with forked(child) as pid:
                assert exit_status(pid, PATIENCE) == 0
        else:
            with core.lock, division._turn, core.tally._lock, forked(child) as pid:
                assert exit_status(pid, PATIENCE) == 0
        for _ in range(2):
            read_epoch(reader, source, BLOCKS, 10)


def test_loaders_that_are_dropped_leave_the_cache(tmp_path: Path) -> None:
    """More of them than may read one source at a time; the prefetches go on from one that is
    there."""
    with make_pool(tmp_path) as pool, Cache("64MiB") as cache:
        write_samples(pool, "train", range(40))
        with Dataset(pool, "train") as data:
            for _ in range(MOST_JOBS + 3):
                loader = DataLoader(data, 8, shuffle=True, cache=cache)
                assert len(list(loader)) == 5
                del loader
                gc.collect()
            assert cache._owned is not None
            stocks = cache._owned.core.stocks.values()
            poll(PATIENCE, lambda: all(not stock.jobs for stock in stocks))


def test_the_collector_may_come_to_a_thread_in_the_cache(tmp_path: Path) -> None:
    """A loop that was left is collected while its thread has the cache's lock: it waits for none,
    and the next loop is in the right order."""
    with make_pool(tmp_path) as pool, Cache("64MiB") as cache:
        write_samples(pool, "train", range(40))
        with (
            Dataset(pool, "train") as data,
            closing(DataLoader(data, 8, shuffle=True, cache=cache)) as loader,
        ):
            kept: list[Any] = [iter(loader)]
            next(kept[0])
            assert cache._owned is not None
            core = cache._owned.core

            def collect() -> None:
                with core.lock:
                    kept.clear()
                    gc.collect()

            thread = threading.Thread(target=collect, name="collect", daemon=True)
            thread.start()
            thread.join(PATIENCE)
            assert not thread.is_alive()
            loader.set_epoch(3)
            seen = [label for batch in loader for label in batch["label"].tolist()]
            assert sorted(seen) == list(range(40))
            assert cache.stats().get("turn_missed_total", 0) == 0


def test_an_order_that_fails_ahead_of_time_is_told_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that tells it ends; the loader goes on."""

    def failing(order: Any, slices: Any, epoch: int, position: int = 0) -> Any:
        if epoch >= 2:
            raise MemoryError("an order")
        return foretell_own(order, slices, epoch, position)

    monkeypatch.setattr(cached_reads, "foretell_own", failing)
    with make_pool(tmp_path) as pool, Cache("64MiB") as cache:
        write_samples(pool, "train", range(40))
        with (
            Dataset(pool, "train") as data,
            closing(DataLoader(data, 8, shuffle=True, cache=cache)) as loader,
        ):
            for _ in range(4):
                assert len(list(loader)) == 5
            assert said(caplog, "told to the cache no further") == 1
            assert pool.metrics.value("order_not_told_total") == 1


def test_threads_that_end_leave_no_connections(tmp_path: Path) -> None:
    """A loader makes threads for each run: the owner serves those that there are."""
    name = f"test-{os.getpid()}-threads"
    with Cache(1 << 20, share=name) as mine:
        source = NumberedSource(COUNT, SIZE)

        def child() -> None:
            with Cache(1 << 20, share=name) as cache:
                reader = cache.attach(source, batch_blocks=10)
                for _ in range(40):
                    thread = threading.Thread(target=read_checked, args=(reader, source, BLOCKS))
                    thread.start()
                    thread.join()
                (tmp_path / "done").touch()
                threading.Event().wait()

        assert mine._owned is not None
        with forked(child):
            poll(PATIENCE, (tmp_path / "done").exists)
            served = [t for t in threading.enumerate() if t.name == "hpstore-cache-peer"]
            poll(PATIENCE, lambda: sum(thread.is_alive() for thread in served) <= 2)


def test_an_owner_without_descriptors_accepts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """accept() fails for a while: counted, said once, and then others join."""
    real, failures = socket.socket.accept, [3]

    def failing(listener: socket.socket) -> Any:
        connection = real(listener)
        if failures[0]:
            failures[0] -= 1
            connection[0].close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return connection

    monkeypatch.setattr(socket.socket, "accept", failing)
    name = f"test-{os.getpid()}-files"
    with Cache(1 << 20, share=name) as mine:
        for _ in range(3):
            with pytest.raises(OSError, match=r"reset|the end"):
                probe(name)
        source = NumberedSource(COUNT, SIZE)

        def child() -> None:
            with Cache(1 << 20, share=name) as cache:
                read_epoch(cache.attach(source, batch_blocks=10), source, BLOCKS, 10)
                assert "owner_lost_total" not in cache.stats()

        with forked(child) as pid:
            assert exit_status(pid, PATIENCE) == 0
        assert mine.stats()["accept_failed_total"] == 3
        assert said(caplog, "cannot join") == 1


def probe(name: str) -> None:
    """A connection to the owner that is ended at once. Raises OSError."""
    with connect(name) as made:
        if not made.recv(1):
            raise OSError("the end")
