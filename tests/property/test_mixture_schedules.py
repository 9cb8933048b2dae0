"""Weights that change with the step, and where epochs end, beside plain counting."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.mixture_order import MixtureOrder
from hpstore.loaders.sampling.mixture_shares import MixtureSchedule, schedule_of
from hpstore.loaders.sampling.order import GlobalOrder, Order, SequentialOrder

WEIGHTS = st.lists(st.integers(0, 9).map(float), min_size=3, max_size=3).filter(any)


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[int, list[float]]]:
    """One to four parts, some shorter than a block, of three sources."""
    gaps = draw(st.lists(st.integers(1, 300), max_size=3))
    starts = np.cumsum([0, *gaps]).tolist()
    return [(start, draw(WEIGHTS)) for start in starts]


def shares_at(steps: list[tuple[int, list[float]]], position: int) -> list[Fraction]:
    """What each source would have had by a position, if positions could be divided."""
    had = [Fraction(0)] * 3
    for number, (start, weights) in enumerate(steps):
        end = steps[number + 1][0] if number + 1 < len(steps) else position
        count = max(0, min(end, position) - start)
        total = Fraction(sum(weights))
        had = [a + count * Fraction(w) / total for a, w in zip(had, weights, strict=True)]
    return had


@given(schedules(), st.integers(60, 250), st.integers(0, 3), st.integers(0, 2**40), st.data())
def test_shares_follow_the_schedule_from_block_to_block(
    steps: list[tuple[int, list[float]]], length: int, last: int, seed: int, data: st.DataObject
) -> None:
    """At the end of every block each source has had its share, within one for each change of
    weights; no source is drawn where it has no weight; draws are numbered on without a gap; a
    stretch by itself is as in the whole."""
    orders: list[Order] = [GlobalOrder(40, 1), SequentialOrder(7), GlobalOrder(90, 2)]
    try:
        mixed = MixtureOrder(orders, MixtureSchedule(steps), seed, length=length, block=60)
    except ConfigError:
        assume(False)
    drawn = [0, 0, 0]
    starts = [start for start, _ in steps]
    for epoch in range(last + 1):
        found = mixed.draws(epoch, 0, length)
        for source, number in zip(found.source.tolist(), found.sample.tolist(), strict=True):
            assert number == drawn[source], "a draw of a source is lost or comes twice"
            drawn[source] += 1
        for position, source in enumerate(found.source.tolist()):
            part = bisect.bisect_right(starts, epoch * length + position) - 1
            assert steps[part][1][source] > 0
        changes = bisect.bisect_right(starts, (epoch + 1) * length)
        for had, share in zip(drawn, shares_at(steps, (epoch + 1) * length), strict=True):
            assert abs(had - share) < 2 * changes
    whole = mixed.indices(last, 0, length)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start, length))
    again = MixtureOrder(orders, MixtureSchedule(steps), seed, length=length, block=60)
    assert (again.indices(last, start, stop) == whole[start:stop]).all()
    counts = np.bincount(mixed.draws(last, 0, length).source[:start], minlength=3)
    first = mixed.draws(last, 0, length)
    before = [
        int(first.sample[first.source == s].min()) if (first.source == s).any() else None
        for s in range(3)
    ]
    for source, (at, place) in enumerate(again.places(last, start)):
        if before[source] is not None:
            number = at * orders[source].length + place
            assert number == before[source] + counts[source]


@given(
    st.lists(st.integers(1, 60), min_size=3, max_size=3),
    schedules(),
    st.sampled_from(["first", "all"]),
)
def test_epochs_end_where_counting_says(
    lengths: list[int], steps: list[tuple[int, list[float]]], stop: Any
) -> None:
    """ "first": one position more, and a source has had more than all of it. "all": one less, and a
    source that ever has a weight lacks some."""
    schedule = MixtureSchedule(steps)
    ever = [s for s in range(3) if any(weights[s] for _, weights in steps)]
    try:
        length = schedule.length_until(stop, lengths)
    except ConfigError:
        far = shares_at(steps, 10**6)
        assert any(far[s] < lengths[s] - 4 for s in ever) or any(
            not steps[-1][1][s] and far[s] < lengths[s] + 4 for s in ever
        )
        return
    # sources have whole numbers at each change: within one there
    slack = len(steps) - 1
    here, beside = (
        shares_at(steps, length),
        shares_at(steps, length + (1 if stop == "first" else -1)),
    )
    if stop == "first":
        assert all(here[s] <= lengths[s] + slack for s in ever)
        assert any(beside[s] > lengths[s] - slack - Fraction(1, 10**9) for s in ever)
    else:
        assert all(here[s] >= lengths[s] - slack for s in ever)
        assert any(beside[s] < lengths[s] + slack + Fraction(1, 10**9) for s in ever)


def test_no_source_loses_what_it_had_where_weights_change_early_in_an_epoch() -> None:
    """1 : 3 : 3 of 66 is 10, 28, 28, and of 67 it is 9, 29, 29 by largest remainders; the weights
    change there, one position into the second epoch, where nothing can be taken back."""
    steps = [(0, [1.0, 3.0, 3.0]), (67, [1.0, 1.0, 1.0])]
    orders: list[Order] = [SequentialOrder(500) for _ in range(3)]
    mixed = MixtureOrder(orders, MixtureSchedule(steps), 0, length=66, block=60)
    found = [mixed.draws(epoch, 0, 66) for epoch in range(3)]
    for source in range(3):
        drawn = np.concatenate([one.sample[one.source == source] for one in found])
        assert (drawn == np.arange(len(drawn))).all()


def test_epochs_of_constant_weights_end_exactly() -> None:
    """3 to 1 of 90 and 50: the first is through after 120, all after 200."""
    schedule = MixtureSchedule([(0, [3, 1, 0])])
    assert schedule.length_until("first", [90, 50, 5]) == 120
    assert schedule.length_until("all", [90, 50, 5]) == 200
    assert schedule.length_until("all", [91, 50, 5]) == math.ceil(50 * 4)


def test_a_source_without_weight_in_the_end_may_never_be_through() -> None:
    """It is named, as "all" would wait for ever."""
    schedule = MixtureSchedule([(0, [1, 1]), (10, [1, 0])])
    assert schedule.length_until("all", [50, 5]) == 55
    with pytest.raises(ConfigError, match="source 1 of the mixture has no weight"):
        schedule.length_until("all", [50, 6])


@pytest.mark.parametrize(
    ("weights", "steps", "says"),
    [
        ([1], 1, "2 data sets, 1 weights"),
        (["x", 1], 1, "weights are numbers"),
        ("12", 1, "weights are '12'"),
        (None, 1, "weights are None"),
        ([], 1, "2 data sets, 0 weights"),
        ([(0, [1, 2]), (5, [1])], 1, "from step 5"),
        ([(1, [1, 2])], 1, "rise, from 0"),
        ([(0, [1, 2]), (0, [2, 1])], 1, "rise, from 0"),
        ([(0, [1, 2]), (-4, [2, 1])], 1, "step"),
        ([(0, [1, 2]), (2.5, [2, 1])], 1, "step"),
        ([(0, 1), (1, 2)], 1, "no \\(step, weights\\)"),
        ([(0, [1, 2]), (5, [0, 0])], 1, "no weight is above 0"),
        ([(0, [1, 2]), (5, [1, -2])], 1, "finite and >= 0"),
        ([1, 2], 0, "step_samples"),
    ],
)
def test_wrong_schedules_are_refused(weights: Any, steps: int, says: str) -> None:
    """By what is wrong with them."""
    with pytest.raises(ConfigError, match=says):
        schedule_of(weights, 2, steps)
