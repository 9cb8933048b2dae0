"""Several data sets as one, in fixed shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from hpstore.closing import Closing
from hpstore.errors import ConfigError
from hpstore.loaders.batches import Batch, BatchValue, Ragged
from hpstore.loaders.dataset import Dataset
from hpstore.loaders.draws import Indices, derive_seed
from hpstore.loaders.engine import Engine
from hpstore.loaders.mixing import MixtureOrder
from hpstore.loaders.order import GlobalOrder, Order, SequentialOrder
from hpstore.loaders.progress import Piece


class Mixture:
    """Data sets with the same fields, mixed by weight, for a DataLoader.

    Every run of 1024 samples (or a few more) has each data set's exact share; a small one is
    repeated, each time in another order. `length`: samples of an epoch, by default those of all
    data sets together. `source_field`: name of an int64 field that tells where a sample is from.
    Raises ConfigError.
    """

    def __init__(
        self, datasets: Sequence[Dataset], weights: Sequence[float], *, length: int | None = None,
        source_field: str | None = None,
    ) -> None:  # fmt: skip
        if not datasets:
            raise ConfigError("a mixture of no data sets")
        first = datasets[0]
        for other in datasets[1:]:
            if other.fields != first.fields:
                raise ConfigError(
                    f"data sets {first.name!r} and {other.name!r} have different fields: "
                    f"{list(first.fields.items())} and {list(other.fields.items())}. Open both "
                    "with fields= for those that they share."
                )
        if source_field in first.fields:
            raise ConfigError(f"{source_field!r} is a field of {first.name!r} already")
        self.datasets, self.weights = tuple(datasets), tuple(map(float, weights))
        self.length, self.source_field = length, source_field
        if len(self.weights) != len(self.datasets):
            raise ConfigError(f"{len(datasets)} data sets, {len(self.weights)} weights")

    def __len__(self) -> int:
        return sum(map(len, self.datasets)) if self.length is None else self.length

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of the data sets, in their order."""
        return tuple(data.fingerprint for data in self.datasets)

    def order(self, shuffle: str, seed: int) -> MixtureOrder:
        """The order of a loader: each data set shuffled by itself ("global") or as it is."""
        if shuffle not in ("global", "none"):
            raise ConfigError(f'shuffle {shuffle!r} of a mixture: choose "global" or "none"')
        orders: list[Order] = [
            GlobalOrder(len(data), derive_seed(seed, number)) if shuffle == "global"
            else SequentialOrder(len(data))
            for number, data in enumerate(self.datasets)
        ]  # fmt: skip
        return MixtureOrder(orders, self.weights, seed, length=self.length)


class MixedEngine(Closing):
    """Batches of a mixture: each data set's share made by an engine of its own, then put together.

    As Engine. Memory for pages is shared by weight, memory for batches is for the shares.
    """

    mode = "mixture"

    def __init__(
        self, mixture: Mixture, order: Order, *, cache_bytes: int, prefetch_bytes: int,
        pin: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(order, MixtureOrder):
            raise ConfigError("the order of a mixture is made from its weights: give no Order")
        self._mixture, self.order = mixture, order
        total = sum(mixture.weights)
        self._engines = [
            Engine(data, None, cache_bytes=int(cache_bytes * weight / total),
                   prefetch_bytes=int(prefetch_bytes * weight / total), pin=pin)
            for data, weight in zip(mixture.datasets, mixture.weights, strict=True)
        ]  # fmt: skip
        self.pid = self._engines[0].pid
        self.make_seconds = 0.0

    def start(self, epoch: int, position: int) -> None:
        """As Engine.start."""
        for engine in self._engines:
            engine.start(epoch, position)

    def make(self, piece: Piece) -> tuple[Indices, Batch]:
        """As Engine.make; indices count through the data sets laid end to end."""
        indices = piece.indices(self.order)
        return indices, self.batch(indices)

    def batch(self, indices: Indices) -> Batch:
        """As Engine.batch."""
        found = self.order.split(indices)
        shares: list[tuple[Indices, Batch]] = []
        for number, engine in enumerate(self._engines):
            rows = np.flatnonzero(found.source == number)
            if len(rows):
                shares.append((rows, engine.batch(found.sample[rows])))
        merged = {
            name: _merged(len(indices), [(rows, part[name]) for rows, part in shares])
            for name in self._mixture.datasets[0].fields
        }
        if self._mixture.source_field is not None:
            merged[self._mixture.source_field] = torch.from_numpy(found.source)
        return merged

    def handed(self, piece: Piece) -> None:
        """As Engine.handed."""

    def stats(self) -> dict[str, float | int | str]:
        """Sums of the engines' counters."""
        found: dict[str, float | int | str] = {"mode": self.mode}
        for engine in self._engines:
            for name, value in engine.stats().items():
                if isinstance(value, int | float):
                    found[name] = value + float(found.get(name, 0))
        return found

    def close(self) -> None:
        """As Engine.close."""
        for engine in self._engines:
            engine.close()


def _merged(count: int, parts: Sequence[tuple[Indices, BatchValue]]) -> BatchValue:
    """Values of all rows from those of some rows each."""
    if len(parts) == 1:
        return parts[0][1]  # all are of one data set, in their order
    first = parts[0][1]
    if isinstance(first, torch.Tensor):
        out = torch.empty((count, *first.shape[1:]), dtype=first.dtype)
        for rows, value in parts:
            assert isinstance(value, torch.Tensor)
            out[torch.from_numpy(rows)] = value
        return out
    by_row: dict[int, Any] = {}
    for rows, value in parts:
        by_row.update(zip(rows.tolist(), value, strict=True))
    values = [by_row[row] for row in range(count)]
    if isinstance(first, list):
        return values
    lengths = torch.tensor([0, *(len(value) for value in values)])
    return Ragged(torch.cat(values), lengths.cumsum(0))


def fingerprints(data: Mixture | Dataset) -> tuple[str, ...]:
    """Of all data sets in it."""
    return data.fingerprints if isinstance(data, Mixture) else (data.fingerprint,)


def stored_bytes(data: Mixture | Dataset) -> float:
    """Mean bytes of a sample's records."""
    sets = data.datasets if isinstance(data, Mixture) else (data,)
    total = sum(int(s.payload_bytes.sum()) for one in sets for s in one.streams)
    return total / max(1, sum(map(len, sets)))


AnyEngine: TypeAlias = Engine | MixedEngine

__all__ = ["AnyEngine", "MixedEngine", "Mixture", "fingerprints", "stored_bytes"]
