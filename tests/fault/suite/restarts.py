"""Processes that are killed: trainers at random and at named phases, rebuild, scrub and ingest at
their operations on devices. Each row says what was wrong afterwards, nothing is raised."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

import hpstore
from hpstore.config import find_config
from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.loaders import (
    Dataset,
    DatasetWriter,
    Field,
    list_datasets,
    remove_orphans,
    verify_dataset,
)
from hpstore.pool import Pool
from tests.fault.common import exit_status, flip, forked, payload, poll, wrapping
from tests.fault.suite.killed import PHASES, reached
from tests.fault.suite.rig import Rig, problems
from tests.fault.suite.runner import Reference
from tests.fault.suite.table import Row
from tests.fault.suite.workload import (
    OBJECT_BYTES,
    OBJECTS,
    ExampleTrainer,
    Plan,
    Trainer,
    digests,
)

T = TypeVar("T")
SEED, PATIENCE = 20261122, 120.0
RANDOM_KILLS = 3
CUT = "cut"  # the data set of the killed ingests
CUT_ROWS = np.random.default_rng(SEED).integers(0, 256, (20_000, 64), np.uint8)


# --- trainers -------------------------------------------------------------------------------


def kill_trainer_at_random(rig: Rig, plan: Plan, healthy: Reference) -> Row:
    """SIGKILL a few steps after each start; the last run goes to the end."""
    rng = random.Random(SEED)
    row = Row(fault="trainer killed at random", method=f"SIGKILL, {RANDOM_KILLS} times")
    events = rig.root / "events"
    options: tuple[str, ...] = ()
    for _ in range(RANDOM_KILLS):
        trainer = ExampleTrainer(rig.toml, plan, events, *options)
        size = events.stat().st_size if events.exists() else 0
        more = rng.randrange(1, plan.steps // 2)
        try:
            poll(PATIENCE, lambda: _steps_after(trainer, size) >= more or bool(trainer.failure()))  # noqa: B023
            row.failures += [trainer.failure()] * bool(trainer.failure())
        finally:
            trainer.kill()
        options = ("--resume",)
    return _resumed_to_the_end(rig, plan, healthy, row)


def _steps_after(trainer: Trainer, size: int) -> int:
    """Steps that were told after the first `size` bytes of the events."""
    if not trainer.events.exists():
        return 0
    with trainer.events.open() as file:
        file.seek(size)
        return sum('"step"' in line and '"loss"' in line for line in file)


def kill_trainer_at_phases(rig: Rig, plan: Plan, healthy: Reference) -> Row:
    """One life for each phase of a save, each resumed from what the one before left."""
    row = Row(fault="trainer killed in a save", method="SIGKILL: " + ", ".join(PHASES))
    events = rig.root / "events"
    options: tuple[str, ...] = ()
    for phase in PHASES:
        longer = Plan(steps=10 * plan.steps, every=plan.every)  # it ends by the kill, not before
        trainer = ExampleTrainer(
            rig.toml, longer, events, *options, launcher=("-m", "tests.fault.suite.killed", phase)
        )
        try:
            code = trainer.process.wait(PATIENCE)
        finally:
            trainer.kill()
        log = events.with_suffix(".log").read_text()
        if code != -signal.SIGKILL or reached(phase) not in log:
            row.failures.append(f"{phase}: not reached, ended with {code}: {log[-300:].strip()}")
        options = ("--resume",)
    reach = max(plan.steps, trainer.step)
    end = Plan(steps=reach + (-reach) % plan.every, every=plan.every)
    return _resumed_to_the_end(rig, end, healthy, row)


def _resumed_to_the_end(rig: Rig, plan: Plan, healthy: Reference, row: Row) -> Row:
    trainer = ExampleTrainer(rig.toml, plan, rig.root / "events", "--resume")
    try:
        failure = trainer.finish()
    finally:
        trainer.kill()
    row.failures += [failure] * bool(failure)
    found = trainer.losses()
    common = found.keys() & healthy.losses.keys()
    if len(common) < len(healthy.losses) or any(found[s] != healthy.losses[s] for s in common):
        row.failures.append("another loss curve")
    with hpstore.open(rig.toml) as pool:
        row.failures += problems(pool)
        kept = digests(pool)
    if any(healthy.checkpoints[s] != kept[s] for s in kept.keys() & healthy.checkpoints.keys()):
        row.failures.append("other checkpoints than without the kills")
    return row


# --- rebuild, scrub, ingest -----------------------------------------------------------------


class DiesAt(DeviceWrapper):
    """Kills the process right before the n-th operation of a kind on any device."""

    def __init__(self, inner: Device, operation: str, left: list[int]) -> None:
        super().__init__(inner)
        self._operation, self._left = operation, left

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == self._operation:
            self._left[0] -= 1
            if not self._left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
        return call()


def open_dying(rig: Rig, operation: str, times: int) -> Pool:
    """The pool, in a process that is to die."""
    config, left = find_config(rig.toml), [times]
    return Pool(config, opener=wrapping(config, lambda _, d: DiesAt(d, operation, left)))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is killed, how damage is done before, and the operations at which it dies."""

    name: str
    prepare: Callable[[Rig], None]
    run: Callable[[Pool], object]
    operations: Sequence[str]


def remove_columns(rig: Rig) -> None:
    """One device has lost its files."""
    for file in rig.columns(rig.disks[0]):
        file.unlink()


def damage_columns(rig: Rig) -> None:
    """A bit of each file of a device is wrong."""
    for file in rig.columns(rig.disks[0]):
        flip(file, 4096 + 700)


def ingest_rows(pool: Pool) -> None:
    """Write a data set, over what may be there."""
    with DatasetWriter(
        pool, CUT, {"x": Field("uint8", (64,))}, shard_bytes=1 << 18, overwrite=True
    ) as writer:
        writer.write_batch({"x": CUT_ROWS})


def _nothing(_: Rig) -> None:
    """No damage before."""


WRITING = ("create", "write", "sync", "publish", "sync_directory")
JOBS = (
    Job(name="rebuild", prepare=remove_columns, run=Pool.rebuild, operations=WRITING),
    Job(name="scrub", prepare=damage_columns, run=lambda pool: pool.scrub(resume=False),
        operations=("read", *WRITING)),
    Job(name="ingest", prepare=_nothing, run=ingest_rows, operations=WRITING),
)  # fmt: skip


def kill_job(rig: Rig, job: Job, times: Sequence[int]) -> Row:
    """Kill it at each operation, so many times in; look, run it to the end, look again."""
    row = Row(fault=f"{job.name} killed", method="SIGKILL at " + ", ".join(job.operations))
    for operation in job.operations:
        for nth in times:
            job.prepare(rig)
            with forked(lambda: job.run(open_dying(rig, operation, nth))) as pid:  # noqa: B023
                if exit_status(pid, PATIENCE) != -signal.SIGKILL:
                    row.failures.append(f"{operation} {nth}: not reached")
            with hpstore.open(rig.toml) as pool:
                wrong = objects_wrong(pool) + data_set_wrong(pool)
                job.run(pool)
                wrong += objects_wrong(pool) + data_set_wrong(pool) + problems(pool)
                row.failures += [f"{operation} {nth}: {text}" for text in wrong]
    return row


def objects_wrong(pool: Pool) -> list[str]:
    """Objects of the reader that do not hold their bytes."""
    return [
        f"probe/{number} is wrong" for number in range(OBJECTS)
        if pool.get(f"probe/{number}") != payload(f"probe/{number}", OBJECT_BYTES)
    ]  # fmt: skip


def data_set_wrong(pool: Pool) -> list[str]:
    """The data set of the ingest is there whole, or not at all."""
    if CUT not in [found.name for found in list_datasets(pool)]:
        return []
    data = Dataset(pool, CUT)
    same = len(data) == len(CUT_ROWS) and np.array_equal(data[len(data) - 1]["x"], CUT_ROWS[-1])
    data.close()
    remove_orphans(pool, CUT)
    return [] if same and verify_dataset(pool, CUT).clean else ["a data set in part"]


__all__ = ["JOBS", "Job", "kill_job", "kill_trainer_at_phases", "kill_trainer_at_random"]
