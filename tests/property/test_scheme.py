"""Schemes as users write them: "k+m" means the k and m of data= and parity=, and nothing else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.format.scheme import PoolScheme, choose_scheme, parse_scheme

units = st.integers(0, 9999)


@given(units, units)
def test_a_scheme_reads_back_as_it_is_written(data: int, parity: int) -> None:
    scheme = PoolScheme(data=data, parity=parity)
    assert parse_scheme(str(scheme)) == scheme


@given(st.text(st.sampled_from("0123456789+- .ab٣\n"), max_size=12))
def test_only_two_numbers_with_a_plus_between_them_are_a_scheme(text: str) -> None:
    """Against the grammar in words: digits, one plus, digits; nothing before, between or after."""
    left, plus, right = text.partition("+")
    valid = bool(plus) and all(
        re.fullmatch("[0-9]+", part, re.ASCII) and len(part) <= 4 for part in (left, right)
    )
    if valid:
        assert parse_scheme(text) == PoolScheme(data=int(left), parity=int(right))
    else:
        with pytest.raises(ConfigError, match="is not a scheme: write k"):
            parse_scheme(text)


@pytest.mark.parametrize("text", ["4+", "+2", "4", "a+b", "4+2+1", "4 + 2", "-4+2", "٤+٢", ""])
def test_what_is_not_a_scheme_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        parse_scheme(text)


@given(units, units)
def test_both_ways_of_giving_a_scheme_are_one(data: int, parity: int) -> None:
    """By data and parity, by scheme, and by both where they agree."""
    expected = PoolScheme(data=data, parity=parity)
    assert choose_scheme(data, parity, None) == expected
    assert choose_scheme(None, None, str(expected)) == expected
    assert choose_scheme(data, parity, str(expected)) == expected


@given(units, units, st.none() | units, st.none() | units)
def test_two_ways_that_differ_are_refused(
    data: int, parity: int, other_data: int | None, other_parity: int | None
) -> None:
    """Also where only one of data and parity is given beside the scheme."""
    scheme = PoolScheme(data=data, parity=parity)
    if other_data in (None, data) and other_parity in (None, parity):
        assert choose_scheme(other_data, other_parity, str(scheme)) == scheme
    else:
        with pytest.raises(ConfigError, match="differ"):
            choose_scheme(other_data, other_parity, str(scheme))


@pytest.mark.parametrize(("data", "parity"), [(None, None), (4, None), (None, 2)])
def test_half_a_scheme_is_refused(data: int | None, parity: int | None) -> None:
    with pytest.raises(ConfigError, match="not a whole scheme"):
        choose_scheme(data, parity, None)
