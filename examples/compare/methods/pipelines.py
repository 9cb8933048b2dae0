"""The model in stages, one a process; a batch goes through them in micro-batches.

The schedules are those of torch.distributed.pipelining, called as any script would. `stage_class`
is what wraps a stage: hooks that wrap PipelineStage go there.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch.distributed as dist
from nets import Chain, stage_blocks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from hpstore.loaders.ranks import Coordinates
from methods.base import Batch, Method, Outcome, Setup, prepared


class TimedStage(PipelineStage):
    """Counts the time in its module; what a step takes beyond that is transfer and bubble."""

    compute_seconds = 0.0

    # Any: torch's own signatures are untyped
    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        found = super().forward_one_chunk(*args, **options)
        self.compute_seconds += time.perf_counter() - began
        return found

    def backward_one_chunk(self, *args: Any, **options: Any) -> None:
        began = time.perf_counter()
        super().backward_one_chunk(*args, **options)
        self.compute_seconds += time.perf_counter() - began


class Pipeline(Method):
    """One stage a process."""

    replicated = False
    communication = "a step less the time in its stage: transfers, and waiting in the bubble"
    schedule_class: ClassVar[type[ScheduleGPipe | Schedule1F1B]]
    stage_class: ClassVar[type[PipelineStage]] = TimedStage

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.stage: Any = self.stage_class(  # Any: as TimedStage
            self.module, self.rank, dist.get_world_size(), setup.device
        )
        self._schedule = self.schedule_class(
            self.stage, n_microbatches=setup.micro_batches, loss_fn=functional.cross_entropy
        )

    def _placed(self) -> Chain:
        whole = self.setup.make_model()
        mine = stage_blocks(len(whole.blocks), dist.get_world_size())[self.rank]
        return whole.keep(mine).to(self.setup.device)

    @property
    def coordinates(self) -> Coordinates | None:
        """First and last stage read the same batches: pictures are for the one, labels for the
        other."""
        ends = (0, dist.get_world_size() - 1)
        return Coordinates(0, 1) if self.rank in ends else None

    def gradients(self, batch: Batch | None) -> Outcome:
        before, began = self.stage.compute_seconds, self.watch.now()
        found = self._step(batch)
        computed = self.stage.compute_seconds - before
        waited = self.watch.now() - began - computed
        self.watch.seconds["communication"] += max(0.0, waited)
        return found

    def _step(self, batch: Batch | None) -> Outcome:
        if batch is None:
            self._schedule.step()
            return Outcome()
        images, labels = prepared(batch, self.setup.device)
        inputs = (images,) if self.stage.is_first else ()
        if not self.stage.is_last:
            self._schedule.step(*inputs)
            return Outcome()
        losses: list[Any] = []
        logits = self._schedule.step(*inputs, target=labels, losses=losses)
        right = int((logits.detach().argmax(1) == labels).sum())
        loss = sum(loss.item() for loss in losses) / len(losses)
        return Outcome(loss=loss, right=right, samples=len(labels))


class GPipe(Pipeline):
    """All forwards, then all backwards."""

    name, title = "gpipe", "GPipe"
    schedule_class = ScheduleGPipe


class OneForwardOneBackward(Pipeline):
    """A backward as soon as there is one."""

    name, title = "f1b", "1F1B"
    schedule_class = Schedule1F1B
