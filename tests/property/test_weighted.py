"""Draws by weight: their shares, their uniqueness, and the logarithm behind them."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.weighted import WeightedOrder, natural_log

weights = st.lists(
    st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e-9, 1e9]) | st.floats(1e-250, 10),
    min_size=1,
    max_size=50,
).filter(lambda values: any(values))


def chi_square(found: list[int], expected: list[float]) -> float:
    """Sum of squared deviations in units of the expectation."""
    return sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True))


@given(weights, st.integers(0, 2**64 - 1), st.booleans(), st.data())
def test_any_range_is_a_part_of_the_whole(
    values: list[float], seed: int, replacement: bool, data: st.DataObject
) -> None:
    """Only samples with a weight; equal after a jump, a pickle and in sequence."""
    draws = 70_000 if replacement else sum(v > 0 for v in values)
    order = WeightedOrder(values, draws, seed, replacement=replacement)
    whole = order.indices(3, 0, draws)
    assert all(values[i] > 0 for i in np.unique(whole))
    assert order.samples == len(values)
    if not replacement:
        assert len(np.unique(whole)) == draws
    for _ in range(4):
        start = data.draw(st.integers(0, draws))
        stop = min(draws, start + data.draw(st.integers(0, 5000)))
        fresh: WeightedOrder = pickle.loads(pickle.dumps(order))
        assert np.array_equal(order.indices(3, start, stop), whole[start:stop])
        assert np.array_equal(fresh.indices(3, start, stop), whole[start:stop])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_draws_with_replacement_have_the_shares_of_their_weights(seed: int) -> None:
    """400,000 draws of 100 samples, some a thousand times as likely: chi-square, 99 degrees."""
    values = np.geomspace(1, 1000, 100)
    found = np.bincount(WeightedOrder(values, 400_000, seed).indices(0, 0, 400_000), minlength=100)
    statistic = chi_square(found.tolist(), (values / values.sum() * 400_000).tolist())
    assert 99 - 5 * math.sqrt(2 * 99) < statistic < 99 + 5 * math.sqrt(2 * 99)


def test_draws_without_replacement_are_one_after_another_from_what_is_left() -> None:
    """All ordered triples of 4 samples have the probability w1/W * w2/(W-w1) * w3/(W-w1-w2)."""
    values, epochs = [1.0, 2.0, 3.0, 6.0], 6000
    order = WeightedOrder(values, 3, 11, replacement=False)
    found = dict.fromkeys(itertools.permutations(range(4), 3), 0)
    for epoch in range(epochs):
        found[tuple(order.indices(epoch, 0, 3).tolist())] += 1
    expected = []
    for triple in found:
        chance, left = float(epochs), sum(values)
        for sample in triple:
            chance *= values[sample] / left
            left -= values[sample]
        expected.append(chance)
    assert chi_square(list(found.values()), expected) < 23 + 5 * math.sqrt(2 * 23)


def test_epochs_and_seeds_draw_anew() -> None:
    """With and without replacement."""
    for replacement in (True, False):
        order = WeightedOrder(np.ones(1000), 500, 1, replacement=replacement)
        other = WeightedOrder(np.ones(1000), 500, 2, replacement=replacement)
        first = order.indices(0, 0, 500)
        assert (order.indices(1, 0, 500) == first).sum() < 10
        assert (other.indices(0, 0, 500) == first).sum() < 10


def test_the_smallest_and_the_largest_word_draw_samples_with_a_weight() -> None:
    """Points at 0 and at the total pass over weights of 0 at both ends, also where rounding has
    made the total larger than any running sum."""
    for inflated in (1.0, 2.0):
        order = WeightedOrder([0, 0.1, 0.1, 0, 0.1, 0], 4, 0)
        order._table[-1] *= inflated
        extremes = np.array([0, 1, 2**64 - 2, 2**64 - 1], np.uint64)
        with patch("hpstore.loaders.sampling.weighted.words", return_value=extremes):
            assert order.indices(0, 0, 4).tolist() == [1, 1, 4, 4]


@given(st.lists(st.integers(0, 2**52 - 1), min_size=1, max_size=50))
def test_the_logarithm_is_the_logarithm(raw: list[int]) -> None:
    """Over all values that are drawn, near 0 and near 1: within 4 units of the last place."""
    values = (np.array([*raw, 0, 2**52 - 1, 2**51], np.float64) + 0.5) * 2.0**-52
    for value, found in zip(values.tolist(), natural_log(values).tolist(), strict=True):
        exact = math.log(value)
        assert abs(found - exact) <= max(4 * math.ulp(exact), 1e-16)
        assert found < 0


def test_what_a_caller_does_to_its_indices_stays_with_it() -> None:
    """Every array is the caller's own."""
    for replacement in (True, False):
        order = WeightedOrder(np.ones(500), 400, 1, replacement=replacement)
        before = order.indices(0, 0, 50).copy()
        order.indices(0, 0, 50)[:] = -1
        assert np.array_equal(order.indices(0, 0, 50), before)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, -1.0], "weight 1 is -1.0"),
        ([math.nan], "weight 0 is nan"),
        ([1, math.inf], "inf"),
        ([0.0, 0.0], "nothing to draw from"),
        ([], "nothing to draw from"),
        ([[1.0]], "shape"),
        (["x", 1], "weights are numbers"),
        ([None], "weights are numbers|weight 0 is nan"),
        ([5e-324, 1.0], "weight 0 is 5e-324, beside one of 1.0"),
    ],
)
def test_bad_weights_are_named(values: list[Any], said: str) -> None:
    """Which one, and what it is."""
    with pytest.raises(ConfigError, match=said):
        WeightedOrder(values, 1, 0)


def test_more_draws_than_samples_are_refused_without_replacement() -> None:
    """Samples of weight 0 do not count."""
    with pytest.raises(ConfigError, match="3 draws without replacement from 2 weights above 0"):
        WeightedOrder([1, 0, 1], 3, 0, replacement=False)


def test_a_description_tells_weights_apart() -> None:
    """Weights, draws, seed and replacement."""
    orders = [
        WeightedOrder([1, 2], 2, 0),
        WeightedOrder([1, 3], 2, 0),
        WeightedOrder([1, 2], 1, 0),
        WeightedOrder([1, 2], 2, 1),
        WeightedOrder([1, 2], 2, 0, replacement=False),
    ]
    assert len({str(order.describe()) for order in orders}) == len(orders)
