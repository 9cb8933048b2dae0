"""SIGTERM to one rank of a pipeline: an agreed stop with a save, and a run that goes on from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpstore.checkpoint import Preempted
from tests.integration.ranks import launch, open_pool
from tests.trainers.pipelines import Trainer, build

AT = 3  # steps that are completed when the signal comes


def train(trainer: Trainer, *, signalled: bool) -> None:
    """Steps, until one raises."""
    for step in range(2000):
        trainer.hooks.step(trainer.schedule, trainer.optimizer)
        if signalled and step == AT:
            os.kill(os.getpid(), signal.SIGTERM)


def stop(rank: int, world: int, directory: Path, signalled: int) -> None:
    """Train without saves until step() raises; rank `signalled` gets the signal."""
    with open_pool(directory) as pool:
        trainer = build(pool, "1f1b", every=1000)
        trainer.hooks.restore(trainer.stages, trainer.optimizer)
        with pytest.raises(Preempted, match="all ranks stop") as error:
            train(trainer, signalled=rank == signalled)
        assert error.value.code == 143
        assert trainer.checkpointer is not None
        done = trainer.hooks.completed
        assert done > AT
        assert trainer.checkpointer.steps() == [done]  # durable already
        (directory / f"stopped-{rank}").write_text(str(done))
        trainer.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def go_on(rank: int, world: int, directory: Path) -> None:
    """The next job begins where all ranks stopped."""
    with open_pool(directory) as pool:
        trainer = build(pool, "1f1b")
        start = trainer.hooks.restore(trainer.stages, trainer.optimizer)
        assert {str(start)} == {f.read_text() for f in directory.glob("stopped-*")}
        trainer.hooks.step(trainer.schedule, trainer.optimizer)
        trainer.close()


def test_no_step_is_lost_and_no_rank_crashes(directory: Path) -> None:
    """bb_sigterm: nothing of 21 steps was kept, and the other rank died of its peer's death."""
    launch(directory, 2, stop, 1)
    launch(directory, 2, go_on)
