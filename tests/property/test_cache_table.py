"""Rows of the cache's index and blocks once each, against plain arrays and numpy.unique."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.loaders.policy.block_stats import Table
from hpstore.loaders.policy.unique_blocks import distinct, in_order

BLOCKS = 9
some = st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS)


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**31 - 1)), max_size=40))
def test_distinct_blocks_are_those_of_unique(blocks: list[int]) -> None:
    """Where each is first, how often, and the order of all."""
    asked = np.array(blocks, np.int64)
    found = distinct(asked)
    unique, first, counts = np.unique(asked, return_index=True, return_counts=True)
    assert found.blocks.tolist() == unique.tolist()
    assert found.first.tolist() == first.tolist()
    assert found.counts.tolist() == counts.tolist()
    assert asked[found.order].tolist() == found.blocks.repeat(found.counts).tolist()
    assert in_order(asked).tolist() == list(dict.fromkeys(blocks))


@pytest.mark.parametrize("columns", [1, 6])
@given(changes=st.lists(some, max_size=6), places=some)
def test_rows_are_what_was_put_there(
    columns: int, changes: list[list[int]], places: list[int]
) -> None:
    """Row by row; what was taken before does not change by that, and other rows do not either."""
    table = Table(BLOCKS)
    table.lay(columns)
    keys = np.full((BLOCKS, columns), -np.inf, np.float32)
    seen = np.zeros(BLOCKS, np.uint8)
    table.places[places] = np.arange(len(places))
    wanted = table.places.tolist()
    for number, change in enumerate(changes):
        blocks = np.array(change, np.int64)
        rows = table.take(blocks)
        before = rows.keys
        assert np.array_equal(before, keys[blocks].T)
        assert rows.places.tolist() == [wanted[block] for block in change]
        rows.keys = np.array([range(number, number + len(change))] * columns, np.float32)
        rows.seen |= np.uint8(1 << number)
        table.put(blocks, rows)
        assert np.array_equal(before, keys[blocks].T)
        keys[blocks] = number + np.arange(len(change))[:, None]
        seen[blocks] |= np.uint8(columns > 1) << np.uint8(number)
    assert np.array_equal(table.keys, keys)
    assert table.seen.tolist() == seen.tolist()
    assert table.places.tolist() == wanted


def test_wider_rows_keep_places_and_what_was_seen() -> None:
    """And back; keys begin anew, marks too."""
    table = Table(BLOCKS)
    table.places[3], table.seen[4] = 7, 5
    for columns in (6, 6, 1):
        table.lay(columns)
        assert table.places.tolist() == [-1, -1, -1, 7, -1, -1, -1, -1, -1]
        assert table.seen.tolist() == [0, 0, 0, 0, 5, 0, 0, 0, 0]
        assert np.isneginf(table.keys).all()
        assert not table.marks.any()
        table.keys[:], table.marks[:] = 0, True
