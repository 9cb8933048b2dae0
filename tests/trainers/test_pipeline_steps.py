"""What a step takes and refuses: arguments for every stage, metrics for schedulers, errors of
before_optimizer, wrappers that torch does not train."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.parallel import DistributedDataParallel

from hpstore.errors import ConfigError, StepBroken, StepVoid
from hpstore.loaders import DataLoader, Dataset
from hpstore.trainers.pipelining import SCHEDULES, step_agreement
from hpstore.trainers.pipelining.joint_optimizers import Optimizers
from hpstore.trainers.pipelining.schedule_plan import ScheduledWork, SchedulePlan
from hpstore.trainers.pipelining.schedule_wrappers import (
    DDP,
    FSDP_NESTED,
    GOOD_IN_DDP,
    fault_of,
    wrappers_of,
)
from hpstore.trainers.pipelining.stage_scaler import Scaling
from hpstore.trainers.pipelining.step_record import Arrivals
from tests.integration.ranks import launch, open_pool
from tests.trainers.pipelines import LAYERS, WIDTH, Part, build, squared


class Masked(Part):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers.values():
            y = torch.tanh(layer(x))
            x = x + (y if mask is None else y * mask)
        return x


def mask_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["id"] % 2).float()[:, None]


def masked(rank: int, world: int, directory: Path) -> None:
    """Three stages; the mask follows from the samples, or is the caller's."""
    pool = open_pool(directory)
    loader = DataLoader(
        Dataset(pool, "samples"), batch_size=8, shuffle=True, drop_last=True, rank=0, world_size=1
    )
    batch = next(iter(loader))
    loader.close()
    wanted = squared(Masked(0, LAYERS)(batch["x"], mask_of(batch)), batch["y"]).item()
    for lazy in (False, True):
        for picks in ({"mask": mask_of}, lambda b: {"mask": mask_of(b)}, None):
            trainer = build(pool, "1f1b", prefix=None, part=Masked, lazy=lazy, keywords=picks)
            trainer.hooks.restore(trainer.stages, trainer.optimizer)
            given = {} if picks else {"mask": mask_of(batch)}
            record = trainer.hooks.step(trainer.schedule, trainer.optimizer, **given)
            if rank == 2:
                assert record.loss == pytest.approx(wanted, abs=1e-6)
            with pytest.raises(ConfigError, match="target: a schedule's step"):
                trainer.hooks.step(trainer.schedule, trainer.optimizer, target=1)
            trainer.close()
    dist.barrier()


def test_every_stage_gets_the_masks_of_its_samples(directory: Path) -> None:
    """t_masks: step(mask=) was a TypeError, and a stage in the middle reads no data."""
    launch(directory, 3, masked)


def plateau(rank: int, world: int, directory: Path) -> None:
    trainer = build(open_pool(directory), "gpipe", prefix=None)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, patience=0)
    trainer.hooks.restore(trainer.stages, trainer.optimizer, scheduler=scheduler)
    trainer.hooks.step(trainer.schedule, trainer.optimizer)
    for metric in (1.0, 2.0):
        assert trainer.hooks.step_scheduler(metric if rank == 1 else None) == metric
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    with pytest.raises(ConfigError, match="no rank has a metric"):
        trainer.hooks.step_scheduler(None)
    trainer.close()
    dist.barrier()


def test_a_scheduler_that_waits_for_a_metric_is_stepped_alike_on_all_ranks(
    directory: Path,
) -> None:
    launch(directory, 2, plateau)


def clipped(rank: int, world: int, directory: Path) -> None:
    """An error ahead of the clipping that the other rank has come to: void there, done again."""
    trainer = build(open_pool(directory), "gpipe", prefix=None, before_optimizer=lambda: clip())
    failing = [rank == 0]

    def clip() -> None:
        if failing[0]:
            raise OSError("a full log")
        trainer.hooks.clip_grad_norm(1.0)

    trainer.hooks.restore(trainer.stages, trainer.optimizer)
    with pytest.raises(OSError, match="a full log") as raised:
        trainer.hooks.step(trainer.schedule, trainer.optimizer)
    assert isinstance(raised.value, StepVoid) == (rank == 1)
    failing[0] = False
    trainer.hooks.step(trainer.schedule, trainer.optimizer)
    assert trainer.hooks.completed == 1
    trainer.close()
    dist.barrier()


def test_an_error_before_the_clipping_is_raised_on_all_ranks(directory: Path) -> None:
    """The others waited in the sum of the norm for one that had left before_optimizer."""
    launch(directory, 2, clipped)


def left(rank: int, world: int, directory: Path) -> None:
    """Ahead of a collective of the user's own, of which hooks know nothing."""
    step_agreement.PATIENCE_SECONDS = 1.0
    trainer = build(open_pool(directory), "gpipe", prefix=None, before_optimizer=lambda: both())

    def both() -> None:
        if rank == 0:
            raise OSError("a full log")
        dist.all_reduce(torch.ones(1))

    trainer.hooks.restore(trainer.stages, trainer.optimizer)
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(OSError, match="a full log") as raised:
            trainer.hooks.step(trainer.schedule, trainer.optimizer)
        assert "did not come within 1 s" in raised.value.__notes__[0]
        with pytest.raises(StepBroken, match="End it"):
            trainer.hooks.step(trainer.schedule, trainer.optimizer)
        return  # and the process ends, as its peer is to notice
    with pytest.raises(RuntimeError):
        trainer.hooks.step(trainer.schedule, trainer.optimizer)
    assert time.monotonic() - began < 60  # not the group's half an hour


def test_a_rank_does_not_wait_for_others_in_a_collective_that_it_left(directory: Path) -> None:
    launch(directory, 2, left)


def uneven(rank: int, world: int, directory: Path) -> None:
    pool = open_pool(directory)
    trainer = build(pool, "gpipe", prefix=None, rows=8, lazy=True)
    trainer.loader.close()
    loader = DataLoader(Dataset(pool, "samples"), batch_size=8)  # 92 samples
    supply: Any = trainer.hooks._supply
    supply._loader = loader
    loader.read_as(0, 1)
    with pytest.raises(ConfigError, match=r"would have 4 of 8 samples.*drop_last=True"):
        trainer.hooks.restore(trainer.stages, trainer.optimizer)
    trainer.close()
    dist.barrier()


def test_a_smaller_last_micro_batch_is_refused_before_the_first_step(directory: Path) -> None:
    """i_uneven: with lazy=True torch failed in the middle of the schedule."""
    launch(directory, 2, uneven)


def changed(rank: int, world: int, directory: Path) -> None:
    """Weights that the loop normalises after the step: the save has those of the step."""
    trainer = build(open_pool(directory), "gpipe", prefix="changed", every=1, snapshot="bubbles")
    trainer.hooks.restore(trainer.stages, trainer.optimizer)
    record = trainer.hooks.step(trainer.schedule, trainer.optimizer)
    part: Any = trainer.stages[0].submod
    weight = part.layers["0"].weight
    wanted = weight.detach().clone()
    assert trainer.hooks.before_update() >= 0
    weight.data.zero_()
    assert record.saved is not None
    record.saved.result()
    name = "model/layers.0.weight"
    assert torch.equal(trainer.wait().load(1, keys=[name])[name], wanted)
    trainer.close()


def test_weights_may_change_after_before_update(directory: Path) -> None:
    """x_post_step: hooks had no call to announce it."""
    launch(directory, 1, changed)


class Dropping(Part):
    """Random in training, and it has running statistics."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        self.norm = torch.nn.ModuleDict({str(start): torch.nn.BatchNorm1d(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (norm,) = self.norm.values()
        return torch.nn.functional.dropout(norm(super().forward(x)), 0.1, self.training)


def evaluated(rank: int, world: int, directory: Path) -> None:
    pool = open_pool(directory)
    runs: list[list[Any]] = []
    for at in ((), (0, 2)):
        torch.manual_seed(1)
        trainer = build(pool, "gpipe", prefix=None, part=Dropping)
        trainer.hooks.restore(trainer.stages, trainer.optimizer)
        other = DataLoader(Dataset(pool, "samples"), batch_size=4, drop_last=True)
        part: Any = trainer.stages[0].submod
        frozen = next(iter(part.norm.values())).eval()
        losses: list[Any] = []
        for step in range(3):
            if step in at:
                value = trainer.hooks.evaluate(trainer.schedule, other)
                heard: list[Any] = [None] * world
                dist.all_gather_object(heard, value)
                assert heard[0] == heard[1] > 0
                assert not frozen.training
                assert trainer.stages[0].submod.training
            losses.append(trainer.hooks.step(trainer.schedule, trainer.optimizer).loss)
        runs.append(losses)
        with pytest.raises(ConfigError, match="micro-batches to evaluate with"):
            trainer.hooks.evaluate(trainer.schedule, other if rank == 0 else None)
        other.close()
        trainer.close()
    assert runs[0] == runs[1]
    dist.barrier()


def test_a_validation_with_its_own_loader_leaves_the_run_as_it_was(directory: Path) -> None:
    launch(directory, 2, evaluated)


# --- optimizers, wrappers -------------------------------------------------------------------------


def test_an_overflow_in_one_optimizer_is_one_in_all() -> None:
    """A scaler skips by optimizer: the others of the rank would have gone on."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    both = Optimizers([torch.optim.SGD([w], lr=1.0) for w in weights])
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaling = Scaling()
    scaling.begin(scaler, both, torch.device("cpu"))
    for value, after in ((float("nan"), 1.0), (4.0, 0.0)):
        weights[0].grad, weights[1].grad = torch.full((2,), 4.0), torch.full((2,), value)
        scaling.unscale()
        scaling.step()
        assert [float(w.detach()[0]) for w in weights] == [after, after, 1.0]
        scaler.update(new_scale=4.0)


def test_wrappers_are_found_in_stages(directory: Path) -> None:
    launch(directory, 1, wrapped)


def wrapped(rank: int, world: int, directory: Path) -> None:
    plain, nested = Part(0, 2), Part(0, 2)
    root: Any = fully_shard(Part(0, 2))
    for layer in nested.layers.values():
        fully_shard(layer)
    assert wrappers_of(plain) == wrappers_of(root) == set()
    whole: Any = fully_shard(nested)
    assert wrappers_of(nested) == wrappers_of(whole) == {FSDP_NESTED}
    ddp = DistributedDataParallel(plain)
    assert wrappers_of(ddp) == {DDP}
    trainer = build(open_pool(directory), "gpipe", prefix=None, part=in_ddp)
    trainer.hooks.restore(trainer.stages, trainer.optimizer)
    with pytest.raises(ConfigError, match=r"ScheduleGPipe of torch .* Use Schedule1F1B"):
        trainer.hooks.step(trainer.schedule, trainer.optimizer)
    trainer.close()


def in_ddp(start: int, stop: int) -> torch.nn.Module:
    return DistributedDataParallel(Part(start, stop))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_knows_every_schedule(name: str) -> None:
    """ee_torch_alone_dp: DDP ends in an assertion but for 1F1B, nested FSDP with a split backward
    has wrong gradients. tests/contract/test_torch_pipelining.py asks torch itself."""
    kind: Any = get_schedule_class(SCHEDULES[name])
    kinds = [base.__name__ for base in kind.__mro__]
    assert bool(fault_of(kinds, {DDP})) == (name != "1f1b")
    assert bool(fault_of(kinds, {FSDP_NESTED})) == (name in ("zero-bubble", "zbv", "dualpipe-v"))
    assert not fault_of(kinds, set())
    assert set(GOOD_IN_DDP) == {"Schedule1F1B"}


# --- what a step costs ----------------------------------------------------------------------------


def test_the_plan_is_not_played_by_a_step_and_once_by_its_record() -> None:
    """z_slack_cost: 17.5 ms of the training thread a step at 16 stages and 128 micro-batches."""
    asked = []

    class Counted(dict[str, float]):
        def get(self, kind: str, default: Any = None) -> Any:
            asked.append(kind)
            return super().get(kind, default)

    works = tuple(ScheduledWork(0, kind, n) for n in range(3) for kind in "FB")
    plan = SchedulePlan(orders={0: works}, num_stages=1)
    arrivals = Arrivals(
        ready=(0.0, 1.0, 5.5),
        began=1.0,
        first=True,
        lazy=True,
        plan=plan,
        seconds=Counted(F=1.0, B=2.0),
    )
    assert not asked
    assert arrivals.slack() == pytest.approx(1.0)  # the first is needed at 1, the third at 1 + 6
    assert len(asked) == len(works)
