"""FullyShardedDataParallel (FSDP1): refused by the Checkpointer, saved through DCP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel

from hpstore.checkpoint import Checkpointer, StorageReader, StorageWriter
from hpstore.errors import CheckpointError
from tests.integration.ranks import launch, make_pool, open_pool

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Without it torch itself cannot load a rank whose parameter groups are empty."""


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A net in FSDP1 with moments; the same on each call, but for the steps."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have FSDP2
        model = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 7) * (dist.get_rank() + 1)).square().sum().backward()
        optimizer.step()


def shards(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def refused_and_saved(rank: int, world: int, directory: Path) -> None:
    """The Checkpointer names the line to change; DCP resumes bit by bit over a StorageWriter."""
    warnings.simplefilter("ignore")
    straight, _ = trained(5)
    model, optimizer = trained(3)
    with open_pool(directory) as pool:
        with Checkpointer(pool, "run") as ckpt:
            for state in ({"model": model}, {"model": model, "optimizer": optimizer}):
                with pytest.raises(
                    CheckpointError, match=r"Write fully_shard\(model\) in the place"
                ):
                    ckpt.save(1, state)
            assert ckpt.steps() == []
        parts: dict[str, Any] = dict(
            zip(("m", "o"), get_state_dict(model, optimizer, options=FLAT), strict=True)
        )
        save(parts, storage_writer=StorageWriter(pool, "dcp"))
        again, moments = trained(1)
        into: dict[str, Any] = dict(
            zip(("m", "o"), get_state_dict(again, moments, options=FLAT), strict=True)
        )
        load(into, storage_reader=StorageReader(pool, "dcp"))
        set_state_dict(
            again, moments, model_state_dict=into["m"], optim_state_dict=into["o"], options=FLAT
        )
        go_on(again, moments, 2)
        pairs = zip(shards(again), shards(straight), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("world", [1, 2])
def test_fsdp1_is_refused_with_the_line_to_change_and_saved_through_dcp(
    tmp_path: Path, world: int
) -> None:
    """On one rank, where nothing is sharded, and on two."""
    make_pool(tmp_path)
    launch(tmp_path, world, refused_and_saved)
