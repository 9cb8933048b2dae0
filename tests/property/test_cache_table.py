"""Rows of the cache's index and blocks once each, against plain arrays and numpy.unique."""

from __future__ import annotations

import numpy as np
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


@given(changes=st.lists(some, max_size=6), places=some)
def test_rows_are_what_was_put_there(changes: list[list[int]], places: list[int]) -> None:
    """Row by row; what was taken before does not change by that, and other rows do not either."""
    table = Table(BLOCKS)
    keys = np.full(BLOCKS, -np.inf, np.float32)
    table.places[places] = np.arange(len(places))
    wanted = table.places.tolist()
    for number, change in enumerate(changes):
        blocks = np.array(change, np.int64)
        rows = table.take(blocks)
        before = rows.keys
        assert np.array_equal(before, keys[blocks])
        assert rows.places.tolist() == [wanted[block] for block in change]
        rows.keys = np.array(range(number, number + len(change)), np.float32)
        table.put(blocks, rows)
        assert np.array_equal(before, keys[blocks])
        keys[blocks] = number + np.arange(len(change))
    assert np.array_equal(table.keys, keys)
    assert table.places.tolist() == wanted
