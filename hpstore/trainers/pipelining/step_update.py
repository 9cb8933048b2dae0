"""The end of a step: from whole gradients to new weights, on all ranks or on none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from hpstore.errors import ConfigError
from hpstore.trainers.pipelining.gradients import all_finite, clip_norm
from hpstore.trainers.pipelining.joint_optimizers import Optimizers
from hpstore.trainers.pipelining.run_position import RunPosition
from hpstore.trainers.pipelining.stage_scaler import Scaling
from hpstore.trainers.pipelining.stages import bare
from hpstore.trainers.pipelining.step_agreement import NONE, Agreement, Votes
from hpstore.trainers.pipelining.step_record import ScheduleRun


# Any below: schedulers, scalers and process groups of torch have no public types
class Updates:
    """Of one rank. It counts into `position`; `before`: the user's `before_optimizer`."""

    def __init__(
        self, agreement: Agreement, *, before: Callable[[], object] | None, skip_nonfinite: bool
    ) -> None:
        self._agreement, self._before, self._skip_nonfinite = agreement, before, skip_nonfinite
        self.position = RunPosition()
        self.scaling = Scaling()
        self.optimizers: Optimizers | None = None
        self._stages: Sequence[PipelineStage] = ()
        self._schedulers: list[Any] = []
        self._votes = NONE
        self._counting: Any = None  # the hook that counts the optimizers' steps
        self._preparing = False  # the user's code runs
        self._settled: BaseException | None = None  # raised on all ranks already
        self.counters = dict.fromkeys(
            ("steps_skipped_by_scaler_total", "steps_skipped_nonfinite_total"), 0
        )

    def begin(
        self,
        optimizers: Optimizers,
        stages: Sequence[PipelineStage],
        votes: Votes,
        *,
        scheduler: Any,
        scaler: Any,
    ) -> None:
        """From now on with these, whose state is loaded already."""
        self.optimizers, self._stages, self._votes = optimizers, stages, votes
        if self._counting is not None:
            self._counting.remove()
        self._counting = optimizers.each[-1].register_step_post_hook(self._count)
        given = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]
        self._schedulers = [one for one in given if one is not None]
        self.scaling.begin(scaler, optimizers, self.device)

    def _count(self, *_: object) -> None:
        self.position.weights += 1

    @property
    def device(self) -> torch.device:
        """Of this rank's stages."""
        return torch.device(self._stages[0].device)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Each once, though two stages share it."""
        return list(dict.fromkeys(p for stage in self._stages for p in stage.submod.parameters()))

    def make(self, run: ScheduleRun, fault: Exception | None) -> bool:
        """Unscale, the user's clipping, the optimizers; whether they were left out. What one rank
        cannot do is raised on all, before any of them changes a weight."""
        assert self.optimizers is not None
        position, scaling = self.position, self.scaling
        weights = position.weights
        try:
            run.losses[:] = scaling.plain(run.losses)
        except ConfigError as error:
            fault = fault or error
        if self._votes.early:
            self._agreement.reach(position.step, fault)
        elif fault is not None:
            raise fault
        if scaling.active:
            scaling.unscale()
        if not self._prepare():
            self.counters["steps_skipped_nonfinite_total"] += 1
        elif scaling.active:
            scaling.step()
            self.counters["steps_skipped_by_scaler_total"] += weights == position.weights
        else:
            self.optimizers.step()
        position.step += 1
        return weights == position.weights

    def _prepare(self) -> bool:
        """`before_optimizer`; False where gradients are to be left out on all ranks."""
        fault, finite = None, True
        try:
            try:
                self._preparing = True
                if self._before is not None:
                    self._before()
                if self._skip_nonfinite:
                    finite = all_finite(self.parameters, self.device)
            except Exception as error:
                if error is self._settled:
                    raise
                fault = error
            finally:
                self._preparing = False
            if self._votes.late:
                return self._agreement.reach(self.position.step, fault, finite=finite, alone=True)
            if fault is not None:
                raise fault
        except BaseException:
            if self.scaling.active:
                self.scaling.undo()
            raise
        return True

    def clip(self, max_norm: float, group: Any, elsewhere: Collection[str]) -> float:
        """Clip by the norm over all stages; the norm. `elsewhere`: tied tensors that an earlier
        rank counts. Collective: in `before_optimizer` all ranks first see that they all came to
        it, so that an error before it on one of them is raised on all."""
        if self._preparing and self._votes.late:
            try:
                self._agreement.reach(self.position.step, None)
            except BaseException as error:
                self._settled = error
                raise
        named = [(n, p) for stage in self._stages for n, p in bare(stage.submod).named_parameters()]
        twice = {id(p) for n, p in named if n in elsewhere}
        return clip_norm(self.parameters, max_norm, group, self.device, but=twice)

    def step_schedulers(self) -> None:
        """After the optimizers have stepped. Those that wait for a metric are not stepped here."""
        for scheduler in self._schedulers:
            if not needs_metric(scheduler):
                scheduler.step()

    def step_by_metric(self, metric: float) -> None:
        """Those that wait for one."""
        waiting = [one for one in self._schedulers if needs_metric(one)]
        if not waiting:
            raise ConfigError(
                "no scheduler of restore(scheduler=) waits for a metric: they are stepped with "
                "the optimizer. Nothing was changed."
            )
        for scheduler in waiting:
            scheduler.step(metric)


def needs_metric(scheduler: Any) -> bool:
    """Whether step() of a scheduler asks for a value, as that of ReduceLROnPlateau does."""
    parameters: Iterable[inspect.Parameter] = inspect.signature(scheduler.step).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )
