"""torch's ZeroRedundancyOptimizer: each rank has the moments of its share of the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.errors import CheckpointError
from tests.integration.ranks import HIDDEN, INPUTS, launch, make_pool, open_pool


def trained(
    ckpt: Checkpointer, net: Any, optimizer: Any, until: int, *, rank: int = 0, world: int = 1
) -> list[float]:
    """Restored, trained with this rank's part of each batch, saved; the losses."""
    state = {"model": net, "optimizer": optimizer}
    start = ckpt.restore(state) or 0
    drawn = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, INPUTS, generator=drawn) for _ in range(until)]
    losses = []
    for batch in batches[start:]:
        optimizer.zero_grad()
        loss = net(batch.chunk(world)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ckpt.save(until, state).result()
    return losses


def net_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, INPUTS)
    )


def sharing(rank: int, world: int, directory: Path) -> None:
    """Three steps, two more by as many ranks, two more by one rank with plain AdamW; all equal to
    a run that was never stopped, of DDP with AdamW."""
    pool = open_pool(directory)

    def run(prefix: str, until: int, staging: str = "overlap", *, zero: bool = True) -> list[float]:
        net = DistributedDataParallel(net_of(until))
        kind: Any = torch.optim.AdamW
        optimizer = (
            ZeroRedundancyOptimizer(net.parameters(), kind, lr=1e-2)
            if zero
            else kind(net.parameters(), lr=1e-2)
        )
        if prefix == "plain":
            net.module.load_state_dict(net_of(3).state_dict())
        with Checkpointer(pool, prefix, save=SaveOptions(staging=staging)) as ckpt:
            return trained(ckpt, net, optimizer, until, rank=rank, world=world)

    found = run("zero", 3) + run("zero", 5)
    assert found == pytest.approx(run("plain", 5, zero=False), abs=1e-6)
    dist.barrier()
    if rank == 0:
        net = net_of(0)
        with Checkpointer(pool, "zero", group="alone") as ckpt:
            adamw = torch.optim.AdamW(net.parameters(), lr=0.5)
            trained(ckpt, net, adamw, 7)
            assert adamw.param_groups[0]["lr"] == 1e-2
            names = {item.name for item in ckpt.steps.manifest(5).items}
        moments = {name for name in names if name.startswith("optimizer/state/")}
        assert len(moments) == 3 * 4
    nameless = ZeroRedundancyOptimizer(net_of(1).parameters(), torch.optim.AdamW, lr=1e-2)
    with (
        Checkpointer(pool, f"nameless-{rank}", group="alone") as ckpt,
        pytest.raises(CheckpointError, match="put its model into the state"),
    ):
        ckpt.save(1, {"optimizer": nameless})
    dist.barrier()


def test_a_share_of_the_moments_is_saved_by_each_rank(tmp_path: Path) -> None:
    """r_zero1: it asked for consolidate_state_dict(), and its inner optimizer had to be known."""
    make_pool(tmp_path)
    launch(tmp_path, 2, sharing)
