"""What one step was like on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hpstore.checkpoint import SaveHandle
from hpstore.trainers.pipelining.events import ComputeEvent
from hpstore.trainers.pipelining.schedule_plan import Deadlines, SchedulePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When the micro-batches of a step that began at `began` were there, and what their deadlines
    follow from: without `lazy` all are needed at its begin, else as `plan` has it with the mean
    `seconds` of each kind of work. `first`: inputs are needed here, else targets."""

    ready: tuple[float, ...]
    began: float
    first: bool
    lazy: bool
    plan: SchedulePlan | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def slack(self) -> float | None:
        """None where nothing is needed or the deadlines are not known."""
        due = None
        if self.lazy and self.ready and self.plan is not None and self.seconds:
            due = self.plan.deadlines(lambda work: self.seconds.get(work.kind, 0.0))
        return slack_of(due, self.ready, self.began, first=self.first, lazy=self.lazy)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step was like on this rank: PipelineHooks.step() returns it.

    All seconds are this rank's. `step` counts from 0; `losses` are those of the micro-batches,
    detached, empty where the last stage is not.
    """

    step: int
    losses: tuple[torch.Tensor, ...]
    events: tuple[ComputeEvent, ...]
    microbatches: int
    schedule_seconds: float  # in the schedule, without waiting for data
    data_wait_seconds: float  # for micro-batches that were not there
    late_microbatches: int  # that somebody waited for
    copy_wait_seconds: float  # for the copies of a save, before the optimizer
    save_seconds: float  # in the commit: the vote, and what save() kept the trainer
    hook_seconds: float  # in the hooks of the events
    idle_bytes: int  # of the save before this step, copied while nothing was computed
    busy_bytes: int  # and while something was
    saved: SaveHandle | None  # the save that began after this step
    arrivals: Arrivals | None = None  # of the micro-batches, where they are needed here
    skipped: bool = False  # the optimizer was left out: an overflow, gradients that are not finite

    @property
    def loss(self) -> float | None:
        """Mean over the micro-batches; waits for a GPU. None where the last stage is not."""
        if not self.losses:
            return None
        return float(torch.stack([loss.float() for loss in self.losses]).mean())

    @property
    def slack_seconds(self) -> float | None:
        """The least time between a micro-batch's arrival and its deadline; negative when late. The
        plan is played when it is asked for: 2 ms for 16 stages and 128 micro-batches."""
        return None if self.arrivals is None else self.arrivals.slack()

    @property
    def busy_seconds(self) -> float:
        """In compute calls."""
        return sum(event.end - event.begin for event in self.events)

    @property
    def idle_seconds(self) -> float:
        """In the schedule and not in a compute call: bubbles, messages, torch itself."""
        return max(0.0, self.schedule_seconds - self.busy_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRun:
    """What a schedule did: when it began, its seconds without waits for data."""

    began: float
    seconds: float
    losses: list[torch.Tensor]
    lazy: bool


def slack_of(
    deadlines: Deadlines | None, ready: Sequence[float], began: float, *, first: bool, lazy: bool
) -> float | None:
    """The least time between a micro-batch's arrival and its deadline; negative when late.

    Without `lazy` all are needed when the step begins. `first`: inputs are needed here, else
    targets. None where nothing is needed or the deadlines are not known.
    """
    if not ready:
        return None
    if not lazy:
        return min(began - at for at in ready)
    if deadlines is None:
        return None
    due = deadlines.inputs if first else deadlines.targets
    return min(began + after - at for after, at in zip(due, ready, strict=True))
