"""The check of histories finds what is wrong, and passes what is right."""

from __future__ import annotations

import math

from hpstore.testing.histories import Observed, is_linearizable


def at(begin: float, end: float, seen: object, written: object | None = None) -> Observed:
    return Observed(begin=begin, end=end, seen=seen, written=written)


def test_histories_in_one_order_pass() -> None:
    """One after the other; overlapping ones in either order; reads within a write."""
    assert is_linearizable([])
    assert is_linearizable([at(0, 1, None, "a"), at(2, 3, "a", "b"), at(4, 5, "b")])
    assert is_linearizable([at(0, 9, "b", "c"), at(1, 5, None, "b"), at(6, 7, "b")])


def test_a_lost_update_a_stale_read_and_two_winners_are_found() -> None:
    """Each is what a broken engine would do."""
    assert not is_linearizable([at(0, 1, None, "a"), at(2, 3, "a", "b"), at(4, 5, "a", "c")])
    assert not is_linearizable([at(0, 1, None, "a"), at(2, 3, None)])
    assert not is_linearizable([at(0, 3, None, "a"), at(1, 2, None, "b")])


def test_an_update_whose_outcome_is_unknown_may_have_happened_at_any_time_or_never() -> None:
    """But not twice, and not before it began."""
    unsure = at(0, math.inf, None, "a")
    assert is_linearizable([unsure, at(1, 2, None)])
    assert is_linearizable([unsure, at(1, 2, None), at(3, 4, "a", "b")])
    assert not is_linearizable([unsure, at(1, 2, None, "b"), at(3, 4, "a", "c")])
    assert not is_linearizable([at(5, math.inf, None, "a"), at(1, 2, "a")])
