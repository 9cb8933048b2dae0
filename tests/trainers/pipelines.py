"""What the tests of pipelines share: a model in stages, its data, a job that trains and may die."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.trainers.pipelining import Event, PipelineHooks, make_schedule, stages_of
from tests.integration.ranks import open_pool

WIDTH, LAYERS, SAMPLES, ROWS = 160, 4, 96, 2  # a layer has 100 KB: its copy can be deferred


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
    fields = {"x": Field("float32", (WIDTH,)), "y": Field("float32", (WIDTH,)),
              "id": Field("int64", ())}  # fmt: skip
    with DatasetWriter(pool, "samples", fields) as writer:
        writer.write_batch({
            "x": rng.standard_normal((SAMPLES, WIDTH), np.float32),
            "y": rng.standard_normal((SAMPLES, WIDTH), np.float32),
            "id": np.arange(SAMPLES),
        })  # fmt: skip


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


def build(
    pool: hpstore.Pool, name: str, *, microbatches: int = 4, prefix: str | None = "run",
    part: Callable[[int, int], nn.Module] = Part, **options: Any,
) -> Trainer:  # fmt: skip
    """This rank of a pipeline over all ranks. `prefix`: None saves nothing. `options`: of
    PipelineHooks. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = stages_of(name, rank, world)
    count = world * len(mine)
    seen: list[int] = []

    def noted(field: str) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
        def take(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if field == "x" or 0 not in mine:
                seen.extend(batch["id"].tolist())
            return batch[field].clone()

        return take

    loader = DataLoader(Dataset(pool, "samples"), batch_size=ROWS, shuffle=True, drop_last=True)
    checkpointer = None if prefix is None else Checkpointer(pool, prefix)
    hooks = PipelineHooks(
        checkpointer, loader, stages=mine, num_stages=count, inputs=noted("x"),
        target=noted("y"), **options,
    )  # fmt: skip
    cuts = [LAYERS * n // count for n in range(count + 1)]
    kind = hooks.wrap_stage(PipelineStage)
    stages = [kind(part(cuts[n], cuts[n + 1]), n, count, torch.device("cpu")) for n in mine]
    schedule = make_schedule(name, stages, microbatches, squared)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    return Trainer(hooks, stages, schedule, optimizer, checkpointer, loader, seen)


def dies_at(step: int, stage: int, kind: str, microbatch: int) -> Callable[[Event], None]:
    """An observer that kills its process behind one compute call of the n-th step seen."""
    steps = 0

    def observe(event: Event) -> None:
        nonlocal steps
        if (event.stage, event.kind, event.microbatch) == (stage, kind, microbatch):
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += 1

    return observe


def train(
    rank: int, world: int, directory: Path, run: str, name: str, until: int, death: str = "",
    options: str = "{}",
) -> None:  # fmt: skip
    """Steps up to `until`, saved after every second one; each step's loss and samples to a file.

    `death`: "step stage kind micro-batch": the process dies behind that call, the others then end.
    """
    pool = open_pool(directory)
    trainer = build(pool, name, prefix=run, every=2, **json.loads(options))
    hooks = trainer.hooks
    start = hooks.restore(trainer.stages, trainer.optimizer)
    where = death.split()
    if where and int(where[1]) in hooks.stages:
        hooks.observe(dies_at(int(where[0]) - start, int(where[1]), where[2], int(where[3])))
    with open(directory / f"{run}-{rank}.jsonl", "a") as log:
        try:
            for step in range(start, until):
                trainer.seen.clear()
                record = hooks.step(trainer.schedule, trainer.optimizer)
                row = {"step": step, "loss": record.loss, "ids": list(trainer.seen),
                       "ledger": hooks.ledger.to_dict() if trainer.seen else None}  # fmt: skip
                log.write(json.dumps(row) + "\n")
                log.flush()
            trainer.wait()
        except Exception:
            if not death:
                raise
            return  # the peer is dead: torchrun would end this process now
    trainer.close()
    dist.barrier()
    pool.close()


def rows_of(directory: Path, run: str, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What the last attempt at each step has logged, by step, of the ranks together."""
    found: dict[int, dict[str, Any]] = {}
    for rank in ranks:
        path = directory / f"{run}-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            known = found.setdefault(row["step"], {})
            known.update({key: value for key, value in row.items() if value not in (None, [])})
    return dict(sorted(found.items()))


__all__ = ["LAYERS", "ROWS", "SAMPLES", "WIDTH", "Part", "Trainer", "build", "dies_at", "rows_of",
           "squared", "train", "write_samples"]  # fmt: skip
