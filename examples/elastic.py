"""Four ranks save, die and lose disks; two ranks, then one, go on from where they were.

    python examples/elastic.py

A model sharded by FSDP2 over four processes (gloo, CPU) and one under tensor parallelism are
trained and saved into one pool; every process is killed in the middle of the next save; two of the
six disks are deleted; two processes and one load the checkpoint and compare every value.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hpstore
from hpstore.checkpoint import Checkpointer

Values = dict[str, torch.Tensor]
STEPS = 3


def make(kind: str, world: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model, sharded over `world` ranks in one of two ways, and its optimizer."""
    torch.manual_seed(0)
    hidden = 1021 if kind == "fsdp" else 1020  # FSDP2 shards unevenly, tensor parallelism does not
    model = torch.nn.Sequential(
        torch.nn.Linear(256, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 64)
    )
    mesh = init_device_mesh("cpu", (world,))
    if kind == "fsdp":
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Values:
    """Parameters and moments, whole. Collective."""
    found: Values = {}
    for name, parameter in model.named_parameters():
        for what, tensor in (("", parameter), *optimizer.state[parameter].items()):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[f"{name}.{what}"] = whole.detach().clone()
    return found


def train(rank: int, world: int, kind: str, pool: str, out: str) -> None:
    """Train, save, and be killed in the middle of the next save."""
    model, optimizer = make(kind, world)
    with hpstore.open(pool) as opened:
        ckpt = Checkpointer(opened, f"runs/{kind}")
        for step in range(STEPS):
            torch.manual_seed(100 + step)
            model(torch.randn(16, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ckpt.save(STEPS, {"model": model, "optimizer": optimizer}).result()
        whole = values(model, optimizer)
        if rank == 0:
            torch.save(whole, out)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        dist.barrier()
        ckpt.save(STEPS + 1, {"model": model, "optimizer": optimizer})
        os.kill(os.getpid(), signal.SIGKILL)


def load(rank: int, world: int, kind: str, pool: str, out: str) -> None:
    """Load the newest step into a fresh model over other ranks and compare every value."""
    model, optimizer = make(kind, world)
    with hpstore.open(pool) as opened, Checkpointer(opened, f"runs/{kind}") as ckpt:
        step = ckpt.restore({"model": model, "optimizer": optimizer})
        found, wanted = values(model, optimizer), torch.load(out)
        same = found.keys() == wanted.keys() and all(
            torch.equal(found[name], wanted[name]) for name in wanted
        )
        if step != STEPS or not same:
            raise SystemExit(f"{kind} on {world}: step {step}, values differ")
        if rank == 0:
            print(
                f"{kind}: saved by 4 ranks, step {step} on {world}: {len(wanted)} tensors "
                "identical",
                flush=True,
            )


def enter(rank: int, job: Callable[..., None], world: int, store: str, *args: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    job(rank, world, *args)
    dist.destroy_process_group()


def launch(root: Path, job: Callable[..., None], world: int, kind: str, *, dies: bool) -> None:
    """Run `job` on `world` processes."""
    args = (kind, str(root / "pool.toml"), str(root / f"{kind}.pt"))
    store = str(root / f"store-{job.__name__}-{kind}-{world}")
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=enter, args=(rank, job, world, store, *args))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    wanted = -signal.SIGKILL if dies else 0
    if any(rank.exitcode != wanted for rank in ranks):
        raise SystemExit(f"{kind} on {world}: exit codes {[rank.exitcode for rank in ranks]}")


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="hpstore-elastic-") as name:
        root = Path(name)
        disks = [root / f"disk{n}" for n in range(6)]
        hpstore.create(disks, data=4, parity=2, config=root / "pool.toml").close()
        for kind in ("fsdp", "tensor-parallel"):
            launch(root, train, 4, kind, dies=True)
        print("both jobs were killed in the middle of a save", flush=True)
        for disk in (disks[1], disks[4]):
            shutil.rmtree(disk)
        print("two of six disks are deleted", flush=True)
        for kind in ("fsdp", "tensor-parallel"):
            for world in (2, 1):
                launch(root, load, world, kind, dies=False)


if __name__ == "__main__":
    sys.exit(main())
