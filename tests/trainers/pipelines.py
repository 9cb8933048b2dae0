"""What the tests of pipelines share: a model in stages, its data, one rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.trainers.pipelining import PipelineHooks, make_schedule, stages_of

WIDTH, LAYERS, ROWS = 160, 4, 2  # a layer has 100 KB: its copy can be deferred
SAMPLES = 92  # an epoch ends in the middle of a step of 4 micro-batches


class Part(nn.Module):
    """Layers start .. stop - 1 of the model, by their numbers in it."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        whole = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.layers = nn.ModuleDict({str(n): whole[n] for n in range(start, stop)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, WIDTH) -> (rows, WIDTH)
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x


def write_samples(pool: hpstore.Pool) -> None:
    """Data set "samples": vectors x and y, and the number of each."""
    rng = np.random.default_rng(1)
    fields = {
        "x": Field("float32", (WIDTH,)),
        "y": Field("float32", (WIDTH,)),
        "id": Field("int64", ()),
    }
    with DatasetWriter(pool, "samples", fields) as writer:
        writer.write_batch(
            {
                "x": rng.standard_normal((SAMPLES, WIDTH), np.float32),
                "y": rng.standard_normal((SAMPLES, WIDTH), np.float32),
                "id": np.arange(SAMPLES),
            }
        )


def squared(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The loss of a micro-batch."""
    return (out - wanted).square().mean()


@dataclass(slots=True)
class Trainer:
    """One rank of a pipeline."""

    hooks: PipelineHooks
    stages: list[PipelineStage]
    schedule: Any  # Any: torch's schedules have no common public type
    optimizer: torch.optim.Optimizer
    checkpointer: Checkpointer | None
    loader: DataLoader
    seen: list[int]  # ids that went into the first stage, or were compared with in the last

    def wait(self) -> Checkpointer:
        """The checkpointer, with nothing on its way."""
        assert self.checkpointer is not None
        self.checkpointer.wait()
        return self.checkpointer

    def close(self) -> None:
        """End what runs in the background."""
        self.hooks.close()
        if self.checkpointer is not None:
            self.checkpointer.close()
        self.loader.close()


@dataclass(frozen=True, slots=True)
class Side:
    """This rank's pipeline among several of `size` ranks each, one behind the other.

    `pipeline`, `stage`: groups of the ranks of this pipeline, and of those with this stage.
    """

    rank: int
    size: int
    pipeline: Any = None  # Any: torch's process groups have no public type
    stage: Any = None

    @classmethod
    def of(cls, replicas: int) -> Side:
        """Collective: every rank makes all groups."""
        rank, world = dist.get_rank(), dist.get_world_size()
        if replicas == 1:
            return cls(rank, world)
        size = world // replicas
        pipelines = [
            dist.new_group(list(range(n * size, n * size + size))) for n in range(replicas)
        ]
        stages = [dist.new_group(list(range(n, world, size))) for n in range(size)]
        return cls(rank % size, size, pipelines[rank // size], stages[rank % size])

    def average(self, module: nn.Module) -> None:
        """Make gradients those of all replicas."""
        if self.stage is not None:
            for parameter in module.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=self.stage)
                parameter.grad /= dist.get_world_size(self.stage)


def build(
    pool: hpstore.Pool,
    name: str,
    *,
    microbatches: int = 4,
    rows: int = ROWS,
    replicas: int = 1,
    prefix: str | None = "run",
    part: Callable[[int, int], nn.Module] = Part,
    **options: Any,
) -> Trainer:
    """This rank of a pipeline over all ranks, or of one of several. `prefix`: None saves nothing.
    `rows`: samples of a micro-batch. `options`: of PipelineHooks. Collective."""
    side = Side.of(replicas)
    mine = stages_of(name, side.rank, side.size)
    count = side.size * len(mine)
    seen: list[int] = []

    def noted(field: str) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
        def take(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if field == "x" or 0 not in mine:
                seen.extend(batch["id"].tolist())
            return batch[field].clone()

        return take

    loader = DataLoader(Dataset(pool, "samples"), batch_size=rows, shuffle=True, drop_last=True)
    checkpointer = None if prefix is None else Checkpointer(pool, prefix)
    stages: list[PipelineStage] = []
    if replicas > 1:

        def average() -> None:
            for stage in stages:
                side.average(stage.submod)

        options["before_optimizer"] = average
    hooks = PipelineHooks(
        checkpointer,
        loader,
        stages=mine,
        num_stages=count,
        inputs=noted("x"),
        target=noted("y"),
        group=side.pipeline,
        **options,
    )
    cuts = [LAYERS * n // count for n in range(count + 1)]
    kind = hooks.wrap_stage(PipelineStage)
    stages += [
        kind(part(cuts[n], cuts[n + 1]), n, count, torch.device("cpu"), group=side.pipeline)
        for n in mine
    ]
    schedule = make_schedule(name, stages, microbatches, squared)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    return Trainer(hooks, stages, schedule, optimizer, checkpointer, loader, seen)
