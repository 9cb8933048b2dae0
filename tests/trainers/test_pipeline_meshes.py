"""Pipelines beside tensor parallelism: four processes in a mesh train what one process trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpstore.checkpoint import Checkpointer
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset
from hpstore.trainers.pipelining import PipelineHooks, make_schedule
from tests.integration.ranks import launch, open_pool
from tests.trainers.pipelines import LAYERS, ROWS, WIDTH, squared

STEPS, NORM = 2, 0.05


class Block(nn.Module):
    """Two layers, the one split by its columns and the other by its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, WIDTH) -> (rows, WIDTH)
        out: torch.Tensor = x + self.b(torch.tanh(self.a(x)))
        return out


class Blocks(nn.Module):
    """Blocks start .. stop - 1 of the model."""

    def __init__(self, start: int, stop: int, tensor: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        whole = [Block() for _ in range(LAYERS)]
        self.layers = nn.ModuleDict({str(n): whole[n] for n in range(start, stop)})
        for block in self.layers.values() if tensor is not None else ():
            parallelize_module(block, tensor, {"a": ColwiseParallel(), "b": RowwiseParallel()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers.values():
            x = block(x)
        return x


# Any: GradScalers, meshes and options have no public types
def trained(
    directory: Path,
    ranks: DeviceMesh | None,
    prefix: str | None,
    *,
    scaler: Any = None,
    loader_mesh: Any = None,
    spoilt: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Some steps of this rank; losses, samples, norms, and where it takes itself to stand."""
    pool = open_pool(directory)
    stage, count = (0, 1) if ranks is None else (ranks.get_local_rank("pp"), ranks["pp"].size())
    group = None if ranks is None else ranks.get_group("pp")
    seen: list[int] = []
    norms: list[float] = []

    def noted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.extend(batch["id"].tolist())
        return batch["x"].clone()

    loader = DataLoader(
        Dataset(pool, "samples"), batch_size=ROWS, shuffle=True, drop_last=True, mesh=loader_mesh
    )
    checkpointer = None if prefix is None else Checkpointer(pool, prefix)
    hooks = PipelineHooks(
        checkpointer,
        loader,
        stages=[stage],
        num_stages=count,
        inputs=noted,
        target="y",
        before_optimizer=lambda: norms.append(hooks.clip_grad_norm(NORM)),
        **options,
    )
    part = Blocks(
        LAYERS * stage // count,
        LAYERS * (stage + 1) // count,
        None if ranks is None else ranks["tp"],
    )
    built = hooks.wrap_stage(PipelineStage)(part, stage, count, torch.device("cpu"), group=group)
    loss = squared if scaler is None else hooks.loss(squared)
    schedule = make_schedule("gpipe", [built], 4, loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    try:
        start = hooks.restore(built, optimizer, scaler=scaler)
        if spoilt:  # on one tensor-parallel rank of one stage alone
            assert ranks is not None
            if (ranks.get_local_rank("tp"), stage) == (1, 0):
                first: Any = next(part.parameters())
                first.register_hook(lambda g: g * float("inf"))
        losses = [hooks.step(schedule, optimizer).loss for _ in range(STEPS)]
        if checkpointer is not None:
            hooks.save().result()
        return {
            "losses": losses,
            "seen": seen[: STEPS * 4 * ROWS],
            "norms": norms,
            "start": start,
            "ledger": hooks.ledger.samples,
            "place": [hooks.place.replica, hooks.place.replicas],
            "skipped": hooks.counters["steps_skipped_by_scaler_total"],
        }
    finally:
        hooks.close()
        if checkpointer is not None:
            checkpointer.close()
        loader.close()
        pool.close()


def alone(rank: int, world: int, directory: Path, prefix: str) -> None:
    """The unsplit model on one process."""
    (directory / f"alone-{prefix}.json").write_text(json.dumps(trained(directory, None, prefix)))


def in_mesh(rank: int, world: int, directory: Path) -> None:
    """Two stages, two tensor-parallel ranks each, told by the hooks' mesh or by the loader's."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    wanted = json.loads((directory / "alone-one.json").read_text())
    group = mesh.get_group("pp")
    told: list[dict[str, Any]] = [
        {"mesh": mesh},
        {"group": group, "loader_mesh": mesh},
        {"group": group, "mesh": mesh},
    ]
    for n, options in enumerate(told):
        found = trained(directory, mesh, f"mesh{n}", **options)
        assert found["place"] == [0, 1]
        assert found["ledger"] == wanted["ledger"] == STEPS * 4 * ROWS
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        if mesh.get_local_rank("pp") == 0:
            assert found["seen"] == wanted["seen"]
        else:
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    dist.barrier()


def refused(rank: int, world: int, directory: Path) -> None:
    """Without a mesh, all ranks say so; nobody waits for another one, and nothing was read."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    with pytest.raises(ConfigError, match="tensor parallelism") as raised:
        trained(directory, mesh, None, group=mesh.get_group("pp"))
    assert "PipelineHooks(mesh=)" in str(raised.value)
    dist.barrier()
    with pytest.raises(ConfigError, match="rank 3: this stage does not tell"):
        _one_unwrapped(directory, mesh)
    dist.barrier()


def _one_unwrapped(directory: Path, mesh: DeviceMesh) -> None:
    """What is wrong on one rank alone is raised on all."""
    pool = open_pool(directory)
    stage = mesh.get_local_rank("pp")
    loader = DataLoader(Dataset(pool, "samples"), batch_size=ROWS, drop_last=True)
    hooks = PipelineHooks(None, loader, stages=[stage], num_stages=2, mesh=mesh)
    part = Blocks(2 * stage, 2 * stage + 2, mesh["tp"])
    kind = PipelineStage if dist.get_rank() == 3 else hooks.wrap_stage(PipelineStage)
    built = kind(part, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    hooks.restore(built, torch.optim.SGD(part.parameters(), lr=0.1))


def overflowing(rank: int, world: int, directory: Path) -> None:
    """An infinity in one shard of one stage: all four ranks skip the step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    found = trained(directory, mesh, None, mesh=mesh, scaler=scaler, spoilt=True)
    assert found["skipped"] == STEPS
    dist.barrier()


def test_tensor_parallel_pipelines_train_as_one_process_does(directory: Path) -> None:
    """u_pp_tp: the tensor-parallel ranks of a stage read the same samples, the ledger counts them
    once, and the norm is that of the unsplit model."""
    launch(directory, 1, alone, "one")
    launch(directory, 4, in_mesh)


def test_split_tensors_without_a_mesh_are_refused_on_all_ranks(directory: Path) -> None:
    """u_pp_tp, without a mesh: it trained on other samples per tensor-parallel rank, silently."""
    launch(directory, 4, refused)


def test_an_overflow_in_one_shard_is_one_on_all_ranks(directory: Path) -> None:
    """b_scaler_void, m: versions of the weights stay alike over shards, too."""
    launch(directory, 4, overflowing)
