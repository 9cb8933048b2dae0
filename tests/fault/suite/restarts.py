"""Processes that are killed: trainers, rebuild, scrub and ingest, at random and at named phases.

What was wrong afterwards stands in the row. Agents: agents.py.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
from hpstore.pool.pool import Pool
from tests.fault.common import exit_status, flip, forked, payload, poll, wrapping
from tests.fault.suite.agents import kill_agent
from tests.fault.suite.killed import AGENT_AWAY, AGENT_BACK, TRAINER, reached
from tests.fault.suite.rig import Healed, Rig, heal
from tests.fault.suite.runner import (
    Pace,
    References,
    StartTrainer,
    judge,
    under_load,
    watched_reads,
)
from tests.fault.suite.table import Row
from tests.fault.suite.workload import OBJECT_BYTES, OBJECTS, PROBE, STILL, ExampleTrainer, Plan

T = TypeVar("T")
SEED, PATIENCE = 20261122, 60.0
RANDOM_KILLS = 3
STEP_SECONDS = 0.2  # about; a random kill comes within such a time after a step
CUT = "cut"  # the data set of the killed ingests
CUT_ROWS = np.random.default_rng(SEED).integers(0, 256, (20_000, 64), np.uint8)
Run = Callable[[Rig, Pace, StartTrainer, References, Row], None]


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One row: who is killed, where, and what does it."""

    name: str
    method: str
    run: Run
    fuse: bool = False


# --- trainers -------------------------------------------------------------------------------


def kill_trainer_at_random(
    rig: Rig, pace: Pace, _: StartTrainer, references: References, row: Row
) -> None:
    """SIGKILL somewhere in a step, so many steps after each start; the last run goes to an end."""
    rng, events, longer = random.Random(SEED), rig.root / "events", endless(pace.plan)
    options: tuple[str, ...] = ()
    step = 0
    with watched_reads(rig, row, pace.reads) as spans:
        spans.fault_begins()
        for _number in range(RANDOM_KILLS):
            trainer = ExampleTrainer(rig.toml, longer, events, *options)
            size = events.stat().st_size if events.exists() else 0
            more = rng.randrange(1, pace.plan.steps // 2)
            try:
                wait_for_steps(trainer, size, more)
                with suppress(subprocess.TimeoutExpired):
                    trainer.process.wait(rng.random() * STEP_SECONDS)
            finally:
                row.failures += [] if trainer.kill() else [f"ended before: {trainer.failure()}"]
            options, step = ("--resume",), trainer.step
        spans.fault_ends()
        losses, plan = resumed_to_the_end(rig, pace.plan, step, row)
        spans.close()
    judge(rig, row, losses, references(plan))


def kill_trainer_at_phases(
    rig: Rig, pace: Pace, _: StartTrainer, references: References, row: Row
) -> None:
    """One life for each phase of a save, each resumed from what the one before left."""
    events, longer = rig.root / "events", endless(pace.plan)
    options: tuple[str, ...] = ()
    step = 0
    with watched_reads(rig, row, pace.reads) as spans:
        spans.fault_begins()
        for phase in TRAINER:
            launcher = ("-m", "tests.fault.suite.killed", phase)
            trainer = ExampleTrainer(rig.toml, longer, events, *options, launcher=launcher)
            try:
                poll(PATIENCE, trainer.ended, partial("killed {}".format, phase))
            finally:
                trainer.kill()
            log = events.with_suffix(".log").read_text()
            code = trainer.process.returncode
            if code != -signal.SIGKILL or reached(phase) not in log:
                row.failures.append(f"{phase}: not reached, ended with {code}: {log[-300:]}")
            options, step = ("--resume",), trainer.step
        spans.fault_ends()
        losses, plan = resumed_to_the_end(rig, pace.plan, step, row)
        spans.close()
    judge(rig, row, losses, references(plan))


def endless(plan: Plan) -> Plan:
    """For a trainer that ends by a kill, not before."""
    return Plan(steps=100 * plan.steps, every=plan.every)


def wait_for_steps(trainer: ExampleTrainer, size: int, count: int) -> None:
    """Until so many steps were told after the first `size` bytes of the events, or it has ended."""

    def told() -> int:
        if not trainer.events.exists():
            return 0
        with trainer.events.open() as file:
            file.seek(size)
            return sum('"step"' in line and '"loss"' in line for line in file)

    poll(PATIENCE, lambda: trainer.ended() or told() >= count, lambda: f"{count} steps further")


def resumed_to_the_end(rig: Rig, plan: Plan, step: int, row: Row) -> tuple[dict[int, str], Plan]:
    """Train on to the first checkpoint at or behind `step` and the plan's end; losses, new plan."""
    reach = max(plan.steps, step)
    end = Plan(steps=reach + (-reach) % plan.every, every=plan.every)
    trainer = ExampleTrainer(rig.toml, end, rig.root / "events", "--resume")
    try:
        failure = trainer.finish()
    finally:
        trainer.kill()
    row.failures += [failure] * bool(failure)
    return trainer.losses(), end


# --- rebuild, scrub, ingest -----------------------------------------------------------------

ANY = ""  # operation


class DiesAt(DeviceWrapper):
    """Kills the process right before the n-th operation of a kind on any device."""

    def __init__(self, inner: Device, operation: str, nth: int, count: Iterator[int]) -> None:
        super().__init__(inner)
        self._operation, self._nth, self._count = operation, nth, count

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if self._operation in (ANY, operation) and next(self._count) == self._nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return call()


def open_dying(rig: Rig, operation: str, nth: int, count: Iterator[int]) -> Pool:
    """The pool, in a process that is to die. `count` goes on with each operation."""
    config = find_config(rig.toml)
    return Pool(config, opener=wrapping(config, lambda _, d: DiesAt(d, operation, nth, count)))


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is killed, how damage is done before, the operations at which it dies, what ends it."""

    name: str
    prepare: Callable[[Rig], None]
    run: Callable[[Pool], object]
    finish: Callable[[Pool], object]
    operations: Sequence[str]


def remove_columns(rig: Rig) -> None:
    """One device has lost files. Nobody reads them meanwhile: readers mend what they find."""
    for file in rig.columns(rig.disks[0], STILL):
        file.unlink()


def damage_columns(rig: Rig) -> None:
    """A bit of files of a device is wrong."""
    for file in rig.columns(rig.disks[0], STILL):
        flip(file, 4096 + 700)


def ingest_rows(pool: Pool) -> None:
    """Write a data set, over what may be there."""
    with DatasetWriter(
        pool, CUT, {"x": Field("uint8", (64,))}, shard_bytes=1 << 18, overwrite=True
    ) as writer:
        writer.write_batch({"x": CUT_ROWS})


def _nothing(_: Rig) -> None:
    """No damage before."""


def _scrub_from_the_start(pool: Pool) -> object:
    return pool.scrub(resume=False)


WRITING = ("create", "write", "sync", "publish", "sync_directory")
JOBS = (
    Job(
        name="rebuild",
        prepare=remove_columns,
        run=Pool.rebuild,
        finish=Pool.rebuild,
        operations=WRITING,
    ),
    Job(
        name="scrub",
        prepare=damage_columns,
        run=_scrub_from_the_start,
        finish=Pool.scrub,
        operations=("read", *WRITING),
    ),
    Job(name="ingest", prepare=_nothing, run=ingest_rows, finish=ingest_rows, operations=WRITING),
)
KILLED_AT = (1, 5)  # the n-th operation of a kind


def kill_job(
    job: Job, rig: Rig, pace: Pace, start: StartTrainer, references: References, row: Row
) -> None:
    """Kill it at each operation and at random, while a trainer saves; look, let it be finished."""
    healed = Healed()
    kills = [(operation, nth) for operation in job.operations for nth in KILLED_AT]
    kills += _random_kills(rig, job)
    steps = (pace.plan.steps - pace.start) // len(kills)
    with under_load(rig, pace, start, row) as load:
        load.begin()
        for operation, nth in kills:
            load.let_train(steps)
            wrong = _killed(rig, job, operation, nth, healed)
            row.failures += [f"{operation or 'operation'} {nth}: {text}" for text in wrong]
        row.failures += load.end()
        losses = load.trainer.losses()
    row.healed_bytes, row.healed_columns = healed.bytes, healed.columns
    judge(rig, row, losses, references(pace.plan))


def _random_kills(rig: Rig, job: Job) -> list[tuple[str, int]]:
    """Places among all operations on devices, which an undisturbed run counts."""
    count, rng = itertools.count(1), random.Random(SEED)
    job.prepare(rig)
    with open_dying(rig, ANY, 0, count) as pool:
        job.run(pool)
    total = next(count)
    # no two runs have as many; the last fifth is left out, so that every kill is met
    return [(ANY, rng.randrange(1, 4 * total // 5)) for _ in range(RANDOM_KILLS)]


def _killed(rig: Rig, job: Job, operation: str, nth: int, healed: Healed) -> list[str]:
    """One kill, and what is wrong after it or after the run that finishes it."""
    job.prepare(rig)
    wrong = []
    with forked(lambda: job.run(open_dying(rig, operation, nth, itertools.count(1)))) as pid:
        code = exit_status(pid, PATIENCE)
        if code != -signal.SIGKILL:
            wrong.append(f"not reached, ended with {code}")
    with hpstore.open(rig.toml) as pool:
        wrong += objects_wrong(pool) + data_set_wrong(pool)
    heal(rig, healed, job.finish)
    with hpstore.open(rig.toml) as pool:
        if not pool.scrub(prefix=f"{STILL}/", resume=False).clean:
            wrong.append("not healed by the run after it")
        return wrong + objects_wrong(pool) + data_set_wrong(pool)


def objects_wrong(pool: Pool) -> list[str]:
    """Objects that do not hold their bytes."""
    keys = [f"{prefix}/{number}" for prefix in (PROBE, STILL) for number in range(OBJECTS)]
    return [f"{key} is wrong" for key in keys if pool.get(key) != payload(key, OBJECT_BYTES)]


def data_set_wrong(pool: Pool) -> list[str]:
    """The data set of the ingest is there whole, or not at all."""
    if CUT not in [found.name for found in list_datasets(pool)]:
        return []
    data = Dataset(pool, CUT)
    same = len(data) == len(CUT_ROWS) and np.array_equal(data[len(data) - 1]["x"], CUT_ROWS[-1])
    data.close()
    remove_orphans(pool, CUT)
    return [] if same and verify_dataset(pool, CUT).clean else ["a data set in part"]


RESTARTS = (
    Restart(
        name="trainer killed at random",
        method=f"SIGKILL, {RANDOM_KILLS} times",
        run=kill_trainer_at_random,
    ),
    Restart(
        name="trainer killed in a save",
        method="SIGKILL: " + ", ".join(TRAINER),
        run=kill_trainer_at_phases,
    ),
    *(
        Restart(
            name=f"{job.name} killed",
            run=partial(kill_job, job),
            method=f"SIGKILL at {', '.join(job.operations)}; {RANDOM_KILLS} at random",
        )
        for job in JOBS
    ),
    Restart(
        name="agent killed",
        run=kill_agent,
        fuse=True,
        method="SIGKILL: " + ", ".join((*AGENT_AWAY, *AGENT_BACK)) + "; at random",
    ),
)
