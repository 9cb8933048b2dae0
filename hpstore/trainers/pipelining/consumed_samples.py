"""Which samples a run has consumed, as a few numbers, and what ranks agree on. Pure.

The digest is a sum of hashes, one for each sample of each epoch: it does not depend on how steps,
micro-batches, stages and ranks share the samples, and differs when one is lost or read twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpstore.errors import CheckpointError
from hpstore.format.untrusted_bytes import MALFORMED, parsing

_WORD = (1 << 64) - 1
Json = Any  # Any: what is said between ranks


class Indices(Protocol):
    """The part of hpstore.loaders.sampling.order.Order that is needed here."""

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Samples at positions start .. stop - 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Positions start .. stop - 1 of an epoch, of all data-parallel ranks together."""

    epoch: int
    start: int
    stop: int


def hashes(epoch: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """One word a sample: SplitMix64's finaliser (Steele, Lea, Flood 2014) over both numbers."""
    offset = np.uint64((epoch + 1) * 0x9E3779B97F4A7C15 & _WORD)
    mixed = ids.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + offset
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Samples consumed since the run began. `digest`: sum of their hashes modulo 2**64."""

    samples: int = 0
    digest: int = 0

    def after(self, spans: Iterable[Span], order: Indices | None) -> Ledger:
        """With more of them. Without an order positions count for samples: a sampler's batches."""
        samples, digest = self.samples, self.digest
        for span in spans:
            ids = (
                np.arange(span.start, span.stop, dtype=np.int64)
                if order is None
                else order.indices(span.epoch, span.start, span.stop)
            )
            samples += len(ids)
            digest += int(hashes(span.epoch, ids).sum(dtype=np.uint64))
        return Ledger(samples=samples, digest=digest & _WORD)

    def to_dict(self) -> dict[str, Json]:
        """For state_dict()."""
        return {"samples": self.samples, "digest": f"{self.digest:016x}"}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Json]) -> Ledger:
        """Inverse of to_dict(). CheckpointError when it is none."""
        try:
            return cls(samples=int(raw["samples"]), digest=int(raw["digest"], 16))
        except MALFORMED as error:
            raise CheckpointError(f"not a ledger of a pipeline: {str(raw)[:200]}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one rank says before a commit. `loader` is None where no data come in."""

    stages: tuple[int, ...]
    step: int
    weights: int  # optimizer steps that its parameters have seen
    microbatches: int
    ledger: Ledger | None = None
    loader: Mapping[str, Json] | None = None

    def to_dict(self) -> dict[str, Json]:
        """For JSON."""
        return {
            "stages": list(self.stages),
            "step": self.step,
            "weights": self.weights,
            "microbatches": self.microbatches,
            "loader": self.loader,
            "ledger": None if self.ledger is None else self.ledger.to_dict(),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Json]) -> Vote:
        """Inverse of to_dict(). Raises IntegrityError."""
        with parsing("a vote of another rank"):
            ledger = raw["ledger"]
            return cls(
                stages=tuple(raw["stages"]),
                step=raw["step"],
                weights=raw["weights"],
                microbatches=raw["microbatches"],
                loader=raw["loader"],
                ledger=None if ledger is None else Ledger.from_dict(ledger),
            )


def agreed(votes: Sequence[Vote]) -> Vote:
    """What all ranks agree on, with the loader's state of those that are fed.

    Raises CheckpointError, alike on all ranks: nothing is saved of stages that stand at different
    steps, whose weights have seen different numbers of optimizer steps, or whose first and last
    stage have consumed different samples.
    """
    what = {
        "step": [vote.step for vote in votes],
        "version of the weights": [vote.weights for vote in votes],
        "number of micro-batches": [vote.microbatches for vote in votes],
    }
    for name, values in what.items():
        if len(set(values)) > 1:
            _refuse(votes[0].step, name, votes, values)
    fed = [vote for vote in votes if vote.loader is not None]
    for name, seen in (
        ("position in the data", [vote.loader for vote in fed]),
        ("ledger of samples", [vote.ledger for vote in fed]),
    ):
        if any(value != seen[0] for value in seen):
            _refuse(votes[0].step, name, fed, seen)
    return fed[0] if fed else votes[0]


def _refuse(step: int, what: str, votes: Sequence[Vote], values: Sequence[object]) -> None:
    rows = [f"stages {list(v.stages)}: {value}" for v, value in zip(votes, values, strict=True)]
    raise CheckpointError(
        f"step {step} is not saved: the {what} differs between the stages ({'; '.join(rows)}). "
        "What was committed before is untouched: restart from it."
    )
