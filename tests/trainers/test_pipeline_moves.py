"""Runs that move: between a pipeline and one process, older states, optimizers of several kinds,
tensors of two names, stages of torch's tracing front end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

from hpstore.checkpoint import Checkpointer
from hpstore.errors import CheckpointError, ConfigError, FormatTooNew
from hpstore.loaders import DataLoader, Dataset
from hpstore.pool.pool import Pool
from hpstore.trainers.pipelining import PipelineHooks, make_schedule
from hpstore.trainers.pipelining.consumed_samples import Ledger
from hpstore.trainers.pipelining.run_position import RunPosition
from tests.integration.ranks import launch, open_pool
from tests.thorough import LONG
from tests.trainers.pipelines import LAYERS, WIDTH, Part, Trainer, build, squared


def alone(pool: Pool, prefix: str, until: int, net: nn.Module | None = None) -> list[float]:
    """One process without a pipeline: batches of 8, which are four micro-batches of 2."""
    torch.manual_seed(0)
    net = Part(0, LAYERS) if net is None else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(
        Dataset(pool, "samples"), batch_size=8, shuffle=True, drop_last=True, rank=0, world_size=1
    )
    losses = []
    with Checkpointer(pool, prefix, group="alone") as ckpt:
        state = {"model": net, "optimizer": optimizer, "loader": loader}
        step = ckpt.restore(state) or 0
        for batch in loader:
            optimizer.zero_grad()
            loss: Any = squared(net(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == until:
                break
        ckpt.save(step, state).result()
    loader.close()
    return losses


def piped(trainer: Trainer, until: int, optimizer: Any = None, **options: Any) -> list[Any]:
    """The same run as a pipeline, up to a step that is saved."""
    hooks, optimizer = trainer.hooks, optimizer or trainer.optimizer
    hooks.restore(trainer.stages, optimizer, **options)
    losses = []
    while hooks.completed < until:
        losses.append(hooks.step(trainer.schedule, optimizer).loss)
    hooks.save().result()
    trainer.close()
    dist.barrier()
    return losses


def moved(rank: int, world: int, directory: Path) -> None:
    pool = open_pool(directory)
    whole = alone(pool, "whole", 4) if rank == 1 else []
    if rank == 1:
        alone(pool, "there", 2)
    dist.barrier()
    there = piped(build(pool, "gpipe", prefix="there"), 4)
    piped(build(pool, "gpipe", prefix="back"), 2)
    if rank == 1:
        assert there == pytest.approx(whole[2:], abs=1e-6)
        assert alone(pool, "back", 4) == pytest.approx(whole[2:], abs=1e-6)
    dist.barrier()


def test_a_run_moves_between_a_pipeline_and_one_process(directory: Path) -> None:
    """y_from_ddp: data had another key in each world, and both refused the other's checkpoint."""
    launch(directory, 2, moved)


class Old:
    """A pipeline's state as version 1 had it: under its own key, the loader's within."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def older(rank: int, world: int, directory: Path) -> None:
    pool = open_pool(directory)
    whole = piped(build(pool, "gpipe", prefix="new"), 3)
    trainer = build(pool, "gpipe", prefix="new2")
    hooks = trainer.hooks
    hooks.restore(trainer.stages, trainer.optimizer)
    hooks.step(trainer.schedule, trainer.optimizer)
    state = hooks.state_dict()
    own = state.pop("pipeline") | {"version": 1, "loader": state}
    trainer.wait()
    with Checkpointer(pool, "old") as ckpt:
        module = trainer.stages[0].submod
        ckpt.save(1, {"model": module, "optimizer": trainer.optimizer, "pipeline": Old(own)})
        ckpt.wait()
    trainer.close()
    again = build(pool, "gpipe", prefix="old")
    assert piped(again, 3) == whole[1:]
    assert again.hooks.ledger.samples == 24


def test_a_checkpoint_with_a_state_of_version_1_goes_on(directory: Path) -> None:
    launch(directory, 1, older)


def test_states_of_runs_are_told_apart() -> None:
    """A pipeline's, a loader's alone, one that is none."""
    loader = {"epoch": 1, "samples": 8}
    mine = RunPosition(step=4, weights=4, ledger=Ledger(samples=32, digest=5), loader=loader)
    state = mine.to_dict(2)
    assert {name: state[name] for name in loader} == loader  # a run without pipeline takes it
    found = RunPosition.from_dict(state)
    assert (found.step, found.ledger, found.loader, found.stages) == (4, mine.ledger, loader, 2)
    assert found.counted
    assert not RunPosition.from_dict(loader).counted
    with pytest.raises(CheckpointError, match="neither the state of a pipeline nor of a loader"):
        RunPosition.from_dict({"a": 1})
    with pytest.raises(FormatTooNew, match="version 3"):
        RunPosition.from_dict({**loader, "pipeline": {"version": 3}})


# --- optimizers -----------------------------------------------------------------------------------


class Both:
    """A container as trainers have it: its state_dict() has no names."""

    def __init__(self, *held: torch.optim.Optimizer) -> None:
        self.held = list(held)

    def step(self) -> None:
        for one in self.held:
            one.step()

    def zero_grad(self) -> None:
        for one in self.held:
            one.zero_grad()


def muon_and_adamw(stages: list[PipelineStage]) -> list[torch.optim.Optimizer]:
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    return [
        torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2),
        torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=1e-2),
    ]


def two(rank: int, world: int, directory: Path, until: int) -> None:
    pool = open_pool(directory)
    trainer = build(pool, "gpipe", prefix="two")
    held = muon_and_adamw(trainer.stages)
    given: Any = held if world == 2 else Both(*held)
    losses = piped(trainer, until, given)
    if world == 1:
        assert len(losses) == 2
        whole = build(pool, "gpipe", prefix="two-whole")
        plain = piped(whole, until, muon_and_adamw(whole.stages))
        assert losses == pytest.approx(plain[2:], abs=1e-5)


def test_two_optimizers_move_to_another_number_of_stages(directory: Path) -> None:
    """g_two_optimizers: a list and a container were AttributeErrors."""
    launch(directory, 2, two, 2)
    launch(directory, 1, two, 4)
    launch(directory, 2, two, 5)


def refused(rank: int, world: int, directory: Path) -> None:
    trainer = build(open_pool(directory), "gpipe", prefix=None)
    held = muon_and_adamw(trainer.stages)
    with pytest.raises(ConfigError, match="have different optimizers"):
        trainer.hooks.restore(trainer.stages, held if rank == 0 else held[:1])
    with pytest.raises(ConfigError, match="have the same parameter"):
        trainer.hooks.restore(trainer.stages, [held[0], torch.optim.Muon(held[0].param_groups)])
    with pytest.raises(ConfigError, match="no optimizer in a dict"):
        trainer.hooks.restore(trainer.stages, {})
    trainer.close()
    dist.barrier()


def test_optimizers_that_ranks_do_not_share_are_refused_on_all(directory: Path) -> None:
    launch(directory, 2, refused)


# --- names ----------------------------------------------------------------------------------------


class Language(nn.Module):
    """The weight of the first layer is that of the last, by another name."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        first, middle = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        if start == 0:
            self.wte = first
            self.middle = middle
        if stop == LAYERS:
            self.lm_head = nn.Linear(WIDTH, WIDTH, bias=False)
            self.lm_head.weight = first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.middle(self.wte(x))) if hasattr(self, "wte") else x
        out: torch.Tensor = self.lm_head(x) if hasattr(self, "lm_head") else x
        return out


def named(rank: int, world: int, directory: Path, tied: Any, until: int) -> None:
    pool = open_pool(directory)
    parts: list[Any] = []

    def shared() -> None:
        if world > 1:
            module = parts[0].stages[0].submod
            dist.all_reduce((module.wte if rank == 0 else module.lm_head).weight.grad)

    prefix = "apart" if isinstance(tied[0], str) else "told"
    trainer = build(pool, "gpipe", prefix=prefix, part=Language, before_optimizer=shared)
    parts.append(trainer)
    losses = piped(trainer, until, tied=tied)
    if world == 1 and until == 4:
        whole = build(pool, "gpipe", prefix=f"{prefix}-whole", part=Language)
        assert losses == pytest.approx(piped(whole, until, tied=tied)[2:], abs=1e-5)


FOUND, TOLD = ("wte.weight", "lm_head.weight"), [("wte.weight", "lm_head.weight")]


@pytest.mark.parametrize("tied", [FOUND, *([TOLD] if LONG else [])])
def test_a_tensor_of_two_names_keeps_its_moments(directory: Path, tied: Any) -> None:
    """w_two_names: two stages to one was refused for lm_head.weight, one to two as well."""
    launch(directory, 2, named, tied, 2)
    launch(directory, 1, named, tied, 4)
    launch(directory, 2, named, tied, 5)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(torch.tanh(self.a(x)))
        return out


def traced(rank: int, world: int, directory: Path) -> None:
    pool = open_pool(directory)
    pipe = pipeline(Mlp(), mb_args=(torch.zeros(2, WIDTH),), split_spec={"b": SplitPoint.BEGINNING})
    loader = DataLoader(Dataset(pool, "samples"), batch_size=2, shuffle=True, drop_last=True)
    ckpt = Checkpointer(pool, "traced")
    hooks = PipelineHooks(ckpt, loader, stages=[rank], num_stages=2, inputs="x", target="y")
    built: Any = pipe.build_stage(rank, torch.device("cpu"))
    stage = hooks.watch(built)
    assert stage is built
    assert hooks.watch(stage) is stage
    schedule = make_schedule("gpipe", [stage], 4, squared)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
    hooks.restore(stage, optimizer)
    records = [hooks.step(schedule, optimizer) for _ in range(2)]
    assert [e.kind for e in records[1].events if e.kind != "R"] == ["F"] * 4 + ["B"] * 4
    hooks.save().result()
    names = {item.name for item in ckpt.steps.manifest(2).items if item.name.startswith("model/")}
    assert names == {f"model/{name}" for name, _ in Mlp().named_parameters()}
    hooks.close()
    ckpt.close()
    loader.close()
    if rank == 1:
        plain = alone(pool, "mlp", 2, Mlp())
        assert [record.loss for record in records] == pytest.approx(plain, abs=1e-6)
    dist.barrier()


def test_a_stage_of_the_tracing_front_end_is_watched(directory: Path) -> None:
    """f_tracer: what build_stage() gives was refused, as it cannot be wrapped before."""
    launch(directory, 2, traced)
