"""PipelineHooks: what joins a pipeline schedule, a loader and a checkpointer (docs/pipeline.md)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.pipelining import PipelineStage

from hpstore.checkpoint import Checkpointer, SaveHandle
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.ranks.stop_step import ON_SIGTERM
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.save.save_options import checked_choice
from hpstore.checkpoint.state.training_state import rng_state, set_rng_state
from hpstore.errors import ConfigError, StepBroken
from hpstore.loaders import DataLoader
from hpstore.runtime.closing import Closing
from hpstore.trainers.pipelining.agreed_parts import agreed_parts
from hpstore.trainers.pipelining.consumed_samples import Ledger, Vote, agreed
from hpstore.trainers.pipelining.events import ComputeEvent, EventRecorder
from hpstore.trainers.pipelining.idle_time import BubbleReport, IdleTally, report_of
from hpstore.trainers.pipelining.micro_batch_feed import Keywords, Pick
from hpstore.trainers.pipelining.older_states import restore_run
from hpstore.trainers.pipelining.rank_coordinates import (
    RankStanding,
    pipeline_group,
    placed,
    standing,
)
from hpstore.trainers.pipelining.run_position import RunPosition
from hpstore.trainers.pipelining.schedule_plan import SchedulePlan
from hpstore.trainers.pipelining.schedule_wrappers import require_trainable
from hpstore.trainers.pipelining.stage_inputs import Supply
from hpstore.trainers.pipelining.stages import (
    Buffers,
    require_free_names,
    require_own_stages,
    watch,
    watched,
)
from hpstore.trainers.pipelining.step_agreement import Agreement, Votes, broken_off, preempted_after
from hpstore.trainers.pipelining.step_record import Arrivals, ScheduleRun, StepRecord
from hpstore.trainers.pipelining.step_update import Updates
from hpstore.trainers.pipelining.tied_tensors import Tied
from hpstore.trainers.pipelining.torch_internals import (
    StepInputs,
    can_be_lazy,
    microbatches_of,
    plan_of,
    require_keywords,
    run_schedule,
)
from hpstore.trainers.pipelining.validation import ValidationEpoch

_log = logging.getLogger(__name__)
SNAPSHOTS = {"free": "overlap", "bubbles": "overlap", "inline": "copy"}  # how saves are staged
COUNTERS = ("lazy_refused_total", "buffers_put_back_total")
S = TypeVar("S", bound=PipelineStage)


class PipelineHooks(Closing):
    """Storage for one rank of a pipeline of torch.distributed.pipelining; docs/pipeline.md.

    `ckpt`: None for a run without checkpoints. `loader`: a batch of it is one micro-batch; only the
    ranks of the first and the last stage read it, the others may give None. `stages`: those of this
    rank, of `num_stages`. `every`: steps between two saves (None: save() is yours to call).
    `inputs`, `target`: what the first stage gets of a batch, and what the last compares with: a
    name or index, a tuple of them, or a function of the batch. `keywords`: what every stage gets
    besides (masks, position ids), by the name of its argument, or a function of the batch that
    gives a dict; then every rank reads the loader. `mesh`: the DeviceMesh of the whole
    job, needed where there are several pipelines; its dimension "pp" is this rank's pipeline, and
    ranks with one data-parallel coordinate ("dp", "dp_...") read the same samples. `group`: instead
    of a mesh where pipelines are the data-parallel ranks, this rank's pipeline. `snapshot`: "free"
    copies a save's tensors while the next step runs, "bubbles" only while this rank computes
    nothing, "inline" before the next step; in each case the copy is whole before the optimizer
    writes next. `lazy`: micro-batches are handed out one by one, each when it is needed.
    `before_optimizer`: called when the gradients are whole and unscaled; the place to clip.
    `microbatches`: of a step, where the schedule does not tell. `skip_nonfinite`: where a gradient
    of any rank is not finite all ranks leave the optimizer out; the step counts. `on_sigterm`:
    "save", when SIGTERM comes to any rank, after a step that all agree on, and raise Preempted from
    it on all ranks; or "finish", what the checkpointer does of its own.

    All calls but close() and before_update() are calls of all ranks, steps too. One thread.
    """

    # Any below: schedules, scalers and process groups of torch have no public types
    def __init__(
        self,
        ckpt: Checkpointer | None,
        loader: DataLoader | None,
        *,
        stages: Sequence[int],
        num_stages: int,
        every: int | None = None,
        inputs: Pick = 0,
        target: Pick = 1,
        keywords: Keywords = None,
        group: Any = None,
        mesh: Any = None,
        snapshot: str = "free",
        lazy: bool = False,
        before_optimizer: Callable[[], object] | None = None,
        microbatches: int | None = None,
        commit_seconds: float = 600.0,
        skip_nonfinite: bool = False,
        on_sigterm: str = "save",
    ) -> None:
        _require_saving(snapshot, every, ckpt)
        self.stages, self.num_stages = tuple(sorted(stages)), num_stages
        self.every, self.lazy, self.microbatches = every, lazy, microbatches
        self.snapshot, self.skip_nonfinite = snapshot, skip_nonfinite
        self._ckpt, self._loader, self._before_optimizer = ckpt, loader, before_optimizer
        self._group = pipeline_group(group, mesh)
        self.gate = CopyGate(blocks=snapshot == "bubbles")
        if ckpt is not None:
            ckpt.saver.stage_by(SNAPSHOTS[snapshot], self.gate)
            saves = checked_choice("on_sigterm", on_sigterm, ON_SIGTERM) == "save"
            if saves and not ckpt.pool.read_only:
                ckpt.saver.expect_preemption(required=False)
        self._recorder = EventRecorder(self.gate)
        self._ranks = Ranks(commit_seconds)
        said = standing(
            self.stages, num_stages, self._group, mesh, loader, everywhere=keywords is not None
        ).to_json()
        heard = self._ranks.all_gather(said, RankChannel.TRAINER)
        self.place = placed([RankStanding.of_json(text) for text in heard], self._ranks.rank)
        first, last = 0 in self.stages, num_stages - 1 in self.stages
        self._supply = Supply(
            loader, first=first, last=last, inputs=inputs, target=target, keywords=keywords
        )
        if self._supply.fed and loader is not None:
            loader.read_as(self.place.replica, self.place.replicas)
        self._state: dict[str, Any] = {}
        self._stages: list[PipelineStage] = []
        self._elsewhere: frozenset[str] = frozenset()  # tied tensors that an earlier rank counts
        self._agreement = Agreement(self._ranks)
        self._updates = Updates(
            self._agreement, before=before_optimizer, skip_nonfinite=skip_nonfinite
        )
        self._position.loader = self._supply.position()
        self._broken = ""  # why no step can follow
        self._copied = (0, 0)  # bytes, as of the step before
        self._tally = IdleTally()
        self._plan: SchedulePlan | None = None
        self._seen: Any = None  # the schedule whose shapes torch has tried out
        self._counters = dict.fromkeys(COUNTERS, 0)

    # --- wiring -----------------------------------------------------------------------------

    def wrap_stage(self, kind: type[S]) -> type[S]:
        """A stage class like `kind` whose compute calls are noted. For every schedule."""
        return watched(kind, self._recorder)

    def watch(self, stage: Any) -> Any:
        """As wrap_stage(), for a stage that is built already, by torch's pipeline(...) for one; the
        same stage."""
        return watch(stage, self._recorder)

    def observe(self, observer: Callable[[ComputeEvent], None]) -> None:
        """Call `observer` after each compute call of a step, on the training thread. What it
        raises is counted and logged once; its time is hook_seconds."""
        self._recorder.observers.append(observer)

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The loss for a schedule when there is a GradScaler: scaled for the backward, not in the
        records."""
        return self._updates.scaling.loss(function)

    def restore(
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        optimizer: Any,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        tied: Iterable[str | Sequence[str]] = (),
        step: int | None = None,
        strict: bool = True,
        data_name: str = "loader",
        **more: Any,
    ) -> int:
        """Take part in checkpoints with these; go on from the newest, or `step`, which is returned.

        Written by another number of stages, or by a run without a pipeline that has its loader as
        `data_name` in its state, it fits by the names of the tensors, which must be those of the
        whole model. `optimizer`: one, a list, or an object that holds some. `scheduler`, `scaler`:
        stepped after the optimizer, saved; a list of schedulers, too. `tied`: names that several
        stages have on purpose, kept equal by you; a tuple for the names of one tensor. `strict`: as
        Checkpointer has it. `more`: saved with the rest, alike on all ranks (what each has for
        itself goes into ckpt.per_rank()). Raises ConfigError for names of two stages,
        CheckpointMismatch.
        """
        self._stages = list(stage) if isinstance(stage, (list, tuple)) else [stage]  # type: ignore[list-item]

        def check() -> None:
            require_free_names(more, data_name)
            require_own_stages(self._stages, self._recorder, self.stages, self.num_stages)
            self._supply.require_even()

        votes = Votes(
            early=self.lazy or scaler is not None,
            late=self._before_optimizer is not None or self.skip_nonfinite,
        )
        parts = agreed_parts(
            self._ranks, self.place, self._stages, optimizer, Tied.of(tied), votes, check
        )
        self._elsewhere = parts.elsewhere
        saved = parts.optimizers.saved
        self._state = {"model": parts.model, "optimizer": saved, data_name: self, **more}
        for name, value in (("scheduler", scheduler), ("scaler", scaler)):
            if value is not None:
                self._state[name] = value
        if self._ckpt is not None:
            found = restore_run(
                self._ckpt, self._ranks, self._state, data_name, step, strict=strict
            )
            if found is not None and not self._position.counted:  # by a run without a pipeline
                self._position.step = self._position.weights = found
                self._position.counted = True
        self._updates.begin(
            parts.optimizers, self._stages, parts.votes, scheduler=scheduler, scaler=scaler
        )
        return self.completed

    @property
    def _position(self) -> RunPosition:
        return self._updates.position

    # --- a step -----------------------------------------------------------------------------

    def step(self, schedule: Any, optimizer: Any, **keywords: Any) -> StepRecord:
        """One step: data, schedule, optimizer, and every `every` steps a save. `keywords`: further
        arguments of this rank's stages, of the whole batch, as a schedule's step() takes them.

        What one rank cannot do makes the step void on all of them: it raises its error, they raise
        StepVoid, and the next call has the same micro-batches. If a schedule
        shared with other ranks fails midway, no further step is possible (StepBroken). Errors of
        the save after a step, or of the one before, are raised too; the step then counts. So does
        one that raises Preempted, a SystemExit: it is saved, durably.
        """
        optimizers = self._updates.optimizers
        if optimizers is None or not optimizers.are(optimizer):
            raise ConfigError("call restore(stage, optimizer) first, with this optimizer")
        if self._broken or self._agreement.broken:
            raise StepBroken(self._broken or self._agreement.broken)
        count = self.microbatches or microbatches_of(schedule)
        optimizers.zero_grad()
        given = self._begin(schedule, count, keywords)
        try:
            run = self._run(schedule, given, keywords)
        except BaseException as error:
            if len(self.place.members) > 1:
                self._broken = broken_off(self.completed, error)
            raise
        finally:
            events = self._recorder.end_step()
        copy_wait = self.before_update()
        skipped = self._updates.make(run, self._supply.fault)
        waited, late = self._supply.wait_seconds, self._supply.late_microbatches
        arrivals = self._arrivals(run, self._consumed(count))
        if not skipped:
            self._updates.step_schedulers()
        idle, busy = self._copied_since()
        saving = time.perf_counter()
        saved = self.save() if self.every and self.completed % self.every == 0 else None
        record = StepRecord(
            step=self.completed - 1,
            losses=tuple(run.losses),
            events=events,
            microbatches=count,
            schedule_seconds=run.seconds,
            data_wait_seconds=waited,
            late_microbatches=late,
            arrivals=arrivals,
            copy_wait_seconds=copy_wait,
            skipped=skipped,
            save_seconds=time.perf_counter() - saving,
            hook_seconds=self._recorder.hook_seconds,
            idle_bytes=idle,
            busy_bytes=busy,
            saved=saved,
        )
        self._tally.add(record)
        if self._ckpt is not None and self._ckpt.reached_preemption(self.completed):
            self._stop(self._ckpt, saved)
        return record

    def _stop(self, ckpt: Checkpointer, saved: SaveHandle | None) -> NoReturn:
        """The last step of this process: durable, then Preempted."""
        if saved is None or saved.skipped:
            self.save()
        ckpt.before_update()
        ckpt.wait()
        raise preempted_after(self.completed)

    def _begin(self, schedule: Any, count: int, keywords: Mapping[str, Any]) -> StepInputs:
        """The data of a step, once all ranks are at it and have theirs."""
        given, fault = StepInputs(), None
        try:
            lazy = self.lazy and can_be_lazy(schedule, self._counters)
            self._supply.begin(count)
            given = self._supply.given(lazy=lazy)
            require_keywords(schedule, self._supply.keyword_names | keywords.keys())
            self._guard_buffers(schedule)
        except Exception as error:  # noqa: BLE001 (raised by reach)
            fault = error
        self._agreement.reach(self.completed, fault)
        self._recorder.begin_step()
        self._updates.scaling.forget()
        return given

    def _run(self, schedule: Any, given: StepInputs, keywords: Mapping[str, Any]) -> ScheduleRun:
        """The schedule."""
        losses: list[torch.Tensor] | None = [] if self._supply.last else None
        before, began = self._supply.wait_seconds, time.perf_counter()
        run_schedule(schedule, self._stages, given, losses, keywords)
        waited = self._supply.wait_seconds - before
        seconds = time.perf_counter() - began - waited
        return ScheduleRun(began=began, seconds=seconds, losses=losses or [], lazy=given.lazy)

    def _arrivals(self, run: ScheduleRun, ready: tuple[float, ...]) -> Arrivals | None:
        """Of the micro-batches; their deadlines follow from what was measured before this step."""
        if not self._supply.first and not self._supply.last:
            return None
        return Arrivals(
            ready=ready,
            began=run.began,
            first=self._supply.first,
            lazy=run.lazy,
            plan=self._plan,
            seconds=self._tally.seconds_by_kind() if run.lazy else {},
        )

    def _guard_buffers(self, schedule: Any) -> None:
        """Where torch may try the shapes out: a new schedule, and after an evaluation."""
        if self._seen is schedule and not self._recorder.events_outside:
            return
        require_trainable(schedule, [stage.submod for stage in self._stages])
        self._seen, self._recorder.events_outside = schedule, 0
        self._plan = plan_of(schedule, self.num_stages)
        buffers, drawn = Buffers(stage.submod for stage in self._stages), rng_state()

        def put_back() -> None:
            buffers.put_back()
            set_rng_state(drawn)
            self._counters["buffers_put_back_total"] += buffers.changed

        self._recorder.before_first = put_back

    def before_update(self) -> float:
        """Call it before weights are changed by anything but the optimizer (clamped, normalised,
        pruned, swapped with an average): the copies of the save are whole after it. The seconds
        that it waited for them. Not collective."""
        if self._ckpt is None:
            return 0.0
        began = time.perf_counter()
        self._ckpt.before_update()
        return time.perf_counter() - began

    def step_scheduler(self, metric: float | None) -> float:
        """For schedulers that wait for a metric (ReduceLROnPlateau), which step() only saves: step
        them with the mean of what ranks give, None where one has nothing; the mean. Collective."""
        said = self._ranks.all_gather(json.dumps(metric).encode(), RankChannel.TRAINER)
        known = [float(value) for text in said if (value := json.loads(text)) is not None]
        if not known:
            raise ConfigError("step_scheduler(): no rank has a metric. Nothing was changed.")
        mean = sum(known) / len(known)
        self._updates.step_by_metric(mean)
        return mean

    def _consumed(self, count: int) -> tuple[float, ...]:
        """Note the micro-batches of the step as consumed; when they were there."""
        used = self._supply.finish()
        if used.after is not None and self._loader is not None:
            order = self._loader.order
            self._position.ledger = self._position.ledger.after(used.spans, order)
            self._position.loader = used.after
        self._position.microbatches = count
        return used.ready

    def evaluate(self, schedule: Any, loader: DataLoader | None) -> float:
        """The mean loss over an epoch of another loader, on all ranks; of whole steps, what is left
        over is not looked at. It is read and picked from as the run's own is, its modules are in
        eval() meanwhile, and the run goes on as if it had not been. Collective."""
        if self._supply.fed and loader is not None:
            loader.read_as(self.place.replica, self.place.replicas)
        count = self.microbatches or microbatches_of(schedule)
        found = ValidationEpoch(self._ranks, self._agreement, self._supply, loader, count)
        self._guard_buffers(schedule)
        return found.losses(schedule, self._stages, self._updates.scaling, self.completed)

    def _copied_since(self) -> tuple[int, int]:
        """Bytes copied since the last call, idle and busy: those of the save before."""
        before = self._copied
        self._copied = self.gate.idle_bytes, self.gate.busy_bytes
        return self._copied[0] - before[0], self._copied[1] - before[1]

    def clip_grad_norm(self, max_norm: float) -> float:
        """For `before_optimizer`: clip by the norm over all stages, and over the shards of each
        tensor; the norm. A tied tensor counts once. Collective."""
        return self._updates.clip(max_norm, self._group, self._elsewhere)

    # --- commit -----------------------------------------------------------------------------

    def save(self) -> SaveHandle:
        """Agree with all ranks, then save the step that stands. Returns once staged. Collective.

        Raises CheckpointError, on all ranks, when stages differ in step, weights or consumed
        samples, and what went wrong in the save before.
        """
        if self._ckpt is None or not self._state:
            raise ConfigError("nothing to save with: give a checkpointer, and call restore() first")
        mine = self._position.vote(self.stages, fed=self._supply.fed)
        said = json.dumps(mine.to_dict(), sort_keys=True).encode()
        heard = self._ranks.all_gather(said, RankChannel.TRAINER)
        self._position.agree(agreed([Vote.from_dict(json.loads(text)) for text in heard]))
        return self._ckpt.save(self.completed, self._state)

    @property
    def ledger(self) -> Ledger:
        """Samples consumed by the whole job; on a rank without data as of the last save."""
        return self._position.ledger

    @property
    def completed(self) -> int:
        """Steps that are completed."""
        return self._position.step

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, alike on all ranks at a save: the loader's state, and what a
        pipeline adds to it. JSON types."""
        return self._position.to_dict(self.num_stages)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with any number of stages; also from a loader's own state. What was
        fetched ahead is forgotten."""
        found = RunPosition.from_dict(state)
        self._supply.go_to(found.loader)
        self._updates.position = found
        if found.stages not in (0, self.num_stages):
            _log.info(
                "step %d of %s stages goes on with %d", found.step, found.stages, self.num_stages
            )

    # --- report -----------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """What was skipped, undone or done in another way, since the start."""
        return (
            self._counters
            | self._updates.counters
            | {
                "observer_errors_total": self._recorder.observer_errors_total,
                "copies_overdue_total": self.gate.overdue_total,
            }
        )

    def bubbles(self) -> BubbleReport:
        """Idle shares of the ranks of this pipeline since the last report. Collective."""
        said = json.dumps(self._tally.to_dict()).encode()
        heard = self._ranks.all_gather(said, RankChannel.TRAINER)
        self._tally = IdleTally()
        tallies = {
            rank: IdleTally.from_dict(json.loads(heard[rank])) for rank in self.place.members
        }
        return report_of(tallies, self._plan)

    def close(self) -> None:
        """Stop fetching. The checkpointer and the loader stay the caller's. Idempotent."""
        self.gate.open()
        self._supply.close()


def _require_saving(snapshot: str, every: int | None, ckpt: Checkpointer | None) -> None:
    """Raise ConfigError for saves that cannot be made so."""
    if snapshot not in SNAPSHOTS:
        raise ConfigError(f"snapshot {snapshot!r} is not one of {', '.join(SNAPSHOTS)}")
    if every is not None and (every < 1 or ckpt is None):
        raise ConfigError("every: a number of steps above 0, and a checkpointer to save with")
