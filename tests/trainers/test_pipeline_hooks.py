"""PipelineHooks on two real processes: every schedule, copies in bubbles, what is refused."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hpstore
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.errors import CheckpointError, ConfigError
from hpstore.trainers.pipelining import SCHEDULES, ComputeEvent
from hpstore.trainers.pipelining.schedule_plan import ScheduledWork
from hpstore.trainers.pipelining.torch_internals import plan_of
from tests.integration.ranks import launch, open_pool
from tests.trainers.pipelines import ROWS, WIDTH, Part, Trainer, build

# --- every schedule -----------------------------------------------------------------------------


def run_all(rank: int, world: int, directory: Path) -> None:
    """A step with each schedule; its events against its plan, its losses to a file."""
    pool = open_pool(directory)
    losses = {}
    for name in SCHEDULES:
        trainer = build(pool, name, prefix=None, lazy=name in ("1f1b", "zbv"))
        trainer.hooks.restore(trainer.stages, trainer.optimizer)
        record = trainer.hooks.step(trainer.schedule, trainer.optimizer)
        plan = plan_of(trainer.schedule, trainer.hooks.num_stages)
        assert plan is not None
        seen = [
            ScheduledWork(e.stage, e.kind, e.microbatch) for e in record.events if e.kind != "R"
        ]
        assert seen == list(plan.orders[rank]), name
        reduced = [e.stage for e in record.events if e.kind == "R"]
        assert sorted(reduced) == sorted(trainer.hooks.stages), name
        assert all(a.end <= b.begin for a, b in itertools.pairwise(record.events))
        assert record.microbatches == 4
        fed = 0 in trainer.hooks.stages or trainer.hooks.num_stages - 1 in trainer.hooks.stages
        assert len(trainer.seen) == (4 * ROWS if fed else 0), name
        report = trainer.hooks.bubbles()
        assert report.steps == 1
        assert report.theory is not None
        assert 0 < report.theory < 1
        losses[name] = record.loss
        assert trainer.hooks.counters["lazy_refused_total"] == 0
        trainer.close()
    (directory / f"losses-{rank}.json").write_text(json.dumps(losses))
    dist.barrier()


def test_every_schedule_tells_each_piece_of_its_plan_in_order(directory: Path) -> None:
    """All seven schedules of torch: one event for each F, B, I and W that the schedule announces,
    in that order; one micro-batch is read once; the same losses whoever computes what when."""
    launch(directory, 2, run_all)
    ranks = [json.loads((directory / f"losses-{rank}.json").read_text()) for rank in range(2)]
    losses = {name: [rank[name] for rank in ranks if rank[name] is not None] for name in SCHEDULES}
    for name in SCHEDULES:
        assert losses[name] == pytest.approx(losses["gpipe"], abs=1e-6), name
        assert len(losses[name]) == 1, name


# --- copies in bubbles --------------------------------------------------------------------------


def copies(rank: int, world: int, directory: Path) -> None:
    """A save, then a step, in each way."""
    pool = open_pool(directory)
    for snapshot in ("free", "bubbles", "inline"):
        copied(pool, snapshot)
    dist.barrier()


class Meeting:
    """Makes the first piece of each save come to the gate while a stage computes."""

    def __init__(self) -> None:
        self._computing, self._there = threading.Event(), threading.Event()
        self._armed = False

    def of(self, gate: CopyGate, module: nn.Module) -> None:
        """This gate, and the forward of this module."""
        self._enter = gate.enter
        vars(gate)["enter"] = self.enter
        module.register_forward_pre_hook(self.compute)

    def arm(self) -> None:
        """For the save that comes next: its pieces wait until the next step computes."""
        self._computing.clear()
        self._there.clear()
        self._armed = True

    def compute(self, *_: object) -> None:
        """A forward has begun, behind the gate that was shut."""
        self._computing.set()
        if self._armed:
            self._armed = False
            assert self._there.wait(60)

    def leave(self) -> None:
        """No step comes any more."""
        self._computing.set()

    def enter(self) -> None:
        """A piece comes."""
        assert self._computing.wait(60)
        self._there.set()
        self._enter()


def copied(pool: hpstore.Pool, snapshot: str) -> None:
    """What is copied when, and that it is whole before the optimizer."""
    meeting = Meeting()
    trainer = build(
        pool,
        "gpipe",
        prefix=snapshot,
        snapshot=snapshot,
        every=1,
        before_optimizer=meeting.arm if snapshot == "bubbles" else None,
    )
    hooks = trainer.hooks
    if snapshot == "bubbles":
        meeting.of(hooks.gate, trainer.stages[0].submod)
    hooks.restore(trainer.stages, trainer.optimizer)
    before = {}
    for step in range(3):
        record = hooks.step(trainer.schedule, trainer.optimizer)
        moved = record.idle_bytes + record.busy_bytes
        if snapshot == "inline":
            assert moved == 0
        elif step:  # the save after the step before: 2 layers of this stage, with two moments
            assert moved >= 3 * 2 * WIDTH * WIDTH * 4
        if snapshot == "bubbles":
            assert record.busy_bytes == 0
        assert record.saved is not None
        before[step + 1] = {
            name: tensor.clone() for name, tensor in trainer.stages[0].submod.state_dict().items()
        }
    meeting.leave()  # the last save waits for no step
    checkpointer = trainer.wait()
    for step, wanted in before.items():
        found = checkpointer.load(step, keys=[f"model/{name}" for name in wanted])
        for name, tensor in wanted.items():
            assert torch.equal(found[f"model/{name}"], tensor), (step, name)
    trainer.close()


def test_a_save_holds_the_step_it_names_however_it_is_copied(directory: Path) -> None:
    """Copied behind the next step's compute, only between it, or before it: the saved values are
    those of the step, as the copy is whole before the optimizer writes. With "bubbles" no byte is
    moved while a stage computes."""
    launch(directory, 2, copies)


# --- what is refused ----------------------------------------------------------------------------


def disagree(rank: int, world: int, directory: Path) -> None:
    """Stages that do not belong together; a good step in between."""
    pool = open_pool(directory)
    trainer = build(pool, "gpipe", prefix="refused")
    hooks = trainer.hooks
    with pytest.raises(ConfigError, match="restore"):
        hooks.step(trainer.schedule, trainer.optimizer)
    hooks.restore(trainer.stages, trainer.optimizer)
    hooks.step(trainer.schedule, trainer.optimizer)
    hooks.save().result()
    if rank == 0:
        trainer.optimizer.step()  # behind the back of the hooks
    with pytest.raises(CheckpointError, match="version of the weights differs"):
        hooks.save()
    assert trainer.wait().steps() == [1]
    trainer.close()
    dist.barrier()

    torch.manual_seed(rank)
    other = build(pool, "gpipe", prefix="other data")
    if rank == 1:
        other.loader.set_epoch(1)
    other.hooks.restore(other.stages, other.optimizer)
    other.hooks.step(other.schedule, other.optimizer)
    with pytest.raises(CheckpointError, match="position in the data differs"):
        other.hooks.save()
    assert other.wait().steps() == []
    other.close()
    dist.barrier()

    alike = build(pool, "gpipe", prefix="alike", part=lambda start, stop: Part(0, 2))
    with pytest.raises(ConfigError, match=r"layers\.0\.weight"):
        alike.hooks.restore(alike.stages, alike.optimizer)
    alike.close()
    dist.barrier()


def test_what_would_not_be_one_step_of_one_model_is_not_saved(directory: Path) -> None:
    """Weights that have seen another number of steps, stages that read other samples, layers
    renumbered by stage: each is refused on all ranks, and what was committed stays."""
    launch(directory, 2, disagree)


# --- gradients ----------------------------------------------------------------------------------


class Normed(Part):
    """With running statistics, which torch's trial run of the shapes would spoil."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.norms = nn.ModuleDict({str(start): nn.BatchNorm1d(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms.values():
            x = norm(x)
        return super().forward(x)


def gradients(rank: int, world: int, directory: Path) -> None:
    """Clipping over all stages, a GradScaler, a scheduler, and batch norms."""
    pool = open_pool(directory)
    norms: list[float] = []
    trainer: Trainer = build(
        pool,
        "gpipe",
        prefix="scaled",
        part=Normed,
        microbatches=2,
        before_optimizer=lambda: norms.append(trainer.hooks.clip_grad_norm(1e-3)),
    )
    hooks = trainer.hooks
    trainer.schedule._loss_fn = hooks.loss(trainer.schedule._loss_fn)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
    hooks.restore(trainer.stages, trainer.optimizer, scaler=scaler, scheduler=scheduler)
    record = hooks.step(trainer.schedule, trainer.optimizer)
    module: Any = trainer.stages[0].submod
    running = next(iter(module.norms.values()))
    assert int(running.num_batches_tracked) == 2  # of two micro-batches, none of the trial
    assert torch.isfinite(running.running_mean).all()
    assert hooks.counters["buffers_put_back_total"] > 0
    mine = sum(float(p.grad.norm()) ** 2 for p in module.parameters())  # clipped already
    both = torch.tensor([mine])
    dist.all_reduce(both)
    assert float(both.sqrt()) == pytest.approx(1e-3, rel=1e-3)
    assert (record.loss is None) == (rank == 0)
    if record.loss is not None:
        assert record.loss < 10  # not scaled by 256

    spoilt = module.layers["0" if rank == 0 else "2"].weight
    hook = spoilt.register_hook(lambda g: g * float("inf")) if rank == 1 else None
    before = spoilt.detach().clone()
    hooks.step(trainer.schedule, trainer.optimizer)
    assert hooks.counters["steps_skipped_by_scaler_total"] == 1  # on both ranks
    assert torch.equal(spoilt, before)
    assert scaler.get_scale() == 2.0**7
    if hook is not None:
        hook.remove()
    hooks.save().result()  # versions are alike: one step each
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5)
    heard: list[Any] = [None, None]
    dist.all_gather_object(heard, norms[0])
    assert heard[0] == heard[1]
    trainer.close()
    dist.barrier()


def test_stages_clip_scale_and_skip_together(directory: Path) -> None:
    """One norm over all stages; an overflow on one makes both skip, so their versions stay alike;
    losses in the records are not scaled; batch statistics see each micro-batch once."""
    launch(directory, 2, gradients)


# --- replicas, observers ------------------------------------------------------------------------


def replicas(rank: int, world: int, directory: Path) -> None:
    """Two pipelines of one stage each; an observer that fails."""
    pool = open_pool(directory)
    groups = [dist.new_group([n]) for n in range(world)]
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from hpstore.checkpoint import Checkpointer
    from hpstore.loaders import DataLoader, Dataset
    from hpstore.trainers.pipelining import PipelineHooks
    from tests.trainers.pipelines import LAYERS, squared

    with pytest.raises(ConfigError, match="each stage once"):
        PipelineHooks(None, None, stages=[0], num_stages=1)
    seen: list[int] = []

    def noted(batch: Any) -> Any:
        seen.extend(batch["id"].tolist())
        return batch["x"].clone()

    loader = DataLoader(Dataset(pool, "samples"), batch_size=ROWS, drop_last=True)
    checkpointer = Checkpointer(pool, "replicas")
    hooks = PipelineHooks(
        checkpointer,
        loader,
        stages=[0],
        num_stages=1,
        group=groups[rank],
        every=1,
        inputs=noted,
        target="y",
    )
    assert (hooks.place.replica, hooks.place.replicas) == (rank, 2)
    stage = hooks.wrap_stage(PipelineStage)(
        Part(0, LAYERS), 0, 1, torch.device("cpu"), group=groups[rank]
    )
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.0)
    schedule = ScheduleGPipe(stage, 2, loss_fn=squared)
    events: list[ComputeEvent] = []

    def fails(event: ComputeEvent) -> None:
        events.append(event)
        raise RuntimeError("not the schedule's business")

    hooks.observe(fails)
    hooks.restore(stage, optimizer)
    record = hooks.step(schedule, optimizer)
    assert record.loss is not None
    assert tuple(events) == record.events
    assert hooks._recorder.observer_errors_total == len(events) > 1
    assert seen == [4 * n + 2 * rank + row for n in range(2) for row in range(2)]
    assert hooks.ledger.samples == 8
    checkpointer.wait()
    hooks.close()
    checkpointer.close()
    loader.close()
    dist.barrier()


def test_replicas_read_as_data_parallel_ranks_and_observers_stop_nothing(directory: Path) -> None:
    """Two replicas of a pipeline: each reads its share as one data-parallel rank, the ledger counts
    all; what an observer raises is counted and the step goes on."""
    launch(directory, 2, replicas)
