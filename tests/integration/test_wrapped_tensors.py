"""Tensors that wrap others have one address, 0, and are none of the bytes that a save copies: they
are refused wherever they come from, and never taken for one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import hpstore
from hpstore.checkpoint import Checkpointer, Stager, StorageWriter
from hpstore.checkpoint.format.items import whole
from hpstore.checkpoint.format.segment_plan import Chunk, place
from hpstore.errors import CheckpointError
from tests.integration.ranks import launch, make_pool, open_pool, raised

ROWS = 30_000


def wrapped(value: float) -> torch.Tensor:
    """Two tensors as one, as float8 weights are beside their scales."""
    one, other = torch.full((ROWS,), value), torch.zeros(ROWS)
    made: torch.Tensor = TwoTensor(one, other)  # type: ignore[no-untyped-call]
    return made


def _save_shards(rank: int, world: int, directory: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))

    def sharded(tensor: torch.Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)

    freed = sharded(torch.ones(ROWS))
    freed.to_local().untyped_storage().resize_(0)
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        state = {"a": sharded(wrapped(1.0)), "b": sharded(wrapped(2.0))}
        assert "the shard of 'a' is a TwoTensor" in raised(lambda: ckpt.save(1, state))
        into = {"a": sharded(torch.ones(ROWS)), "b": sharded(torch.ones(ROWS))}
        assert "the shard of 'f' is a tensor whose storage was freed" in raised(
            lambda: ckpt.save(1, {"f": freed})
        )
        ckpt.save(2, into).result()
        assert "the shard of 'a' is a TwoTensor" in raised(lambda: ckpt.restore(state, 2))


def test_shards_that_wrap_tensors_are_refused(tmp_path: Path) -> None:
    """FSDP2's of float8 with all-gather in float8: all layers of a shape were saved as the first,
    without a word."""
    make_pool(tmp_path)
    launch(tmp_path, 1, _save_shards)


def test_no_two_tensors_without_an_address_share_a_place() -> None:
    """A plan copies each, whatever it is."""
    chunks = [
        Chunk(name=name, dtype="float32", shape=(ROWS,), box=whole((ROWS,)), tensor=wrapped(value))
        for name, value in (("a", 1.0), ("b", 2.0))
    ]
    (piece,) = place(chunks)
    assert piece.copies == (0, 1)
    assert piece.items[0].offset != piece.items[1].offset


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_saves_none(pool: hpstore.Pool) -> None:
    """Its writer read the memory at address 0, its stager kept the last of the tensors inside."""
    state: dict[str, Any] = {"a": wrapped(1.0), "b": wrapped(2.0)}
    with pytest.raises(CheckpointException, match="'a' is a TwoTensor, made of several tensors"):
        dcp_save(state, storage_writer=StorageWriter(pool, "dcp"), no_dist=True)
    assert pool.list("dcp/segment") == []
    stager = Stager()
    with pytest.raises(CheckpointError, match="is a TwoTensor, made of several tensors"):
        stager.stage(state)
    stager.close()
