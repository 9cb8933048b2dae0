"""Pieces of many sizes are joined byte for byte, and nobody's number of threads changes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hpstore.codec.galois import Bytes
from hpstore.loaders import joining
from hpstore.loaders.joining import LARGE_BYTES, join


def pieces_of(sizes: list[int]) -> list[Bytes]:
    """Views of one array that are not aligned to anything."""
    source = np.random.default_rng(7).integers(0, 256, sum(sizes) + len(sizes) + 1, np.uint8)
    starts = np.cumsum([1, *(size + 1 for size in sizes)])
    return [source[at : at + size] for at, size in zip(starts.tolist(), sizes, strict=False)]


@given(
    sizes=st.lists(st.integers(0, 3 * LARGE_BYTES) | st.just(0), min_size=1, max_size=12),
    writable=st.booleans(),
    openmp=st.booleans(),
)
@example(sizes=[3 * LARGE_BYTES + 1, 0, 5, 2 * LARGE_BYTES], writable=True, openmp=True)
@example(sizes=[3 * LARGE_BYTES + 1, 0, 5, 2 * LARGE_BYTES], writable=True, openmp=False)
@example(sizes=[3 * LARGE_BYTES + 1, 0, 5, 2 * LARGE_BYTES], writable=False, openmp=True)
def test_what_is_joined_is_what_the_pieces_hold(
    sizes: list[int], writable: bool, openmp: bool
) -> None:
    """By numpy or by torch: small and large pieces, empty ones, bytes that nobody may write."""
    pieces, out = pieces_of(sizes), np.zeros(sum(sizes) + 2, np.uint8)
    pieces[0].flags.writeable = writable
    with pytest.MonkeyPatch.context() as patch:
        if not openmp:
            patch.setattr(joining, "_set_threads", None)
        join(pieces, out[1:-1])
    assert out[1:-1].tobytes() == b"".join(one.tobytes() for one in pieces)
    assert out[0] == out[-1] == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_join_computes_alone_and_leaves_torchs_threads_as_they_were(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Those of its own thread, when it fails too, of others meanwhile, of threads that begin
    later."""
    inside: list[int] = []
    cat = torch.cat

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        inside.append(torch.get_num_threads())
        inside.append(numbers_of_a_new_thread())
        if fails:
            raise MemoryError
        return cat(*args, **kwargs)

    monkeypatch.setattr(torch, "cat", noted)
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pieces = pieces_of([LARGE_BYTES, LARGE_BYTES])
        if fails:
            with pytest.raises(MemoryError):
                join(pieces, np.empty(2 * LARGE_BYTES, np.uint8))
        else:
            join(pieces, np.empty(2 * LARGE_BYTES, np.uint8))
        assert inside == [1, 3]
        assert (torch.get_num_threads(), numbers_of_a_new_thread()) == (3, 3)
    finally:
        torch.set_num_threads(usual)


def numbers_of_a_new_thread() -> int:
    """How many threads torch would use in a thread that begins now."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_that_numpy_joins_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where torch's OpenMP is not to be found."""
    monkeypatch.setattr(joining, "_set_threads", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    joining._say_that_numpy_joins.cache_clear()
    for _ in range(2):
        join(pieces_of([LARGE_BYTES]), np.empty(LARGE_BYTES, np.uint8))
    assert [r.message for r in caplog.records if "joined by numpy" in r.message] != []
    assert len(caplog.records) == 1
