"""Runs one fault under a trainer and a reader, and judges what is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.errors import HpstoreError
from hpstore.pool import Pool
from tests.fault.suite.faults import Fault
from tests.fault.suite.rig import (
    Detection,
    Healed,
    Rig,
    heal,
    problems,
    reader_observer,
    status_observer,
)
from tests.fault.suite.table import Row, latency
from tests.fault.suite.workload import PREFIX, Plan, Reader, Trainer, digests, reader

NOTICE_SECONDS = 20.0  # a fault that must be seen is given up after so long
StartTrainer = Callable[[Path, Plan, Path], AbstractContextManager[Trainer]]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The same run on a healthy pool."""

    losses: dict[int, str]
    checkpoints: dict[int, str]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long each part of a run is."""

    plan: Plan
    start: int  # steps before the fault; at least one checkpoint
    steps: int  # steps at each yield of a script
    reads: int  # reads before, at each yield, after


def reference(
    root: Path, plan: Plan, start: StartTrainer, create: Callable[[Path], Path]
) -> Reference:
    """Train once without a fault."""
    toml, events = create(root), root / "events"
    with start(toml, plan, events) as trainer:
        failure = trainer.finish()
        assert not failure, failure
        losses = trainer.losses()
    assert sorted(losses) == list(range(1, plan.steps + 1))
    with hpstore.open(toml) as pool:
        return Reference(losses=losses, checkpoints=digests(pool))


def run_fault(fault: Fault, rig: Rig, pace: Pace, start: StartTrainer, healthy: Reference) -> Row:
    """Break, watch, heal, judge. What is wrong stands in the row, it is not raised."""
    row, healed = Row(fault=fault.name, method=fault.method), Healed()
    with (
        reader(rig.toml, rig.root / "reads") as reads,
        start(rig.toml, pace.plan, rig.root / "events") as trainer,
    ):
        try:
            _under_load(fault, rig, pace, trainer, reads, row, healed)
        finally:
            rig.relieve()  # else nobody could be ended
        row.failures += [f"reads: {read.problem}" for read in reads.reads() if read.problem][:3]
    if fault.back is not None:
        fault.back(rig, healed)
    row.healed_bytes, row.healed_columns = healed.bytes, healed.columns
    if trainer.losses() != healthy.losses:
        row.failures.append("another loss curve")
    with hpstore.open(rig.toml) as pool:
        row.failures += problems(pool)
        if digests(pool) != healthy.checkpoints:
            row.failures.append("other checkpoints than without the fault")
    return row


def _under_load(
    fault: Fault, rig: Rig, pace: Pace, trainer: Trainer, reads: Reader, row: Row, healed: Healed
) -> None:
    """The part during which trainer and reader run."""
    trainer.reach(pace.start)
    reads.await_reads(pace.reads)
    began = time.monotonic()
    row.before = latency(reads.reads(until=began))
    detection = Detection(
        began=began, observers=[reader_observer(reads), status_observer(rig)]
    )  # fmt: skip
    step = trainer.step
    for _ in fault.script(rig):
        step += pace.steps
        while not detection.look() and fault.seen and time.monotonic() < began + NOTICE_SECONDS:
            reads.await_reads(1)
        trainer.reach(step)
        detection.look()
        reads.await_reads(pace.reads)
    row.failures += _newest_is_whole(rig)
    if fault.evict:
        for number in fault.evict:
            heal(rig, healed, lambda pool, n=number: pool.evict(rig.paths[n]))  # type: ignore[misc]
        heal(rig, healed, Pool.rebuild)
    if fault.lift is not None:
        fault.lift(rig)
    _repair(fault, rig, healed, detection, row)
    ended = time.monotonic()
    row.during = latency(reads.reads(since=began, until=ended))
    reads.await_reads(pace.reads)
    failure = trainer.finish()
    row.after = latency(reads.reads(since=ended))
    if failure:
        row.failures.append(failure)
    row.detected_seconds, row.detected_by = detection.seconds, detection.by
    if fault.seen and not detection.by:
        row.failures.append(f"not seen within {NOTICE_SECONDS:.0f} s")


def _newest_is_whole(rig: Rig) -> list[str]:
    """With the fault still there: the newest checkpoint reads, every byte of it."""
    try:
        with hpstore.open(rig.toml, read_only=True) as pool:
            checkpointer = Checkpointer(pool, PREFIX, rng=False, warm=False)
            step = checkpointer.latest_valid()
            if step is None:
                return ["no checkpoint during the fault"]
            report = checkpointer.verify(step)
            return [] if report.ok else [f"step {step} is damaged during the fault"]
    except HpstoreError as error:
        return [f"no checkpoint could be read during the fault: {error}"]


def _repair(fault: Fault, rig: Rig, healed: Healed, detection: Detection, row: Row) -> None:
    """What an operator does next, with the pool as it is."""
    heal(rig, healed, Pool.rebuild)
    if fault.scrub:
        heal(rig, healed, lambda pool: pool.scrub(resume=False))
        if healed.damaged:
            detection.seen_by("scrub")
        elif not detection.by:
            row.failures.append("a scrub found no damage")
    waiting = healed.reports[-1].waiting if healed.reports else 0
    if waiting:
        row.note = f"{waiting} objects waited for it"
    lost = {key for report in healed.reports for key in report.unreadable}
    if lost:
        row.failures.append(f"unreadable: {sorted(lost)[:3]}")


__all__ = ["Pace", "Reference", "StartTrainer", "reference", "run_fault"]
