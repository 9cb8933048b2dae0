"""Directories in C: the same hits and contents as the rules in Python, request by request."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstore.loaders.policy.directories import KINDS, MARGIN, PHASE, RULES, Directories
from hpstore.loaders.traces.trace_comparison import PLAIN
from tests.unit.counted_policies import CountPolicy, FreshCountPolicy, PhasePolicy, StaticPolicy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hpstore._directories") is None, reason="installed without a compiler"
)

BLOCKS = 24
asked = st.lists(st.integers(0, BLOCKS - 1), max_size=150)
WAITS = np.linspace(9, 1, 256).astype(np.float32)
SEEN = (np.arange(BLOCKS) * 7 % 256).astype(np.uint8)


def in_python(rule: str, room: int) -> Callable[[int], bool]:
    """What says whether a request hits."""
    if rule in PLAIN:
        return PLAIN[rule](room, BLOCKS)
    if rule == "static":
        return StaticPolicy(room).request
    if rule == "phase":
        return PhasePolicy(room, lambda b: float(WAITS[SEEN[b]]), margin=MARGIN).request
    if rule == "fresh count":
        return FreshCountPolicy(room, growth=2 ** (2 / BLOCKS)).request
    return CountPolicy(room, margin=math.exp(MARGIN)).request


@pytest.mark.parametrize("rule", KINDS)
@given(seed=st.integers(0, 1000), room=st.integers(2, 15))
@settings(max_examples=40, deadline=None)
def test_each_rule_hits_as_in_python(rule: str, seed: int, room: int) -> None:
    """Skewed requests with loops between: short lists of anything reach few of the rules' lines."""
    rng = np.random.default_rng(seed)
    parts = [rng.zipf(1.3, 60) % BLOCKS if rng.random() < 0.6 else np.arange(40) % BLOCKS]
    parts += [rng.integers(0, BLOCKS, 60), np.arange(50) % (room + 3), rng.zipf(1.5, 150) % BLOCKS]
    requests = np.concatenate(parts).tolist()
    found = Directories([rule], BLOCKS, room, seen=SEEN)
    hits = found.request(np.array(requests, np.int64), WAITS)
    request = in_python(rule, room)
    assert [bool(hit) for hit in hits] == [request(block) for block in requests]


@given(requests=asked, cuts=st.lists(st.integers(0, 150), max_size=3), room=st.integers(2, 15))
@settings(max_examples=80, deadline=None)
def test_masks_say_what_would_hit_and_hold_no_more_than_fits(
    requests: list[int], cuts: list[int], room: int
) -> None:
    """Whatever batches the requests come in."""
    found = Directories(RULES, BLOCKS, room, seen=SEEN)
    whole = Directories(RULES, BLOCKS, room, seen=SEEN)
    blocks = np.array(requests, np.int64)
    parts = [found.request(part, WAITS) for part in np.split(blocks, sorted(cuts))]
    assert np.array_equal(np.concatenate(parts), whole.request(blocks, WAITS))
    for bit in range(len(RULES)):
        assert np.count_nonzero(found.masks >> bit & 1) <= room
    for block in range(BLOCKS):
        held = int(found.masks[block])
        assert int(found.request(np.array([block]), WAITS)[0]) == held


def test_without_epochs_the_phase_rule_is_left_out() -> None:
    found = Directories(RULES, BLOCKS, 5, seen=SEEN)
    found.request(np.zeros(3, np.int64))
    assert int(found.masks[0]) == (1 << PHASE) - 1


def test_bytes_are_those_of_the_arrays() -> None:
    """At most 20 a block for the largest of them."""
    for rule in KINDS:
        one = Directories([rule], 1000, 200, seen=np.zeros(1000, np.uint8))
        assert 2 * 1000 < one.nbytes <= 20 * 1000
