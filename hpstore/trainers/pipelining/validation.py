"""A validation with a loader of its own, between the steps of a run that it leaves as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader
from hpstore.trainers.pipelining.micro_batch_feed import as_arguments, joined, keywords_of, picked
from hpstore.trainers.pipelining.stage_inputs import Supply
from hpstore.trainers.pipelining.stage_scaler import Scaling
from hpstore.trainers.pipelining.step_agreement import Agreement
from hpstore.trainers.pipelining.torch_internals import StepInputs


@contextmanager
def evaluating(stages: Sequence[PipelineStage]) -> Iterator[None]:
    """With all modules in eval(); each goes back to the mode it had."""
    modes = [(m, m.training) for stage in stages for m in stage.submod.modules()]
    try:
        for stage in stages:
            stage.submod.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# Any below: torch's schedules have no common public type
class ValidationEpoch:
    """One epoch of `loader`, in whole steps of `count` micro-batches. All calls are collective."""

    def __init__(
        self,
        ranks: Ranks,
        agreement: Agreement,
        supply: Supply,
        loader: DataLoader | None,
        count: int,
    ) -> None:
        self._ranks, self._agreement, self._supply, self._count = ranks, agreement, supply, count
        mine = -1
        if supply.fed:
            mine = -2 if loader is None else len(loader)
        said = [batches for (batches,) in ranks.numbers((mine,), RankChannel.TRAINER)]
        known = {batches for batches in said if batches != -1}
        if len(known) != 1 or min(known) < count:
            raise ConfigError(
                f"the ranks have {said} micro-batches to evaluate with (-1: needs none, -2: has no "
                f"loader), and a step takes {count}: give those that read data the same loader, "
                "with one step's micro-batches at least. Nothing was changed."
            )
        self.steps, self.left_out = divmod(known.pop(), count)
        self._batches = iter(loader) if loader is not None and supply.fed else iter(())

    def losses(
        self, schedule: Any, stages: Sequence[PipelineStage], scaling: Scaling, step: int
    ) -> float:
        """The mean loss, on all ranks; `step`: of the run. What one rank cannot read is raised on
        all of them."""
        total = 0.0
        with evaluating(stages):
            for _ in range(self.steps):
                given, fault = StepInputs(), None
                try:
                    given = self._given()
                except Exception as error:  # noqa: BLE001 (raised by reach)
                    fault = error
                self._agreement.reach(step, fault)
                losses: list[torch.Tensor] = []
                target = {"target": given.target, "losses": losses} if self._supply.last else {}
                scaling.forget()
                schedule.eval(*given.arguments, **target, **(given.keywords or {}))
                if self._supply.last:
                    plain = scaling.plain(losses)
                    total += float(torch.stack([loss.float() for loss in plain]).mean())
        mine = json.dumps(total / self.steps if self._supply.last else None).encode()
        heard = [json.loads(text) for text in self._ranks.all_gather(mine, RankChannel.TRAINER)]
        known = [value for value in heard if value is not None]
        return float(sum(known) / len(known))

    def _given(self) -> StepInputs:
        if not self._supply.fed:
            return StepInputs()
        batches = [next(self._batches) for _ in range(self._count)]
        inputs, target, keywords = self._supply.picks
        found: dict[str, Any] = {}
        if keywords is not None:
            each = [keywords_of(batch, keywords) for batch in batches]
            found = {name: joined([one[name] for one in each], name) for name in each[0]}
        arguments = [as_arguments(picked(batch, inputs)) for batch in batches if self._supply.first]
        targets = [picked(batch, target) for batch in batches if self._supply.last]
        return StepInputs(
            joined(arguments, "inputs") if arguments else (),
            joined(targets, "targets") if targets else None,
            keywords=found,
        )
