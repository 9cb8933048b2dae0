"""Pieces of many sizes are joined byte for byte, and nobody's number of threads changes."""

from __future__ import annotations

import platform
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hpstore.codec.galois import Bytes
from hpstore.loaders.batching import gather_copy, streaming_copy
from hpstore.loaders.batching.gather_copy import LARGE_BYTES, How, Pieces, join
from hpstore.loaders.batching.streaming_copy import PIECE_BYTES

MIXED = [3 * LARGE_BYTES + 1, 0, 5, 2 * LARGE_BYTES]


def pieces_of(sizes: list[int]) -> list[Bytes]:
    """Views of one array that are not aligned to anything."""
    source = np.random.default_rng(7).integers(0, 256, sum(sizes) + len(sizes) + 1, np.uint8)
    starts = np.cumsum([1, *(size + 1 for size in sizes)])
    return [source[at : at + size] for at, size in zip(starts.tolist(), sizes, strict=False)]


def ranges_of(views: list[Bytes]) -> Pieces:
    """The same views of pieces_of() as ranges of their array."""
    source: Bytes = views[0].base  # type: ignore[assignment]
    starts = [one.ctypes.data - source.ctypes.data for one in views]
    return Pieces(source, np.array(starts, np.int64), np.array([len(one) for one in views]))


def joined_plainly(views: list[Bytes]) -> bytes:
    return b"".join(one.tobytes() for one in views)


@given(
    sizes=st.lists(st.integers(0, 3 * LARGE_BYTES) | st.just(0), min_size=1, max_size=12),
    writable=st.booleans(),
    openmp=st.booleans(),
    large=st.booleans(),
    ranges=st.booleans(),
)
@example(sizes=MIXED, writable=True, openmp=True, large=False, ranges=False)
@example(sizes=MIXED, writable=True, openmp=False, large=False, ranges=False)
@example(sizes=MIXED, writable=False, openmp=True, large=False, ranges=False)
@example(sizes=MIXED, writable=True, openmp=True, large=True, ranges=False)
@example(sizes=MIXED, writable=False, openmp=True, large=True, ranges=False)
@example(sizes=MIXED, writable=True, openmp=True, large=True, ranges=True)
def test_what_is_joined_is_what_the_pieces_hold(
    sizes: list[int], writable: bool, openmp: bool, large: bool, ranges: bool
) -> None:
    """By numpy, by torch, past the cache: small and large pieces, empty ones, bytes that nobody may
    write, views and ranges of one memory."""
    pieces, out = pieces_of(sizes), np.zeros(sum(sizes) + 2, np.uint8)
    pieces[0].flags.writeable = writable
    if ranges:
        pieces[0].base.flags.writeable = writable  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patch:
        if not openmp:
            patch.setattr(gather_copy, "_set_threads", None)
        if large:
            patch.setattr(streaming_copy, "LARGE_BYTES", 0)
            patch.setattr(streaming_copy, "PIECE_BYTES", 0)
        join(ranges_of(pieces) if ranges else pieces, out[1:-1])
    assert out[1:-1].tobytes() == joined_plainly(pieces)
    assert out[0] == out[-1] == 0


@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_how_a_large_batch_was_joined_is_told(
    monkeypatch: pytest.MonkeyPatch, there: bool, ranges: bool
) -> None:
    """What is to go past the cache and cannot is told apart from what need not."""
    called: list[int] = []

    def past(addresses: Any, lengths: Any, out: Bytes) -> None:
        called.append(len(out))

    monkeypatch.setattr(streaming_copy, "_installed", lambda: past if there else None)
    monkeypatch.setattr(streaming_copy, "_library", lambda: None)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    views = pieces_of([LARGE_BYTES] * 4)
    pieces = ranges_of(views) if ranges else views
    out = np.empty(4 * LARGE_BYTES, np.uint8)
    assert join(pieces, out) is How.USUALLY
    monkeypatch.setattr(streaming_copy, "LARGE_BYTES", len(out))
    assert join(pieces, out) is (How.PAST_THE_CACHE if there else How.THROUGH_THE_CACHE)
    assert called == [len(out)] * there
    small = pieces_of([PIECE_BYTES - 1] * 5)  # by their mean: whatever they are in all
    assert join(small, np.empty(5 * (PIECE_BYTES - 1), np.uint8)) is How.USUALLY


@pytest.mark.parametrize(
    ("start", "length"),
    [(-1, 8), (93, 8), (101, 0), (0, -1), (2**63 - 60, 100), (0, 2**63 - 1), (-(2**63), 8)],
)
@pytest.mark.parametrize("ask", [Pieces.addresses, Pieces.views])
def test_no_piece_lies_outside_of_its_memory(start: int, length: int, ask: Any) -> None:
    """They are copied by their addresses: nothing else would stop it."""
    pieces = Pieces(np.zeros(100, np.uint8), np.array([0, start]), np.array([8, length]))
    with pytest.raises(IndexError, match="100 bytes"):
        ask(pieces)


def test_pieces_are_cut_as_their_views_would_be() -> None:
    pieces = ranges_of(pieces_of([50, 60, 70]))
    part = pieces.cut(np.array([0, 10, 70]), np.array([50, 20, 0]))
    views = pieces.views()
    wanted = [views[0], views[1][10:30], views[2][70:]]
    assert [one.tobytes() for one in part.views()] == [one.tobytes() for one in wanted]


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
    monkeypatch.setattr(gather_copy, "_set_threads", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    gather_copy._say_that_numpy_joins.cache_clear()
    for _ in range(2):
        join(pieces_of([LARGE_BYTES]), np.empty(LARGE_BYTES, np.uint8))
    assert [r.message for r in caplog.records if "joined by numpy" in r.message] != []
    assert len(caplog.records) == 1
