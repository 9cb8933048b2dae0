"""Room in the arena of direct reads: ranges never overlap, and all of it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.loaders.gpu.direct.arena_allocator import Ranges

PAGE = 4096
TOTAL = 64 * PAGE


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20 * PAGE)), max_size=60))
def test_ranges_lie_apart_and_are_refused_only_without_room(
    steps: list[tuple[bool, int]],
) -> None:
    """Against a list of bytes that are out: aligned, inside, apart; refused when no gap fits."""
    ranges, out = Ranges(TOTAL, PAGE), dict[int, int]()
    for take, size in steps:
        if not take and out:
            start = sorted(out)[size % len(out)]
            ranges.give(start * PAGE)
            del out[start]
            continue
        pages = max(1, -(-size // PAGE))
        used = {page for at, count in out.items() for page in range(at, at + count)}
        begin = ranges.take(size)
        if begin is None:
            free = "".join("x" if page in used else "." for page in range(TOTAL // PAGE))
            assert "." * pages not in free
            continue
        assert begin % PAGE == 0
        mine = set(range(begin // PAGE, begin // PAGE + pages))
        assert not mine & used
        assert max(mine) < TOTAL // PAGE
        out[begin // PAGE] = pages
    assert ranges.taken_bytes == sum(out.values()) * PAGE
    for page in out:
        ranges.give(page * PAGE)
    assert ranges.take(TOTAL) == 0


def test_what_is_not_out_cannot_be_given_back() -> None:
    """A range that was given twice would be two batches' memory."""
    ranges = Ranges(TOTAL, PAGE)
    first = ranges.take(1)
    assert first == 0
    ranges.give(first)
    with pytest.raises(KeyError):
        ranges.give(first)
    assert Ranges(0, PAGE).take(1) is None
