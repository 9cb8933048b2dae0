"""How the keys of a rebuild become tasks of a cluster."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hpstore.interop.ray_repairs import split_keys

_NAMES = ["a", "b", "c"]
_places = st.lists(st.permutations([*_NAMES, "elsewhere"]), max_size=60)


@given(_places, st.sets(st.sampled_from(_NAMES)), st.integers(1, 9))
def test_each_key_is_in_one_batch_near_a_holder(
    places: list[list[str]], near: set[str], size: int
) -> None:
    """No key twice or missing; never over the size; only near a domain that holds columns."""
    domains = {f"k{number}": place[:2] for number, place in enumerate(places)}
    batches = split_keys(list(domains), domains.__getitem__, near, size)
    assert Counter(key for batch in batches for key in batch.keys) == Counter(list(domains))
    for batch in batches:
        assert 1 <= len(batch.keys) <= size
        for key in batch.keys:
            holders = [name for name in domains[key] if name in near]
            assert batch.domain in holders if holders else batch.domain == ""


@given(st.integers(1, 200))
def test_hosts_that_hold_all_alike_get_alike_many(count: int) -> None:
    """4+2 over three hosts: each holds two columns of every object."""
    batches = split_keys([f"k{n}" for n in range(count)], lambda _: _NAMES, _NAMES, 1000)
    sizes = [len(batch.keys) for batch in batches]
    assert max(sizes) - min(sizes) <= 1 or count < 3
