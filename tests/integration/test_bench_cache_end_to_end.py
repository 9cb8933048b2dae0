"""The end-to-end part of `hpstore bench cache`: honest contenders, checked batches, verdicts."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstore.benchmarks.cache.cache_end_to_end import (
    LRU,
    NOTHING,
    CacheScale,
    measure_end_to_end,
    verdicts,
)
from hpstore.benchmarks.cache.lru_reference import Lru

SMALL = CacheScale(rows=256, record_bytes=8192, bytes_per_second=1e9)


def test_all_contenders_hand_out_the_same_batches(tmp_path: Path) -> None:
    """The LRU and the cache have hits, and read less than what was asked for."""
    kept: list[list[str]] = []
    found = measure_end_to_end(
        scale=SMALL, repeats=1, directory=tmp_path, keep=lambda so_far: kept.append(list(so_far))
    )
    assert [len(so_far) for so_far in kept] == [5, 6, 7]  # four facts, and a case after the other
    for name in ("importance", "two jobs", "full shuffle, one epoch"):
        assert found[name]["same_batches"] is True
    rows = found["importance"]["contenders"]
    assert rows[LRU]["hits"] > 0
    for who in ("hpstore", "hpstore, order unknown"):
        assert 0 < rows[who]["source_bytes"] < 2 * 256 * 8192
        assert rows[who].get("order_left_total", 0) == 0
    assert "hpstore to LRU" in found["two jobs"]
    assert not list(tmp_path.iterdir())


def test_other_batches_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that hands out wrong bytes ends the benchmark."""
    whole = Lru.find

    def damaged(self: Lru, keys: list[tuple[int, int]]) -> list[object]:
        return [None if data is None else data ^ 1 for data in whole(self, keys)]

    monkeypatch.setattr(Lru, "find", damaged)
    with pytest.raises(AssertionError, match="LRU handed out other batches"):
        measure_end_to_end(scale=SMALL, repeats=1, directory=tmp_path)


def test_verdicts_compare_repetition_by_repetition() -> None:
    """The median of ratios, against both rivals; against nothing at all within 2 %."""
    found = verdicts({NOTHING: [10.0, 20.0, 10.0], LRU: [8.0, 16.0, 8.0], "ours": [6.9, 13.8, 9.0]})
    assert found["ours to no cache"]["ratio"] == 0.69
    assert found["ours to no cache"]["met"] is True
    assert found["ours to LRU"]["met"] is False
    once = verdicts({NOTHING: [10.0], "ours": [10.3]})
    assert once == {
        "ours to no cache": {
            "ratio": 1.03,
            "lowest": 1.03,
            "highest": 1.03,
            "bar": 1.02,
            "met": False,
        },
    }


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 6))
def test_the_lru_keeps_what_was_used_last(requests: list[int], room: int) -> None:
    """Against a list of the last distinct records."""
    lru, last = Lru(room * 8), deque[int](maxlen=room)
    for number in requests:
        found = lru.find([(0, number)])[0]
        assert (found is not None) == (number in last)
        if found is None:
            lru.keep([((0, number), np.full(8, number, np.uint8))])
        else:
            assert set(found.tolist()) == {number}
            last.remove(number)
        last.append(number)
        assert lru.used_bytes == 8 * len(last)
