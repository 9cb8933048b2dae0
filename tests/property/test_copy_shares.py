"""Shares of a copy that threads take in turn: all bytes, few of them, small at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hpstore.checkpoint.save import host_copy
from hpstore.checkpoint.save.host_copy import Copier, Pair, shares
from hpstore.units import KIB

PIECE = 64 * KIB


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Pieces of 64 KiB, shares of 1 MiB at most: small tensors show the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "PIECE_BYTES", PIECE)
        patch.setattr(host_copy, "MAX_SHARE_BYTES", 16 * PIECE)
        yield


def pairs_of(sizes: list[int]) -> list[Pair]:
    """Targets of zeros, sources of ones and more."""
    return [
        (torch.zeros(size, dtype=torch.uint8), torch.full((size,), n % 200 + 1, dtype=torch.uint8))
        for n, size in enumerate(sizes)
    ]


SIZES = st.lists(st.integers(1, 40 * PIECE), max_size=12)


@given(sizes=SIZES, threads=st.integers(1, 9))
@example(sizes=[40 * PIECE], threads=1)
def test_shares_are_all_pieces_in_order_and_the_last_is_small(
    sizes: list[int], threads: int
) -> None:
    """What threads wait for at the end is hardly more than a piece; none is larger than is said."""
    pairs = pairs_of(sizes)
    found = [[len(piece) for _, piece in share] for share in shares(pairs, threads)]
    wanted = [
        min(PIECE, size - at)
        for size in sizes
        if size >= host_copy.SMALL_BYTES
        for at in range(0, size, PIECE)
    ]
    assert [length for share in found for length in share] == wanted
    assert all(sum(share) < host_copy.MAX_SHARE_BYTES + PIECE for share in found)
    if found and all(size >= host_copy.SMALL_BYTES for size in sizes):
        assert sum(found[-1]) <= 1.5 * PIECE


def test_a_large_copy_is_taken_in_few_shares() -> None:
    """Each one is a hand-over of the interpreter's lock: 256 pieces in a tenth as many."""
    found = list(shares(pairs_of([256 * PIECE]), 2))
    assert len(found) < 40
    assert len(found[-1]) == 1


@given(sizes=SIZES, helpers=st.integers(0, 3))
def test_all_is_copied_by_any_number_of_threads(sizes: list[int], helpers: int) -> None:
    """Also what is too small to be a piece."""
    pairs, copier = pairs_of(sizes), Copier()
    copier._helpers = helpers
    try:
        copier.run(pairs)
    finally:
        copier.close()
    for target, source in pairs:
        assert torch.equal(target, source)
