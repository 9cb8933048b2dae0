"""Pages of the cache: chains of them, stamps, which are free and when."""

from __future__ import annotations

import numpy as np
import pytest

from hpstore.loaders.cache.cache_counters import shares
from hpstore.loaders.cache.page_allocator import (
    NO_PAGE,
    FoundPages,
    FreePages,
    Pages,
    choose_page_bytes,
)
from hpstore.loaders.cache.source_state import FetchTurn, ReaderJob, SourcePace


def test_blocks_of_one_size_waste_no_page() -> None:
    """The page is the block, or an equal part of it where it is large."""
    assert choose_page_bytes([(12_288, 1000)]) == 12_288
    page = choose_page_bytes([(3_000_000, 10)])
    assert page <= 1 << 20
    assert -(-3_000_000 // page) * page - 3_000_000 < 3


def test_blocks_of_many_sizes_waste_little() -> None:
    """Less than a tenth of the bytes around 114 KB; small ones are not given large pages."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.normal(114_660, 60_000, 5000), 2000, None).astype(np.int64)
    page = choose_page_bytes([(sizes, 5000)])
    assert (-(-sizes // page) * page).sum() < 1.1 * sizes.sum()
    both = choose_page_bytes([(sizes, 5000), (2048, 400_000)])
    assert -(-2048 // both) * both < 1.3 * 2048


def stored(sizes: list[int], page_bytes: int) -> tuple[Pages, np.ndarray, list[np.ndarray]]:
    """Blocks written into pages that lie in no order."""
    rng = np.random.default_rng(1)
    pages = Pages(np.zeros(1 << 16, np.uint8), page_bytes)
    free = FreePages(pages.page_count)
    free.give_back(rng.permutation(free.take(pages.page_count)).astype(np.int32))
    counts = pages.pages_each(np.array(sizes))
    heads = pages.chain(free.take(int(counts.sum())), counts)
    blocks = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    for head, block in zip(heads.tolist(), blocks, strict=True):
        pages.write(head, block)
    return pages, heads, blocks


@pytest.mark.parametrize("page_bytes", [64, 100, 4096])
def test_a_chain_gives_back_what_was_written(page_bytes: int) -> None:
    """Blocks of 1 byte to many pages, whole pages or not, in any order, some of them not there."""
    sizes = [1, 64, 65, 100, 101, 4096, 5000, 3, 200]
    pages, heads, blocks = stored(sizes, page_bytes)
    order = np.array([3, 8, 0, 6, 5, 2, 7, 4, 1])
    first = heads.copy()
    first[6] = NO_PAGE
    targets = [np.zeros(sizes[i], np.uint8) for i in order]
    good = pages.copy(pages.find(first, order), np.array(sizes)[order], targets)
    assert good.tolist() == [i != 6 for i in order]
    for i, target in zip(order.tolist(), targets, strict=True):
        if i != 6:
            assert np.array_equal(target, blocks[i])


@pytest.mark.parametrize(("size", "page_bytes"), [(128, 128), (256, 64), (200, 100)])
def test_rows_of_one_array_are_gathered_at_once(size: int, page_bytes: int) -> None:
    """The fast path of whole pages gives the same bytes."""
    pages, heads, blocks = stored([size] * 5, page_bytes)
    rows = np.zeros((4, size), np.uint8)
    order = np.array([4, 0, 0, 2])
    assert pages.copy(pages.find(heads, order), np.full(4, size), rows).all()
    assert np.array_equal(rows, np.stack([blocks[i] for i in order]))


def test_a_copy_of_pages_that_were_given_away_is_noticed() -> None:
    """Found, then given to another block and overwritten: not good, whichever page of the chain."""
    pages, heads, _ = stored([300, 300], 100)
    found = pages.find(heads, np.array([0, 1]))
    ids = pages.chained(heads[:1], np.array([3]))
    pages.chain(ids, np.array([3]))
    pages.write(int(heads[0]), np.full(300, 7, np.uint8))
    targets = [np.zeros(300, np.uint8) for _ in range(2)]
    assert pages.copy(found, np.array([300, 300]), targets).tolist() == [False, True]


def test_pages_rest_until_older_copies_are_over() -> None:
    """A page freed beside a copy is not ready before that copy ends; newer copies do not matter."""
    free = FreePages(4)
    taken = free.take(4)
    old = free.begin_copy()
    free.give_back(taken[:3])
    new = free.begin_copy()
    assert (free.free_count, free.ready_count) == (3, 0)
    with pytest.raises(ValueError, match="1 pages taken of 0"):
        free.take(1)
    assert free.end_copy(old)
    assert free.ready_count == 3
    free.give_back(taken[3:])
    assert free.take(3).tolist() == taken[:3].tolist()  # the longest free first
    assert free.ready_count == 0
    assert free.end_copy(new)
    assert free.take(1).tolist() == taken[3:].tolist()


def test_absent_blocks_are_never_good() -> None:
    """Page -1 is the last one for numpy: its stamp must not speak for a block that is not there."""
    pages, _, _ = stored([64], 64)
    found = FoundPages(
        np.array([NO_PAGE], np.int32), pages.find(np.array([0], np.int32), np.array([0])).stamps
    )
    assert not pages.copy(found, np.array([64]), np.zeros((1, 64), np.uint8)).any()


def test_a_batch_that_comes_early_knows_its_turn() -> None:
    """By what was foretold, over the end of an epoch; a stranger has none."""
    job = ReaderJob(0, "train", None)
    job.tell(np.arange(10))
    job.tell(np.arange(9, -1, -1))
    assert job.turn_of(np.array([0, 1, 2])) == 0
    assert job.turn_of(np.array([3, 4, 5])) == 3
    assert job.turn_of(np.array([8, 9, 9, 8])) == 8
    assert job.turn_of(np.array([5, 4, 7])) is None
    job.moved(11, 0.0)
    assert job.turn_of(np.array([8, 7])) == 11
    job.moved(9, 1.0)
    assert job.turn_of(np.array([0])) is None
    assert not job.foretold


def test_a_block_that_is_first_in_many_batches_does_not_hide_their_turns() -> None:
    """All of twelve batches begin alike."""
    job = ReaderJob(0, "train", None)
    job.tell(np.array([(0, number + 1, 0) for number in range(12)]).reshape(-1))
    assert job.turn_of(np.array([0, 12, 0])) == 33


def test_of_batches_told_one_by_one_a_short_one_is_no_part_of_another() -> None:
    """Nor do two equal ones take the same turn: who finds it taken waits for the next."""
    job = ReaderJob(0, "train", None)
    for batch in ([3, 5, 5], [7, 5, 3], [5], [7, 5, 3]):
        job.tell(np.array(batch), batch=True)
    assert job.turn_of(np.array([5])) == 6
    assert job.turn_of(np.array([5, 7])) is None
    first, second = (FetchTurn(job, np.array([7, 5, 3])) for _ in range(2))
    assert not first.has_come()
    job.moved(3, 0.0)
    assert first.has_come()
    job.moved(3, 0.0)
    assert not second.has_come()
    job.moved(1, 0.0)
    assert second.has_come()


def test_prefetch_calls_follow_the_measured_bandwidth() -> None:
    """A slow source gets small calls, a fast one large ones, within limits."""
    slow, fast = SourcePace(), SourcePace()
    for _ in range(50):
        slow.add(1 << 20, 0.1)
        fast.add(1 << 20, 0.01)
    assert slow.call_bytes() < fast.call_bytes() <= 8 << 20
    assert slow.window_bytes() >= 2 * slow.call_bytes()


def test_ratios_say_zero_where_nothing_happened() -> None:
    """And otherwise what they are made of."""
    assert set(shares({}).values()) == {0.0}
    found = shares(
        {
            "memory_hit_total": 6,
            "late_total": 1,
            "miss_total": 1,
            "disk_hit_total": 2,
            "prefetch_used_total": 3,
            "prefetch_late_total": 1,
        }
    )
    assert found["hit_ratio"] == 0.8
    assert (found["coverage"], found["timeliness"]) == (0.75, 0.75)
