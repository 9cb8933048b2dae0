"""Placement against its rules, for any pool."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hpstore.format.placement import (
    Candidate,
    bound_spread,
    choose,
    domain_cap,
    lost_columns,
    placeable,
    rank,
    score,
)
from hpstore.format.records import Member, PoolRecord

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


@given(keys, pools, st.integers(0, 12), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_spread_is_a_bound(
    key: str, pool: list[Candidate], count: int, parity: int, spread: int, data: st.DataObject
) -> None:
    """PROTOCOL 3: no domain gets more, those it has counted; as many as placeable() says."""
    names = sorted({c.domain for c in pool})
    occupied = data.draw(st.lists(st.sampled_from(names), max_size=6)) if names else []
    chosen = choose(key, pool, count, parity=parity, occupied=occupied, spread=spread)
    load = Counter(c.domain for c in chosen)
    assert all(
        held + occupied.count(d) <= max(spread, occupied.count(d)) for d, held in load.items()
    )
    assert len(chosen) == min(count, placeable([c.domain for c in pool], spread, occupied))


def fleet(sizes: list[int], data: int, parity: int) -> PoolRecord:
    members = [
        Member(device_id=f"{d}-{n}", url=f"/{d}/{n}", domain=f"h{d}")
        for d, size in enumerate(sizes)
        for n in range(size)
    ]
    return PoolRecord(
        pool_id="p",
        generation=1,
        nonce="n",
        parent="",
        data=data,
        parity=parity,
        unit_bytes=4096,
        members=tuple(members),
        spread=bound_spread(data + parity, parity, sizes),
    )


@given(
    keys,
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.data(),
)
def test_no_object_has_more_columns_on_lost_devices_than_they_weigh(
    key: str, sizes: list[int], k: int, m: int, data: st.DataObject
) -> None:
    """PROTOCOL 14: a pool that opens without some devices can read every object that is whole."""
    record = fleet(sizes, k, m)
    ids = [member.device_id for member in record.members]
    lost = set(data.draw(st.lists(st.sampled_from(ids), unique=True)))
    candidates = [Candidate(device=x.device_id, domain=x.domain) for x in record.members]
    usable = placeable([c.domain for c in candidates], record.spread)
    chosen = choose(key, candidates, min(k + m, usable), parity=m, spread=record.spread)
    assert sum(c.device in lost for c in chosen) <= record.weight(lost)
    if record.spread is None:
        assert record.weight(lost) == len(lost)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.data(),
)
def test_every_opening_meets_a_record_that_was_committed(
    sizes: list[int], k: int, m: int, data: st.DataObject
) -> None:
    """PROTOCOL 14: no set of devices that opens the pool misses all holders of a record."""
    record = fleet(sizes, k, m)
    ids = [member.device_id for member in record.members]
    missing = set(data.draw(st.lists(st.sampled_from(ids), unique=True)))
    holders = set(data.draw(st.lists(st.sampled_from(ids), unique=True)))
    if record.opens_without(missing) and missing != set(ids) and record.reached_by(holders):
        assert holders - missing
    assert record.reached_by(set(ids))


def test_pools_of_hosts_survive_a_host() -> None:
    """t_64: 8 x 8 at 8+3, 4 x 4 at 4+2, 3 x 6 at 6+3; two hosts at 4+2 cannot bound a stripe."""
    for hosts, disks, k, m, spread in ((8, 8, 8, 3, 2), (4, 4, 4, 2, 2), (3, 6, 6, 3, 3)):
        record = fleet([disks] * hosts, k, m)
        assert record.spread == spread
        assert record.opens_without([f"0-{n}" for n in range(disks)])
        assert not record.opens_without([f"{h}-{n}" for h in (0, 1) for n in range(disks)])
    assert fleet([4, 4], 4, 2).spread is None
    assert fleet([1] * 6, 4, 2).spread is None
    assert lost_columns(["a", "a", "a", "b"], 2) == 3
