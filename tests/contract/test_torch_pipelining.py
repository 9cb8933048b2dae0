"""What PipelineHooks takes for granted of the installed torch, beyond its public interface."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from hpstore.trainers.pipelining import SCHEDULES, make_schedule, probes, stages_of
from hpstore.trainers.pipelining.plan import Plan, idle_shares


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
    plan = probes.plan_of(made(name, world, 8), world * len(stages_of(name, 0, world)))
    assert plan is not None
    for rank, works in plan.orders.items():
        assert {work.stage for work in works} == set(stages_of(name, rank, world))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_announces_a_plan_and_can_be_fed_lazily(name: str) -> None:
    """Its number of micro-batches, its order of work for all ranks, the call that takes lists: all
    that the probes ask for is there, and the plan can be played to its end."""
    schedule = made(name, 2, 8)
    assert probes.microbatches_of(schedule) == 8
    assert probes.not_lazy(schedule) == ""
    assert probes.options_of_step(schedule) == {"return_outputs": False}
    stages = 2 if name in ("gpipe", "1f1b") else 4
    plan = probes.plan_of(schedule, stages)
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
        plan = probes.plan_of(made(name, world, microbatches), world)
        assert isinstance(plan, Plan)
        for share in idle_shares(plan.timeline()).values():
            assert share == pytest.approx((world - 1) / (microbatches + world - 1))


def test_stages_have_the_methods_that_are_watched() -> None:
    """With the arguments that are looked at; the others are passed on."""
    backward = inspect.signature(PipelineStage.backward_one_chunk).parameters
    assert list(backward)[:4] == ["self", "bwd_chunk_id", "loss", "full_backward"]
    for name, first in (
        ("forward_one_chunk", "fwd_chunk_id"), ("backward_weight_one_chunk", "bwd_chunk_id"),
    ):  # fmt: skip
        assert list(inspect.signature(getattr(PipelineStage, name)).parameters)[1] == first
    assert callable(PipelineStage.perform_reduce_grad)
    assert callable(PipelineStage.clear_runtime_states)
