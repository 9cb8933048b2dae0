"""What samplers are going to yield: our own order, and torch's samplers replayed on a copy.

Nothing here consumes a sampler or its generator. What is foretold is a promise of somebody else's
code, so that CachePolicy checks every batch against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hpstore.loaders.sampling.batch_plan import pieces
from hpstore.loaders.sampling.order import Order
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.rank_slices import Slices

_DRAWN_TOGETHER = 32  # by RandomSampler with replacement


def foretell_own(order: Order, slices: Slices, epoch: int, position: int = 0) -> Indices:
    """Samples that this rank reads from a position to the end of an epoch, in order: int64[n].

    A pure function: any epoch may be asked for, as often as anybody likes.
    """
    parts = [piece.indices(order) for piece in pieces(slices, epoch, position)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


# Any: a sampler of whatever yields, torch's own classes are not generic at run time
def foretell(sampler: Any, epochs: int = 1, *, draws_between: int = 0) -> list[Indices] | None:
    """Samples of the next passes over a torch sampler, int64[n] each: at most `epochs` of them.

    To be called right before the pass: what else draws from the sampler's generator until then
    makes it wrong. None: nothing is known about this kind of sampler; subclasses of torch's may
    do anything. Of a BatchSampler the samples of its batches, in a row.

    DistributedSampler: this epoch and those that set_epoch() will count on to. A sampler with a
    generator of its own: as many passes as asked for, if nobody else draws from it but, between
    two passes, `draws_between` seeds: 1 for a generator that torch's DataLoader was given too.
    With torch's default generator one pass, since anybody draws from that.
    """
    kind = type(sampler)
    if kind is BatchSampler:
        found = foretell(sampler.sampler, epochs, draws_between=draws_between)
        size = sampler.batch_size
        if found is None or not sampler.drop_last:
            return found
        return [order[: len(order) // size * size] for order in found]
    if kind is SequentialSampler:
        return [np.arange(len(sampler.data_source))] * epochs
    if kind is DistributedSampler:
        return [_distributed(sampler, sampler.epoch + ahead) for ahead in range(epochs)]
    replay = _REPLAYS.get(kind)
    if replay is None:
        return None
    own = sampler.generator
    generator = _copy(own)
    passes: list[Indices] = []
    for number in range(epochs if own is not None else 1):
        for _ in range(draws_between if number else 0):
            _seed(generator)
        passes.append(replay(sampler, generator).numpy())
    return passes


class WatchedSampler(Sampler[Any]):
    """A sampler that says what it is going to yield, at the start of every pass.

    `told` gets foretell(sampler, epochs), None included, right before the sampler's first draw:
    earlier a DataLoader may still draw its own seed from the same generator.
    """

    def __init__(
        self,
        sampler: Any,
        told: Callable[[list[Indices] | None], None],
        epochs: int = 1,
        *,
        draws_between: int = 0,
    ) -> None:
        self.sampler, self._told = sampler, told
        self._epochs, self._draws_between = epochs, draws_between

    def __iter__(self) -> Iterator[Any]:
        # runs at the first next(), where the sampler's own __iter__ runs too
        self._told(foretell(self.sampler, self._epochs, draws_between=self._draws_between))
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


def _copy(generator: torch.Generator | None) -> torch.Generator:
    """One that will draw the same; of torch's default one if there is none."""
    source = torch.default_generator if generator is None else generator
    copy = torch.Generator(device=source.device)
    copy.set_state(source.get_state())
    return copy


def _seed(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _random(sampler: RandomSampler, generator: torch.Generator) -> torch.Tensor:
    size, wanted = len(sampler.data_source), sampler.num_samples
    if sampler.generator is None:
        seeded = torch.Generator()
        seeded.manual_seed(_seed(generator))
        generator = seeded
    if sampler.replacement:
        draws = [_DRAWN_TOGETHER] * (wanted // _DRAWN_TOGETHER) + [wanted % _DRAWN_TOGETHER]
        parts = [
            torch.randint(size, (count,), dtype=torch.int64, generator=generator) for count in draws
        ]
    else:
        parts = [torch.randperm(size, generator=generator) for _ in range(wanted // size + 1)]
    return torch.cat(parts)[:wanted]


def _weighted(sampler: WeightedRandomSampler, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(
        sampler.weights, sampler.num_samples, sampler.replacement, generator=generator
    )


def _subset(sampler: SubsetRandomSampler, generator: torch.Generator) -> torch.Tensor:
    indices: Sequence[int] = sampler.indices
    return torch.as_tensor(indices, dtype=torch.int64)[
        torch.randperm(len(indices), generator=generator)
    ]


def _distributed(sampler: DistributedSampler[Any], epoch: int) -> Indices:
    size = len(sampler.dataset)  # type: ignore[arg-type]
    indices = np.arange(size)
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + epoch)
        indices = torch.randperm(size, generator=generator).numpy()
    # padded from its own start, or cut, to whole rounds
    indices = np.tile(indices, math.ceil(sampler.total_size / max(size, 1)))[: sampler.total_size]
    return indices[sampler.rank :: sampler.num_replicas]


_REPLAYS: dict[type, Callable[[Any, torch.Generator], torch.Tensor]] = {
    RandomSampler: _random,
    SubsetRandomSampler: _subset,
    WeightedRandomSampler: _weighted,
}
