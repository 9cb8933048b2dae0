"""How the saves of a pipeline's steps are staged, and how the last one ends a preempted process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from hpstore.checkpoint import Checkpointer, SaveHandle
from hpstore.checkpoint.ranks.stop_step import ON_SIGTERM
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.save.save_options import checked_choice
from hpstore.errors import ConfigError
from hpstore.trainers.pipelining.step_agreement import preempted_after

SNAPSHOTS = {"free": "overlap", "bubbles": "overlap", "inline": "copy"}  # how saves are staged


def prepare_saves(
    ckpt: Checkpointer | None, *, every: int | None, snapshot: str, on_sigterm: str
) -> CopyGate:
    """Let the checkpointer stage as PipelineHooks was asked; the gate that its copies go through.
    Raises ConfigError."""
    if snapshot not in SNAPSHOTS:
        raise ConfigError(f"snapshot {snapshot!r} is not one of {', '.join(SNAPSHOTS)}")
    if every is not None and (every < 1 or ckpt is None):
        raise ConfigError("every: a number of steps above 0, and a checkpointer to save with")
    gate = CopyGate(blocks=snapshot == "bubbles")
    if ckpt is not None:
        ckpt.saver.stage_by(SNAPSHOTS[snapshot], gate)
        saves = checked_choice("on_sigterm", on_sigterm, ON_SIGTERM) == "save"
        if saves and not ckpt.pool.read_only:
            ckpt.saver.expect_preemption(required=False)
    return gate


def stop_saved(
    ckpt: Checkpointer, saved: SaveHandle | None, save: Callable[[], object], step: int
) -> NoReturn:
    """End the last step of this process: durable, then Preempted. `saved`: its save, if any."""
    if saved is None or saved.skipped:
        save()
    ckpt.before_update()
    ckpt.wait()
    raise preempted_after(step)
