"""Mixtures: exact shares, nobody skipped, every source in its own order, O(1) anywhere."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.mixture_order import MIX_BLOCK_POSITIONS, MixtureOrder
from hpstore.loaders.sampling.mixture_shares import MixtureShares
from hpstore.loaders.sampling.order import GlobalOrder, Order, SequentialOrder
from hpstore.loaders.sampling.random_draws import Indices

weights = st.lists(st.integers(1, 20).map(float) | st.floats(0.05, 20), min_size=1, max_size=6)


@st.composite
def mixtures(draw: st.DrawFn) -> MixtureOrder:
    """Sources of any length, blocks from the shortest possible, epochs that cut blocks."""
    values = draw(weights)
    orders: list[Order] = [
        GlobalOrder(draw(st.integers(1, 90)), source)
        if draw(st.booleans())
        else SequentialOrder(draw(st.integers(1, 90)))
        for source in range(len(values))
    ]
    needed = MixtureShares.of(values).needed_positions()
    assume(needed < 500)
    block = needed + draw(st.integers(0, 40))
    length = draw(st.integers(needed, 5 * block))
    seed = draw(st.integers(0, 2**64 - 1))
    return MixtureOrder(orders, values, seed, length=length, block=block)


def fractions_of(weights: Sequence[float], total: int) -> list[Fraction]:
    """What each would get if positions could be divided."""
    exact = [Fraction(weight) for weight in weights]
    return [total * weight / sum(exact) for weight in exact]


def counts_of(mixture: MixtureOrder, indices: Indices) -> list[int]:
    """How many indices are of each source."""
    counts = np.bincount(mixture.split(indices).source, minlength=len(mixture.weights))
    return [int(count) for count in counts]


@given(mixtures(), st.integers(0, 10**6))
def test_blocks_and_epochs_keep_the_weights(mixture: MixtureOrder, epoch: int) -> None:
    """Counted from the first epoch, every source is within one of its share at the end of every
    block; so each block is within two, each epoch within two, and no block misses a source."""
    exact = MixtureShares.of(mixture.weights)
    found = mixture.indices(epoch, 0, mixture.length)
    ends = [*range(mixture.block, mixture.length - mixture.block + 1, mixture.block)]
    start = 0
    total = exact.split(epoch * mixture.length)
    for end in [*ends, mixture.length]:
        block = counts_of(mixture, found[start:end])
        assert min(block) >= 1
        total = [a + b for a, b in zip(total, block, strict=True)]
        share = fractions_of(mixture.weights, epoch * mixture.length + end)
        assert all(abs(a - b) < 1 for a, b in zip(total, share, strict=True))
        start = end
    assert total == exact.split((epoch + 1) * mixture.length)


@given(mixtures())
def test_every_source_goes_through_its_own_epochs(mixture: MixtureOrder) -> None:
    """What three epochs take from a source is the beginning of its epochs, one after another."""
    parts = [mixture.indices(e, 0, mixture.length) for e in range(3)]
    drawn = mixture.split(np.concatenate(parts))
    for source, order in enumerate(mixture.orders):
        taken = drawn.sample[drawn.source == source]
        rounds = range(len(taken) // order.length + 1)
        own = np.concatenate([order.indices(e, 0, order.length) for e in rounds])
        assert np.array_equal(taken, own[: len(taken)])


@given(mixtures(), st.integers(0, 10**9), st.data())
def test_any_range_is_a_part_of_the_whole(
    mixture: MixtureOrder, epoch: int, data: st.DataObject
) -> None:
    """After jumps, by an order that read nothing before, and pickled."""
    whole = mixture.indices(epoch, 0, mixture.length)
    for _ in range(4):
        start = data.draw(st.integers(0, mixture.length))
        stop = data.draw(st.integers(start, mixture.length))
        fresh: MixtureOrder = pickle.loads(pickle.dumps(mixture))
        assert np.array_equal(mixture.indices(epoch, start, stop), whole[start:stop])
        assert np.array_equal(fresh.indices(epoch, start, stop), whole[start:stop])


@given(
    st.lists(st.floats(1e-200, 1e6) | st.just(0.0), min_size=1, max_size=30).filter(any),
    st.integers(0, 10**15),
)
def test_a_total_is_split_without_a_rest(values: list[float], total: int) -> None:
    """Exactly, within one of each share, nothing for a weight of 0."""
    split, share = MixtureShares.of(values).split(total), fractions_of(values, total)
    assert sum(split) == total
    assert all(abs(a - b) < 1 for a, b in zip(split, share, strict=True))
    assert all(not a for a, b in zip(split, share, strict=True) if not b)


def test_largest_remainders_get_the_rest() -> None:
    """And the earlier of equal ones."""
    assert MixtureShares.of([5, 3, 2]).split(4) == [2, 1, 1]
    assert MixtureShares.of([1, 1, 1]).split(4) == [2, 1, 1]


class Counting(SequentialOrder):
    """Counts what is asked of it."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.asked: list[tuple[int, int, int]] = []

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """As SequentialOrder."""
        self.asked.append((epoch, start, stop))
        return super().indices(epoch, start, stop)


def test_a_jump_far_ahead_asks_for_nothing_before_it() -> None:
    """256 positions at 99 % of epoch 10**6 are 256 samples of the sources, in a few ranges."""
    orders = [Counting(10**9), Counting(1000)]
    mixture = MixtureOrder(orders, [0.9, 0.1], 0)
    start = mixture.length * 99 // 100
    found = mixture.indices(10**6, start, start + 256)
    asked = [*orders[0].asked, *orders[1].asked]
    assert len(asked) <= 4
    assert sum(stop - first for _, first, stop in asked) == 256
    large = counts_of(mixture, found)[0]
    assert abs(large - 230) < 30
    assert abs(orders[0].asked[0][0] - 0.9 * 10**6) < 10**4  # its own epoch, not the mixture's


def test_the_same_source_stands_elsewhere_in_each_block_and_seed() -> None:
    """Half and half, yet not alternating: blocks, epochs and seeds are shuffled anew."""
    orders = [SequentialOrder(4096), SequentialOrder(4096)]
    mixture = MixtureOrder(orders, [1, 1], 0)
    first = mixture.indices(0, 0, 1024) >= 4096
    assert first.sum() == 512
    for found in (
        mixture.indices(0, 1024, 2048),
        mixture.indices(1, 0, 1024),
        MixtureOrder(orders, [1, 1], 1).indices(0, 0, 1024),
    ):
        agree = int(((found >= 4096) == first).sum())
        assert 400 < agree < 624


def test_a_mixture_of_mixtures_is_an_order() -> None:
    """Indices count through all innermost data sets; split gives one level back."""
    inner = MixtureOrder([SequentialOrder(10), SequentialOrder(20)], [1, 1], 3, block=10)
    outer = MixtureOrder([inner, SequentialOrder(5)], [3, 1], 4, block=20)
    assert outer.samples == 35
    assert outer.length == 35
    found = outer.split(outer.indices(0, 0, 35))
    assert np.bincount(found.source).tolist() == [26, 9]
    level = inner.split(found.sample[found.source == 0])
    assert np.bincount(level.source[:20]).tolist() == [10, 10]  # its two first blocks
    assert level.sample[level.source == 1][:10].tolist() == list(range(10))


def test_a_source_of_weight_0_is_left_out() -> None:
    """It keeps its place in the numbering, may be empty, and needs no long blocks."""
    orders = [SequentialOrder(10), SequentialOrder(0), SequentialOrder(7)]
    mixture = MixtureOrder(orders, [1, 0, 0], 0)
    assert sorted(mixture.indices(0, 0, 10)) == list(range(10))
    assert mixture.offsets.tolist() == [0, 10, 10, 17]


def test_the_default_block_grows_until_every_source_appears() -> None:
    """1024, and more for a rare source."""
    orders = [SequentialOrder(10**6)] * 3
    assert MixtureOrder(orders, [1, 1, 1], 0).block == MIX_BLOCK_POSITIONS
    mixture = MixtureOrder(orders, [9999, 9999, 2], 0)
    assert mixture.block == 20_000
    assert counts_of(mixture, mixture.indices(0, 0, 20_000)) == [9999, 9999, 2]


def test_mixtures_that_would_skip_a_source_are_refused_by_name() -> None:
    """Blocks and epochs that are too short, too small a weight, a source without samples."""
    ten = SequentialOrder(10)
    with pytest.raises(ConfigError, match=r"source 1 has 0\.01 .* needs 100 positions in an epoch"):
        MixtureOrder([ten, ten], [0.99, 0.01], 0)
    with pytest.raises(ConfigError, match=r"needs 100 positions in a mix block .* 64 are set"):
        MixtureOrder([ten, ten], [0.99, 0.01], 0, block=64, length=1000)
    with pytest.raises(ConfigError, match=r"source 0 .* give it more weight"):
        MixtureOrder([ten, ten], [1e-9, 1], 0, length=10**10)
    with pytest.raises(ConfigError, match="source 1 of the mixture has a weight and no samples"):
        MixtureOrder([ten, SequentialOrder(0)], [1, 1], 0)
    with pytest.raises(ConfigError, match="2 sources, 1 weights"):
        MixtureOrder([ten, ten], [1], 0)
    with pytest.raises(ConfigError, match="weight 1 is -1"):
        MixtureOrder([ten, ten], [1, -1], 0)


def test_a_description_tells_mixtures_apart() -> None:
    """Sources, weights, seed, block and length."""
    ten, nine = SequentialOrder(10), SequentialOrder(9)
    orders = [
        MixtureOrder([ten, ten], [1, 1], 0),
        MixtureOrder([ten, ten], [1, 2], 0),
        MixtureOrder([ten, ten], [1, 1], 1),
        MixtureOrder([ten, nine], [1, 1], 0, length=20),
        MixtureOrder([ten, ten], [1, 1], 0, block=4),
        MixtureOrder([ten, ten], [1, 1], 0, length=8),
    ]
    assert len({str(order.describe()) for order in orders}) == len(orders)
