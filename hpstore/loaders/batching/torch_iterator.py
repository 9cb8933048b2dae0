"""Other people's datasets: torch's own iterators, with our order and our state."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch.utils.data

from hpstore.errors import ConfigError
from hpstore.loaders.batching.served import Served
from hpstore.loaders.batching.torch_run_state import (
    has_state,
    put_back,
    put_back_iterator,
    reads_again,
    worker_seed,
)
from hpstore.loaders.batching.worker_states import BEGUN, SNAPSHOT
from hpstore.loaders.sampling.batch_plan import BatchPiece, pieces
from hpstore.loaders.sampling.data_parallel import RankShares, coordinates_of
from hpstore.loaders.sampling.order import Order, digest

_log = logging.getLogger(__name__)
_END = object()


class PositionSampler(torch.utils.data.Sampler[Any]):
    """Batches of indices from `at`, (epoch, position), to the end of the epoch.

    `asked`: the pieces that torch has asked for and not handed out yet. `single`: indices alone.
    """

    def __init__(self, order: Order, shares: RankShares, *, single: bool) -> None:
        self._order, self._shares, self._single = order, shares, single
        self.at = (0, 0)
        self.asked: deque[BatchPiece] = deque()

    def renew(self, order: Order, shares: RankShares) -> None:
        """The dataset has another length now."""
        self._order, self._shares = order, shares

    def __iter__(self) -> Iterator[Any]:
        # here, not at the first batch: iterators of an earlier pass keep what is theirs
        self.asked = asked = deque[BatchPiece]()
        found = pieces(self._shares.now(), *self.at, single=self._single)
        return self._ask(self._order, asked, found)

    @staticmethod
    def _ask(order: Order, asked: deque[BatchPiece], found: Iterator[BatchPiece]) -> Iterator[Any]:
        for piece in found:
            asked.append(piece)
            indices = piece.indices(order).tolist()
            yield indices[0] if piece.single else indices

    def __len__(self) -> int:
        return self._shares.now().own_steps()


def described(dataset: Any, size: int | None = None) -> str:
    """What tells a dataset of others from another one in a saved state.

    Kind and size, which may be another one than it has now; its `fingerprint`, where it has one; of
    a Subset also which samples.
    """
    now = len(dataset) if hasattr(dataset, "__len__") else "?"
    text = f"{type(dataset).__name__}[{now if size is None else size}]"
    if isinstance(dataset, torch.utils.data.Subset):
        return f"{text} {digest(np.asarray(dataset.indices, np.int64))} of " + described(
            dataset.dataset
        )
    known = getattr(dataset, "fingerprint", None)
    return f"{text} {known}" if isinstance(known, str) else text


_WORK = ("transform", "batch_transform", "device", "layout", "on_error", "decode")
_READING = ("cache", "memory", "gpu", "packing", "filter")


def refuse_ours(loader: Served, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise ConfigError for arguments that would have no effect on a dataset of others.

    `parameters` of the loader: their defaults mean that nothing was given.
    """
    given = {n: getattr(loader, n) for n in _WORK + _READING}
    off = ["cache"] if given["cache"] in (None, 0) else []  # as it is here, whatever is asked for
    names = [n for n in given if given[n] != parameters[n].default and n not in off]
    if names:
        hint = "leave them out."
        if set(names) & set(_WORK):
            hint = "do that in its __getitem__, in collate_fn, or in the training loop."
        raise ConfigError(
            f"{', '.join(names)}: for data sets of hpstore alone. This is a "
            f"{type(loader.dataset).__name__}, which torch's own workers read: {hint}"
        )


def begin(loader: Served, states: Mapping[str, Any], make: Callable[[], Any]) -> ForeignIterator:
    """The loop from where the loader stands. `make`: torch's own iterator. `states`: see
    Companions.begin.
    """
    epoch, position = loader.standing()
    again = position > 0 and SNAPSHOT not in states and reads_again(loader)
    again = again and _falls_on(loader, epoch, position)
    first = 0 if again else position  # that is read
    if loader.positions is not None:
        loader.positions.at = (epoch, first)
    loader.to_skip = first
    seeded, rank = loader.generator is None, coordinates_of(loader).rank
    if seeded:
        begun = states.get(SNAPSHOT, {}).get(BEGUN, first)  # of workers that go on
        loader.generator = worker_seed(loader.seed, rank, epoch, begun)
    try:
        put_back(loader.dataset, states)
        found = make()
    finally:
        loader.to_skip = 0
        if seeded:
            loader.generator = None
    made = ForeignIterator(loader, found, epoch, position)
    if put_back_iterator(found, states):
        return made
    if again:
        made.read_to(position)
    return made


def reference(made: ForeignIterator) -> Callable[[], ForeignIterator | None]:
    """What the loader keeps of a loop: nothing that holds workers or a dropped iterator.

    But where the dataset is read here and has a state that is half of the iterator's, the state
    of a loop that was left by `break` needs both.
    """
    return (lambda: made) if has_state(made) else weakref.ref(made)


def _falls_on(loader: Served, epoch: int, position: int) -> bool:
    """Whether a batch ends at a position, so that one can read up to it."""
    if loader.positions is None or loader.slices is None:
        return True
    single = loader.batch_size is None
    found = pieces(loader.slices, epoch, 0, single=single)
    if any(piece.after == (epoch, position) for piece in found):
        return True
    _log.warning(
        "no batch of this loader ends at position %d, where the saved one stood: what workers keep "
        "of a Stateful data set begins afresh",
        position,
    )
    return False


class ForeignIterator:
    """torch's iterator over an epoch; tells the loader where each batch leaves the run.

    What else one looks for on it is torch's own.
    """

    def __init__(self, loader: Served, found: Any, epoch: int, position: int) -> None:
        self._loader, self._found = weakref.ref(loader), found
        self._epoch, self._number = epoch, position
        self._over, self._failed = False, False
        self._asked = loader.positions.asked if loader.positions is not None else None
        self._length: int | None = None
        iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        if not (iterable and loader.num_workers):  # each worker of theirs ends with a smaller batch
            with contextlib.suppress(TypeError):  # an iterable dataset that does not tell
                self._length = len(loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_found":  # not made yet, in a copy
            raise AttributeError(name)
        return getattr(self._found, name)

    def read_to(self, position: int) -> None:
        """Read again what was handed out, up to a position."""
        loader, at = self._loader(), 0
        while at < position and next(self._found, _END) is not _END:
            at = self._asked.popleft().after[1] if self._asked is not None else at + 1
            if loader is not None:
                loader.skipped_batches_total += 1

    def __iter__(self) -> ForeignIterator:
        return self

    def __len__(self) -> int:
        return len(self._found)

    @property
    def under_way(self) -> bool:
        """Whether its end has not come."""
        return not self._over

    def __next__(self) -> Any:
        loader, asked = self._loader(), time.perf_counter()
        if self._failed:  # who goes on passes that batch over
            self._failed, self._number = False, self._number + 1
            if self._asked:
                self._asked.popleft()
        received = getattr(self._found, "_rcvd_idx", None)
        try:
            batch = next(self._found)
        except StopIteration:
            if not self._over and loader is not None:
                loader.stands.ended(self._epoch)
            self._over = True
            raise
        except Exception as error:
            if loader is not None and loader.order is not None and loader.in_order and self._asked:
                samples = self._asked[0].indices(loader.order).tolist()
                error.add_note(f"hpstore: of samples {samples}")
            # torch has used the batch up; not where it has only waited too long for it
            self._failed = received is None or received != self._found._rcvd_idx
            raise
        self._number += 1
        after, samples = (self._epoch, self._number), 0
        if self._asked is not None:
            piece = self._asked.popleft()
            after, samples = piece.after, piece.samples
        elif self._number == self._length:
            after = (self._epoch + 1, 0)
        if loader is not None:
            loader.waits.waited(asked)
            loader.finish.counted(samples)
            loader.stands.moved(after)
        return batch
