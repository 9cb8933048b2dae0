"""Where a run of batches stands, and the pieces of it still to come. Pure but for the order.

A piece is one rank's rows of one global batch. Pieces are arithmetic: which samples they are is
computed by whoever makes the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpstore.loaders.sampling.order import Order
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.rank_slices import Slices, wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPiece:
    """Positions start .. stop - 1 of an epoch; `after` is where the run stands behind it."""

    epoch: int
    start: int
    stop: int
    after: tuple[int, int]  # (epoch, position)
    listed: tuple[int, ...] | None = None  # its samples, where a user's sampler has chosen them
    single: bool = False  # one sample by itself, not a batch of it

    @property
    def samples(self) -> int:
        """How many."""
        return self.stop - self.start if self.listed is None else len(self.listed)

    def indices(self, order: Order | None) -> Indices:
        """Its samples. `order` is not needed where they are listed."""
        if self.listed is not None:
            return np.array(self.listed, np.int64)
        if order is None:
            raise ValueError("a piece of an order without the order")
        parts = [
            order.indices(self.epoch, low, high)
            for low, high in wrapped(self.start, self.stop, order.length)
        ]
        return np.concatenate(parts) if len(parts) != 1 else parts[0]


def pieces(
    slices: Slices, epoch: int, position: int, *, single: bool = False
) -> Iterator[BatchPiece]:
    """This rank's pieces from a position to the end of the epoch; none where it has no rows."""
    steps = slices.own_steps(position)
    for number in range(steps):
        step = slices.step(position, number)
        done = step.after >= slices.length or slices.steps(step.after) == 0
        over = number == steps - 1 and done
        after = (epoch + 1, 0) if over else (epoch, step.after)
        yield BatchPiece(epoch=epoch, start=step.start, stop=step.stop, after=after, single=single)


def endless(
    slices: Slices, epoch: int, position: int, *, single: bool = False
) -> Iterator[BatchPiece]:
    """Pieces of this epoch and all that follow."""
    while True:
        empty = True
        for piece in pieces(slices, epoch, position, single=single):
            empty = False
            yield piece
        if empty and not slices.own_steps():
            return  # no epoch has anything for this rank
        epoch, position = epoch + 1, 0


def listed(
    batches: Iterable[Sequence[int] | int], epoch: int, position: int
) -> Iterator[BatchPiece]:
    """Pieces of what is left of a user's sampler from a position on; positions count batches.

    What is no list is a sample by itself.
    """
    found = enumerate(batches, position)
    number, batch = next(found, (position, None))
    while batch is not None:
        following, after = next(found, (number + 1, None))
        single = np.ndim(batch) == 0
        yield BatchPiece(
            epoch=epoch,
            start=number,
            stop=number + 1,
            after=(epoch + 1, 0) if after is None else (epoch, number + 1),
            listed=tuple(np.asarray(batch, np.int64).reshape(-1).tolist()),
            single=single,
        )
        number, batch = following, after
