"""Other people's data sets: torch's own iterators, with our order and our state."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.utils.data

from hpstore.loaders.order import Order
from hpstore.loaders.progress import Piece, pieces
from hpstore.loaders.slices import Slices

if TYPE_CHECKING:
    from hpstore.loaders.loader import DataLoader


class PositionSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of indices from `at`, (epoch, position), to the end of the epoch.

    `asked`: the pieces that torch has asked for and not handed out yet.
    """

    def __init__(self, order: Order, slices: Slices) -> None:
        self._order, self._slices = order, slices
        self.at = (0, 0)
        self.asked: deque[Piece] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.asked = asked = deque[Piece]()
        for piece in pieces(self._slices, *self.at):
            asked.append(piece)
            yield piece.indices(self._order).tolist()

    def __len__(self) -> int:
        return self._slices.own_steps()


class ForeignIterator:
    """torch's iterator over an epoch; tells the loader where each batch leaves the run."""

    def __init__(self, loader: DataLoader, found: Any, epoch: int, position: int) -> None:
        self._loader = weakref.ref(loader)
        self._found, self._epoch, self._number = found, epoch, position
        self._sampler = loader.positions
        self._asked: deque[Piece] | None = None
        try:
            self._length: int | None = len(loader)
        except TypeError:  # an iterable data set that does not tell
            self._length = None
        if self._sampler is None and position:
            # an IterableDataset or a sampler of the user's: what was handed out is read again
            for _ in itertools.islice(found, position):
                loader.skipped_batches_total += 1

    def __iter__(self) -> ForeignIterator:
        return self

    def __len__(self) -> int:
        return len(self._found)

    def __next__(self) -> Any:
        loader = self._loader()
        try:
            batch = next(self._found)
        except StopIteration:
            if self._sampler is None and loader is not None and self._number != self._length:
                loader.moved((self._epoch + 1, 0))
            raise
        self._number += 1
        after = (self._epoch, self._number)
        if self._sampler is not None:
            if self._asked is None:
                self._asked = self._sampler.asked  # of this iterator, not of a later one
            after = self._asked.popleft().after
        elif self._number == self._length:
            after = (self._epoch + 1, 0)
        if loader is not None:
            loader.moved(after)
        return batch


__all__ = ["ForeignIterator", "PositionSampler"]
