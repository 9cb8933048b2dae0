"""Durability for any group: more parity helps, slower repair and more failures harm."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.durability import (
    Group,
    in_a_year,
    losses_per_year,
    nines,
    unreadable_per_year,
    window,
    years_to_loss,
)

groups = st.builds(
    Group,
    data=st.integers(1, 20),
    parity=st.integers(0, 8),
    afr=st.floats(1e-4, 0.5),
    repair_hours=st.floats(0.01, 500),
)
factors = st.floats(1.01, 100)


def chain(group: Group) -> float:
    return 1 / years_to_loss(group)


MODELS = (losses_per_year, chain)


@given(groups, factors)
def test_more_failures_or_slower_repair_never_help(group: Group, factor: float) -> None:
    """For the chain any worsening costs; one device more to fail, too.

    Not for the closed form: a device that is being repaired cannot fail.
    """
    worse = (
        replace(group, afr=group.afr * factor),
        replace(group, repair_hours=group.repair_hours * factor),
        replace(group, data=group.data + 1),
    )
    for changed in worse:
        assert chain(changed) >= chain(group) * (1 - 1e-9)


@given(groups)
def test_one_more_parity_device_always_helps_the_chain(group: Group) -> None:
    """The same data on one device more that may be lost."""
    assert years_to_loss(replace(group, parity=group.parity + 1)) > years_to_loss(group)


@given(groups)
def test_probabilities_are_probabilities(group: Group) -> None:
    """Between 0 and 1, never more nines for more groups."""
    found = window(group)
    for value in (found.exactly_parity, found.beyond_parity, found.loss):
        assert 0 <= value <= 1
    for model in MODELS:
        assert 0 < in_a_year(model(group)) <= 1
        assert nines(in_a_year(model(group), 10)) <= nines(in_a_year(model(group)))


@given(groups)
def test_closed_form_and_chain_agree_where_repairs_are_quick(group: Group) -> None:
    """Within a few loads of each other, as both are exact up to that order."""
    slack = 3 * group.width * 2**group.parity * group.load
    if slack < 0.5:
        assert losses_per_year(group) == pytest.approx(chain(group), rel=slack)


@given(groups)
def test_closed_form_is_the_small_load_formula_in_the_limit(group: Group) -> None:
    """n a C(n-1, m) (aT)^m, the formula of the textbooks."""
    n, m = group.width, group.parity
    plain = n * group.afr * math.comb(n - 1, m) * group.load**m
    assert losses_per_year(group) <= plain
    assert losses_per_year(group) == pytest.approx(plain / (1 + group.load) ** n)


@given(groups, st.integers(10**9, 10**13), st.floats(1e-18, 1e-13))
def test_unreadable_sectors_grow_with_what_is_read(group: Group, size: int, rate: float) -> None:
    """More bytes or more errors a bit never lower it; it is bounded by the critical states."""
    found = unreadable_per_year(group, size, rate)
    assert 0 <= found <= unreadable_per_year(group, 2 * size, rate)
    assert found <= unreadable_per_year(group, size, 2 * rate)
