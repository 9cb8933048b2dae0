"""What PipelineHooks takes for granted of the installed torch, beyond its public interface."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

from hpstore.trainers.pipelining import SCHEDULES, make_schedule, stages_of, torch_internals
from hpstore.trainers.pipelining.schedule_plan import SchedulePlan, idle_shares
from hpstore.trainers.pipelining.schedule_wrappers import DDP, FSDP_NESTED, fault_of
from tests.integration.ranks import launch
from tests.thorough import LONG
from tests.trainers.pipelines import LAYERS, WIDTH, Part, squared


class Stage:
    """What a schedule asks of a stage when it is made."""

    def __init__(self, index: int, count: int, rank: int, world: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.group_rank, self.group_size = rank, world
        self.is_first, self.is_last = index == 0, index == count - 1
        self.has_backward, self.submod = True, None
        self.stage_index_to_group_rank: dict[int, int] = {}


def made(name: str, world: int, microbatches: int, rank: int = 0) -> Any:
    """A schedule as a rank has it."""
    mine = stages_of(name, rank, world)
    stages: Any = [Stage(n, world * len(mine), rank, world) for n in mine]
    return make_schedule(name, stages, microbatches, min)


def test_all_public_schedules_of_torch_have_a_short_name() -> None:
    """But for those that have no step of training, and the bases."""
    public = {name for name in pipelining.__all__ if name.startswith("Schedule")}
    assert public == {f"Schedule{name}" for name in SCHEDULES.values()}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_are_placed_where_torch_has_them(name: str, world: int) -> None:
    """By the plan that the schedule itself announces."""
    plan = torch_internals.plan_of(made(name, world, 8), world * len(stages_of(name, 0, world)))
    assert plan is not None
    for rank, works in plan.orders.items():
        assert {work.stage for work in works} == set(stages_of(name, rank, world))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_announces_a_plan_and_can_be_fed_lazily(name: str) -> None:
    """Its number of micro-batches, its order of work for all ranks, the call that takes lists: all
    that the probes ask for is there, and the plan can be played to its end."""
    schedule = made(name, 2, 8)
    assert torch_internals.microbatches_of(schedule) == 8
    assert torch_internals.not_lazy(schedule) == ""
    assert torch_internals.options_of_step(schedule) == {"return_outputs": False}
    stages = 2 if name in ("gpipe", "1f1b") else 4
    plan = torch_internals.plan_of(schedule, stages)
    assert plan is not None
    works = {work for orders in plan.orders.values() for work in orders}
    assert {(w.stage, w.microbatch) for w in works if w.kind == "F"} == {
        (stage, mb) for stage in range(stages) for mb in range(8)
    }
    shares = idle_shares(plan.timeline())
    assert all(0 <= share < 0.5 for share in shares.values())
    deadlines = plan.deadlines()
    assert list(deadlines.inputs) == sorted(deadlines.inputs)
    assert len(deadlines.targets) == 8


@pytest.mark.parametrize(("world", "microbatches"), [(2, 4), (2, 16), (4, 8)])
def test_plans_of_gpipe_and_1f1b_have_the_known_bubble(world: int, microbatches: int) -> None:
    """(K - 1) / (M + K - 1) of the step on every rank."""
    for name in ("gpipe", "1f1b"):
        plan = torch_internals.plan_of(made(name, world, microbatches), world)
        assert isinstance(plan, SchedulePlan)
        for share in idle_shares(plan.timeline()).values():
            assert share == pytest.approx((world - 1) / (microbatches + world - 1))


def test_stages_have_the_methods_that_are_watched() -> None:
    """With the arguments that are looked at; the others are passed on."""
    backward = inspect.signature(PipelineStage.backward_one_chunk).parameters
    assert list(backward)[:4] == ["self", "bwd_chunk_id", "loss", "full_backward"]
    for name, first in (
        ("forward_one_chunk", "fwd_chunk_id"),
        ("backward_weight_one_chunk", "bwd_chunk_id"),
    ):
        assert list(inspect.signature(getattr(PipelineStage, name)).parameters)[1] == first
    assert callable(PipelineStage.perform_reduce_grad)
    assert callable(PipelineStage.clear_runtime_states)


# --- wrappers -------------------------------------------------------------------------------------


def step_alone(rank: int, world: int, directory: Path, name: str, how: str) -> None:
    """Two pipelines of two stages with torch alone; the losses of three steps, or why none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pp, dp = mesh["pp"], mesh["dp"]
    replica, mine = dp.get_local_rank(), stages_of(name, pp.get_local_rank(), 2)
    count = 2 * len(mine)
    cuts = [LAYERS * n // count for n in range(count + 1)]
    modules: list[Any] = [Part(cuts[n], cuts[n + 1]) for n in mine]
    for number, module in enumerate(modules):
        if how == DDP:
            modules[number] = DistributedDataParallel(module, process_group=dp.get_group())
            continue
        for layer in module.layers.values() if how == FSDP_NESTED else ():
            fully_shard(layer, mesh=dp)
        fully_shard(module, mesh=dp)
    stages = [
        PipelineStage(module, n, count, torch.device("cpu"), group=pp.get_group())
        for n, module in zip(mine, modules, strict=True)
    ]
    schedule = make_schedule(name, stages, 4, squared)
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
    found: list[Any] = []
    try:
        for x, y in batches():
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            first, last = 0 in mine, count - 1 in mine
            schedule.step(
                *((x[replica::2],) if first else ()),
                **({"target": y[replica::2], "losses": losses} if last else {}),
            )
            optimizer.step()
            found.append(torch.stack(losses).mean().item() if last else 0.0)
    except RuntimeError as error:
        found = [f"{error} {error.__cause__}"]
    said = json.dumps([count - 1 in mine, found])
    (directory / f"{name}-{rank}.json").write_text(said)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, WIDTH, generator=drawn), torch.randn(8, WIDTH, generator=drawn))
        for _ in range(3)
    ]


def in_one_process() -> list[float]:
    module = Part(0, LAYERS)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss: Any = squared(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


PAIRS = [(name, how) for how in (DDP, FSDP_NESTED, "root") for name in SCHEDULES]
SHORT = [("gpipe", DDP), ("zbv", FSDP_NESTED)]


@pytest.mark.parametrize(("name", "how"), PAIRS if LONG else SHORT)
def test_the_table_of_wrappers_is_true_of_this_torch(tmp_path: Path, name: str, how: str) -> None:
    """ee_torch_alone_dp: what PipelineHooks refuses fails, or trains otherwise than one process,
    with torch alone; what it takes does not. A torch that mends one makes this fail."""
    launch(tmp_path, 4, step_alone, name, how)
    kind: Any = get_schedule_class(SCHEDULES[name])
    refused = fault_of([base.__name__ for base in kind.__mro__], {how})
    rows = [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{name}-*.json"))]
    assert len(rows) == 4
    texts = [found[0] for _, found in rows if isinstance(found[0], str)]
    same = False
    if not texts:
        last = [found for is_last, found in rows if is_last]
        mean = [sum(step) / len(last) for step in zip(*last, strict=True)]
        same = mean == pytest.approx(in_one_process(), abs=1e-4)
    assert same != bool(refused), (texts, refused)
