"""Which windows are filled at once. Pure."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpstore.loaders.batching.page_prefetch import fills_of
from hpstore.loaders.sampling.window_shuffle import WindowOrder


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    window_stripes=st.integers(1, 9),
    batch_rows=st.integers(1, 40),
    data=st.data(),
)
def test_fills_are_whole_windows_joined_up_to_a_batch(
    counts: list[int], window_stripes: int, batch_rows: int, data: st.DataObject
) -> None:
    """From any position: all stripes in their order, room for a large window is enough, and only
    that keeps a fill from being a batch."""
    order = WindowOrder(np.cumsum([0, *counts]), 1, window_stripes=window_stripes)
    first = data.draw(st.integers(0, order.length))
    position, filled, expected = first, list[int](), list[int]()
    for stripes, stop in fills_of(order, 3, first, batch_rows):
        assert order.window_of(3, stop - 1).stop == stop  # a window ends where it does
        assert len(stripes) <= window_stripes
        if stop - position < batch_rows and stop < order.length:
            assert len(stripes) + len(order.window_of(3, stop).stripes) > window_stripes
        assert position < stop
        filled, position = [*filled, *stripes.tolist()], stop
    assert position == order.length
    while first < order.length:
        window = order.window_of(3, first)
        expected, first = [*expected, *window.stripes.tolist()], window.stop
    assert filled == expected


def test_a_fill_that_is_a_batch_takes_no_more_windows() -> None:
    """Who waits for a first batch does not wait for what the second one needs."""
    order = WindowOrder(np.arange(0, 3001, 100), 1, window_stripes=8)
    counts = [len(stripes) for stripes, _ in fills_of(order, 0, 0, 100)]
    assert counts[:4] == [1, 2, 4, 7]
    assert [len(stripes) for stripes, _ in fills_of(order, 0, 0, 101)][:3] == [3, 4, 7]
    assert [len(stripes) for stripes, _ in fills_of(order, 0, 0, 2000)][:2] == [7, 7]
