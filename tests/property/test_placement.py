"""Placement against its rules, for any pool."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hpstore.placement import Candidate, choose, domain_cap, rank, score

pools = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6), st.sampled_from([0.5, 1.0, 1.0, 3.0])),
    unique_by=lambda row: row[0],
    max_size=20,
).map(lambda rows: [Candidate(device=f"d{d}", domain=f"r{r}", weight=w) for d, r, w in rows])
keys = st.text(max_size=20)


@given(keys, pools, st.integers(0, 12), st.integers(1, 4), st.randoms())
def test_a_choice_is_a_function_of_key_and_pool(
    key: str, pool: list[Candidate], count: int, parity: int, rng: object
) -> None:
    """As many as asked or as there are, none twice, the same in any order of candidates."""
    chosen = choose(key, pool, count, parity=parity)
    assert len(chosen) == min(count, len(pool))
    assert len({c.device for c in chosen}) == len(chosen)
    assert {c.device for c in chosen} <= {c.device for c in pool}
    shuffled = list(pool)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' Random has no better type
    assert choose(key, shuffled, count, parity=parity) == chosen


@given(keys, pools, st.integers(1, 12), st.integers(1, 4))
def test_the_cap_holds_where_it_can(
    key: str, pool: list[Candidate], count: int, parity: int
) -> None:
    """A domain is above its cap only when all others are at it or used up."""
    chosen = choose(key, pool, count, parity=parity)
    load, size = Counter(c.domain for c in chosen), Counter(c.domain for c in pool)
    cap = domain_cap(count, len(size), parity)
    if any(held > cap for held in load.values()):
        assert all(load[domain] >= min(cap, size[domain]) for domain in size)


@given(keys, pools)
def test_rank_is_by_score(key: str, pool: list[Candidate]) -> None:
    """Best first; scores are finite and positive for positive weights."""
    scores = [score(key, c) for c in rank(key, pool)]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < value < float("inf") for value in scores)
