"""The cache's policy against slow and obvious models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpstore.loaders.policy import CachePolicy, SampledLog, belady, most_hits, simulate
from hpstore.loaders.policy.cache_plan import Int64s
from hpstore.loaders.policy.known_order import NEVER, Future

BLOCKS = 12
batches = st.lists(st.lists(st.integers(0, BLOCKS - 1), max_size=6), max_size=25)


def array(values: Sequence[int]) -> Int64s:
    """int64[n]."""
    return np.array(values, np.int64)


def brute_min(requests: list[int], capacity: int) -> int:
    """Hits of the best of all cache contents after each request. Exponential."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for block in requests:
        after: dict[frozenset[int], int] = {}
        for content, hits in best.items():
            now = hits + (block in content)
            for kept in {content, content | {block}} | {
                content - {old} | {block} for old in content
            }:
                if len(kept) <= capacity:
                    after[kept] = max(after.get(kept, 0), now)
        best = after
    return max(best.values())


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 3))
@settings(max_examples=60)
def test_belady_hits_as_often_as_the_best_of_all_choices(
    requests: list[int], capacity: int
) -> None:
    """MIN with bypass against an exhaustive search."""
    assert int(belady(requests, capacity).sum()) == brute_min(requests, capacity)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(4, 50),
    st.booleans(),
)
def test_no_hits_are_above_min(
    asked: list[tuple[int, bool]], capacity: int, limit: int, together: bool
) -> None:
    """Any hits that a cache reports, of whatever size its blocks are, however full it was before.

    Case share_of_min: a log that has lost its beginning, or whose sample was kept by a larger share
    of the cache, came to 1.04 to 1.375 of MIN.
    """
    log = SampledLog(capacity, every=1, limit=limit)
    requests, hit = array([block for block, _ in asked]), np.array([hit for _, hit in asked])
    for part in [slice(None)] if together and len(asked) <= limit else range(len(asked)):
        at = part if isinstance(part, slice) else slice(part, part + 1)
        log.record(requests[at], hit[at])
    assert (log.share_of_min() or 0.0) <= 1.0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 3), st.data())
@settings(max_examples=60)
def test_most_hits_are_those_of_the_best_choice_from_the_best_beginning(
    requests: list[int], capacity: int, data: st.DataObject
) -> None:
    """Against an exhaustive search; a cache that hit as the search did changes nothing."""
    counted = data.draw(st.integers(0, len(requests) - 1))
    begun = sorted(set(requests[:counted]))
    best = brute_min([*begun, *requests[counted:]], capacity)
    assert most_hits(requests, capacity, counted=counted) == best
    assert most_hits(requests, capacity, belady(requests, capacity), counted=counted) == best


@given(batches, st.lists(st.integers(0, 25)), st.integers(4, 60), st.booleans(), st.integers(0, 3))
def test_residents_fit_and_only_admitted_blocks_hit(
    asked: list[list[int]], told: list[int], capacity: int, sized: bool, changes: int
) -> None:
    """Whatever is known: plans add up, bytes fit, no block hits that was not let in before.

    Blocks in flight or pinned are never evicted; drops, holds and pins come in between.
    """
    sizes = array([1 + n % 4 for n in range(BLOCKS)])
    policy = CachePolicy(sizes if sized else 4, BLOCKS, capacity, jobs=2)
    model: set[int] = set()
    fixed: set[int] = set()  # in flight or pinned
    policy.begin_epoch(0, 6)
    policy.expect(1, array([block for batch in asked[1::2] for block in batch]))
    for number, batch in enumerate(asked):
        plan = policy.access(number % 2, array(batch))
        for at, block in enumerate(batch):
            assert bool(plan.hit[at] or plan.late[at]) == (block in model)
            assert bool(plan.again[at]) == (block not in model and block in batch[:at])
        leave, come = set(plan.evict.tolist()), set(plan.admit.tolist())
        assert leave <= model - fixed
        assert come <= set(batch) - model
        assert len(plan.evict) + len(plan.admit) == len(leave) + len(come)
        model = model - leave | come
        if number % 4 < changes:
            wanted = policy.next_wanted(1, 9)
            model = model - set(wanted.evict.tolist()) | set(wanted.fetch.tolist())
            policy.arrived(wanted.fetch[::2])
            fixed |= set(wanted.fetch[1::2].tolist())
            gone = array(told[number : number + 2]) % BLOCKS
            policy.dropped(gone)
            model -= set(gone.tolist())
            fixed -= set(gone.tolist())
        assert set(policy.residents().tolist()) == model
        nbytes = sum(int(sizes[block]) if sized else 4 for block in model)
        assert policy.resident_bytes == nbytes <= capacity


@given(
    st.integers(2, 9).flatmap(
        lambda n: st.lists(st.permutations(range(n)), min_size=2, max_size=5)
    ),
    st.integers(1, 8),
)
def test_a_known_order_hits_as_often_as_belady(orders: list[list[int]], capacity: int) -> None:
    """Request by request, the whole future told: nothing is lost to MIN."""
    requests = [block for order in orders for block in order]
    starts = list(range(0, len(requests), len(orders[0])))
    found = simulate(
        requests, capacity, batch=1, known_order=True, horizon_epochs=9, epoch_starts=starts
    )
    assert found.hits == int(belady(requests, capacity).sum())
    assert found.mismatches == 0


@given(st.lists(st.integers(0, 7), min_size=1, max_size=60), st.integers(1, 8), st.integers(2, 8))
@example([0, 1, 1, 0, 1], 1, 2)  # the very next request and the one after it are not equally near
def test_a_known_order_in_batches_is_beladys_within_a_batch(
    requests: list[int], capacity: int, batch: int
) -> None:
    """A batch is decided on when it is over: an eviction each may come too late, and repeats inside
    it are hits only of what it admits.
    """
    best = int(belady(requests, capacity).sum())
    found = simulate(requests, capacity, batch=batch, known_order=True, epoch_starts=[0])
    rounds = -(-len(requests) // batch)
    assert abs(found.hits - best) <= rounds * min(batch, capacity) + found.repeats
    single = simulate(requests, capacity, batch=1, known_order=True, epoch_starts=[0])
    assert single.hits == best


@given(st.lists(st.lists(st.integers(0, BLOCKS - 1), max_size=9), max_size=9), st.data())
def test_the_next_use_is_the_first_one_in_what_is_still_foretold(
    pieces: list[list[int]], data: st.DataObject
) -> None:
    """Told piece by piece, made batch by batch, with the positions counted anew now and then."""
    future, queued, head = Future(BLOCKS), list[int](), 0
    for piece in pieces:
        future.append(array(piece))
        queued += piece
        made = data.draw(st.integers(0, len(queued)))
        batch = queued[:made]
        if data.draw(st.booleans()):
            batch = batch[::-1]  # within a batch the order does not count
        assert future.advance(array(batch))
        queued, head = queued[made:], head + made
        if data.draw(st.booleans()):
            future._count_anew()
        uses = future.next_use(np.arange(BLOCKS)).astype(np.int64)
        for block in range(BLOCKS):
            due = queued.index(block) if block in queued else None
            assert (uses[block] == NEVER) if due is None else (uses[block] - future.head == due)
        assert future.upcoming(0, 99).tolist() == queued


@pytest.mark.parametrize("phases", [False, True])
@given(seed=st.integers(0, 9), cut=st.integers(1, 60))
@settings(max_examples=12, deadline=None)
def test_a_restored_policy_has_the_residents_the_leader_and_all_that_was_counted(
    phases: bool, seed: int, cut: int
) -> None:
    """Directories begin with the residents: it may decide otherwise, but begins with all hits."""
    rng = np.random.default_rng(seed)
    requests = rng.zipf(1.3, (80, 10)) % 300
    policy = CachePolicy(1, 300, 20)
    for number, batch in enumerate(requests[:cut]):
        if phases and number % 7 == 0:
            policy.begin_epoch(0, 70)
        policy.access(0, batch)
    arrays = policy.state_arrays()
    other = CachePolicy(1, 300, 20)
    other.restore(arrays)
    again = other.state_arrays()
    assert sorted(arrays.pop("residents").tolist()) == sorted(again.pop("residents").tolist())
    assert arrays.keys() == again.keys()
    assert all(np.array_equal(arrays[name], again[name]) for name in arrays)
    assert policy.expert == other.expert
    next_one = requests[cut]
    assert np.array_equal(policy.access(0, next_one).hit, other.access(0, next_one).hit)
    for batch in requests[cut + 1 :]:
        other.access(0, batch)
        assert other.resident_bytes <= 20
