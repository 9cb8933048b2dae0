"""Iterating over a native data set, and the orders that its loaders use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.utils.data

from hpstore.errors import ConfigError
from hpstore.loaders.dataset import Dataset
from hpstore.loaders.draws import Indices
from hpstore.loaders.mixture import Mixture, stored_bytes
from hpstore.loaders.order import GlobalOrder, Order, SequentialOrder, SubsetOrder
from hpstore.loaders.pipeline import Pipeline
from hpstore.loaders.progress import endless, listed
from hpstore.loaders.windows import WindowOrder, subset_stripes

if TYPE_CHECKING:
    from hpstore.loaders.loader import DataLoader

LEAST_AHEAD, MOST_AHEAD = 2, 16  # batches, unless prefetch_factor says


@dataclass(frozen=True, slots=True)
class Native:
    """A hpstore data set or a mixture, and which samples are used: all, or those of a Subset."""

    data: Dataset | Mixture
    mapping: Indices | None

    def __len__(self) -> int:
        return len(self.data) if self.mapping is None else len(self.mapping)


# Any: whatever the user's data set is
def native_of(dataset: Any) -> Native | None:
    """The hpstore data set under torch's Subset and random_split; None when it is another."""
    mapping: Indices | None = None
    while isinstance(dataset, torch.utils.data.Subset):
        chosen = np.asarray(dataset.indices, np.int64)
        mapping = chosen if mapping is None else chosen[mapping]
        dataset = dataset.dataset
    return Native(dataset, mapping) if isinstance(dataset, Dataset | Mixture) else None


def order_for(
    dataset: Any, native: Native | None, shuffle: bool | str | Order | None, seed: int,
    window_bytes: int,
) -> Order:  # fmt: skip
    """The order that `shuffle` asks for. Raises ConfigError."""
    count = len(native) if native is not None else len(dataset)
    name = {None: "none", False: "none", True: "global"}.get(shuffle, shuffle)  # type: ignore[arg-type]
    made: Order
    if isinstance(name, str):
        if name not in ("none", "global", "window"):
            raise ConfigError(
                f'shuffle {name!r} is not one of True, False, "global", "window", "none"'
            )
        if native is not None and isinstance(native.data, Mixture):
            made = native.data.order(name, seed)
            return _of_subset(made, native)
        if name == "window":
            if native is None:
                raise ConfigError(
                    'shuffle="window" follows the stripes of a hpstore data set; this is a '
                    f'{type(dataset).__name__}: use "global"'
                )
            return _window_order(native, seed, window_bytes)
        made = GlobalOrder(count, seed) if name == "global" else SequentialOrder(count)
    else:
        assert name is not None
        made = name
        if made.samples > count:
            raise ConfigError(f"the order chooses from {made.samples} samples, there are {count}")
    return _of_subset(made, native)


def _of_subset(order: Order, native: Native | None) -> Order:
    if native is None or native.mapping is None:
        return order
    return SubsetOrder(order, native.mapping, samples=len(native.data))


def _window_order(native: Native, seed: int, window_bytes: int) -> Order:
    data = native.data
    assert isinstance(data, Dataset)
    stripes = data.stripes()
    payload = sum(int(stream.payload_bytes.sum()) for stream in data.streams)
    stripe_bytes = max(1, payload // max(1, len(stripes) - 1))
    windows = max(1, window_bytes // stripe_bytes)
    if native.mapping is None:
        return WindowOrder(stripes, seed, window_stripes=windows)
    mapping = np.sort(native.mapping)
    order = WindowOrder(subset_stripes(stripes, mapping), seed, window_stripes=windows)
    return SubsetOrder(order, mapping, samples=len(data))


class NativeIterator:
    """One epoch from a position on. What it makes ahead of the next epoch is left to the loader."""

    def __init__(self, loader: DataLoader, native: Native, epoch: int, position: int) -> None:
        self._loader, self._engine, self._finish = loader, loader.engine(), loader.finish
        self._epoch = epoch
        self._engine.start(epoch, position)
        slices = loader.slices
        if slices is not None:
            todo = endless(slices, epoch, position)
        else:
            todo = listed(_batches(loader, native, epoch), epoch, position)
        threads = loader.num_workers or min(2, len(os.sched_getaffinity(0)))
        depth = loader.prefetch_factor
        depth = depth * threads if depth else self._depth(native, threads)
        engine, finish = self._engine, self._finish
        self._pipeline = Pipeline(
            todo, lambda piece: finish.make(engine, piece), depth=depth, threads=threads
        )
        self._over, self._waited = False, loader.wait_seconds

    def _depth(self, native: Native, threads: int) -> int:
        """Batches ahead: half of the memory for batches, the other half is the user's."""
        batch = stored_bytes(native.data) * (self._loader.batch_size or 1)
        fitting = int(self._loader.batch_memory_bytes // 2 // max(batch, 1))
        return max(LEAST_AHEAD, threads, min(MOST_AHEAD, fitting))

    def begins_at(self, epoch: int, position: int) -> bool:
        """Whether this, having ended an epoch, goes on there; then it does."""
        piece = self._pipeline.peek()
        wanted = piece is not None and (piece.epoch, position) == (epoch, 0)
        self._over, self._epoch = not wanted, epoch
        return wanted

    def __iter__(self) -> NativeIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        while True:
            piece = self._pipeline.peek()
            if self._over or piece is None or piece.epoch != self._epoch:
                self._end(piece is not None)
                raise StopIteration
            try:
                piece, made = self._pipeline.take()
            except Exception:
                self._over = True
                self._pipeline.close()
                raise
            self._loader.wait_seconds = self._waited + self._pipeline.wait_seconds
            self._engine.handed(piece)
            self._loader.moved(piece.after)
            batch = self._finish.hand_out(made)
            if batch is not None:  # else all of its samples were skipped
                return batch

    def _end(self, more: bool) -> None:
        if self._over:
            return
        self._over = True
        if more:
            self._loader.keep_ready(self)
        else:
            self._pipeline.close()

    def close(self) -> None:
        """Stop what is made ahead. Idempotent."""
        self._over = True
        self._pipeline.close()

    def __del__(self) -> None:
        pipeline = getattr(self, "_pipeline", None)
        if pipeline is not None:
            pipeline.abandon()


def _batches(loader: DataLoader, native: Native, epoch: int) -> Any:
    """Batches of indices of the user's sampler, which follows the epoch if it can."""
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    inner: Any = getattr(sampler, "sampler", None)
    for one in (sampler, inner):
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)
    if loader.batch_sampler is None:
        sampler = ([index] for index in sampler)
    if native.mapping is None:
        return sampler
    mapping = native.mapping
    return (mapping[np.asarray(batch, np.int64)].tolist() for batch in sampler)


__all__ = ["Native", "NativeIterator", "native_of", "order_for"]
