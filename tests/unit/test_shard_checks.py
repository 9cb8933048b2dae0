"""Shards are as their placement says, and staged whole, or the save is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Partial

from hpstore.checkpoint.format.items import Box, Item, require_cover
from hpstore.checkpoint.format.segment_plan import chunks_of
from hpstore.errors import CheckpointError


def test_a_shard_of_another_size_than_its_placement_says_is_refused() -> None:
    """r_uneven: boxes that cover the tensor on paper, with bytes that do not."""
    part = SimpleNamespace(offsets=(0,), sizes=(3,))

    def made(rows: int) -> object:
        return SimpleNamespace(
            dtype=torch.float32,
            shape=(5,),
            numel=lambda: 5,
            __create_chunk_list__=lambda: [part],
            __get_tensor_shard__=lambda _: torch.zeros(rows),
        )

    assert chunks_of("t", made(3))[0].box.sizes == (3,)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="local shard on this rank has shape"):
        chunks_of("t", made(1))  # type: ignore[arg-type]


def test_values_that_are_not_summed_yet_are_refused_by_name() -> None:
    """multi.py `fromlocal`: torch's own ValueError said neither which tensor nor what to do."""
    tensor = SimpleNamespace(
        dtype=torch.float32, shape=(3,), placements=(Partial(),), __create_chunk_list__=list
    )
    with pytest.raises(CheckpointError, match=r"'t' is a DTensor of partial values.*redistribute"):
        chunks_of("t", tensor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "good"), [((12, 8), True), ((4, 16), False), ((12, 4), False), ((0, 8), False)]
)
def test_a_commit_counts_the_bytes_that_were_staged(lengths: tuple[int, int], good: bool) -> None:
    """r_uneven: the boxes cover the tensor, the staged bytes must be all of each box."""
    items = [
        Item(
            name="t",
            dtype="float32",
            shape=(5,),
            box=Box(offsets=(at,), sizes=(n,)),
            offset=0,
            length=length,
        )
        for (at, n), length in zip([(0, 3), (3, 2)], lengths, strict=True)
    ]
    if good:
        require_cover(items, ["t"])
    else:
        with pytest.raises(CheckpointError, match="bytes were staged"):
            require_cover(items, ["t"])
