"""Pipelines of real processes: how idle ranks are, and what a checkpoint costs their steps.

    python -m hpstore.benchmarks.pipeline [--json FILE] [--plots DIR] [--quick]

Ranks are processes of this machine (gloo, one thread each), so there must be as many free cores as
stages. A stage is a chain of matrix products whose length is chosen so that its forward takes
`forward_seconds`; for the picture it sleeps instead, and several stages share a core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn
from torch.distributed.pipelining import PipelineStage

import hpstore
from hpstore.benchmarks.report import describe, machine
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader
from hpstore.trainers.pipelining import PipelineHooks, make_schedule

WIDTH = 512
PATIENCE_SECONDS = 300.0
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


class Noise(torch.utils.data.Dataset[Any]):
    """Samples that are there at once."""

    def __init__(self) -> None:
        self.rows = torch.randn(256, WIDTH)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % len(self.rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pipeline: a step of `microbatches` with a save every `every` steps (0: none)."""

    schedule: str = "gpipe"
    stages: int = 2
    microbatches: int = 8
    forward_seconds: float = 0.05
    rows: int = 256
    asleep: bool = False
    state_bytes: int = 0  # of a rank, when asleep
    every: int = 0
    snapshot: str = "free"


# --- one rank -----------------------------------------------------------------------------------


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
    """This process's part of a pipeline. `prefix`: of its checkpoints in the pool."""

    def __init__(self, case: Case, pool: hpstore.Pool | None, prefix: str, depth: int) -> None:
        rank = dist.get_rank()
        self.checkpointer = Checkpointer(pool, prefix, keep_last=2) if pool is not None else None
        self.loader = DataLoader(Noise(), batch_size=case.rows, drop_last=True)
        self.hooks = PipelineHooks(
            self.checkpointer, self.loader, stages=[rank], num_stages=case.stages,
            every=case.every or None, inputs=lambda x: x, target=lambda x: x,
            snapshot=case.snapshot,
        )  # fmt: skip
        module: Any = (
            Asleep(rank, case.forward_seconds, case.state_bytes) if case.asleep
            else Products(rank, depth)
        )  # fmt: skip
        kind = self.hooks.wrap_stage(PipelineStage)
        self.stage = kind(module, rank, case.stages, torch.device("cpu"))
        self.schedule = make_schedule(
            case.schedule, [self.stage], case.microbatches, nn.functional.mse_loss
        )
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
        self.hooks.restore(self.stage, self.optimizer)

    def step(self) -> float:
        """One step; its seconds."""
        began = time.perf_counter()
        self.record = self.hooks.step(self.schedule, self.optimizer)
        return time.perf_counter() - began

    def close(self) -> None:
        """End what runs in the background. Collective."""
        self.hooks.close()
        if self.checkpointer is not None:
            self.checkpointer.close()
        self.loader.close()
        dist.barrier()


def idle_rank(directory: Path, cases: Sequence[Case], steps: int) -> list[Row]:
    """The bubble report of each case, over `steps` steps after one that warms up."""
    found = []
    depth = depth_for(cases[0])
    for case in cases:
        rank = Rank(case, None, "", depth)
        rank.step()
        rank.hooks.bubbles()
        for _ in range(steps):
            dist.barrier()
            rank.step()
        report = rank.hooks.bubbles()
        forwards = [e.end - e.begin for e in rank.record.events if e.kind == "F"]
        row = {"microbatches": case.microbatches, "stages": case.stages}
        found.append(row | {"forward_seconds": statistics.median(forwards)} | report.as_dict())
        rank.close()
    return found


def cost_rank(directory: Path, case: Case, rounds: int, steps: int) -> Row:
    """Seconds a step without checkpoints, with ours in each way, and with torch.save in between."""
    depth = depth_for(case)
    with hpstore.open(directory / "pool.toml") as pool:
        ways: dict[str, Rank] = {"none": Rank(case_with(case, 0, "free"), None, "none", depth)}
        for way in ("free", "bubbles", "inline"):
            ways[way] = Rank(case_with(case, case.every, way), pool, way, depth)
        ways["torch.save"] = Rank(case_with(case, 0, "free"), None, "peer", depth)
        found: dict[str, Row] = {way: {"step_seconds": [], "data_wait": []} for way in ways}
        for rank in ways.values():
            rank.step()
        for _ in range(rounds):
            for way, rank in ways.items():
                seconds, waited = _timed(way, rank, case.every, steps, directory)
                found[way]["step_seconds"].append(seconds)
                found[way]["data_wait"].append(waited)
        for way, rank in ways.items():
            gate = rank.hooks.gate
            found[way]["idle_bytes"], found[way]["busy_bytes"] = gate.idle_bytes, gate.busy_bytes
            rank.close()
    return found


def case_with(case: Case, every: int, snapshot: str) -> Case:
    """The same pipeline, saved in another way."""
    return Case(**{**asdict(case), "every": every, "snapshot": snapshot})


def _timed(way: str, rank: Rank, every: int, steps: int, directory: Path) -> tuple[float, float]:
    """Mean seconds of a step of one round, and the share of it spent waiting for data."""
    dist.barrier()
    waited = 0.0
    began = time.perf_counter()
    for number in range(steps):
        rank.step()
        waited += rank.record.data_wait_seconds
        if way == "torch.save" and (number + 1) % every == 0:
            _save_inline(rank, directory)
    seconds = time.perf_counter() - began
    if rank.checkpointer is not None:
        rank.checkpointer.wait()  # the next contender has the disks for itself
    return seconds / steps, waited / seconds


def _save_inline(rank: Rank, directory: Path) -> None:
    """As many trainers do it: written and synced before the next step."""
    path = directory / f"peer-{dist.get_rank()}.pt"
    with open(path, "wb") as file:
        torch.save([rank.stage.submod.state_dict(), rank.optimizer.state_dict()], file)
        file.flush()
        os.fsync(file.fileno())


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
            found.append({
                "case": asdict(case), "events": [asdict(e) for e in rank.record.events],
                "copies": [piece for piece in copies if piece[0] < rank.record.events[-1].end],
            })  # fmt: skip
            rank.close()
    return found


# --- all ranks ----------------------------------------------------------------------------------


def launch(world: int, directory: Path, job: Callable[..., Any], *args: Any) -> list[Any]:
    """What `job(directory, *args)` returns in each of so many processes, by rank."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_enter, args=(rank, world, directory, job, args))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(PATIENCE_SECONDS)
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}; what they printed says why")
    finally:
        for process in processes:
            process.kill()
    return [json.loads((directory / f"found-{rank}.json").read_text()) for rank in range(world)]


def _enter(
    rank: int, world: int, directory: Path, job: Callable[..., Any], args: Sequence[Any]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = directory / f"store-{job.__name__}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    (directory / f"found-{rank}.json").write_text(json.dumps(job(directory, *args)))
    dist.barrier()
    dist.destroy_process_group()


def idle_table(
    microbatches: Sequence[int] = (4, 8, 16), *, stages: int = 2, forward_seconds: float = 0.05,
    steps: int = 3, schedule: str = "gpipe",
) -> list[Row]:  # fmt: skip
    """Idle share of a step against (K - 1) / (M + K - 1), by number of micro-batches.

    Rows of BubbleReport.as_dict() with the micro-batches, the stages and the forward's seconds.
    """
    cases = [
        Case(schedule=schedule, stages=stages, microbatches=count, forward_seconds=forward_seconds)
        for count in microbatches
    ]
    with tempfile.TemporaryDirectory(prefix="hpstore-bench-") as name:
        rows: list[Row] = launch(stages, Path(name), idle_rank, cases, steps)[0]
    return rows


def cost_table(
    directory: Path, *, stages: int = 2, forward_seconds: float = 0.02, rounds: int = 3,
    steps: int = 10, every: int = 5,
) -> dict[str, Row]:  # fmt: skip
    """Step time by way of saving: median, lowest and highest of the rounds, of the slowest rank.

    `overhead` is the median of the rounds' ratios to the round without checkpoints.
    """
    make_pool(directory)
    case = Case(stages=stages, forward_seconds=forward_seconds, every=every)
    found = launch(stages, directory, cost_rank, case, rounds, steps)
    rows: dict[str, Row] = {}
    for way in found[0]:
        seconds = [
            max(rank[way]["step_seconds"][n] for rank in found) for n in range(rounds)
        ]  # by round
        plain = [max(rank["none"]["step_seconds"][n] for rank in found) for n in range(rounds)]
        ratios = [a / b - 1 for a, b in zip(seconds, plain, strict=True)]
        rows[way] = {
            "step_ms": round(1e3 * statistics.median(seconds), 1),
            "lowest": round(1e3 * min(seconds), 1),
            "highest": round(1e3 * max(seconds), 1),
            "overhead": round(statistics.median(ratios), 4),
            "data_wait_share": round(max(max(rank[way]["data_wait"]) for rank in found), 4),
            "idle_mb": sum(rank[way]["idle_bytes"] for rank in found) // 1_000_000,
            "busy_mb": sum(rank[way]["busy_bytes"] for rank in found) // 1_000_000,
        }
    return rows


def make_pool(directory: Path) -> None:
    """Six directories, 4 + 2."""
    places = [directory / f"disk{n}" for n in range(6)]
    hpstore.create(places, data=4, parity=2, config=directory / "pool.toml").close()


def events_of(directory: Path, cases: Sequence[Case]) -> list[list[Row]]:
    """Events of one step of each case, by rank: what the picture is drawn from."""
    make_pool(directory)
    by_rank = launch(cases[0].stages, directory, picture_rank, cases)
    return [[rank[n] for rank in by_rank] for n in range(len(cases))]


PICTURES = tuple(
    Case(schedule=schedule, stages=4, microbatches=8, forward_seconds=0.02, rows=2, asleep=True,
         state_bytes=144_000_000, every=1, snapshot="bubbles")
    for schedule in ("gpipe", "1f1b")
)  # fmt: skip


def shown(row: Row) -> Row:
    """A row of idle_table() in a few numbers."""
    return {
        "forward_ms": round(1e3 * row["forward_seconds"], 1),
        "step_ms": round(1e3 * row["step_seconds"], 1),
        **{name: round(row[name], 3) for name in ("idle_share", "theory", "modelled")},
        "by_rank": [round(rank["idle_share"], 3) for rank in row["ranks"]],
        "us_an_event": [round(1e6 * rank["hook_seconds_per_event"], 1) for rank in row["ranks"]],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Both tables, and the picture where matplotlib is and a place for it is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--plots", type=Path, help="a directory for the picture")
    parser.add_argument("--quick", action="store_true", help="short, to show that all works")
    options = parser.parse_args(arguments)
    few: Mapping[str, Any] = {"forward_seconds": 0.01, "steps": 1} if options.quick else {}
    found: dict[str, Any] = {"machine": machine()}
    found["idle"] = {f"M={row['microbatches']}": shown(row) for row in idle_table(**few)}
    with tempfile.TemporaryDirectory(prefix="hpstore-bench-") as name:
        short: Mapping[str, Any] = {"rounds": 1, "steps": 5} if options.quick else {}
        found["checkpoints"] = cost_table(Path(name), **short)
    if options.plots is not None:
        from hpstore.benchmarks.pipeline_picture import draw

        with tempfile.TemporaryDirectory(prefix="hpstore-bench-") as name:
            found["picture"] = str(draw(events_of(Path(name), PICTURES), options.plots))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    sys.stdout.write(describe(found))
    return 0


__all__ = ["Case", "cost_table", "events_of", "idle_table", "main"]

if __name__ == "__main__":
    sys.exit(main())
