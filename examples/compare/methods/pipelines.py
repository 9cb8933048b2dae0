"""The model in stages, one a process; a batch goes through them in micro-batches.

The schedules are those of torch.distributed.pipelining. Where samples come from a pool, hpstore's
PipelineHooks drive them: they read each micro-batch ahead, vote, save and resume. From memory and
from files the schedule is called as any script would.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from nets import Chain, stage_blocks
from savers import Saver
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from hpstore.loaders.sampling.data_parallel import Coordinates
from hpstore.trainers import PipelineHooks
from methods.base import Batch, Method, Outcome, Setup, Step, prepared


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

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.hooks: PipelineHooks | None = None
        self._ids: list[int] = []  # of the step
        self._right: list[torch.Tensor] = []  # by micro-batch of the step

    def attach(self, loader: Any, keeper: Saver) -> None:
        stage_class: type[PipelineStage] = TimedStage
        if self.setup.pooled:
            self.hooks = PipelineHooks(
                keeper.checkpointer,
                loader,
                stages=[self.rank],
                num_stages=dist.get_world_size(),
                inputs=self._inputs,
                target=self._target,
            )
            keeper.through(self.hooks)
            stage_class = self.hooks.wrap_stage(stage_class)
        self.stage: Any = stage_class(  # Any: as TimedStage
            self.module, self.rank, dist.get_world_size(), self.setup.device
        )
        self._schedule = self.schedule_class(
            self.stage, n_microbatches=self.setup.micro_batches, loss_fn=self._loss
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

    @property
    def batches_a_step(self) -> int:
        """A batch of the loader is a micro-batch for the hooks."""
        return self.setup.micro_batches if self.setup.pooled else 1

    def _inputs(self, batch: Batch) -> torch.Tensor:
        self._ids += batch["id"].tolist()
        return prepared(batch, self.setup.device)[0]

    def _target(self, batch: Batch) -> torch.Tensor:
        if not self.stage.is_first:
            self._ids += batch["id"].tolist()
        return prepared(batch, self.setup.device)[1]

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._right.append((logits.detach().argmax(1) == labels).sum())
        return functional.cross_entropy(logits, labels)

    def _outcome(self, losses: list[torch.Tensor], samples: int) -> Outcome:
        """Of the micro-batches of a step; torch's trial run of the shapes has computed one more."""
        right = sum(int(count) for count in self._right[len(self._right) - len(losses) :])
        self._right.clear()
        loss = sum(loss.item() for loss in losses) / len(losses)
        return Outcome(loss=loss, right=right, samples=samples)

    # --- driven by hooks --------------------------------------------------------------------

    def restore(self, keeper: Saver, state: dict[str, Any]) -> int:
        if self.hooks is None:
            return super().restore(keeper, state)
        return self.hooks.restore(self.stage, self.optimizer)

    def step(self, batches: Iterator[Batch | None]) -> Step:
        if self.hooks is None:
            return super().step(batches)
        self._ids.clear()
        before = self.stage.compute_seconds
        record = self.hooks.step(self._schedule, self.optimizer)
        computed = self.stage.compute_seconds - before
        self.watch.seconds["communication"] += max(0.0, record.schedule_seconds - computed)
        ids = list(self._ids)
        outcome = self._outcome(list(record.losses), len(ids)) if record.losses else Outcome()
        return Step(
            outcome=outcome,
            ids=ids if self.coordinates is not None else None,
            wait=record.data_wait_seconds,
            stall=record.copy_wait_seconds,
        )

    def state(self) -> dict[str, Any]:  # Any: modules and optimizers
        found = super().state()
        return found if self.hooks is None else found | {"pipeline": self.hooks}

    def seen(self) -> dict[str, Any]:  # Any: JSON
        if self.hooks is None:
            return {}
        ledger = self.hooks.ledger.to_dict() if self.coordinates is not None else None
        return {"pipeline": self.hooks.bubbles().as_dict() | {"ledger": ledger}}

    def close(self) -> None:
        if self.hooks is not None:
            self.hooks.close()

    # --- as any script ----------------------------------------------------------------------

    def gradients(self, batch: Batch | None) -> Outcome:
        before, began = self.stage.compute_seconds, self.watch.now()
        found = self._whole(batch)
        computed = self.stage.compute_seconds - before
        waited = self.watch.now() - began - computed
        self.watch.seconds["communication"] += max(0.0, waited)
        return found

    def _whole(self, batch: Batch | None) -> Outcome:
        if batch is None:
            self._schedule.step()
            return Outcome()
        images, labels = prepared(batch, self.setup.device)
        inputs = (images,) if self.stage.is_first else ()
        if not self.stage.is_last:
            self._schedule.step(*inputs)
            return Outcome()
        losses: list[Any] = []
        self._schedule.step(*inputs, target=labels, losses=losses)
        return self._outcome(losses, len(labels))


class GPipe(Pipeline):
    """All forwards, then all backwards."""

    name, title = "gpipe", "GPipe"
    schedule_class = ScheduleGPipe


class OneForwardOneBackward(Pipeline):
    """A backward as soon as there is one."""

    name, title = "f1b", "1F1B"
    schedule_class = Schedule1F1B
