"""PipelineHooks: what joins a pipeline schedule, a loader and a checkpointer (docs/pipeline.md)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.pipelining import PipelineStage

from hpstore.checkpoint import Checkpointer, SaveHandle
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader
from hpstore.runtime.closing import Closing
from hpstore.trainers.pipelining.agreed_parts import Parts, agreed_parts
from hpstore.trainers.pipelining.consumed_samples import Ledger, Vote, agreed
from hpstore.trainers.pipelining.events import ComputeEvent, EventRecorder
from hpstore.trainers.pipelining.idle_time import BubbleReport, IdleTally, report_of
from hpstore.trainers.pipelining.micro_batch_feed import Keywords, Pick
from hpstore.trainers.pipelining.older_states import restore_run
from hpstore.trainers.pipelining.rank_coordinates import agreed_place, pipeline_group, standing
from hpstore.trainers.pipelining.run_position import RunPosition
from hpstore.trainers.pipelining.stage_inputs import Supply
from hpstore.trainers.pipelining.stages import (
    require_free_names,
    require_own_stages,
    watch,
    watched,
)
from hpstore.trainers.pipelining.step_agreement import Agreement, Votes
from hpstore.trainers.pipelining.step_record import StepRecord
from hpstore.trainers.pipelining.step_runner import StepRunner
from hpstore.trainers.pipelining.step_saves import prepare_saves, stop_saved
from hpstore.trainers.pipelining.step_update import Updates
from hpstore.trainers.pipelining.tied_tensors import Tied
from hpstore.trainers.pipelining.torch_internals import microbatches_of
from hpstore.trainers.pipelining.validation import ValidationEpoch

_log = logging.getLogger(__name__)
S = TypeVar("S", bound=PipelineStage)


class PipelineHooks(Closing):
    """Storage for one rank of a pipeline of torch.distributed.pipelining; docs/pipeline.md.

    All calls but close() and before_update() are calls of all ranks, steps too. One thread.

    Parameters
    ----------
    ckpt
        None for a run without checkpoints. It stays the caller's.
    loader
        A batch of it is one micro-batch. Only the ranks of the first and the last stage read it,
        the others may give None. It stays the caller's.
    stages, num_stages
        The stages of this rank, and how many there are.
    every
        Steps between two saves. None: save() is yours to call.
    inputs, target
        What the first stage gets of a batch, and what the last compares with: a name or index, a
        tuple of them, or a function of the batch.
    keywords
        What every stage gets besides (masks, position ids), by the name of its argument, or a
        function of the batch that gives a dict. Then every rank reads the loader.
    group
        Instead of a mesh where pipelines are the data-parallel ranks: this rank's pipeline.
    mesh
        The DeviceMesh of the whole job, needed where there are several pipelines. Its dimension
        "pp" is this rank's pipeline; ranks with one data-parallel coordinate ("dp", "dp_...") read
        the same samples.
    snapshot
        When a save's tensors are copied: "free", while the next step runs; "bubbles", only while
        this rank computes nothing; "inline", before the next step. In each case the copy is whole
        before the optimizer writes next.
    lazy
        Micro-batches are handed out one by one, each when it is needed.
    before_optimizer
        Called when the gradients are whole and unscaled: the place to clip.
    microbatches
        Of a step, where the schedule has no such number.
    commit_seconds
        How long a rank waits for the others in a call of all ranks.
    skip_nonfinite
        Where a gradient of any rank is not finite, all ranks leave the optimizer out. The step
        counts.
    on_sigterm
        "save": when SIGTERM comes to any rank, save after a step that all agree on, and raise
        Preempted from it on all ranks. "finish": what the checkpointer does of its own.

    Raises
    ------
    ConfigError
        An argument is wrong, or the ranks' stages, mesh or loaders do not fit together.
    CheckpointError
        A rank did not come to this call within `commit_seconds`.
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
        self.stages, self.num_stages = tuple(sorted(stages)), num_stages
        self.every, self.lazy, self.microbatches = every, lazy, microbatches
        self.snapshot, self.skip_nonfinite = snapshot, skip_nonfinite
        self._ckpt, self._loader, self._before_optimizer = ckpt, loader, before_optimizer
        self._group = pipeline_group(group, mesh)
        self.gate = prepare_saves(ckpt, every=every, snapshot=snapshot, on_sigterm=on_sigterm)
        self._recorder = EventRecorder(self.gate)
        self._ranks = Ranks(commit_seconds)
        mine = standing(
            self.stages, num_stages, self._group, mesh, loader, everywhere=keywords is not None
        )
        self.place = agreed_place(self._ranks, mine)
        first, last = 0 in self.stages, num_stages - 1 in self.stages
        self._supply = Supply(
            loader, first=first, last=last, inputs=inputs, target=target, keywords=keywords
        )
        if self._supply.fed and loader is not None:
            loader.read_as(self.place.replica, self.place.replicas)
        self._state: dict[str, Any] = {}
        self._elsewhere: frozenset[str] = frozenset()  # tied tensors that an earlier rank counts
        self._agreement = Agreement(self._ranks)
        self._updates = Updates(
            self._agreement, before=before_optimizer, skip_nonfinite=skip_nonfinite
        )
        self._position.loader = self._supply.position()
        self._runner = StepRunner(
            self._supply,
            loader,
            self._agreement,
            self._recorder,
            self._updates,
            self.gate,
            lazy=lazy,
            num_stages=num_stages,
            alone=len(self.place.members) == 1,
        )

    # --- wiring -----------------------------------------------------------------------------

    def wrap_stage(self, kind: type[S]) -> type[S]:
        """Make a stage class whose compute calls are noted. For every schedule.

        Parameters
        ----------
        kind
            A class of torch, such as PipelineStage, or one derived from it.

        Returns
        -------
        type
            A class derived from `kind`.
        """
        return watched(kind, self._recorder)

    def watch(self, stage: Any) -> Any:
        """As wrap_stage(), for a stage that is built already.

        Parameters
        ----------
        stage
            By torch's pipeline(...).build_stage(...), for one.

        Returns
        -------
        PipelineStage
            The same stage.
        """
        return watch(stage, self._recorder)

    def observe(self, observer: Callable[[ComputeEvent], None]) -> None:
        """Call a function after each compute call of a step, on the training thread.

        Parameters
        ----------
        observer
            What it raises is counted and logged once; its time is hook_seconds of the record.
        """
        self._recorder.observers.append(observer)

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Make the loss for a schedule when there is a GradScaler.

        Parameters
        ----------
        function
            The loss of a micro-batch's output and target.

        Returns
        -------
        Callable
            The same loss, scaled for the backward, not in the records.
        """
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
        """Take part in checkpoints with these objects, and go on from a step.

        A checkpoint of another number of stages, or of a run without a pipeline that has its loader
        as `data_name` in its state, fits by the names of the tensors: those of the whole model.

        Parameters
        ----------
        stage, optimizer
            One or a list of each; for optimizers, also an object that holds some.
        scheduler, scaler
            Stepped after the optimizer, and saved. Of schedulers, a list, too.
        tied
            Names that several stages have on purpose, kept equal by you; a tuple: of one tensor.
        step, strict
            As of Checkpointer.restore.
        data_name
            The name in the state of what these hooks save.
        **more
            Saved with the rest, alike on all ranks; for what differs see ckpt.per_rank().

        Returns
        -------
        int
            The step; 0 where there is none.

        Raises
        ------
        ConfigError
            A name is given by two stages, or the ranks do not fit together.
        CheckpointMismatch
            The checkpoint has other tensors.
        """
        self._runner.stages = list(stage) if isinstance(stage, (list, tuple)) else [stage]  # type: ignore[list-item]
        free = partial(require_free_names, more, data_name)
        parts = self._agreed_parts(optimizer, Tied.of(tied), free, scaled=scaler is not None)
        self._elsewhere = parts.elsewhere
        saved = parts.optimizers.saved
        self._state = {"model": parts.model, "optimizer": saved, data_name: self, **more}
        stepped = {"scheduler": scheduler, "scaler": scaler}
        self._state |= {name: value for name, value in stepped.items() if value is not None}
        if self._ckpt is not None:
            found = restore_run(
                self._ckpt, self._ranks, self._state, data_name, step, strict=strict
            )
            self._position.stand_behind(found)
        self._updates.begin(parts.optimizers, self._runner.stages, parts.votes, **stepped)
        return self.completed

    def _agreed_parts(
        self, optimizer: Any, tied: Tied, free: Callable[[], None], *, scaled: bool
    ) -> Parts:
        """What this rank trains, once all ranks have found that it fits. `free`: raises for names
        that are taken."""
        stages = self._runner.stages

        def check() -> None:
            free()
            require_own_stages(stages, self._recorder, self.stages, self.num_stages)
            self._supply.require_even()

        late = self._before_optimizer is not None or self.skip_nonfinite
        votes = Votes(early=self.lazy or scaled, late=late)
        return agreed_parts(self._ranks, self.place, stages, optimizer, tied, votes, check)

    @property
    def _position(self) -> RunPosition:
        return self._updates.position

    # --- a step -----------------------------------------------------------------------------

    def step(self, schedule: Any, optimizer: Any, **keywords: Any) -> StepRecord:
        """Make one step: data, schedule, optimizer, and every `every` steps a save.

        Errors of the save after a step, or of the one before, are raised; the step then counts.

        Parameters
        ----------
        schedule
            Of torch.distributed.pipelining.
        optimizer
            What restore() was given.
        **keywords
            Further arguments of this rank's stages, of the whole batch.

        Raises
        ------
        StepVoid
            Another rank could not: it raises its own error, and the next call has the same batches.
        StepBroken
            A schedule shared with other ranks failed midway: no further step is possible.
        Preempted
            A SystemExit; the step counts and is saved, durably.
        """
        record = self._runner.make(
            schedule, optimizer, keywords, self.microbatches, self.before_update
        )
        saved: SaveHandle | None = None
        if self.every and self.completed % self.every == 0:
            saving = time.perf_counter()
            saved = self.save()
            record = replace(record, saved=saved, save_seconds=time.perf_counter() - saving)
        self._runner.tally.add(record)
        if self._ckpt is not None and self._ckpt.reached_preemption(self.completed):
            stop_saved(self._ckpt, saved, self.save, self.completed)
        return record

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
        """Step the schedulers that wait for a metric (ReduceLROnPlateau), which step() only saves.

        Parameters
        ----------
        metric
            This rank's; None where it has nothing.

        Returns
        -------
        float
            The mean over the ranks, which the schedulers were stepped with.

        Raises
        ------
        ConfigError
            No rank has a metric, or no scheduler waits for one. Nothing was changed.
        """
        said = self._ranks.all_gather(json.dumps(metric).encode(), RankChannel.TRAINER)
        known = [float(value) for text in said if (value := json.loads(text)) is not None]
        if not known:
            raise ConfigError("step_scheduler(): no rank has a metric. Nothing was changed.")
        mean = sum(known) / len(known)
        self._updates.step_by_metric(mean)
        return mean

    def evaluate(self, schedule: Any, loader: DataLoader | None) -> float:
        """Compute the mean loss over an epoch of another loader, in eval(). The run is left alone.

        Parameters
        ----------
        schedule
            As of step().
        loader
            Read and picked from as the run's own is; micro-batches beyond whole steps are left out.

        Returns
        -------
        float
            On all ranks.

        Raises
        ------
        ConfigError
            The ranks have loaders of different lengths, or one of less than a step.
        """
        if self._supply.fed and loader is not None:
            loader.read_as(self.place.replica, self.place.replicas)
        count = self.microbatches or microbatches_of(schedule)
        found = ValidationEpoch(self._ranks, self._agreement, self._supply, loader, count)
        self._runner.guard_buffers(schedule)
        return found.losses(schedule, self._runner.stages, self._updates.scaling, self.completed)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip by the norm over all stages and over the shards of each tensor, for
        `before_optimizer`. A tied tensor counts once.

        Parameters
        ----------
        max_norm
            Above 0.

        Returns
        -------
        float
            The norm before.
        """
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
        """Go on from a state, with any number of stages. What was fetched ahead is forgotten.

        Parameters
        ----------
        state
            Of state_dict(), or of a loader.
        """
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
            self._runner.counters
            | self._updates.counters
            | {
                "observer_errors_total": self._recorder.observer_errors_total,
                "copies_overdue_total": self.gate.overdue_total,
            }
        )

    def bubbles(self) -> BubbleReport:
        """Idle shares of the ranks of this pipeline since the last report. Collective."""
        said = json.dumps(self._runner.tally.to_dict()).encode()
        heard = self._ranks.all_gather(said, RankChannel.TRAINER)
        self._runner.tally = IdleTally()
        tallies = {
            rank: IdleTally.from_dict(json.loads(heard[rank])) for rank in self.place.members
        }
        return report_of(tallies, self._runner.plan)

    def close(self) -> None:
        """Stop fetching, and exchange no more messages: call bubbles() before. The checkpointer and
        the loader stay the caller's. Idempotent."""
        self.gate.open()
        self._supply.close()
        self._ranks.close()
