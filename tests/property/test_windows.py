"""The window shuffle: whole stripes, every sample once, small windows first."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.loaders.sampling import random_draws
from hpstore.loaders.sampling import window_shuffle as windows
from hpstore.loaders.sampling.order import GlobalOrder, SubsetOrder
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.window_shuffle import (
    ShuffleWindow,
    WindowOrder,
    subset_stripes,
    window_edges,
)

counts = st.lists(st.integers(0, 30) | st.just(0), max_size=60)
sizes = st.tuples(st.integers(1, 20), st.integers(1, 8))


def stripes_of(samples: list[int]) -> Indices:
    """First sample of every stripe, then their number."""
    return np.cumsum([0, *samples], dtype=np.int64)


def all_windows(order: WindowOrder, epoch: int) -> list[ShuffleWindow]:
    """Window by window through an epoch."""
    found, at = [], 0
    while at < order.length:
        found.append(order.window_of(epoch, at))
        at = found[-1].stop
    return found


@given(counts, sizes, st.integers(0, 2**64 - 1), st.integers(0, 10**6))
@example([], (4, 1), 0, 0)
@example([0, 0], (4, 1), 0, 0)
@example([1], (1, 1), 0, 0)
def test_an_epoch_is_a_permutation_of_whole_windows(
    samples: list[int], size: tuple[int, int], seed: int, epoch: int
) -> None:
    """Each window holds all samples of its stripes and no other; stripes occur once."""
    stripes = stripes_of(samples)
    order = WindowOrder(stripes, seed, window_stripes=size[0], first=size[1])
    whole = order.indices(epoch, 0, order.length)
    assert sorted(whole) == list(range(order.length))
    windows = all_windows(order, epoch)
    assert [w.number for w in windows] == list(range(len(windows)))
    for window in windows:
        held = [range(stripes[s], stripes[s + 1]) for s in window.stripes]
        assert sorted(itertools.chain(*held)) == sorted(whole[window.start : window.stop])
        assert 1 <= len(window.stripes) <= max(size)
        for position in (window.start, window.stop - 1):
            again = order.window_of(epoch, position)
            assert (again.number, again.start, again.stop) == (
                window.number,
                window.start,
                window.stop,
            )
    used = [int(s) for window in windows for s in window.stripes]
    assert sorted(used) == [s for s, count in enumerate(samples) if count]


@given(counts, sizes, st.data())
def test_any_range_is_a_part_of_the_whole(
    samples: list[int], size: tuple[int, int], data: st.DataObject
) -> None:
    """Across windows, after jumps, by an order that read nothing before and by one that did."""
    order = WindowOrder(stripes_of(samples), 8, window_stripes=size[0], first=size[1])
    whole = order.indices(1, 0, order.length)
    for _ in range(5):
        start = data.draw(st.integers(0, order.length))
        stop = data.draw(st.integers(start, order.length))
        fresh: WindowOrder = pickle.loads(pickle.dumps(order))
        assert np.array_equal(order.indices(1, start, stop), whole[start:stop])
        assert np.array_equal(fresh.indices(1, start, stop), whole[start:stop])


@given(st.integers(0, 3000), st.integers(1, 200), st.integers(1, 200))
def test_windows_double_up_to_their_limit_and_end_even(
    stripes: int, limit: int, first: int
) -> None:
    """first, twice as many ... below the limit; then equal ones, within one stripe, at most it."""
    edges = window_edges(stripes, window_stripes=limit, first=first)
    widths = np.diff(edges).tolist()
    assert edges[0] == 0
    assert edges[-1] == stripes
    assert all(0 < width <= limit for width in widths)
    ramp: list[int] = []
    while first < limit and sum(ramp) + first < stripes:
        ramp.append(first)
        first *= 2
    assert widths[: len(ramp)] == ramp
    rest = widths[len(ramp) :]
    assert not rest or max(rest) - min(rest) <= 1
    assert len(rest) == -(-(stripes - sum(ramp)) // limit)


def test_epochs_and_seeds_mix_stripes_and_samples_anew() -> None:
    """Other stripes in a window, and another order of the same stripe's samples."""
    stripes = np.arange(0, 4001, 40)
    order = WindowOrder(stripes, 1, window_stripes=16)
    base = order.indices(0, 0, 4000)
    for found in (
        order.indices(1, 0, 4000),
        WindowOrder(stripes, 2, window_stripes=16).indices(0, 0, 4000),
    ):
        assert (found == base).sum() < 20
        assert (found // 40 == base // 40).sum() < 200  # not the same stripes at the same places
        ranks = [row[row // 40 == 7].tolist() for row in (base, found)]
        assert ranks[0] != ranks[1]


@pytest.mark.parametrize("stripe_count", [1, 5, 40])
def test_the_first_batches_of_an_epoch_are_drawn_in_the_one_before(
    stripe_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for them between two epochs, nor for those of the next in a first batch."""
    drawn: list[int] = []

    def counted(*words: object, **key: int) -> Indices:
        drawn.append(key["epoch"])
        return random_draws.shuffled(*words, **key)  # type: ignore[arg-type]

    monkeypatch.setattr(windows, "shuffled", counted)
    stripes = np.arange(0, 16 * stripe_count + 1, 16)
    order = WindowOrder(stripes, 7, window_stripes=16)
    small = order.window_of(0, min(order.length, 64) - 1).stop
    for epoch in range(3):
        drawn.clear()
        order.indices(epoch, 0, 4)
        assert set(drawn) == ({0} if not epoch else set())
        for start in range(4, order.length, 4):
            order.indices(epoch, start, start + 4)
            assert start + 4 > small or not epoch or epoch not in drawn
        assert set(drawn) <= {epoch, epoch + 1}
    drawn.clear()
    WindowOrder(stripes, 7, window_stripes=16).indices(3, order.length - 4, order.length)
    assert set(drawn) == {3}


def test_a_subset_is_read_by_whole_stripes_too() -> None:
    """Windows over a random half of the samples: those of the stripe, and no other stripe."""
    stripes = np.arange(0, 1001, 50)
    mapping = np.sort(GlobalOrder(1000, 6).indices(0, 0, 500))
    inner = WindowOrder(subset_stripes(stripes, mapping), 3, window_stripes=4)
    order = SubsetOrder(inner, mapping, samples=1000)
    assert sorted(order.indices(0, 0, 500)) == mapping.tolist()
    window = inner.window_of(0, 300)
    held = set(order.indices(0, window.start, window.stop) // 50)
    assert held == set(window.stripes.tolist())
    with pytest.raises(ConfigError, match="rising order"):
        subset_stripes(stripes, mapping[::-1])


@pytest.mark.parametrize("stripes", [[], [1, 2], [0, 5, 3], [[0, 1]]])
def test_stripes_that_are_no_list_of_first_samples_are_refused(stripes: list[int]) -> None:
    """Empty, not from 0, falling, of two dimensions."""
    with pytest.raises(ConfigError, match="rising list of first samples"):
        WindowOrder(np.array(stripes, np.int64), 0, window_stripes=4)


def test_windows_of_no_stripes_are_refused() -> None:
    """Both the largest and the first."""
    for limit, first in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="1 or more are needed"):
            WindowOrder(np.array([0, 5]), 0, window_stripes=limit, first=first)
    order = WindowOrder(np.array([0, 5]), 0, window_stripes=1)
    for position in (-1, 5):
        with pytest.raises(ValueError, match="an epoch has"):
            order.window_of(0, position)


def test_a_description_tells_windows_apart() -> None:
    """Stripes, seed, largest and first window."""
    stripes = np.arange(0, 101, 10)
    orders = [
        WindowOrder(stripes, 1, window_stripes=4),
        WindowOrder(stripes, 2, window_stripes=4),
        WindowOrder(stripes, 1, window_stripes=5),
        WindowOrder(stripes, 1, window_stripes=4, first=2),
        WindowOrder(np.arange(0, 101, 20), 1, window_stripes=4),
    ]
    assert len({str(order.describe()) for order in orders}) == len(orders)
