"""One step of one rank, from its micro-batches to new weights; saves come after it (hooks.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.state.training_state import rng_state, set_rng_state
from hpstore.errors import ConfigError, StepBroken
from hpstore.loaders import DataLoader
from hpstore.trainers.pipelining.events import EventRecorder
from hpstore.trainers.pipelining.idle_time import IdleTally
from hpstore.trainers.pipelining.schedule_plan import SchedulePlan
from hpstore.trainers.pipelining.schedule_wrappers import require_trainable
from hpstore.trainers.pipelining.stage_inputs import Supply
from hpstore.trainers.pipelining.stages import Buffers
from hpstore.trainers.pipelining.step_agreement import Agreement, broken_off
from hpstore.trainers.pipelining.step_record import Arrivals, ScheduleRun, StepRecord
from hpstore.trainers.pipelining.step_update import Updates
from hpstore.trainers.pipelining.torch_internals import (
    StepInputs,
    can_be_lazy,
    microbatches_of,
    plan_of,
    require_keywords,
    run_schedule,
)

COUNTERS = ("lazy_refused_total", "buffers_put_back_total")


# Any below: torch's schedules have no common public type
class StepRunner:
    """Makes steps with what they need. `stages` are those that restore() was given; `alone`: this
    rank is its whole pipeline. All calls are collective."""

    def __init__(
        self,
        supply: Supply,
        loader: DataLoader | None,
        agreement: Agreement,
        recorder: EventRecorder,
        updates: Updates,
        gate: CopyGate,
        *,
        lazy: bool,
        num_stages: int,
        alone: bool,
    ) -> None:
        self._supply, self._loader, self._agreement = supply, loader, agreement
        self._recorder, self._updates, self._gate = recorder, updates, gate
        self._lazy, self._num_stages, self._alone = lazy, num_stages, alone
        self.stages: list[PipelineStage] = []
        self.plan: SchedulePlan | None = None
        self.tally = IdleTally()  # of the steps before
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._broken = ""  # why no step can follow
        self._copied = (0, 0)  # bytes, as of the step before
        self._seen: Any = None  # the schedule whose shapes torch has tried out

    def make(
        self,
        schedule: Any,
        optimizer: Any,
        keywords: Mapping[str, Any],
        microbatches: int | None,
        before_update: Callable[[], float],
    ) -> StepRecord:
        """What PipelineHooks.step() does before it saves; the record has no save yet."""
        optimizers = self._updates.optimizers
        if optimizers is None or not optimizers.are(optimizer):
            raise ConfigError("call restore(stage, optimizer) first, with this optimizer")
        if self._broken or self._agreement.broken:
            raise StepBroken(self._broken or self._agreement.broken)
        count = microbatches or microbatches_of(schedule)
        optimizers.zero_grad()
        given = self._begin(schedule, count, keywords)
        try:
            run = self._run(schedule, given, keywords)
        except BaseException as error:
            if not self._alone:
                self._broken = broken_off(self._updates.position.step, error)
            raise
        finally:
            events = self._recorder.end_step()
        copy_wait = before_update()
        skipped = self._updates.make(run, self._supply.fault)
        waited, late = self._supply.wait_seconds, self._supply.late_microbatches
        arrivals = self._arrivals(run, self._consumed(count))
        if not skipped:
            self._updates.step_schedulers()
        idle, busy = self._copied_since()
        return StepRecord(
            step=self._updates.position.step - 1,
            losses=tuple(run.losses),
            events=events,
            microbatches=count,
            schedule_seconds=run.seconds,
            data_wait_seconds=waited,
            late_microbatches=late,
            arrivals=arrivals,
            copy_wait_seconds=copy_wait,
            skipped=skipped,
            save_seconds=0.0,
            hook_seconds=self._recorder.hook_seconds,
            idle_bytes=idle,
            busy_bytes=busy,
            saved=None,
        )

    def _begin(self, schedule: Any, count: int, keywords: Mapping[str, Any]) -> StepInputs:
        """The data of a step, once all ranks are at it and have theirs."""
        given, fault = StepInputs(), None
        try:
            lazy = self._lazy and can_be_lazy(schedule, self.counters)
            self._supply.begin(count)
            given = self._supply.given(lazy=lazy)
            require_keywords(schedule, self._supply.keyword_names | keywords.keys())
            self.guard_buffers(schedule)
        except Exception as error:  # noqa: BLE001 (raised by reach)
            fault = error
        self._agreement.reach(self._updates.position.step, fault)
        self._recorder.begin_step()
        self._updates.scaling.forget()
        return given

    def _run(self, schedule: Any, given: StepInputs, keywords: Mapping[str, Any]) -> ScheduleRun:
        """The schedule."""
        losses: list[torch.Tensor] | None = [] if self._supply.last else None
        before, began = self._supply.wait_seconds, time.perf_counter()
        run_schedule(schedule, self.stages, given, losses, keywords)
        waited = self._supply.wait_seconds - before
        seconds = time.perf_counter() - began - waited
        return ScheduleRun(began=began, seconds=seconds, losses=losses or [], lazy=given.lazy)

    def _consumed(self, count: int) -> tuple[float, ...]:
        """Note the micro-batches of the step as consumed; when they were there."""
        used, position = self._supply.finish(), self._updates.position
        if used.after is not None and self._loader is not None:
            position.ledger = position.ledger.after(used.spans, self._loader.order)
            position.loader = used.after
        position.microbatches = count
        return used.ready

    def _arrivals(self, run: ScheduleRun, ready: tuple[float, ...]) -> Arrivals | None:
        """Of the micro-batches; their deadlines follow from what was measured before this step."""
        if not self._supply.first and not self._supply.last:
            return None
        return Arrivals(
            ready=ready,
            began=run.began,
            first=self._supply.first,
            lazy=run.lazy,
            plan=self.plan,
            seconds=self.tally.seconds_by_kind() if run.lazy else {},
        )

    def _copied_since(self) -> tuple[int, int]:
        """Bytes copied since the last call, idle and busy: those of the save before."""
        before = self._copied
        self._copied = self._gate.idle_bytes, self._gate.busy_bytes
        return self._copied[0] - before[0], self._copied[1] - before[1]

    def guard_buffers(self, schedule: Any) -> None:
        """Where torch may try the shapes out: a new schedule, and after an evaluation."""
        if self._seen is schedule and not self._recorder.events_outside:
            return
        require_trainable(schedule, [stage.submod for stage in self.stages])
        self._seen, self._recorder.events_outside = schedule, 0
        self.plan = plan_of(schedule, self._num_stages)
        buffers, drawn = Buffers(stage.submod for stage in self.stages), rng_state()

        def put_back() -> None:
            buffers.put_back()
            set_rng_state(drawn)
            self.counters["buffers_put_back_total"] += buffers.changed

        self._recorder.before_first = put_back
