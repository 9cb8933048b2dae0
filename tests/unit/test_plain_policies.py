"""Plain policies: tiny sequences worked out by hand, and what holds for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstore.loaders.policy import belady
from hpstore.loaders.traces.trace_comparison import PLAIN

BLOCKS = 12

# capacity 3 unless given; x is a hit
SEQUENCES = [
    ("LRU", 3, "a b c a d b a", ". . . x . . x"),
    ("LFU", 3, "a a b c d a b", ". x . . . x ."),
    ("SIEVE", 3, "a b c a d b a", ". . . x . . x"),
    ("SIEVE", 3, "a b c b d e b", ". . . x . . x"),
    ("2Q", 4, "a b c d e a a", ". . . . . . x"),
    ("2Q", 4, "a b c d e a f g h a", ". . . . . . . . . x"),
    ("S3-FIFO", 10, "a a a b c d e f g h i j k l a", ". x x . . . . . . . . . . . x"),
    ("S3-FIFO", 10, "a a b c d e f g h i j k a", ". x . . . . . . . . . . ."),
    ("ARC", 3, "a a b c d e a", ". x . . . . x"),
    ("LIRS", 3, "a b c d a e b", ". . . . x . x"),
    ("W-TinyLFU", 3, "a a b b c d e a b", ". x . x . . . x x"),
]


@pytest.mark.parametrize(("name", "room", "asked", "expected"), SEQUENCES)
def test_tiny_sequences_have_the_hits_of_the_papers_rules(
    name: str, room: int, asked: str, expected: str
) -> None:
    request = PLAIN[name](room, BLOCKS + 26)
    found = ["x" if request(ord(c) - 97) else "." for c in asked.split()]
    assert " ".join(found) == expected


@pytest.mark.parametrize("name", PLAIN)
@given(st.lists(st.integers(0, BLOCKS - 1), max_size=80), st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_no_policy_hits_above_min_or_a_block_that_it_never_had(
    name: str, asked: list[int], room: int
) -> None:
    request = PLAIN[name](room, BLOCKS)
    hits = [request(block) for block in asked]
    assert sum(hits) <= belady(np.array(asked, np.int64), room).sum()
    seen: set[int] = set()
    for block, hit in zip(asked, hits, strict=True):
        assert not hit or block in seen
        seen.add(block)


@pytest.mark.parametrize("name", PLAIN)
def test_what_fits_is_fetched_once(name: str) -> None:
    asked = [block for _ in range(4) for block in range(8)]
    request = PLAIN[name](BLOCKS, BLOCKS)
    assert sum(map(request, asked)) == 3 * 8


def test_a_loop_larger_than_the_cache_separates_those_that_resist_it() -> None:
    asked = list(range(100)) * 20
    ratio = {name: np.mean([*map(made(50, 100), asked)]) for name, made in PLAIN.items()}
    assert ratio["LRU"] == 0
    assert ratio["LIRS"] > 0.4
