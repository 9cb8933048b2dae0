"""Steps that one rank cannot do: void on all and done again, or refused on all, within seconds."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpstore.errors import CheckpointError, StepBroken, StepVoid
from tests.integration.ranks import launch, open_pool
from tests.thorough import LONG
from tests.trainers.pipelines import Part, Trainer, build

STEPS, AT = 4, 2  # steps that are trained, the one that is void once


class Once:
    """Raises once, at the third call within step AT."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind, self.calls, self.raised = kind, 0, False
        self.trainer: Trainer | None = None

    def thrice(self) -> None:
        """As a guard of one step: all its calls."""
        for _ in range(3):
            self()

    def __call__(self) -> None:
        if self.trainer is None or self.trainer.hooks.completed != AT or self.raised:
            return
        self.calls += 1
        if self.calls == 3:
            self.raised = True
            raise self.kind("once")


def trained(
    trainer: Trainer, voids: type[Exception] | tuple[type[Exception], ...] = ()
) -> list[Any]:
    """Losses of all steps; those that are void are done again, twice at most."""
    trainer.hooks.restore(trainer.stages, trainer.optimizer)
    losses, tries = [], 0
    while trainer.hooks.completed < STEPS:
        try:
            losses.append(trainer.hooks.step(trainer.schedule, trainer.optimizer).loss)
        except voids:
            tries += 1
            assert tries < 3
    assert trainer.hooks.save().result().step == STEPS
    return losses


def spoil_data(trainer: Trainer, once: Once) -> None:
    """Its micro-batches raise as the schedule asks for them."""
    supply: Any = trainer.hooks._supply
    look: Callable[[int], Any] = supply._look

    def looked(index: int) -> Any:
        once()
        return look(index)

    supply._look = looked


# Any: options of PipelineHooks
def void(rank: int, world: int, directory: Path, what: str, schedule: str, at: int) -> None:
    """Rank `at` has an error once; losses, samples and ledger are those of a run without it."""
    pool = open_pool(directory)
    once = Once(OSError if what == "data" else FloatingPointError)
    options: dict[str, Any] = {"lazy": what == "data"}
    if what == "guard":
        options["before_optimizer"] = once.thrice if rank == at else None
    name = f"{what}-{schedule}-{at}"
    with_it = build(pool, schedule, prefix=f"void-{name}", **options)
    if rank == at:
        once.trainer = with_it
        if what == "data":
            spoil_data(with_it, once)
    losses = trained(with_it, once.kind)
    assert once.raised == (rank == at)
    plain = build(pool, schedule, prefix=f"plain-{name}", **options)
    once.raised = True
    assert losses == trained(plain)
    assert with_it.hooks.ledger == plain.hooks.ledger
    for trainer in (with_it, plain):
        trainer.close()
    dist.barrier()


ROWS_OF_VOIDS = [
    (what, schedule, at)
    for what in ("data", "guard")
    for schedule in ("gpipe", "1f1b")
    for at in (0, 1)
]


@pytest.mark.parametrize(("what", "schedule", "at"), ROWS_OF_VOIDS[:: 1 if LONG else 3])
def test_a_step_that_one_rank_voids_is_done_again_on_all(
    directory: Path, what: str, schedule: str, at: int
) -> None:
    """a_void_step, aa_one_rank_void: five of six hung, or inputs and targets were of different
    samples from then on."""
    launch(directory, 2, void, what, schedule, at)


def broken(rank: int, world: int, directory: Path) -> None:
    """A forward fails on rank 0, which asks for the step again; both end, with what to do."""
    pool = open_pool(directory)
    trainer = build(pool, "1f1b", prefix=None)
    trainer.hooks.restore(trainer.stages, trainer.optimizer)
    trainer.hooks.step(trainer.schedule, trainer.optimizer)
    began = time.monotonic()
    if rank == 0:
        module: Any = trainer.stages[0].submod

        def fails(_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

        module.forward = fails
        with pytest.raises(RuntimeError, match="failed to run forward") as raised:
            trainer.hooks.step(trainer.schedule, trainer.optimizer)
        assert "cannot be repeated" in raised.value.__notes__[0]
        with pytest.raises(StepBroken, match="End it"):
            trainer.hooks.step(trainer.schedule, trainer.optimizer)
        return  # and the process ends, as its peer is to notice
    with pytest.raises(RuntimeError) as lost:
        trainer.hooks.step(trainer.schedule, trainer.optimizer)
    assert "newest committed step" in "".join(lost.value.__notes__)
    assert time.monotonic() - began < 60  # not the group's half an hour


def test_a_schedule_that_broke_off_is_not_repeated(directory: Path) -> None:
    """a_void_step, forward: it hung for 30 minutes."""
    launch(directory, 2, broken)


def not_finite(rank: int, world: int, directory: Path) -> None:
    """A NaN on one rank, without a scaler: all leave the optimizer out, and the step counts."""
    pool = open_pool(directory)
    trainer = build(pool, "gpipe", skip_nonfinite=True)
    hooks = trainer.hooks
    hooks.restore(trainer.stages, trainer.optimizer)
    weight: Any = next(trainer.stages[0].submod.parameters())
    before = weight.detach().clone()
    hook = weight.register_hook(lambda g: g * float("nan")) if rank == 1 else None
    assert hooks.step(trainer.schedule, trainer.optimizer).skipped
    assert torch.equal(weight, before)
    assert (hooks.completed, hooks.counters["steps_skipped_nonfinite_total"]) == (1, 1)
    if hook is not None:
        hook.remove()
    assert not hooks.step(trainer.schedule, trainer.optimizer).skipped
    assert not torch.equal(weight, before)
    assert hooks.save().result().step == 2
    assert hooks.ledger.samples == 16
    trainer.close()
    dist.barrier()


def test_gradients_that_are_not_finite_are_left_out_on_all_ranks(directory: Path) -> None:
    launch(directory, 2, not_finite)


class Frozen(Part):
    """The first, or the last stage of two has nothing to train."""

    first = True

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(start, stop)
        if (start == 0) == self.first:
            self.requires_grad_(requires_grad=False)


class FrozenLast(Frozen):
    first = False


def scaled(rank: int, world: int, directory: Path, part: str, at: int) -> None:
    """With a GradScaler: a stage without gradients keeps its scale and version in step with the
    others; a step that `before_optimizer` voids on one rank is done again."""
    pool = open_pool(directory)
    once, overflows = Once(ValueError), [True]
    kinds = {"whole": Part, "first": Frozen, "last": FrozenLast}
    trainer = build(
        pool,
        "gpipe",
        prefix=f"scaled-{part}-{at}",
        part=kinds[part],
        skip_nonfinite=False,
        before_optimizer=once.thrice,
    )
    hooks = trainer.hooks
    once.trainer = trainer if rank == at else None
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    trainer.schedule._loss_fn = hooks.loss(trainer.schedule._loss_fn)
    hooks.restore(trainer.stages, trainer.optimizer, scaler=scaler)
    trained: list[Any] = [p for p in trainer.stages[0].submod.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.register_hook(lambda g: g * float("inf") if overflows[0] else g)
    scales, voids = [], list[bool]()
    while hooks.completed < STEPS:
        try:
            hooks.step(trainer.schedule, trainer.optimizer)
        except ValueError as error:
            voids.append(isinstance(error, StepVoid))
        scales.append(scaler.get_scale())
        overflows[0] = False
    assert scales[0] == 2.0**7  # on the rank without gradients, too
    heard: list[Any] = [None] * world
    dist.all_gather_object(heard, (scales, hooks.counters["steps_skipped_by_scaler_total"]))
    assert heard[0] == heard[1]
    assert len(scales) == STEPS + 1
    assert voids == [rank != at]
    assert hooks.save().result().step == STEPS
    trainer.close()
    dist.barrier()


@pytest.mark.parametrize(
    ("part", "at"), [("whole", 1), ("last", 0), *([("whole", 0), ("first", 1)] if LONG else [])]
)
def test_scalers_stay_alike_over_void_steps_and_frozen_stages(
    directory: Path, part: str, at: int
) -> None:
    """b_scaler_void, n_frozen: the scaler was spoilt by the first error."""
    launch(directory, 2, scaled, part, at)


def apart(rank: int, world: int, directory: Path) -> None:
    """Rank 1 has counted a step on its own, whatever it did."""
    pool = open_pool(directory)
    trainer = build(pool, "gpipe", prefix=None)
    trainer.hooks.restore(trainer.stages, trainer.optimizer)
    trainer.hooks.step(trainer.schedule, trainer.optimizer)
    trainer.hooks._position.step += rank
    with pytest.raises(CheckpointError, match=r"different steps \(\[1, 2\]"):
        trainer.hooks.step(trainer.schedule, trainer.optimizer)
    (directory / f"apart-{rank}.json").write_text(json.dumps(trainer.hooks.completed))
    trainer.close()
    dist.barrier()


def test_ranks_at_different_steps_train_no_further(directory: Path) -> None:
    """aa_one_rank_void: it was noticed at the next save, ten steps later."""
    launch(directory, 2, apart)


class Noisy(Part):
    """Draws from all three sources in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = (random.random() > 0.3) * float(np.random.random() > 0.3)
        return super().forward(torch.nn.functional.dropout(x, 0.3)) * (0.5 + keep)


def seeded(rank: int, world: int, directory: Path, until: int, fresh: int) -> None:
    """Steps up to `until`, from the newest checkpoint; their losses to a file."""
    pool = open_pool(directory)
    name = "whole" if fresh else "cut"
    trainer = build(pool, "gpipe", prefix=name, part=Noisy)
    start = trainer.hooks.restore(trainer.stages, trainer.optimizer)
    if not start:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
    losses = {}
    while trainer.hooks.completed < until:
        losses[trainer.hooks.completed] = trainer.hooks.step(
            trainer.schedule, trainer.optimizer
        ).loss
    trainer.hooks.save().result()
    (directory / f"{name}-{start}-{rank}.json").write_text(json.dumps(losses))
    trainer.close()
    dist.barrier()


def test_a_resumed_run_draws_the_same_random_numbers(directory: Path) -> None:
    """k_random_state: torch tries the shapes out again in the resumed job, and forks its own
    generators at most around that."""
    launch(directory, 2, seeded, 4, 1)
    launch(directory, 2, seeded, 2, 0)
    launch(directory, 2, seeded, 4, 0)
    whole = json.loads((directory / "whole-0-1.json").read_text())
    resumed = json.loads((directory / "cut-2-1.json").read_text())
    assert resumed == {step: whole[step] for step in ("3", "4")}
