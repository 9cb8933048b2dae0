"""What a sampler has drawn ahead: the cache's policy against slow and obvious models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstore.benchmarks.cache.cache_traces import trace_named
from hpstore.errors import ConfigError
from hpstore.loaders.policy import CachePolicy, simulate
from hpstore.loaders.policy.cache_plan import Int64s
from hpstore.loaders.policy.known_order import NEVER
from hpstore.loaders.policy.sampler_lookahead import Drawn

BLOCKS = 12
batches = st.lists(st.lists(st.integers(0, BLOCKS - 1), max_size=6), max_size=25)


def array(values: Sequence[int]) -> Int64s:
    """int64[n]."""
    return np.array(values, np.int64)


@given(st.lists(st.lists(st.integers(0, BLOCKS - 1), max_size=9), max_size=9), st.data())
def test_the_next_use_is_the_first_one_in_what_is_still_drawn(
    pieces: list[list[int]], data: st.DataObject
) -> None:
    """Told piece by piece, made batch by batch."""
    drawn, queued = Drawn(), list[int]()
    for piece in pieces:
        drawn.append(array(piece))
        queued += piece
        made = data.draw(st.integers(0, len(queued)))
        batch = queued[:made]
        if data.draw(st.booleans()):
            batch = batch[::-1]  # within a batch the order does not count
        assert drawn.advance(array(batch))
        queued = queued[made:]
        uses = drawn.next_use(np.arange(BLOCKS, dtype=np.int32)).tolist()
        assert uses == [queued.index(b) if b in queued else NEVER for b in range(BLOCKS)]
        assert drawn.upcoming(0, 99).tolist() == queued
        assert drawn.queued == len(queued)


@given(batches, st.integers(1, 11), st.integers(0, 4), st.booleans())
@settings(max_examples=200)
def test_nothing_that_is_drawn_leaves_while_something_else_could(
    asked: list[list[int]], capacity: int, ahead: int, prefetch: bool
) -> None:
    """Whoever leaves is asked for later than all that stay and come, as far as is drawn.

    So a drawn block leaves only when everything that stays is drawn too.
    """
    policy = CachePolicy(4, BLOCKS, 4 * capacity)
    policy.begin_epoch(0)
    told = 0
    for number, batch in enumerate(asked):
        while told < min(len(asked), number + 1 + ahead):
            policy.expect(0, array(asked[told]), drawn=True)
            told += 1
        coming = [block for later in asked[number + 1 : told] for block in later]
        due = {block: coming.index(block) for block in set(coming)}
        plan = policy.access(0, array(batch))
        evicted = [plan.evict]
        if prefetch:
            wanted = policy.next_wanted(0, 8)
            assert set(wanted.fetch.tolist()) <= set(coming)
            policy.arrived(wanted.fetch)
            evicted.append(wanted.evict)
        stay = [due.get(block, 999) for block in policy.residents().tolist()]
        for gone in evicted:
            assert all(due.get(block, 999) >= max(stay) for block in gone.tolist())
    assert policy.counters["mismatches"] == 0


@given(batches, st.integers(4, 60), st.integers(0, 3), st.booleans())
def test_plans_add_up_whatever_was_drawn(
    asked: list[list[int]], capacity: int, ahead: int, sized: bool
) -> None:
    """Two jobs, one drawn ahead; bytes fit, and no block hits that was not let in before."""
    sizes = array([1 + n % 4 for n in range(BLOCKS)])
    policy = CachePolicy(sizes if sized else 4, BLOCKS, capacity, jobs=2)
    model: set[int] = set()
    mine, told = asked[::2], 0
    for number, batch in enumerate(asked):
        while told < min(len(mine), number // 2 + 1 + ahead):
            policy.expect(0, array(mine[told]), drawn=True)
            told += 1
        plan = policy.access(number % 2, array(batch))
        assert plan.hit.tolist() == [block in model for block in batch]
        leave, come = set(plan.evict.tolist()), set(plan.admit.tolist())
        assert leave <= model
        assert come <= set(batch) - model
        model = model - leave | come
        assert set(policy.residents().tolist()) == model
        assert policy.resident_bytes <= capacity
    assert policy.counters["mismatches"] == 0


@given(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=30), st.integers(0, BLOCKS - 1))
def test_what_was_drawn_and_not_made_is_forgotten(drawn: list[int], other: int) -> None:
    """Counted once; the same plans as without from then on, until drawing begins anew."""
    policy, plain = CachePolicy(1, BLOCKS, 3), CachePolicy(1, BLOCKS, 3)
    policy.expect(0, array(drawn), drawn=True)
    policy.access(0, array([other]))
    plain.access(0, array([other]))
    left = other != drawn[0]
    assert policy.mismatched(0) is left
    if not left:
        return
    policy.expect(0, array(drawn), drawn=True)
    assert policy.expected(0) == 0
    for block in drawn:
        ours, theirs = policy.access(0, array([block])), plain.access(0, array([block]))
        assert (ours.admit.tolist(), ours.evict.tolist()) == (
            theirs.admit.tolist(),
            theirs.evict.tolist(),
        )
    policy.expect(0, None)
    policy.expect(0, array(drawn), drawn=True)
    assert policy.expected(0) == len(drawn)


@pytest.mark.parametrize("name", ["uniform", "importance", "mix", "recency"])
def test_no_workload_loses_by_what_was_drawn(name: str) -> None:
    """The same policy, told no more than it would have found out: half a point is chance."""
    trace = trace_named(name, 3, 1500)
    requests = trace.requests[: 8 * 1500]
    starts = [start for start in trace.starts[0] if start < len(requests)]
    found = [
        simulate(requests, 300, batch=20, epoch_starts=starts, drawn_batches=drawn)
        .hit[1500:]
        .mean()
        for drawn in (0, 12)
    ]
    assert found[1] > found[0] - 0.005


def test_importance_sampling_gains_by_what_was_drawn() -> None:
    """Window of the cache's size: a clear gain."""
    trace = trace_named("importance", 3, 1500)
    starts = list(trace.starts[0])
    without, ours = (
        simulate(trace.requests, 300, batch=20, epoch_starts=starts, drawn_batches=drawn)
        for drawn in (0, 15)
    )
    assert ours.hit_ratio > without.hit_ratio + 0.02


def test_drawn_batches_are_of_unknown_orders() -> None:
    """All or some is known, not both."""
    with pytest.raises(ConfigError, match="drawn_batches are of orders not known"):
        simulate([1, 2], 1, known_order=True, drawn_batches=3, epoch_starts=[0])
    with pytest.raises(ConfigError, match="drawn_batches -1"):
        simulate([1, 2], 1, drawn_batches=-1)


def test_a_few_draws_only_serve_to_prefetch_where_the_cache_is_large() -> None:
    """Looking them up would cost more than it brings: one to 32 residents is the limit."""
    policy = CachePolicy(1, 60_000, 9000)
    policy.hold(np.arange(9000))
    policy.access(0, array([1]))
    drawn = np.arange(20_000, 20_281)
    policy.expect(0, drawn, drawn=True)
    assert policy.expected_use(drawn[:1]).tolist() == [np.inf]
    assert policy.next_wanted(0, 10).fetch.tolist() == drawn[:10].tolist()
    policy.expect(0, array([30_000]), drawn=True)
    assert policy.expected_use(array([20_001, 30_000])).tolist() == pytest.approx(
        np.log([2, 282]).tolist()
    )
