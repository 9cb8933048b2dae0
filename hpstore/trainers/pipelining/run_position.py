"""Where a run stands: what is counted, voted on and saved of it.

A checkpoint has it beside the loader's own state, in one value: a run without a pipeline that has
its loader under the same name goes on from it, and a pipeline from that of such a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpstore.errors import CheckpointError, FormatTooNew
from hpstore.trainers.pipelining.consumed_samples import Ledger, Vote

STATE_VERSION = 2
OWN = "pipeline"  # what a loader's state has besides, written by a pipeline
Json = Any  # Any: JSON


@dataclass(slots=True, kw_only=True)
class RunPosition:
    """After `step` steps. `weights`: optimizer steps that the parameters have seen; `loader`: the
    loader's state behind what was consumed, None where no data come in before the first save.

    `counted`: False for what a run without a pipeline has saved, which has no count of steps.
    """

    step: int = 0
    weights: int = 0
    microbatches: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    loader: Mapping[str, Json] | None = None
    stages: int = 0  # of the run that saved it
    counted: bool = True

    def vote(self, stages: tuple[int, ...], *, fed: bool) -> Vote:
        """What a rank with these stages says before a commit."""
        return Vote(
            stages=stages,
            step=self.step,
            weights=self.weights,
            microbatches=self.microbatches,
            ledger=self.ledger if fed else None,
            loader=self.loader if fed else None,
        )

    def stand_behind(self, step: int | None) -> None:
        """Take over the count of a run without a pipeline, whose `step` was restored."""
        if step is not None and not self.counted:
            self.step = self.weights = step
            self.counted = True

    def agree(self, common: Vote) -> None:
        """What all ranks have agreed on is this one's, too."""
        self.loader = None if common.loader is None else dict(common.loader)
        self.ledger = common.ledger or self.ledger

    def to_dict(self, num_stages: int) -> dict[str, Json]:
        """The loader's state, with what a pipeline adds. JSON types."""
        own = {
            "version": STATE_VERSION,
            "step": self.step,
            "weights": self.weights,
            "ledger": self.ledger.to_dict(),
            "stages": num_stages,
        }
        return {**(self.loader or {}), OWN: own}

    @classmethod
    def from_dict(cls, state: Mapping[str, Json]) -> RunPosition:
        """Inverse of to_dict(); also of a loader's state alone, and of version 1, which had the
        loader's within its own. Raises CheckpointError, FormatTooNew."""
        own = state.get(OWN)
        if isinstance(own, Mapping):
            return cls._read(own, {name: v for name, v in state.items() if name != OWN} or None)
        if "ledger" in state and "stages" in state:
            return cls._read(state, state.get("loader"))
        if "epoch" in state and "samples" in state:
            return cls(loader=state, counted=False)
        raise CheckpointError(
            f"neither the state of a pipeline nor of a loader, with {sorted(map(str, state))}. "
            "Nothing was loaded."
        )

    @classmethod
    def _read(cls, own: Mapping[str, Json], loader: Mapping[str, Json] | None) -> RunPosition:
        version = own.get("version")
        if isinstance(version, int) and version > STATE_VERSION:
            raise FormatTooNew(
                f"the pipeline's state has version {version}, this hpstore reads {STATE_VERSION}: "
                "nothing was loaded; upgrade to resume from it"
            )
        try:
            return cls(
                step=int(own["step"]),
                weights=int(own["weights"]),
                loader=loader,
                ledger=Ledger.from_dict(own["ledger"]),
                stages=int(own["stages"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"not the state of a pipeline, with {sorted(map(str, own))}"
            ) from error
