"""Sequential, global and subset orders: permutations, functions of their arguments alone."""

from __future__ import annotations

import math
import pickle
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.loaders.sampling import order as order_module
from hpstore.loaders.sampling.feistel import ROUNDS, Feistel
from hpstore.loaders.sampling.order import (
    PERMUTATION_SAMPLES,
    GlobalOrder,
    Order,
    SequentialOrder,
    SubsetOrder,
)
from hpstore.loaders.sampling.order_cache import BLOCK_POSITIONS, NEAR_POSITIONS, Recent
from hpstore.loaders.sampling.random_draws import (
    Indices,
    Purpose,
    below,
    derive_seed,
    shuffled,
    words,
)

LARGE = 2_000_003  # a prime above the limit of tables
seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 5) | st.integers(0, 2**40)


def is_permutation(found: Indices, length: int) -> bool:
    """Each of 0 .. length - 1 once."""
    seen = np.zeros(length, bool)
    seen[found] = True
    return len(found) == length and bool(seen.all())


def slow_image(number: int, length: int, *, seed: int, epoch: int) -> int:
    """The network of feistel.py as its docstring says it, one number at a time."""
    columns = math.isqrt(length - 1) + 1
    rows = -(-length // columns)
    row, column = divmod(number, columns)
    for part in range(ROUNDS):
        size, limit = (columns, rows) if part % 2 == 0 else (rows, columns)
        drawn = words(Purpose.FEISTEL, seed=seed, epoch=epoch, part=part, count=size)
        if part % 2 == 0:
            row = (row + ((int(drawn[column]) >> 24) * limit >> 40)) % rows
        else:
            column = (column + ((int(drawn[row]) >> 24) * limit >> 40)) % columns
    image = row * columns + column
    return image if image < length else slow_image(image, length, seed=seed, epoch=epoch)


@pytest.mark.parametrize("block", [range(64), range(64, 512), (1009, 4095, 4096, 4097, 65537)])
def test_a_global_order_is_a_permutation_at_every_length(block: range | tuple[int, ...]) -> None:
    """Powers of two and their neighbours, primes, 0 and 1: table and network alike."""
    for length in block:
        assert is_permutation(GlobalOrder(length, 5).indices(3, 0, length), length)
        network = GlobalOrder(length, 5, table_samples=0)
        assert is_permutation(network.indices(3, 0, length), length)


@pytest.mark.parametrize("length", [PERMUTATION_SAMPLES, PERMUTATION_SAMPLES + 1, LARGE, 1 << 22])
def test_a_global_order_is_a_permutation_around_the_limit_of_tables(length: int) -> None:
    """The last table, and networks just above it."""
    assert is_permutation(GlobalOrder(length, 2**64 - 1).indices(0, 0, length), length)


@pytest.mark.parametrize("length", [10**9, 10**12 + 39, 1 << 40])
def test_a_network_repeats_nothing_where_no_list_of_it_can_be_made(length: int) -> None:
    """300,000 positions at both ends and in the middle have as many images, all inside."""
    order = GlobalOrder(length, 1)
    parts = [order.indices(7, at, at + 100_000) for at in (0, length // 2, length - 100_000)]
    images = np.concatenate(parts)
    assert len(np.unique(images)) == len(images)
    assert 0 <= images.min() <= images.max() < length


@given(st.integers(1, 5000), seeds, epochs, st.data())
def test_the_network_is_the_one_that_is_described(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    """Against integers one at a time."""
    number = data.draw(st.integers(0, length - 1))
    fast = Feistel.of(length, seed=seed, epoch=epoch).images(number, number + 1)
    assert fast.tolist() == [slow_image(number, length, seed=seed, epoch=epoch)]


@given(st.sampled_from([300, 100_000, LARGE, 10**9]), seeds, epochs, st.data())
def test_any_range_is_a_part_of_the_whole(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    """Ranges read in sequence, after jumps and again agree with an order that read nothing."""
    order = GlobalOrder(length, seed)
    at = 0
    for gap in data.draw(st.lists(st.integers(-70_000, 70_000), max_size=12)):
        start = min(max(0, at + gap), length)
        stop = min(length, start + data.draw(st.integers(0, 3000)))
        found = order.indices(epoch, start, stop)
        whole = GlobalOrder(length, seed).indices(
            epoch, max(0, start - 5), min(length, stop + BLOCK_POSITIONS)
        )
        assert found.dtype == np.int64
        assert np.array_equal(found, whole[start - max(0, start - 5) :][: stop - start])
        at = stop


@pytest.mark.parametrize("batch", [1, 256, NEAR_POSITIONS, BLOCK_POSITIONS + 1])
def test_reading_in_sequence_crosses_blocks_without_a_seam(batch: int) -> None:
    """Batches of two blocks and a bit, each as an order that jumps there gives it."""
    order = GlobalOrder(LARGE, 9)
    first = BLOCK_POSITIONS - 2 * batch if batch < BLOCK_POSITIONS else 0
    for start in range(first, first + 5 * batch, batch):
        jumped = GlobalOrder(LARGE, 9).indices(1, start, start + batch)
        assert np.array_equal(order.indices(1, start, start + batch), jumped)


def test_reading_in_sequence_evaluates_each_block_once() -> None:
    """The network is asked for whole blocks, and for single batches only after a jump."""
    asked = []
    images = Feistel.images

    def spy(self: Feistel, start: int, stop: int) -> Indices:
        asked.append((start, stop))
        return images(self, start, stop)

    order = GlobalOrder(LARGE, 9)
    with patch.object(Feistel, "images", spy):
        for start in range(0, 2 * BLOCK_POSITIONS, 256):
            order.indices(0, start, start + 256)
        order.indices(0, 1_500_000, 1_500_256)
    assert asked == [
        (0, 256),
        (0, BLOCK_POSITIONS),
        (BLOCK_POSITIONS, 2 * BLOCK_POSITIONS),
        (1_500_000, 1_500_256),
    ]


@pytest.mark.parametrize(
    "order", [SequentialOrder(1000), GlobalOrder(1000, 1), GlobalOrder(LARGE, 1)]
)
def test_what_a_caller_does_to_its_indices_stays_with_it(order: Order) -> None:
    """Every array is the caller's own, evaluated for it or taken from a block that is kept."""
    before = pickle.loads(pickle.dumps(order)).indices(0, 0, 300)
    for start in (0, 100, 200):  # the second of these reads makes the block
        order.indices(0, start, start + 100)[:] = -1
    for start in (0, 100, 200):
        assert np.array_equal(order.indices(0, start, start + 100), before[start : start + 100])


@given(st.sampled_from([1000, LARGE]), seeds)
def test_epochs_and_seeds_differ(length: int, seed: int) -> None:
    """Another epoch, another seed, one that differs in its high half: another order."""
    first = GlobalOrder(length, seed).indices(0, 0, 500)
    for other, epoch in ((seed, 1), (seed ^ 1, 0), (seed ^ 1 << 40, 0), (seed, 1 << 40)):
        found = GlobalOrder(length, other).indices(epoch, 0, 500)
        assert (found == first).sum() < 10


@given(st.integers(0, 3000), st.data())
def test_a_subset_is_its_mapping_in_the_order_given(length: int, data: st.DataObject) -> None:
    """Any samples of a larger set, each once an epoch, at any range."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    mapping = rng.permutation(length * 2 + 1)[:length].astype(np.int64)
    inner = GlobalOrder(length, 4)
    order = SubsetOrder(inner, mapping, samples=length * 2 + 1)
    assert sorted(order.indices(2, 0, length)) == sorted(mapping)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert np.array_equal(
        order.indices(2, start, stop), mapping[inner.indices(2, 0, length)[start:stop]]
    )


def test_a_subset_that_does_not_fit_is_refused() -> None:
    """Too short a mapping, and indices outside the data set."""
    with pytest.raises(ConfigError, match="an order of 5 samples over a subset of 4"):
        SubsetOrder(SequentialOrder(5), np.arange(4), samples=9)
    for bad in (9, -1):
        with pytest.raises(ConfigError, match=f"{min(bad, 3)} .. {max(bad, 3)} of 9 samples"):
            SubsetOrder(SequentialOrder(2), np.array([3, bad]), samples=9)


@pytest.mark.parametrize("order", [SequentialOrder(10), GlobalOrder(10, 0), GlobalOrder(LARGE, 0)])
def test_positions_that_do_not_exist_are_refused(order: Order) -> None:
    """Below 0, beyond the end, backwards, in no epoch."""
    for epoch, start, stop in ((0, -1, 3), (0, 0, order.length + 1), (0, 5, 4), (-1, 0, 1)):
        with pytest.raises(ValueError, match=f"an epoch has 0 .. {order.length}"):
            order.indices(epoch, start, stop)
    assert order.indices(0, 4, 4).shape == (0,)


def test_seeds_and_lengths_that_do_not_exist_are_refused() -> None:
    """Seeds are 64-bit, lengths at most 2**40."""
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match=r"seed is -1, at least 0|outside 0 \.\. 2\*\*64 - 1"):
            GlobalOrder(10, seed)
    for length in (-1, 2**40 + 1):
        with pytest.raises(ConfigError, match="are possible"):
            GlobalOrder(length, 1)


def test_a_pickled_order_goes_on_and_carries_no_table() -> None:
    """For spawned processes: a few hundred bytes, whatever was read before."""
    for length in (PERMUTATION_SAMPLES, LARGE):
        order = GlobalOrder(length, 3)
        for start in (0, 256, 512):
            order.indices(0, start, start + 256)
        raw = pickle.dumps(order)
        assert len(raw) < 1000
        copy = pickle.loads(raw)
        assert np.array_equal(copy.indices(0, 9, 300), order.indices(0, 9, 300))
        assert copy.describe() == order.describe()


def test_a_description_tells_orders_apart() -> None:
    """Whatever changes the samples of a position changes the description."""
    subset = SubsetOrder(GlobalOrder(3, 1), np.array([1, 2, 4]), samples=5)
    orders: list[Order] = [
        SequentialOrder(9),
        SequentialOrder(8),
        GlobalOrder(9, 1),
        GlobalOrder(9, 2),
        GlobalOrder(8, 1),
        GlobalOrder(9, 1, table_samples=8),
        subset,
        SubsetOrder(GlobalOrder(3, 1), np.array([1, 2, 3]), samples=5),
        SubsetOrder(GlobalOrder(3, 2), np.array([1, 2, 4]), samples=5),
    ]
    texts = {str(order.describe()) for order in orders}
    assert len(texts) == len(orders)


def test_the_limit_of_tables_is_the_one_that_is_stated() -> None:
    """At the limit a table is made, above it none: 8 MB is the most that an epoch holds."""
    with patch.object(order_module, "shuffled", side_effect=AssertionError("a table was made")):
        GlobalOrder(PERMUTATION_SAMPLES + 1, 0).indices(0, 0, 10)
        with pytest.raises(AssertionError, match="a table was made"):
            GlobalOrder(PERMUTATION_SAMPLES, 0).indices(0, 0, 10)
        GlobalOrder(1001, 0, table_samples=1000).indices(0, 0, 10)
        with pytest.raises(AssertionError, match="a table was made"):
            GlobalOrder(1000, 0, table_samples=1000).indices(0, 0, 10)


def test_the_next_epochs_table_is_made_in_the_middle_of_an_epoch() -> None:
    """So nobody waits for it at the border, and the first batch of a run waits for one alone."""
    made: list[int] = []

    def counted(purpose: Purpose, *, epoch: int, **words: int) -> np.ndarray:
        made.append(epoch)
        return shuffled(purpose, epoch=epoch, **words)

    with patch.object(order_module, "shuffled", side_effect=counted):
        order = GlobalOrder(1000, 3)
        order.indices(4, 900, 910)
        assert made == [4]
        for start in (0, 490, 500, 600, 990):
            order.indices(4, start, start + 10)
            assert made == ([4] if start < 500 else [4, 5])
        order.indices(5, 0, 10)
        order.indices(4, 990, 1000)  # by a thread that is behind
        assert made == [4, 5]
        order.indices(5, 990, 1000)
        assert made == [4, 5, 6]
        order.indices(0, 0, 10)  # set_epoch(0)
        order.indices(0, 990, 1000)
        assert made == [4, 5, 6, 0, 1]


def test_a_value_that_two_threads_computed_takes_one_place() -> None:
    """Else it would push out one that is still asked for."""
    kept: Recent[int, str] = Recent(2)
    kept.get(1, lambda: "a")
    kept.get(2, lambda: kept.get(2, lambda: "b"))
    assert 1 in kept
    assert 2 in kept


@given(st.integers(0, 2000), seeds, epochs, seeds)
def test_shuffled_is_a_permutation_keyed_by_all_its_words(
    count: int, seed: int, epoch: int, part: int
) -> None:
    """Also where the high half of a word is all that differs."""
    found = shuffled(Purpose.MIX, seed=seed, epoch=epoch, part=part, count=count)
    assert is_permutation(found, count)
    if count > 50:
        for key in (
            (seed ^ 1 << 40, epoch, part),
            (seed, epoch ^ 1 << 40, part),
            (seed, epoch, part ^ 1 << 40),
        ):
            again = shuffled(Purpose.MIX, seed=key[0], epoch=key[1], part=key[2], count=count)
            assert again.tolist() != found.tolist()
        other = shuffled(Purpose.WINDOW, seed=seed, epoch=epoch, part=part, count=count)
        assert other.tolist() != found.tolist()


@given(
    seeds,
    epochs,
    st.integers(0, 5) | st.integers(0, 10**15),
    st.integers(0, 9),
    st.integers(1, 300),
)
def test_words_may_be_read_from_anywhere(
    seed: int, epoch: int, start: int, skip: int, count: int
) -> None:
    """Word i of a stream is the same word from whichever word the reading began."""
    whole = words(Purpose.WEIGHTED, seed=seed, epoch=epoch, start=start, count=skip + count)
    rest = words(Purpose.WEIGHTED, seed=seed, epoch=epoch, start=start + skip, count=count)
    assert np.array_equal(whole[skip:], rest)


@given(st.integers(1, 1 << 24), st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_below_stays_below(limit: int, raw: list[int]) -> None:
    """Also for the largest word, and without a negative number."""
    found = below(limit, np.array([*raw, 2**64 - 1, 0], np.uint64))
    assert found.min() == 0
    assert found.max() == limit - 1


def test_derived_seeds_are_a_family() -> None:
    """Other numbers, other seeds; the same number, the same seed."""
    family = [derive_seed(s, n) for s in range(20) for n in range(20)]
    assert len(set(family)) == 400
    assert derive_seed(3, 4) == family[3 * 20 + 4]
