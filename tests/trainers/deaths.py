"""Where a rank of a pipeline dies in a test: behind a compute call, or at a line of a save."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hpstore.checkpoint.save.commit import StepCommit
from hpstore.trainers.pipelining import ComputeEvent
from tests.trainers.pipelines import Trainer

POINTS = ("updated", "voted", "staged", "written", "planned", "published")
"""Behind the optimizer's step; behind the vote; behind save(), which has staged; when this rank's
segment is put; on rank 0, which commits: before the manifest's put, and behind it."""
_LINES = {
    "written": ("make", False),
    "planned": ("_manifest", True),
    "published": ("_publish", True),
}


def die() -> None:
    """As by the kernel or an operator."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(trainer: Trainer, death: str) -> None:
    """Let this process die where `death` says, in the run's step of that number, counted from 0.

    "STEP STAGE KINDS MICROBATCH": behind a compute call of one of these kinds, on the rank that has
    the stage. "STEP RANK POINT": one of POINTS.
    """
    step, where, *what = death.split()
    if len(what) == 2:
        _behind(trainer, int(step), int(where), what[0], int(what[1]))
    elif int(where) == dist.get_rank():
        _at(trainer, int(step), what[0])


def _behind(trainer: Trainer, step: int, stage: int, kinds: str, microbatch: int) -> None:
    hooks = trainer.hooks

    def observe(event: ComputeEvent) -> None:
        here = event.stage == stage and event.microbatch == microbatch and event.kind in kinds
        if here and hooks.completed == step:
            die()

    hooks.observe(observe)


def _at(trainer: Trainer, step: int, point: str) -> None:
    """At a line behind the optimizer's step of that number."""
    hooks, checkpointer = trainer.hooks, trainer.checkpointer
    assert checkpointer is not None
    if point == "updated":

        def updated(*_: object) -> None:
            if hooks.completed == step:
                die()

        trainer.optimizer.register_step_post_hook(updated)
    elif point in _LINES:
        name, behind = _LINES[point]

        def saves_it(commit: StepCommit, *_: object) -> bool:
            return commit._options.step == step + 1

        setattr(StepCommit, name, _dying(getattr(StepCommit, name), saves_it, behind=behind))
    else:
        dying = _dying(checkpointer.save, lambda at, *_: at == step + 1, behind=point == "staged")
        vars(checkpointer)["save"] = dying


def _dying(
    original: Callable[..., Any], there: Callable[..., bool], *, behind: bool
) -> Callable[..., Any]:
    """A call before or behind which the process dies."""

    def call(*args: Any, **options: Any) -> Any:
        if there(*args) and not behind:
            die()
        found = original(*args, **options)
        if there(*args) and behind:
            die()
        return found

    return call
