"""Devices that are lost, full, slow while a pipeline trains: real file systems, real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hpstore
from hpstore.config import Settings
from hpstore.testing.loopfs import LoopFilesystem
from hpstore.testing.scratch import throttle_problem
from hpstore.units import MIB
from tests.fault.common import Call, MakeDisks, poll
from tests.fault.suite.faults import SLOW_BYTES_PER_SECOND, write_proof
from tests.integration.ranks import PATIENCE, launch, open_pool
from tests.thorough import LONG
from tests.trainers.pipelines import build, write_samples
from tests.trainers.runs import Run, keep_on, require_each_sample_once, require_same_losses

STEPS, HURT = 14, 5  # steps in all, steps that are done when something breaks
pytestmark = [
    pytest.mark.fault,
    pytest.mark.root,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not LONG,
        reason="four launches of a pipeline a fault: HPSTORE_LONG_TESTS=1",
    ),
]


def train_meanwhile(
    rank: int, world: int, directory: Path, run: str, attempt: int, until: int, pause: bool
) -> None:
    """Train up to a step. `pause`: after HURT steps, until somebody has broken something."""

    def wait() -> None:
        if trainer.hooks.completed == HURT:
            (directory / f"reached-{rank}").touch()
            poll(PATIENCE, (directory / "hurt").exists)

    with open_pool(directory) as pool:
        options: dict[str, Any] = {"before_optimizer": wait} if pause else {}
        trainer = build(pool, "1f1b", prefix=run, **options)
        keep_on(trainer, until, directory / f"{run}.{attempt}.{rank}.jsonl")
        trainer.close()
        dist.barrier()


def lose(disks: list[LoopFilesystem]) -> None:
    """Two devices give EIO for everything but what the kernel has cached of them."""
    for disk in disks[:2]:
        disk.shutdown()
        with pytest.raises(OSError):
            Path(disk.path, "new").touch()


def fill(disks: list[LoopFilesystem]) -> None:
    """Two devices take nothing more."""
    for disk in disks[:2]:
        disk.fill()
        assert disk.free_bytes() < MIB


def slow_down(disks: list[LoopFilesystem]) -> None:
    """The kernel lets one device do 1 MiB a second."""
    problem = throttle_problem()
    if problem is not None:
        pytest.skip(problem)
    disks[0].throttle(SLOW_BYTES_PER_SECOND)
    began = time.monotonic()
    write_proof(disks[0].path, SLOW_BYTES_PER_SECOND // 2)
    assert time.monotonic() - began > 0.35, "nothing is throttled"


@pytest.mark.parametrize("hurt", [lose, fill, slow_down])
def test_a_pipeline_trains_and_resumes_whatever_its_devices_do(
    make_disks: MakeDisks, tmp_path: Path, hurt: Callable[[list[LoopFilesystem]], None]
) -> None:
    """m of 4 + 2 devices lost, or full, or one slow, from the middle of a step on: training goes
    on, saves are committed, and another job resumes from them on what is left. Losses bit by bit
    those of healthy devices; samples lost = repeated = 0."""
    disks = make_disks(6)
    settings = Settings(memory_bytes=16 * MIB, run_directory=str(tmp_path / "run"))
    hpstore.create(
        [disk.path for disk in disks],
        data=4,
        parity=2,
        config=tmp_path / "pool.toml",
        settings=settings,
    ).close()
    with open_pool(tmp_path) as pool:
        write_samples(pool)
    whole, run = Run(tmp_path, "whole"), Run(tmp_path, "hurt")
    whole.go(2, "1f1b", STEPS)

    job = Call(lambda: launch(tmp_path, 2, train_meanwhile, run.name, 0, 10, True))
    poll(PATIENCE, lambda: (tmp_path / "reached-0").exists() or job.ended(0))
    try:
        hurt(disks)
    finally:
        (tmp_path / "hurt").touch()  # whatever became of it: the job ends
    assert job.ended(2 * PATIENCE)
    job.result()
    run.attempts = 1
    assert run.committed()[-1] == 10
    assert run.go(2, "1f1b", STEPS) == 10
    found = run.steps()
    require_each_sample_once(found, STEPS)
    require_same_losses(found, whole.steps(), exact_to=0.0)
