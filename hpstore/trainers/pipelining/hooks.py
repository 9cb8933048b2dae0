"""PipelineHooks: what joins a pipeline schedule, a loader and a checkpointer (docs/pipeline.md)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer

from hpstore.checkpoint import Checkpointer, SaveHandle
from hpstore.checkpoint.gates import CopyGate
from hpstore.checkpoint.modules import module_state
from hpstore.checkpoint.ranks import Channel, Ranks
from hpstore.checkpoint.training import rng_state, set_rng_state
from hpstore.closing import Closing
from hpstore.errors import CheckpointError, ConfigError, FormatTooNew, StepBroken
from hpstore.loaders import DataLoader
from hpstore.trainers.pipelining.agreement import NONE, Agreement, Votes, broken_off
from hpstore.trainers.pipelining.bubbles import (
    BubbleReport,
    Tally,
    deadlines_of,
    report_of,
)
from hpstore.trainers.pipelining.events import Event, Recorder
from hpstore.trainers.pipelining.feed import Pick
from hpstore.trainers.pipelining.gradients import all_finite, clip_norm
from hpstore.trainers.pipelining.ledger import Ledger, Vote, agreed
from hpstore.trainers.pipelining.places import (
    Standing,
    pipeline_group,
    placed,
    require_told,
    shares_tensors,
    standing,
)
from hpstore.trainers.pipelining.plan import Plan
from hpstore.trainers.pipelining.probes import (
    microbatches_of,
    not_lazy,
    plan_of,
    run_schedule,
)
from hpstore.trainers.pipelining.records import Run, StepRecord, slack_of
from hpstore.trainers.pipelining.scaling import Scaling
from hpstore.trainers.pipelining.stages import (
    Buffers,
    Held,
    bare,
    counted_elsewhere,
    merged,
    require_free_names,
    require_own_names,
    require_own_parameters,
    require_own_stages,
    watched,
)
from hpstore.trainers.pipelining.supply import Given, Supply

_log = logging.getLogger(__name__)
STATE_VERSION = 1
SNAPSHOTS = {"free": "overlap", "bubbles": "overlap", "inline": "copy"}  # how saves are staged
COUNTERS = ("lazy_refused_total", "buffers_put_back_total", "steps_skipped_by_scaler_total",
            "steps_skipped_nonfinite_total")  # fmt: skip
S = TypeVar("S", bound=PipelineStage)


class PipelineHooks(Closing):
    """Storage for one rank of a pipeline of torch.distributed.pipelining; docs/pipeline.md.

    `ckpt`: None for a run without checkpoints. `loader`: a batch of it is one micro-batch; only the
    ranks of the first and the last stage read it, the others may give None. `stages`: those of this
    rank, of `num_stages`. `every`: steps between two saves (None: save() is yours to call).
    `inputs`, `target`: what the first stage gets of a batch, and what the last compares with: a
    name or index, a tuple of them, or a function of the batch. `mesh`: the DeviceMesh of the whole
    job, needed where there are several pipelines; its dimension "pp" is this rank's pipeline, and
    ranks with one data-parallel coordinate ("dp", "dp_...") read the same samples. `group`: instead
    of a mesh where pipelines are the data-parallel ranks, this rank's pipeline. `snapshot`: "free"
    copies a save's tensors while the next step runs, "bubbles" only while this rank computes
    nothing, "inline" before the next step; in each case the copy is whole before the optimizer
    writes next. `lazy`: micro-batches are handed out one by one, each when it is needed.
    `before_optimizer`: called when the gradients are whole and unscaled; the place to clip.
    `microbatches`: of a step, where the schedule does not tell. `skip_nonfinite`: where a gradient
    of any rank is not finite all ranks leave the optimizer out; the step counts.

    All calls but close() are calls of all ranks, steps too. One thread.
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
        group: Any = None,
        mesh: Any = None,
        snapshot: str = "free",
        lazy: bool = False,
        before_optimizer: Callable[[], object] | None = None,
        microbatches: int | None = None,
        commit_seconds: float = 600.0,
        skip_nonfinite: bool = False,
    ) -> None:
        if snapshot not in SNAPSHOTS:
            raise ConfigError(f"snapshot {snapshot!r} is not one of {', '.join(SNAPSHOTS)}")
        if every is not None and (every < 1 or ckpt is None):
            raise ConfigError("every: a number of steps above 0, and a checkpointer to save with")
        self.stages, self.num_stages = tuple(sorted(stages)), num_stages
        self.every, self.lazy, self.microbatches = every, lazy, microbatches
        self.snapshot, self.skip_nonfinite = snapshot, skip_nonfinite
        self._ckpt, self._loader, self._before_optimizer = ckpt, loader, before_optimizer
        self._group = pipeline_group(group, mesh)
        self.gate = CopyGate(blocks=snapshot == "bubbles")
        if ckpt is not None:
            ckpt.stage_by(SNAPSHOTS[snapshot], self.gate)
        self._recorder = Recorder(self.gate)
        self._ranks = Ranks(commit_seconds)
        said = standing(self.stages, num_stages, self._group, mesh, loader).to_json()
        heard = self._ranks.all_gather(said, Channel.TRAINER)
        self.place = placed([Standing.of_json(text) for text in heard], self._ranks.rank)
        first, last = 0 in self.stages, num_stages - 1 in self.stages
        self._supply = Supply(loader, first=first, last=last, inputs=inputs, target=target)
        if self._supply.fed and loader is not None:
            loader.read_as(self.place.replica, self.place.replicas)
        self._step = self._weights = self._microbatches = 0
        self._ledger, self._loader_state = Ledger(), self._supply.position()
        self._state: dict[str, Any] = {}
        self._stages: list[PipelineStage] = []
        self._elsewhere: frozenset[str] = frozenset()  # tied tensors that an earlier rank counts
        self._scaling = Scaling()
        self._scheduler: Any = None
        self._counting: Any = None  # the hook that counts the optimizer's steps
        self._agreement, self._votes = Agreement(self._ranks), NONE
        self._broken = ""  # why no step can follow
        self._copied = (0, 0)  # bytes, as of the step before
        self._tally = Tally()
        self._plan: Plan | None = None
        self._seen: Any = None  # the schedule whose shapes torch has tried out
        self._counters = dict.fromkeys(COUNTERS, 0)

    # --- wiring -----------------------------------------------------------------------------

    def wrap_stage(self, kind: type[S]) -> type[S]:
        """A stage class like `kind` whose compute calls are noted. For every schedule."""
        return watched(kind, self._recorder)

    def observe(self, observer: Callable[[Event], None]) -> None:
        """Call `observer` after each compute call of a step, on the training thread. What it
        raises is counted and logged once; its time is hook_seconds."""
        self._recorder.observers.append(observer)

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The loss for a schedule when there is a GradScaler: scaled for the backward, not in the
        records."""

        return self._scaling.loss(function)

    def restore(
        self,
        stage: PipelineStage | Sequence[PipelineStage],
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        tied: Iterable[str] = (),
        step: int | None = None,
        strict: bool = True,
        **more: Any,
    ) -> int:
        """Take part in checkpoints with these; go on from the newest, or `step`, which is returned.

        Written by another number of stages, it fits by the names of the tensors, which must be
        those of the whole model. `scheduler`, `scaler`: stepped after the optimizer, saved. `tied`:
        names that several stages have on purpose, kept equal by you. `strict`: as Checkpointer has
        it. `more`: saved with the rest, alike on all ranks (what each has for itself goes into
        ckpt.per_rank()). Raises ConfigError for names of two stages, CheckpointMismatch.
        """
        self._stages = list(stage) if isinstance(stage, (list, tuple)) else [stage]  # type: ignore[list-item]
        model = self._agreed_model(optimizer, tuple(tied), more, scaled=scaler is not None)
        if self._counting is not None:
            self._counting.remove()
        self._counting = optimizer.register_step_post_hook(self._updated)
        self._scheduler = scheduler
        self._state = {"model": model, "optimizer": optimizer, "pipeline": self, **more}
        for name, value in (("scheduler", scheduler), ("scaler", scaler)):
            if value is not None:
                self._state[name] = value
        if self._ckpt is not None:
            self._ckpt.restore(self._state, step, strict=strict)
        self._scaling.begin(scaler, optimizer, self._device)
        return self._step

    def _agreed_model(
        self, optimizer: Optimizer, tied: Sequence[str], more: Iterable[str], *, scaled: bool
    ) -> torch.nn.Module:
        """One module of this rank's stages. An error on one rank is raised on every rank."""
        model, fault = torch.nn.Module(), ""
        try:
            require_free_names(more)
            require_own_stages(self._stages, self._recorder, self.stages, self.num_stages)
            model = merged([s.submod for s in self._stages])
            require_own_parameters(model, optimizer)
        except ConfigError as error:
            fault = str(error)
        mine = Held(
            stages=self.stages, names=tuple(module_state(model)), fault=fault,
            split=shares_tensors([s.submod for s in self._stages]),
            votes=Votes(early=self.lazy or scaled,
                        late=self._before_optimizer is not None or self.skip_nonfinite),
        )  # fmt: skip
        said = self._ranks.all_gather(mine.to_json(), Channel.TRAINER)
        heard = [Held.of_json(text) for text in said]
        require_own_names(heard, tied)
        require_told(self.place, [held.split for held in heard])
        self._votes = Votes.of_any([held.votes for held in heard])
        self._elsewhere = counted_elsewhere(self.place.members, self._ranks.rank, heard, tied)
        return model

    def _updated(self, *_: object) -> None:
        self._weights += 1

    # --- a step -----------------------------------------------------------------------------

    def step(self, schedule: Any, optimizer: Optimizer) -> StepRecord:
        """One step: data, schedule, optimizer, and every `every` steps a save.

        What one rank cannot do makes the step void on all of them: it raises its error, they raise
        StepVoid, and the next call has the same micro-batches. If a schedule
        shared with other ranks fails midway, no further step is possible (StepBroken). Errors of
        the save after a step, or of the one before, are raised too; the step then counts.
        """
        if self._state.get("optimizer") is not optimizer:
            raise ConfigError("call restore(stage, optimizer) first, with this optimizer")
        if self._broken:
            raise StepBroken(self._broken)
        count = self.microbatches or microbatches_of(schedule)
        optimizer.zero_grad(set_to_none=True)
        given = self._begin(schedule, count)
        try:
            run = self._run(schedule, given)
        except BaseException as error:
            if len(self.place.members) > 1:
                self._broken = broken_off(self._step, error)
            raise
        finally:
            events = self._recorder.end_step()
        copy_wait, weights = self._before_update(), self._weights
        skipped = self._update(optimizer, run)
        waited, late = self._supply.wait_seconds, self._supply.late_microbatches
        slack = self._slack(run, self._consumed(count))
        if self._scheduler is not None and weights != self._weights:
            self._scheduler.step()
        idle, busy = self._copied_since()
        saving = time.perf_counter()
        saved = self.save() if self.every and self._step % self.every == 0 else None
        record = StepRecord(
            step=self._step - 1, losses=tuple(run.losses), events=events, microbatches=count,
            schedule_seconds=run.seconds, data_wait_seconds=waited, late_microbatches=late,
            slack_seconds=slack, copy_wait_seconds=copy_wait, skipped=skipped,
            save_seconds=time.perf_counter() - saving, hook_seconds=self._recorder.hook_seconds,
            idle_bytes=idle, busy_bytes=busy, saved=saved,
        )  # fmt: skip
        self._tally.add(record)
        return record

    def _begin(self, schedule: Any, count: int) -> Given:
        """The data of a step, once all ranks are at it and have theirs."""
        given, fault = Given(), None
        try:
            lazy = self._may_be_lazy(schedule)
            self._supply.begin(count)
            given = self._supply.given(lazy=lazy)
            self._guard_buffers(schedule)
        except Exception as error:  # noqa: BLE001 (raised by reach)
            fault = error
        self._agreement.reach(self._step, fault)
        self._recorder.begin_step()
        self._scaling.forget()
        return given

    def _run(self, schedule: Any, given: Given) -> Run:
        """The schedule."""
        losses: list[torch.Tensor] | None = [] if self._supply.last else None
        before, began = self._supply.wait_seconds, time.perf_counter()
        run_schedule(schedule, self._stages, given, losses)
        waited = self._supply.wait_seconds - before
        seconds = time.perf_counter() - began - waited
        return Run(began=began, seconds=seconds, losses=losses or [], lazy=given.lazy)

    def _slack(self, run: Run, ready: tuple[float, ...]) -> float | None:
        """Between the arrival of the micro-batches and their deadlines."""
        due = deadlines_of(self._plan, self._tally) if run.lazy and self._plan else None
        return slack_of(due, ready, run.began, first=self._supply.first, lazy=run.lazy)

    def _may_be_lazy(self, schedule: Any) -> bool:
        if not self.lazy:
            return False
        reason = not_lazy(schedule)
        if reason:
            self._counters["lazy_refused_total"] += 1
            if self._counters["lazy_refused_total"] == 1:
                _log.warning(
                    "lazy=True is not possible with %s of this torch: %s. Whole batches are used.",
                    type(schedule).__name__, reason,
                )  # fmt: skip
        return not reason

    def _guard_buffers(self, schedule: Any) -> None:
        """Where torch may try the shapes out: a new schedule, and after an evaluation."""
        if self._seen is schedule and not self._recorder.events_outside:
            return
        self._seen, self._recorder.events_outside = schedule, 0
        self._plan = plan_of(schedule, self.num_stages)
        buffers, drawn = Buffers(stage.submod for stage in self._stages), rng_state()

        def put_back() -> None:
            buffers.put_back()
            set_rng_state(drawn)
            self._counters["buffers_put_back_total"] += buffers.changed

        self._recorder.before_first = put_back

    def _before_update(self) -> float:
        """The copies of a save are whole before parameters change; seconds waited for them."""
        if self._ckpt is None:
            return 0.0
        began = time.perf_counter()
        self._ckpt.before_update()
        return time.perf_counter() - began

    def _update(self, optimizer: Optimizer, run: Run) -> bool:
        """Unscale, the user's clipping, the optimizer; whether it was left out. What one rank
        cannot do is raised on all, before any of them changes a weight."""
        weights, scaling, parameters = self._weights, self._scaling, list(self._parameters())
        fault = self._supply.fault
        try:
            run.losses[:] = scaling.plain(run.losses)
        except ConfigError as error:
            fault = fault or error
        if self._votes.early:
            self._agreement.reach(self._step, fault)
        elif fault is not None:
            raise fault
        if scaling.active:
            scaling.unscale(parameters, self._device)
        if not self._prepare_update(parameters):
            self._counters["steps_skipped_nonfinite_total"] += 1
        elif scaling.active:
            scaling.step(stood_in=all(p.grad is None for p in parameters))
            self._counters["steps_skipped_by_scaler_total"] += weights == self._weights
        else:
            optimizer.step()
        self._step += 1
        return weights == self._weights

    def _prepare_update(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """`before_optimizer`; False where gradients are to be left out on all ranks."""
        fault, finite = None, True
        try:
            if self._before_optimizer is not None:
                self._before_optimizer()
            if self.skip_nonfinite:
                finite = all_finite(parameters, self._device)
        except Exception as error:  # noqa: BLE001 (raised by reach)
            fault = error
        try:
            if self._votes.late:
                return self._agreement.reach(self._step, fault, finite=finite)
            if fault is not None:
                raise fault
        except BaseException:
            if self._scaling.active:
                self._scaling.undo()
            raise
        return True

    def _consumed(self, count: int) -> tuple[float, ...]:
        """Note the micro-batches of the step as consumed; when they were there."""
        used = self._supply.finish()
        if used.after is not None and self._loader is not None:
            order = self._loader.order
            self._ledger = self._ledger.after(used.spans, order)
            self._loader_state = used.after
        self._microbatches = count
        return used.ready

    def _copied_since(self) -> tuple[int, int]:
        """Bytes copied since the last call, idle and busy: those of the save before."""
        before = self._copied
        self._copied = self.gate.idle_bytes, self.gate.busy_bytes
        return self._copied[0] - before[0], self._copied[1] - before[1]

    def clip_grad_norm(self, max_norm: float) -> float:
        """For `before_optimizer`: clip by the norm over all stages, and over the shards of each
        tensor; the norm. A tied tensor counts once. Collective."""
        named = [(n, p) for stage in self._stages for n, p in bare(stage.submod).named_parameters()]
        twice = {id(p) for n, p in named if n in self._elsewhere}
        return clip_norm(self._parameters(), max_norm, self._group, self._device, but=twice)

    def _parameters(self) -> Iterable[torch.nn.Parameter]:
        """Each once, though two stages share it."""
        return dict.fromkeys(p for stage in self._stages for p in stage.submod.parameters())

    @property
    def _device(self) -> torch.device:
        return torch.device(self._stages[0].device)

    # --- commit -----------------------------------------------------------------------------

    def save(self) -> SaveHandle:
        """Agree with all ranks, then save the step that stands. Returns once staged. Collective.

        Raises CheckpointError, on all ranks, when stages differ in step, weights or consumed
        samples (ledger.agreed), and what went wrong in the save before.
        """
        if self._ckpt is None or not self._state:
            raise ConfigError("nothing to save with: give a checkpointer, and call restore() first")
        mine = Vote(
            stages=self.stages, step=self._step, weights=self._weights,
            microbatches=self._microbatches,
            ledger=self._ledger if self._supply.fed else None,
            loader=self._loader_state if self._supply.fed else None,
        )  # fmt: skip
        said = json.dumps(mine.to_dict(), sort_keys=True).encode()
        heard = self._ranks.all_gather(said, Channel.TRAINER)
        common = agreed([Vote.from_dict(json.loads(text)) for text in heard])
        self._loader_state = None if common.loader is None else dict(common.loader)
        self._ledger = common.ledger or self._ledger
        return self._ckpt.save(self._step, self._state)

    @property
    def ledger(self) -> Ledger:
        """Samples consumed by the whole job; on a rank without data as of the last save."""
        return self._ledger

    @property
    def completed(self) -> int:
        """Steps that are completed."""
        return self._step

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, alike on all ranks at a save. JSON types."""
        return {
            "version": STATE_VERSION, "step": self._step, "weights": self._weights,
            "ledger": self._ledger.to_dict(), "loader": self._loader_state,
            "stages": self.num_stages,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with any number of stages. What was fetched ahead is forgotten."""
        version = state.get("version")
        if isinstance(version, int) and version > STATE_VERSION:
            raise FormatTooNew(
                f"the pipeline's state has version {version}, this hpstore reads {STATE_VERSION}: "
                "nothing was loaded; upgrade to resume from it"
            )
        if version != STATE_VERSION:
            raise CheckpointError(f"not the state of a pipeline, with {sorted(map(str, state))}")
        self._supply.go_to(state["loader"])
        self._step, self._weights = int(state["step"]), int(state["weights"])
        self._ledger, self._loader_state = Ledger.from_dict(state["ledger"]), state["loader"]
        if state["stages"] != self.num_stages:
            _log.info("step %d of %s stages goes on with %d", self._step, state["stages"],
                      self.num_stages)  # fmt: skip

    # --- report -----------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, int]:
        """What was skipped, undone or done in another way, since the start."""
        return self._counters | {
            "observer_errors_total": self._recorder.observer_errors_total,
            "copies_overdue_total": self.gate.overdue_total,
        }

    def bubbles(self) -> BubbleReport:
        """Idle shares of the ranks of this pipeline since the last report. Collective."""
        said = json.dumps(self._tally.to_dict()).encode()
        heard = self._ranks.all_gather(said, Channel.TRAINER)
        self._tally = Tally()
        tallies = {rank: Tally.from_dict(json.loads(heard[rank])) for rank in self.place.members}
        return report_of(tallies, self._plan)

    def close(self) -> None:
        """Stop fetching. The checkpointer and the loader stay the caller's. Idempotent."""
        self.gate.open()
        self._supply.close()


__all__ = ["STATE_VERSION", "PipelineHooks"]
