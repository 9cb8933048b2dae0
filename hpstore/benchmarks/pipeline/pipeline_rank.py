"""One rank of the pipelines that hpstore/benchmarks/pipeline/pipeline_bench.py measures.

Ranks are processes of this machine (gloo, one thread each). A stage is a chain of matrix products
whose length is chosen so that its forward takes `forward_seconds`; for the picture it sleeps.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
from hpstore.trainers.pipelining import PipelineHooks, make_schedule

WIDTH = 512
SAMPLES, DATA_SET = 8192, "rows"  # 16 MiB
SNAPSHOTS = ("free", "bubbles", "inline")
WAYS = ("none", *SNAPSHOTS, "torch.save")
"""Of saving: not at all, with hpstore and each of its snapshots, as many trainers do it."""
# Any below: torch's schedules, and JSON
Row = dict[str, Any]


class Products(nn.Module):
    """A chain of matrix products: its backward takes about twice its forward."""

    def __init__(self, index: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {f"{index}-{n}": nn.Linear(WIDTH, WIDTH, bias=False) for n in range(depth)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, WIDTH) -> (rows, WIDTH)
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Asleep(nn.Module):
    """Sleeps for a forward and twice as long for a backward; has weights to be saved."""

    def __init__(self, index: int, seconds: float, state_bytes: int) -> None:
        super().__init__()
        self.seconds = seconds
        count = max(1, state_bytes // 12)  # AdamW keeps two moments of each
        self.weights = nn.ParameterDict({str(index): nn.Parameter(torch.ones(count))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, WIDTH) -> (rows, WIDTH)
        scale = next(iter(self.weights.values()))[0]
        slept: torch.Tensor = _Sleep.apply(x * scale, self.seconds)  # type: ignore[no-untyped-call]
        return slept


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pipeline: a step of `microbatches` of `rows` samples, a save every `every` steps (0:
    none) with one `snapshot` of PipelineHooks."""

    schedule: str = "gpipe"
    stages: int = 2
    microbatches: int = 8
    forward_seconds: float = 0.06
    rows: int = 256
    asleep: bool = False
    state_bytes: int = 0  # of a rank, when asleep
    every: int = 0
    snapshot: str = "free"


def make_pool(directory: Path) -> None:
    """Six directories, 4 + 2, and the data."""
    places = [directory / f"disk{n}" for n in range(6)]
    with (
        hpstore.create(places, data=4, parity=2, config=directory / "pool.toml") as pool,
        DatasetWriter(pool, DATA_SET, {"x": Field("float32", (WIDTH,))}) as writer,
    ):
        rows = np.random.default_rng(0).standard_normal((SAMPLES, WIDTH), np.float32)
        writer.write_batch({"x": rows})


def depth_for(case: Case) -> int:
    """How many products take `forward_seconds` while all ranks compute. Collective."""
    trial = Products(0, 8)
    x = torch.randn(case.rows, WIDTH)
    dist.barrier()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        trial(x)
        seconds.append(time.perf_counter() - began)
    one = torch.tensor([statistics.median(seconds) / 8])
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    return max(1, round(case.forward_seconds / float(one)))


class Rank:
    """This process's part of a pipeline, fed from the pool. `prefix`: of its checkpoints there."""

    def __init__(self, case: Case, pool: hpstore.Pool, prefix: str, depth: int) -> None:
        rank = dist.get_rank()
        self.checkpointer = Checkpointer(pool, prefix, keep_last=2) if case.every else None
        self.loader = DataLoader(
            Dataset(pool, DATA_SET),
            batch_size=case.rows,
            shuffle=True,
            drop_last=True,
            cache=0,  # every micro-batch is read from the devices
        )
        self.hooks = PipelineHooks(
            self.checkpointer,
            self.loader,
            stages=[rank],
            num_stages=case.stages,
            every=case.every or None,
            inputs="x",
            target="x",
            snapshot=case.snapshot,
        )
        module: Any = (
            Asleep(rank, case.forward_seconds, case.state_bytes)
            if case.asleep
            else Products(rank, depth)
        )
        kind = self.hooks.wrap_stage(PipelineStage)
        self.stage = kind(module, rank, case.stages, torch.device("cpu"))
        self.schedule = make_schedule(
            case.schedule, [self.stage], case.microbatches, nn.functional.mse_loss
        )
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
        self.hooks.restore(self.stage, self.optimizer)

    def step(self) -> None:
        """One step; what it was like is in `record`."""
        self.record = self.hooks.step(self.schedule, self.optimizer)

    def save_inline(self, path: Path) -> None:
        """As many trainers do it: written and synced before the next step."""
        with open(path, "wb") as file:
            torch.save([self.stage.submod.state_dict(), self.optimizer.state_dict()], file)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """End what runs in the background. Collective."""
        self.hooks.close()
        if self.checkpointer is not None:
            self.checkpointer.close()
        self.loader.close()
        dist.barrier()


# --- jobs ---------------------------------------------------------------------------------------


def idle_rank(directory: Path, cases: Sequence[Case], rounds: int, steps: int) -> list[Row]:
    """The bubble report of each case and round, over `steps` steps; each case is warm by then."""
    found = []
    depth = depth_for(cases[0])
    with hpstore.open(directory / "pool.toml") as pool:
        ranks = [Rank(case, pool, "", depth) for case in cases]
        for rank in ranks:
            rank.step()
        for _ in range(rounds):
            for case, rank in zip(cases, ranks, strict=True):
                found.append({"microbatches": case.microbatches} | idle_round(rank, steps))
        for rank in ranks:
            rank.close()
    return found


def idle_round(rank: Rank, steps: int) -> Row:
    """Of this rank: its forwards; of all: the report."""
    rank.hooks.bubbles()  # forgets what was before
    forwards = []
    for _ in range(steps):
        dist.barrier()
        rank.step()
        forwards += [e.end - e.begin for e in rank.record.events if e.kind == "F"]
    return {"forward_seconds": statistics.median(forwards), **rank.hooks.bubbles().as_dict()}


def cost_rank(directory: Path, case: Case, rounds: int, steps: int) -> dict[str, Row]:
    """Seconds a step in each of WAYS, round by round; a first round is not counted.

    Each round begins where its first step is saved, and goes on long enough for what is written in
    the background to disturb the steps it is written beside.
    """
    depth = depth_for(case)
    with hpstore.open(directory / "pool.toml") as pool:
        ranks = {
            way: Rank(
                replace(case, snapshot=way) if way in SNAPSHOTS else replace(case, every=0),
                pool,
                way,
                depth,
            )
            for way in WAYS
        }
        for rank in ranks.values():
            for _ in range(case.every - 1):
                rank.step()
        found: dict[str, Row] = {way: {"seconds": [], "wait": [], "tail": []} for way in ranks}
        for number in range(1 + rounds):
            for way, rank in ranks.items():
                timed = cost_round(way, rank, case.every, steps, directory)
                if number:
                    for name, value in timed.items():
                        found[way][name].append(value)
        for way, rank in ranks.items():
            gate = rank.hooks.gate
            found[way] |= {"idle_bytes": gate.idle_bytes, "busy_bytes": gate.busy_bytes}
            rank.close()
    return found


def cost_round(way: str, rank: Rank, every: int, steps: int, directory: Path) -> dict[str, float]:
    """Mean seconds of a step; the share of it that was waited for data; the seconds for which the
    last save was still written when the steps were over."""
    dist.barrier()
    waited = 0.0
    began = time.perf_counter()
    for _ in range(steps):
        rank.step()
        waited += rank.record.data_wait_seconds
        if way == "torch.save" and rank.hooks.completed % every == 0:
            rank.save_inline(directory / f"peer-{dist.get_rank()}.pt")
    ended = time.perf_counter()
    if rank.checkpointer is not None:
        rank.checkpointer.wait()  # the next contender has the disks for itself
    seconds = ended - began
    return {
        "seconds": seconds / steps,
        "wait": waited / seconds,
        "tail": time.perf_counter() - ended,
    }


def picture_rank(directory: Path, cases: Sequence[Case]) -> list[Row]:
    """Events of the step after a save, and of the copies meanwhile, by case."""
    found = []
    with hpstore.open(directory / "pool.toml") as pool:
        for number, case in enumerate(cases):
            rank = Rank(case, pool, f"picture-{number}", 0)
            rank.step()
            rank.hooks.gate.recent.clear()
            rank.step()  # its save has copied nothing yet when the next step begins
            copies = list(rank.hooks.gate.recent.copy())  # the next save may have begun
            found.append(
                {
                    "case": asdict(case),
                    "events": [asdict(e) for e in rank.record.events],
                    "copies": [piece for piece in copies if piece[0] < rank.record.events[-1].end],
                }
            )
            rank.close()
    return found
