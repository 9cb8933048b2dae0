"""The tiers of the cache: one fetch a block, prefetching, the disk, what a restart finds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.loaders.cache import Attached, Cache, MemoryLost
from hpstore.loaders.cache import cache_core as core_module
from hpstore.loaders.cache.block_source import Targets
from hpstore.loaders.cache.cache_core import Core
from hpstore.loaders.cache.cache_counters import CacheTally
from hpstore.loaders.cache.disk_tier import DiskTier
from hpstore.loaders.cache.policy_interface import Floats
from hpstore.loaders.cache.prefetch import MOST_WINDOW_SHARE, next_work
from hpstore.loaders.cache.source_state import Fetched
from hpstore.loaders.dataset.record_layout import Int64s
from tests.fault.common import exit_status, forked, poll
from tests.integration.cache_sources import NumberedSource, read_checked, read_epoch

COUNT, SIZE = 200, 3000
PATIENCE = 60.0


def core_of(cache: Cache) -> Core:
    """The insides, for what must not depend on when threads run."""
    assert cache._owned is not None
    return cache._owned.core


@pytest.fixture
def source() -> NumberedSource:
    return NumberedSource(COUNT, SIZE)


@pytest.fixture
def still(source: NumberedSource) -> Iterator[tuple[Cache, Attached]]:
    """A quarter of the source fits; nothing is prefetched by itself."""
    with Cache(COUNT * SIZE // 4, prefetch_threads=0) as cache:
        reader = cache.attach(source, batch_blocks=10)
        assert isinstance(reader, Attached)
        yield cache, reader


# --- one fetch a block ------------------------------------------------------------------------


def test_one_fetch_serves_all_who_ask_for_a_block(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """Six threads ask for the same blocks while their fetch waits: one fetch, same bytes."""
    cache, reader = still
    source.gate = threading.Event()
    wanted = np.array([3, 8, 5])
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(read_checked, reader, source, wanted) for _ in range(6)]
        core = core_of(cache)
        poll(
            PATIENCE,
            lambda: (
                all(f.waiting == 5 for f in core.stocks[source.name].flights.values())
                and source.entered.is_set()
            ),
        )
        source.gate.set()
        for one in asked:
            one.result(PATIENCE)
    assert source.fetches[wanted].tolist() == [1, 1, 1]
    assert cache.stats()["late_total"] == 15


def test_who_waited_for_a_fetch_that_failed_fetches_himself(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """The error is the first one's alone."""
    cache, reader = still
    source.gate, source.failing = threading.Event(), True
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(read_checked, reader, source, np.array([7]))
        poll(PATIENCE, source.entered.is_set)
        second = pool.submit(read_checked, reader, source, np.array([7]))
        flights = core_of(cache).stocks[source.name].flights
        poll(PATIENCE, lambda: flights[7].waiting == 1)
        original, source.read = source.read, NumberedSource(COUNT, SIZE).read  # type: ignore[method-assign]
        source.gate.set()
        with pytest.raises(OSError, match="the source fails"):
            first.result(PATIENCE)
        second.result(PATIENCE)
    assert original is not None
    assert not flights


def test_who_leaves_the_foretold_order_waits_for_nobody(
    source: NumberedSource, still: tuple[Cache, Attached], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that skips ahead waits for its turn once; from then on its order is unknown."""
    monkeypatch.setattr(core_module, "TURN_SECONDS", 0.1)
    cache, reader = still
    reader.expect(0, np.arange(COUNT))
    read_epoch(reader, source, np.arange(50, 150), 10)
    stats = cache.stats()
    assert (stats["turn_missed_total"], stats["order_left_total"]) == (1, 1)


def test_repeats_in_a_batch_are_fetched_once(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """With replacement, as weighted samplers draw."""
    cache, reader = still
    read_checked(reader, source, np.array([4, 9, 4, 4, 9]))
    assert source.fetches[[4, 9]].tolist() == [1, 1]
    assert (cache.stats()["again_total"], cache.stats().get("late_total", 0)) == (3, 0)


def test_targets_and_blocks_that_do_not_fit_change_nothing(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """Refused before anything is asked of the policy or the source."""
    cache, reader = still
    for blocks, rows in (([0], 2999), ([COUNT], SIZE), ([-1], SIZE)):
        with pytest.raises(ValueError, match="block"):
            reader.read(np.array(blocks), np.zeros((1, rows), np.uint8))
    assert not source.calls
    assert not core_of(cache).stocks[source.name].flights


# --- prefetching ------------------------------------------------------------------------------


def test_a_foretold_order_is_there_when_it_is_asked_for(source: NumberedSource) -> None:
    """After a first look each batch finds its bytes; neighbours came in one call."""
    order = np.arange(COUNT)
    with Cache(COUNT * SIZE // 4) as cache:
        reader = cache.attach(source, batch_blocks=10)
        reader.begin_epoch(COUNT)
        reader.expect(0, order)
        for at in range(0, COUNT, 10):
            wanted = min(at + 10, COUNT)
            poll(PATIENCE, lambda: cache.stats().get("prefetch_total", 0) >= wanted)  # noqa: B023
            read_checked(reader, source, order[at : at + 10])
        stats = cache.stats()
    assert stats.get("miss_total", 0) == 0
    assert stats["prefetch_used_total"] + stats.get("prefetch_late_total", 0) == COUNT
    assert stats["coverage"] == stats["accuracy"] == 1.0
    assert any(len(call) >= 4 and np.all(np.diff(call) == 1) for call in source.calls)


def test_prefetched_bytes_stay_within_their_credit(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """Without a consumer the work ends; when some of it is used there is as much again."""
    cache, reader = still
    core = core_of(cache)
    reader.expect(0, np.arange(COUNT))
    limit = core.room.pages.page_count * SIZE // MOST_WINDOW_SHARE

    def all_work() -> int:
        found = 0
        while True:
            with core.lock:
                work = next_work(core)
            if work is None:
                return found
            found += len(work.blocks)
            for block, flight in zip(work.blocks.tolist(), work.flights, strict=True):
                core.tally.add(prefetch_total=1)
                data = source.bytes_of(block)
                core.land(work.stock, work.room, [Fetched(block, flight, data)])
            assert 0 < cache.stats()["ahead_bytes"] <= limit

    first = all_work()
    assert 0 < first <= limit // SIZE
    read_checked(reader, source, np.arange(first))
    assert 0 < all_work() <= first + 1


def test_nothing_is_prefetched_while_a_request_reads_its_source(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """Prefetching never delays who waits; it goes on afterwards."""
    cache, reader = still
    core = core_of(cache)
    reader.expect(0, np.arange(COUNT))
    source.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(read_checked, reader, source, np.arange(10))
        poll(PATIENCE, source.entered.is_set)
        with core.lock:
            assert next_work(core) is None
        source.gate.set()
        asked.result(PATIENCE)
    with core.lock:
        assert next_work(core) is not None


def test_an_order_taken_back_is_prefetched_no_more(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """What is wanted is decided before each call: a seek cancels the rest."""
    cache, reader = still
    core = core_of(cache)
    reader.expect(0, np.arange(COUNT))
    reader.expect(0, None)
    with core.lock:
        assert next_work(core) is None
    reader.expect(0, np.arange(COUNT)[::-1].copy())
    with core.lock:
        work = next_work(core)
    assert work is not None
    assert work.blocks[-1] == COUNT - 1


def test_batches_made_side_by_side_keep_the_foretold_order(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """The second batch is asked for first: the policy still sees them in order."""
    cache, reader = still
    order = np.random.default_rng(0).permutation(COUNT)
    reader.expect(0, order)
    stock = core_of(cache).stocks[source.name]
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(read_checked, reader, source, order[10:20])
        poll(PATIENCE, lambda: stock.jobs[0].early == 1)
        read_checked(reader, source, order[:10])
        early.result(PATIENCE)
    assert not stock.policy.mismatched(0)
    assert stock.policy.expected(0) == COUNT - 20


class LosingSource(NumberedSource):
    """Its first read does not end: its memory is lost, and written into later."""

    lost: list[Bytes] | None = None
    shared = False

    def read(self, blocks: Int64s, targets: Targets) -> None:
        if self.lost is None:
            self.lost = list(targets)
            raise MemoryLost
        # an assertion here would be a failed prefetch, which is no failure
        self.shared |= any(np.shares_memory(old, new) for old in self.lost for new in targets)
        super().read(blocks, targets)
        for old in self.lost:
            old[:] = 0xAA


def test_memory_that_a_hung_read_may_write_into_is_not_used_again() -> None:
    """A lost prefetch changes its memory; nobody sees what is written late (PROTOCOL 21)."""
    source = LosingSource(COUNT, SIZE)
    with Cache(COUNT * SIZE // 2) as cache, cache.attach(source) as reader:
        reader.expect(0, np.arange(COUNT))
        poll(PATIENCE, lambda: cache.stats().get("prefetch_abandoned_total", 0) > 0)
        read_epoch(reader, source, np.arange(COUNT))
    assert not source.shared


# --- the disk ---------------------------------------------------------------------------------


def on_disk(cache: Cache, source: NumberedSource) -> Int64s:
    """Blocks that the disk tier holds."""
    cache.flush()
    part = core_of(cache).stocks[source.name].disk
    assert part is not None
    return np.flatnonzero(part.file.checks)


def filled(source: NumberedSource, folder: Path, disk_blocks: int) -> tuple[Cache, Int64s]:
    """A cache after some passes over its source, and what is on its disk."""
    cache = Cache(COUNT * SIZE // 8, disk_path=folder, disk_bytes=disk_blocks * 4096)
    reader = cache.attach(source, batch_blocks=10)
    rng = np.random.default_rng(0)
    for epoch in range(4):
        reader.begin_epoch(COUNT)
        read_epoch(reader, source, rng.permutation(COUNT), 10)
        cache.flush()
        assert epoch >= 0
    return cache, on_disk(cache, source)


def test_a_restart_finds_the_disk_and_what_was_learned(
    source: NumberedSource, tmp_path: Path
) -> None:
    """Blocks of the last run come from the disk, with its counts; nothing of it from the source."""
    cache, blocks = filled(source, tmp_path, COUNT)
    assert len(blocks) > COUNT // 4
    learned = core_of(cache).stocks[source.name].policy.state_arrays()
    cache.close()
    again = NumberedSource(COUNT, SIZE)
    with (
        Cache(
            COUNT * SIZE // 8, disk_path=tmp_path, disk_bytes=COUNT * 4096, prefetch_threads=0
        ) as cache,
        cache.attach(again, batch_blocks=10) as reader,
    ):
        kept = core_of(cache).stocks[source.name].policy.state_arrays()
        assert len(np.unique(learned["learner_keys"])) > 1
        assert np.array_equal(kept["learner_keys"], learned["learner_keys"])
        assert cache.stats().get("learned_refused_total", 0) == 0
        read_epoch(reader, again, blocks, 10)
        stats = cache.stats()
    assert stats["disk_hit_total"] == len(blocks)
    assert not again.fetches.any()


def test_a_restart_brings_the_favourites_of_the_disk_into_memory(
    source: NumberedSource, tmp_path: Path
) -> None:
    """Before anybody asks, and without the source."""
    cache, blocks = filled(source, tmp_path, COUNT)
    cache.close()
    assert len(blocks)
    again = NumberedSource(COUNT, SIZE)
    with (
        Cache(COUNT * SIZE // 8, disk_path=tmp_path, disk_bytes=COUNT * 4096) as cache,
        cache.attach(again, batch_blocks=10),
    ):
        poll(PATIENCE, lambda: cache.stats().get("prefetch_total", 0) > 0)
    assert not again.fetches.any()


def test_a_changed_source_drops_all_that_was_kept_of_it(
    source: NumberedSource, tmp_path: Path
) -> None:
    """Another identity under the same name: disk and counts are gone, bytes are the new ones."""
    cache, blocks = filled(source, tmp_path, COUNT)
    cache.close()
    assert len(blocks)
    changed = NumberedSource(COUNT, SIZE, version=1)
    with (
        Cache(COUNT * SIZE // 8, disk_path=tmp_path, disk_bytes=COUNT * 4096) as cache,
        cache.attach(changed, batch_blocks=10) as reader,
    ):
        assert not len(on_disk(cache, changed))
        assert cache.stats()["learned_refused_total"] == 1
        read_epoch(reader, changed, np.arange(COUNT), 10)


def test_the_source_may_change_under_a_running_cache(
    source: NumberedSource, still: tuple[Cache, Attached], caplog: pytest.LogCaptureFixture
) -> None:
    """Readers of the old generation go on beside the cache: its bytes for them, new for the new."""
    cache, old = still
    read_epoch(old, source, np.arange(COUNT))
    changed = NumberedSource(COUNT, SIZE, version=1)
    new = cache.attach(changed, batch_blocks=10)
    for _ in range(2):
        read_epoch(new, changed, np.arange(40))
        read_epoch(old, source, np.arange(40))
    assert cache.stats()["passed_by_total"] == 6
    assert len([r for r in caplog.records if "without its cache" in r.message]) == 1


def test_the_disk_stays_within_its_bytes(source: NumberedSource, tmp_path: Path) -> None:
    """By what it says, and by what the filesystem says."""
    cache, blocks = filled(source, tmp_path, 40)
    with cache:
        part = core_of(cache).stocks[source.name].disk
        assert part is not None
        assert 30 < len(blocks) <= 40
        assert part.used_bytes == len(blocks) * 4096
        real = sum(
            (tmp_path / n).stat().st_blocks * 512 for n in map(str, tmp_path.glob("*.blocks"))
        )
        assert real <= 41 * 4096


def test_a_full_disk_gives_up_a_block_only_for_one_that_is_needed_sooner(
    source: NumberedSource, tmp_path: Path
) -> None:
    """Not for one that is needed later or never; what was given up is gone, also from the file."""
    with DiskTier(str(tmp_path), 40 * 4096, CacheTally()) as tier:
        part = tier.part(source)
        assert part is not None

        level = [9.0]  # when what is there is needed
        given_up: list[int] = []

        def uses(others: Int64s) -> Floats:
            return np.full(len(others), level[0], np.float32)

        def offer(blocks: list[int], when: list[float]) -> list[bool]:
            numbers = np.array(blocks, np.int64)
            taken = part.offer(numbers, np.array(when, np.float32), 1 << 20, uses)
            chosen = numbers[taken.take].tolist()
            given_up.extend(taken.drop)
            part.write(chosen, [source.bytes_of(block) for block in chosen], taken.drop)
            return [bool(took) for took in taken.take]

        assert all(offer(list(range(39)), [5.0] * 39))
        assert offer([45], [np.inf]) == [False]
        assert offer([39], [5.0]) == [True]
        assert offer([50, 51, 52], [6.0, np.inf, 9.0]) == [True, False, False]
        level[0] = 5.0
        assert offer([60, 61], [5.0, 4.95]) == [False, False]
        assert offer([60, 61], [5.0, 4.0]) == [False, True]
        assert len(given_up) == 2
        assert not part.holds(np.array(given_up)).any()
        assert part.read(np.array(given_up)) == [None, None]
        assert part.used_bytes == 40 * 4096
        assert np.count_nonzero(part.file.checks) == 40


# --- sources, and the end ----------------------------------------------------------------------


def test_the_share_of_the_best_possible_is_measured(source: NumberedSource) -> None:
    """Hits over those of MIN, on a sample: a cache for all gets all, one pass gets nothing."""
    many = NumberedSource(2000, 100)
    with Cache(400_000, prefetch_threads=0) as cache:
        reader = cache.attach(many, batch_blocks=50)
        read_epoch(reader, many, np.arange(2000), 50)
        assert "share_of_min" not in cache.stats()
        for _ in range(3):
            read_epoch(reader, many, np.arange(2000), 50)
        assert cache.stats()["share_of_min"] == 1.0


def test_a_second_source_shares_the_memory(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """It empties the memory once; both then have hits and the right bytes."""
    cache, reader = still
    other = NumberedSource(50, np.arange(500, 1000, 10), name="val/0")
    second = cache.attach(other, batch_blocks=4)
    for _ in range(3):
        read_epoch(reader, source, np.arange(20))
        read_epoch(second, other, np.arange(4), 4)
    stats = cache.stats()
    assert stats["redivided_total"] == 1
    assert stats["memory_hit_total"] == 2 * 20 + 2 * 4


def test_a_forked_child_reads_its_source(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """Also while the parent holds the cache's lock: the child never takes it."""
    cache, reader = still
    with core_of(cache).lock, forked(lambda: read_checked(reader, source, np.arange(20))) as pid:
        assert exit_status(pid, PATIENCE) == 0


def test_a_closed_cache_leaves_its_readers_to_their_sources(
    source: NumberedSource, still: tuple[Cache, Attached]
) -> None:
    """And takes no new ones."""
    cache, reader = still
    cache.close()
    cache.close()
    read_checked(reader, source, np.arange(20))
    with pytest.raises(ConfigError, match="closed"):
        cache.attach(source)


def test_many_threads_and_jobs_get_the_right_bytes(tmp_path: Path) -> None:
    """Two jobs of three threads each, one order foretold, one not; a small memory and a disk."""
    sizes = np.random.default_rng(0).integers(100, 6000, COUNT).astype(np.int64)
    source = NumberedSource(COUNT, sizes)
    with Cache(150_000, disk_path=tmp_path, disk_bytes=100 * 4096) as cache:
        known, unknown = (cache.attach(source, job=j, batch_blocks=8) for j in ("a", "b"))
        rng = np.random.default_rng(1)
        orders = [rng.permutation(COUNT) for _ in range(4)]
        for epoch, order in enumerate(orders):
            known.expect(epoch, order)
        told = np.concatenate(orders)
        drawn = rng.integers(0, COUNT, 4 * COUNT)
        with ThreadPoolExecutor(3) as ours, ThreadPoolExecutor(3) as theirs:
            reads = [
                pool.submit(read_checked, reader, source, what[at : at + 8])
                for at in range(0, len(told), 8)
                for pool, reader, what in ((ours, known, told), (theirs, unknown, drawn))
            ]
            for read in reads:
                read.result(PATIENCE)
        core = core_of(cache)
        assert not core.stocks[source.name].policy.mismatched(0)
        assert not core.stocks[source.name].flights
        cache.flush()
        poll(PATIENCE, lambda: core.stocks[source.name].ahead_bytes == 0)
        stock, room = core.stocks[source.name], core.room
        here = np.flatnonzero(stock.first >= 0)
        used = int(room.pages.pages_each(sizes[here]).sum())
        assert used + room.free.free_count == room.pages.page_count  # no page is lost
        assert set(here.tolist()) == set(stock.policy.residents().tolist())  # type: ignore[attr-defined]
