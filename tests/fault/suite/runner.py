"""Runs one fault under a trainer and a reader, and judges what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.errors import HpstoreError
from hpstore.pool.pool import Pool
from tests.fault.common import poll
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

NOTICE_SECONDS = 30.0  # a fault that must be seen is given up after so long
SAVE_SECONDS = 60.0  # for a checkpoint that is under way
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
    steps: int  # steps at each yield of a script; one of them saves
    reads: int  # reads before, at each yield, after


class References:
    """Runs without a fault, by plan; each is made when it is first asked for."""

    def __init__(self, root: Path, start: StartTrainer, create: Callable[[Path], Path]) -> None:
        self._root, self._start, self._create = root, start, create
        self._found: dict[Plan, Reference] = {}

    def __call__(self, plan: Plan) -> Reference:
        """The run of this plan."""
        if plan not in self._found:
            root = self._root / f"{plan.steps}-{plan.every}"
            root.mkdir()
            self._found[plan] = self._trained(root, plan)
        return self._found[plan]

    def _trained(self, root: Path, plan: Plan) -> Reference:
        toml = self._create(root)
        with self._start(toml, plan, root / "events") as trainer:
            failure = trainer.finish()
            assert not failure, failure
            losses = trainer.losses()
        assert sorted(losses) == list(range(1, plan.steps + 1))
        with hpstore.open(toml) as pool:
            found = Reference(losses=losses, checkpoints=digests(pool))
        assert plan.steps in found.checkpoints, "the run has saved nothing at its end"
        return found


# --- load -----------------------------------------------------------------------------------


class ReadSpans:
    """How reads go before, during and after a fault; the row gets it."""

    def __init__(self, reads: Reader, row: Row, count: int) -> None:
        self.reads, self._row, self._count = reads, row, count
        self._began = self._ended = 0.0

    def fault_begins(self) -> None:
        """Read for a while; from here on reads count as during the fault."""
        self.reads.await_reads(self._count)
        self._began = time.monotonic()
        self._row.before = latency(self.reads.reads(until=self._began))

    def go_on(self) -> None:
        """Read for a while."""
        self.reads.await_reads(self._count)

    def fault_ends(self) -> None:
        """It is over and healed; from here on reads count as after it."""
        self._ended = time.monotonic()
        self._row.during = latency(self.reads.reads(since=self._began, until=self._ended))

    def close(self) -> None:
        """Read for a while, the last time."""
        self.reads.await_reads(self._count)
        self._row.after = latency(self.reads.reads(since=self._ended))


@contextmanager
def watched_reads(rig: Rig, row: Row, count: int) -> Iterator[ReadSpans]:
    """A reader beside the block; what it met goes into the row, however the block ends."""
    with reader(rig.toml, rig.root / "reads") as reads:
        try:
            yield ReadSpans(reads, row, count)
        finally:
            found = [f"reads: {read.problem}" for read in reads.reads() if read.problem]
            row.failures += found[:3]


class Load:
    """A trainer and a reader beside a fault."""

    def __init__(self, trainer: Trainer, spans: ReadSpans, pace: Pace) -> None:
        self.trainer, self.spans, self._pace = trainer, spans, pace
        self.step = pace.start  # up to which it may train

    def begin(self) -> None:
        """Train and read for a while. Then the trainer waits, and nothing is broken yet."""
        self.trainer.reach(self.step)
        self.spans.fault_begins()

    def let_train(self, steps: int) -> None:
        """Beside what comes next."""
        self.step += steps
        self.trainer.allow(self.step)

    def go_on(self) -> None:
        """Train and read for a while, with the fault there."""
        self.let_train(self._pace.steps)
        self.trainer.reach(self.step)
        self.spans.go_on()

    @property
    def saved(self) -> int:
        """The newest step at which it had to save, while the fault was there."""
        step = min(self.step, self._pace.plan.steps)
        newest = step - step % self._pace.plan.every
        assert newest > self._pace.start, "nothing was saved since the fault began"
        return newest

    def end(self) -> list[str]:
        """It is over: train to the end. What was wrong with that."""
        self.trainer.reach(self.step)
        self.spans.fault_ends()
        failure = self.trainer.finish()
        self.spans.close()
        return [failure] if failure else []


@contextmanager
def under_load(rig: Rig, pace: Pace, start: StartTrainer, row: Row) -> Iterator[Load]:
    """A trainer and a reader run beside the block. At its end nothing hangs or is slow any more."""
    with (
        watched_reads(rig, row, pace.reads) as spans,
        start(rig.toml, pace.plan, rig.root / "events") as trainer,
    ):
        try:
            yield Load(trainer, spans, pace)
        finally:
            rig.relieve()  # else nobody could be ended


def judge(rig: Rig, row: Row, losses: dict[int, str], healthy: Reference) -> None:
    """Same losses, same checkpoints, everything as good as new; else it stands in the row."""
    if losses != healthy.losses:
        row.failures.append("another loss curve")
    with hpstore.open(rig.toml) as pool:
        row.failures += problems(pool)
        if digests(pool) != healthy.checkpoints:
            row.failures.append("other checkpoints than without the fault")


# --- a fault --------------------------------------------------------------------------------


def run_fault(
    fault: Fault, rig: Rig, pace: Pace, start: StartTrainer, healthy: Reference, row: Row
) -> None:
    """Break, watch, heal, judge. What is wrong stands in the row."""
    healed = Healed()
    if fault.prepare is not None:
        fault.prepare(rig)
    with under_load(rig, pace, start, row) as load:
        load.begin()
        detection = _break(fault, rig, load)
        row.failures += _newest_is_whole(rig, load.saved)
        load.let_train(pace.steps)
        _heal(fault, rig, healed, detection, row)
        row.failures += load.end()
        losses = load.trainer.losses()
    row.detected_seconds, row.detected_by = detection.seconds, detection.by
    if fault.seen and not detection.by:
        row.failures.append(f"not seen within {NOTICE_SECONDS:.0f} s")
    if fault.back is not None:
        fault.back(rig, healed)
    row.healed_bytes, row.healed_columns = healed.bytes, healed.columns
    judge(rig, row, losses, healthy)


def _break(fault: Fault, rig: Rig, load: Load) -> Detection:
    """Train and read with the fault there, once somebody has seen it who must."""
    reads = load.spans.reads
    detection = Detection(
        began=time.monotonic(), observers=[reader_observer(reads), status_observer(rig)]
    )
    for number, _ in enumerate(fault.script(rig)):
        if not number:
            detection.began = time.monotonic()  # to break it takes time, too
        until = time.monotonic() + NOTICE_SECONDS
        while not detection.look() and fault.seen and time.monotonic() < until:
            reads.await_reads(1)
        load.go_on()
        detection.look()
    return detection


def _newest_is_whole(rig: Rig, saved: int) -> list[str]:
    """With the fault still there: what was saved meanwhile is there and reads, every byte of it."""
    try:
        with hpstore.open(rig.toml, read_only=True) as pool:
            checkpointer = Checkpointer(pool, PREFIX, rng=False, save=SaveOptions(warm=False))
            poll(
                SAVE_SECONDS,
                lambda: max(checkpointer.steps(), default=0) >= saved,
                lambda: f"saved: step {saved}",
            )
            step = checkpointer.latest_valid()
            if step != saved:
                return [f"step {step} is the newest during the fault, not {saved}"]
            report = checkpointer.verify(step)
            return [] if report.ok else [f"step {step} is damaged during the fault"]
    except HpstoreError as error:
        return [f"no checkpoint could be read during the fault: {error}"]


def _heal(fault: Fault, rig: Rig, healed: Healed, detection: Detection, row: Row) -> None:
    """What an operator does next, while training goes on."""
    if fault.evict:
        for number in fault.evict:
            heal(rig, healed, lambda pool, n=number: pool.evict(rig.paths[n]))  # type: ignore[misc]
        heal(rig, healed, Pool.rebuild)
    if fault.lift is not None:
        fault.lift(rig)
    heal(rig, healed, Pool.rebuild)
    if fault.scrub:
        rewritten = healed.columns  # on a busy machine saves may pass the slow device by
        heal(rig, healed, lambda pool: pool.scrub(resume=False))
        if healed.damaged:
            detection.seen_by("scrub")
        elif rewritten:
            row.note = f"{rewritten} columns were written elsewhere meanwhile, none that was hurt"
        elif not detection.by:
            row.failures.append("a scrub found no damage")
    waiting = healed.reports[-1].waiting
    if waiting:
        row.note = f"{waiting} objects waited for it"
    lost = {key for report in healed.reports for key in report.unreadable}
    if lost:
        row.failures.append(f"unreadable: {sorted(lost)[:3]}")
