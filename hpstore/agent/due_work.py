"""What an agent finds to do for the whole pool: rebuilds, rebalances, sweeps; and scrubs.

When it looks it knows what is there; jobs report what came of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from hpstore.agent.agent_config import AgentConfig
from hpstore.agent.background_jobs import BackgroundJob, JobKind, Jobs, Report
from hpstore.agent.observer import Observer, WalkShape
from hpstore.agent.pool_keeper import PoolKeeper
from hpstore.agent.saved_state import AgentState
from hpstore.format.records import DeviceState
from hpstore.maintenance.rebalance import RebalanceReport
from hpstore.maintenance.rebuild import RebuildReport
from hpstore.maintenance.scrub_columns import ColumnScrubReport
from hpstore.pool.admin import PoolAdmin

_DAY_MS = 86_400_000
_SWEEP_SECONDS = 86_400.0  # between two sweeps of a pool that no scrub of it as a whole sweeps
_LONG_AGO = -1e18


class Tending(Protocol):
    """What work an agent gives, and what it knows."""

    config: AgentConfig
    memory: AgentState
    eyes: Observer
    jobs: Jobs
    keeper: PoolKeeper
    present: frozenset[str]


class DueWork:
    """Of one agent. `look` is called by the agent's thread, `started` and `finished` by that of the
    jobs. `save()` makes the agent's memory durable, and returns whether it is."""

    def __init__(self, agent: Tending, admin: PoolAdmin, save: Callable[[], bool]) -> None:
        self._agent, self._admin, self._clock, self._save = agent, admin, admin.clock, save
        self._lock = threading.Lock()  # guards all below
        self.put_off: dict[str, int] = {}  # why -> objects, of the last rebuild
        self._put_off_until_ms = 0
        self._reconciled: set[str] = set()
        self._rebuild_saw: frozenset[str] = frozenset()  # who answered when it began
        self._rebuilt_shape: WalkShape | None = None  # of the pool when one had ended
        self._fruitless: int | None = None  # what it could do nothing about, as Condition has it
        self._rebuild_todo: int | None = None  # what there was to be done when one began
        self._rebuilt_seconds = self._swept_seconds = _LONG_AGO
        self._evened_seconds, self._evened_columns = _LONG_AGO, 0  # of the last rebalance
        self._evened_shape: WalkShape | None = None
        self._scrubbed_ms = 0
        self._scrub_failed_seconds = _LONG_AGO

    def reconciled(self, present: frozenset[str] | None = None) -> frozenset[str]:
        """Devices whose columns were judged since they came back, of those that are `present`."""
        with self._lock:
            if present is not None:
                self._reconciled &= present
            return frozenset(self._reconciled)

    def look(self, now: float) -> None:
        """Rebuild what can be completed or widened; scrub when it is time. What only the keeper may
        do is left to it."""
        keeper, config = self._agent.keeper, self._agent.config
        condition, shape = self._agent.eyes.condition(), self._agent.eyes.shape()
        if condition is not None and keeper.repairs:
            self._look_for_rebuild(now, shape)
        if condition is not None and not condition.todo:
            with self._lock:  # what was put off has been deleted
                self.put_off, self._put_off_until_ms = {}, 0
            if config.rebalance_spread and keeper.decides:
                self._look_at_fullness(now, shape)
        if keeper.shared and keeper.decides:
            with self._lock:
                due = now - self._swept_seconds >= _SWEEP_SECONDS
            if due:
                self._agent.jobs.submit(BackgroundJob(kind=JobKind.SWEEP, reason="it is time"))
        if config.scrub_days:
            self._look_for_scrub(now)

    def _look_for_rebuild(self, now: float, shape: WalkShape) -> None:
        condition, config = self._agent.eyes.condition(), self._agent.config
        with self._lock:
            waited, before = now - self._rebuilt_seconds, self._rebuilt_shape
            fruitless, until_ms = self._fruitless, self._put_off_until_ms
        if condition is None or not (condition.todo or self._unmarked()):
            return
        same = fruitless == condition.todo_identity
        patience = config.again_seconds if same else config.survey_seconds
        over = 0 < until_ms < self._clock.wall_ms()  # what was put off was not deleted
        if shape != before or waited >= patience or over:
            reason = (
                f"{condition.todo} objects are not as they should be"
                if condition.todo
                else "no rebuild has confirmed yet that evicted devices are made up for"
            )
            self._agent.jobs.submit(BackgroundJob(kind=JobKind.REBUILD, reason=reason))

    def _unmarked(self) -> bool:
        """Whether evicted devices count as lost although a rebuild could confirm that their columns
        are rebuilt: it does so only when all members answer."""
        record = self._admin.record
        there = all(member.device_id in self._agent.present for member in record.members)
        return there and bool(record.unhealed())

    def _look_at_fullness(self, now: float, shape: WalkShape) -> None:
        """Even out how full devices are, once every object is whole and every member is there."""
        seen, record = self._agent.eyes.seen(), self._admin.record
        config, present = self._agent.config, self._agent.present
        calm = all(m.state is DeviceState.ONLINE and m.device_id in present for m in record.members)
        shares = [
            1 - s.free_bytes / s.total_bytes
            for s in seen.values()
            if s.total_bytes and not s.read_only
        ]
        spread = max(shares, default=0.0) - min(shares, default=0.0)
        if not calm or spread <= config.rebalance_spread:
            return
        with self._lock:
            before, moved = self._evened_shape, self._evened_columns
            waited = now - self._evened_seconds
        patience = config.survey_seconds if moved else config.again_seconds
        if shape != before or waited >= patience:
            reason = f"the fullest device is {max(shares):.0%} full, the emptiest {min(shares):.0%}"
            self._agent.jobs.submit(BackgroundJob(kind=JobKind.REBALANCE, reason=reason))

    def _look_for_scrub(self, now: float) -> None:
        agent, wall = self._agent, self._clock.wall_ms()
        began, running = agent.memory.scrub_began_ms, agent.jobs.running
        # what others have scrubbed counts where a scrub is one of the whole pool
        seen = 0 if agent.keeper.shared else agent.eyes.scrub_ended_ms
        scrubs = running is not None and running.kind is JobKind.SCRUB
        with self._lock:
            ended = max(self._scrubbed_ms, agent.memory.scrub_ended_ms)
            if ended < seen <= wall and not scrubs:  # of another process: it counts
                began, ended = max(began, seen), seen
            rested = now - self._scrub_failed_seconds >= agent.config.survey_seconds
            if max(began, ended) > wall:  # by a clock that was ahead
                began = ended = self._scrubbed_ms = 0
        unfinished = ended < began
        due = unfinished or wall - began >= agent.config.scrub_days * _DAY_MS
        if due and not unfinished:
            began = wall
        agent.memory = replace(agent.memory, scrub_began_ms=began, scrub_ended_ms=ended)
        self._save()  # before the job, which goes on with the pass that began then
        if due and rested and not scrubs:
            agent.jobs.submit(BackgroundJob(kind=JobKind.SCRUB, reason="it is time"))

    def started(self, job: BackgroundJob) -> None:
        """Called by the thread of jobs."""
        condition = self._agent.eyes.condition()
        with self._lock:
            if job.kind is JobKind.REBUILD:
                self._rebuild_saw = self._agent.present
                self._rebuild_todo = None if condition is None else condition.todo_identity

    def finished(self, job: BackgroundJob, report: Report | None) -> None:
        """Called by the thread of jobs."""
        shape, now = self._agent.eyes.shape(), self._clock.monotonic()
        with self._lock:
            if job.kind is JobKind.READMIT and self._admin.record.member(job.device) is not None:
                self._reconciled.add(job.device)
            elif job.kind is JobKind.REBUILD:
                self._rebuilt_seconds, self._rebuilt_shape = now, shape
                if isinstance(report, RebuildReport):
                    self._reconciled |= self._rebuild_saw
                    self.put_off, self._put_off_until_ms = report.put_off, report.put_off_until_ms
                # what has come since it began, it has not looked at; without a report it never ran
                idle = isinstance(report, RebuildReport) and not report.columns_written
                self._fruitless = self._rebuild_todo if idle else None
            elif job.kind is JobKind.REBALANCE:
                self._evened_seconds, self._evened_shape = now, shape
                moved = isinstance(report, RebalanceReport) and report.columns_moved
                self._evened_columns = moved or 0
            elif job.kind is JobKind.SWEEP:
                self._swept_seconds = now
            elif job.kind is JobKind.SCRUB and report is not None and not _left_out(report):
                self._scrubbed_ms = self._clock.wall_ms()
            elif job.kind is JobKind.SCRUB:  # another process scrubs or rebuilds, or a device fails
                self._scrub_failed_seconds = now
        if job.kind is not JobKind.SCRUB:
            self._agent.eyes.disturb()


def _left_out(report: Report) -> bool:
    """Whether a scrub of columns gave up a device: the pass goes on with that one later."""
    return isinstance(report, ColumnScrubReport) and bool(report.given_up)
