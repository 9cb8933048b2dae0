"""Several datasets as one, in fixed shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from hpstore.errors import ConfigError
from hpstore.loaders.batching.batch_counters import Counts, PoolReads
from hpstore.loaders.batching.batch_maker import Engine, Session, cache_budget
from hpstore.loaders.batching.loader_options import LoaderMemory
from hpstore.loaders.cache import Cache
from hpstore.loaders.dataset.batch_values import Batch, BatchValue, Ragged, row_bytes
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.sampling.batch_plan import BatchPiece
from hpstore.loaders.sampling.mixture_order import MixtureOrder, Sources, sources_of
from hpstore.loaders.sampling.order import PERMUTATION_SAMPLES, GlobalOrder, Order, SequentialOrder
from hpstore.loaders.sampling.random_draws import Indices, derive_seed
from hpstore.runtime.closing import Closing

if TYPE_CHECKING:
    from hpstore.loaders.gpu.direct_reader import DirectAccess


class Mixture:
    """Datasets with the same fields, mixed by weight, for a DataLoader.

    Every run of 1024 samples (or a few more) has each dataset's exact share; a small one is
    repeated, each time in another order.

    Parameters
    ----------
    datasets
        Open datasets. They stay the caller's.
    weights
        Share of each dataset, of their sum: finite and not negative, one above 0.
    length
        Samples of an epoch. Default: those of all datasets together.
    source_field
        Name of an int64 field that batches have besides: the number of the dataset in `datasets`
        that a sample is from.

    Raises
    ------
    ConfigError
        There is no dataset, one is not a Dataset of hpstore, their fields differ, there are more or
        fewer weights, or `source_field` is a field already. Weights are checked by order().
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        *,
        length: int | None = None,
        source_field: str | None = None,
    ) -> None:
        if not datasets:
            raise ConfigError("a mixture of no data sets")
        for data in datasets:
            if not isinstance(data, Dataset):
                raise ConfigError(
                    f"a mixture is of hpstore's Datasets, this is a {type(data).__name__}. A part "
                    "of a data set is mixed in as a data set of its own; a Subset of the whole "
                    "mixture is those samples, each once, whatever the weights."
                )
        first = datasets[0]
        for other in datasets[1:]:
            if other.fields != first.fields:
                raise ConfigError(
                    f"data sets {first.name!r} and {other.name!r} have different fields: "
                    f"{list(first.fields.items())} and {list(other.fields.items())}. Open both "
                    "with fields= for those that they share."
                )
        if source_field in first.stored:
            raise ConfigError(f"{source_field!r} is a field of {first.name!r} already")
        self.datasets, self.weights = tuple(datasets), tuple(map(float, weights))
        self.length, self.source_field = length, source_field
        self._offsets = np.cumsum([0, *map(len, self.datasets)], dtype=np.int64)
        if len(self.weights) != len(self.datasets):
            raise ConfigError(f"{len(datasets)} data sets, {len(self.weights)} weights")

    def __len__(self) -> int:
        return sum(map(len, self.datasets)) if self.length is None else self.length

    @property
    def samples(self) -> int:
        """Of all datasets; indices count through them laid end to end."""
        return int(self._offsets[-1])

    def split(self, indices: Indices) -> Sources:
        """Find the samples in their datasets.

        Parameters
        ----------
        indices
            int64 (n,), 0 <= i < samples, counted through the datasets laid end to end.

        Returns
        -------
        Sources
            Numbers of the datasets and of the samples in them, int64 (n,) each.

        Raises
        ------
        IndexError
            An index is outside.
        """
        return sources_of(indices, self._offsets)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of the datasets, in their order."""
        return tuple(data.fingerprint for data in self.datasets)

    def order(self, shuffle: str, seed: int) -> MixtureOrder:
        """Make the order of a loader.

        Parameters
        ----------
        shuffle
            "global": each dataset is shuffled by itself. "none": each is read as it was written.
        seed
            0 <= seed < 2**64. It determines the order, with the datasets' sizes and the weights.

        Returns
        -------
        MixtureOrder
            An Order over `samples`.

        Raises
        ------
        ConfigError
            `shuffle` is neither, or the weights or the seed cannot be used.
        """
        if shuffle not in ("global", "none"):
            raise ConfigError(f'shuffle {shuffle!r} of a mixture: choose "global" or "none"')
        tables = PERMUTATION_SAMPLES // len(self.datasets)  # else 200 of them take seconds
        orders: list[Order] = [
            GlobalOrder(len(data), derive_seed(seed, number), table_samples=tables)
            if shuffle == "global"
            else SequentialOrder(len(data))
            for number, data in enumerate(self.datasets)
        ]
        return MixtureOrder(orders, self.weights, seed, length=self.length)


class MixedSession:
    """As Session: each dataset's share made by a session of its own, then put together."""

    def __init__(
        self, mixture: Mixture, order: Order | None, counts: Counts, sessions: Sequence[Session]
    ) -> None:
        """`order`: of the weights, of a Subset, or none where a sampler decides."""
        self._mixture, self._sessions = mixture, sessions
        self.order, self.counts = order, counts
        self.fields = dict(mixture.datasets[0].fields)
        if mixture.source_field is not None:
            self.fields[mixture.source_field] = Field("int64")

    def make(self, piece: BatchPiece) -> tuple[Indices, Batch]:
        """As Session.make; indices count through the datasets laid end to end."""
        began = time.perf_counter()
        indices = piece.indices(self.order)
        made = self.batch(indices)
        took = time.perf_counter() - began
        self.counts.make_seconds += took
        return indices, made

    def batch(self, indices: Indices) -> Batch:
        """As Session.batch."""
        found = self._mixture.split(indices)
        shares: list[tuple[Indices, Batch]] = []
        for number, session in enumerate(self._sessions):
            rows = np.flatnonzero(found.source == number)
            if len(rows):
                shares.append((rows, session.batch(found.sample[rows])))
        merged = {
            name: _merged(len(indices), [(rows, part[name]) for rows, part in shares])
            for name in self._mixture.datasets[0].stored
        }
        if self._mixture.source_field is not None:
            merged[self._mixture.source_field] = torch.from_numpy(found.source)
        return merged

    def needed_from(self, piece: BatchPiece | None) -> None:
        """As Session.needed_from."""
        for session in self._sessions:
            session.needed_from(piece)

    def leave(self) -> None:
        """As Session.leave."""
        for session in self._sessions:
            session.leave()

    def close(self) -> None:
        """As Session.close."""
        for session in self._sessions:
            session.close()


class MixedEngine(Closing):
    """As Engine, for a mixture. Memory for pages and for batches is shared by weight."""

    mode = "mixture"

    def __init__(
        self,
        mixture: Mixture,
        order: Order | None,
        *,
        batch_rows: int,
        cache_bytes: int,
        prefetch_bytes: int,
        pin: Callable[[Any], object] | None = None,
        cache: Cache | None = None,
    ) -> None:
        self._mixture, self.order = mixture, order
        total = sum(mixture.weights)
        self._engines = [
            Engine(
                data,
                None,
                batch_rows=batch_rows,
                cache_bytes=int(cache_bytes * weight / total),
                prefetch_bytes=int(prefetch_bytes * weight / total),
                pin=pin,
                cache=cache,
            )
            for data, weight in zip(mixture.datasets, mixture.weights, strict=True)
        ]
        self.pid = self._engines[0].pid
        self.counts = Counts()
        self._reads = PoolReads(data.pool for data in mixture.datasets)

    def expect(self, steady: int, most: int) -> None:
        """Nothing: slots of many small shares would take far more than the budget."""

    def start(self, epoch: int, position: int) -> MixedSession:
        """As Engine.start."""
        sessions = [engine.start(epoch, position) for engine in self._engines]
        return MixedSession(self._mixture, self.order, self.counts, sessions)

    def stats(self) -> dict[str, Any]:
        """Sums of the engines' counters."""
        found: dict[str, Any] = {"mode": self.mode}
        for engine in self._engines:
            for name, value in engine.stats().items():
                if isinstance(value, int | float):
                    found[name] = value + float(found.get(name, 0))
        fetched = sum(engine.counts.fetch_seconds for engine in self._engines)
        found["assemble_seconds"] = max(0.0, self.counts.make_seconds - fetched)
        return found | self._reads.stats()

    def stop(self) -> None:
        """As Engine.stop."""
        for engine in self._engines:
            engine.stop()

    def close(self) -> None:
        """As Engine.close."""
        for engine in self._engines:
            engine.close()


def _merged(count: int, parts: Sequence[tuple[Indices, BatchValue]]) -> BatchValue:
    """Values of all rows from those of some rows each."""
    if len(parts) == 1:
        return parts[0][1]  # all are of one dataset, in their order
    first = parts[0][1]
    if isinstance(first, torch.Tensor):
        out = torch.empty((count, *first.shape[1:]), dtype=first.dtype)
        for rows, value in parts:
            assert isinstance(value, torch.Tensor)
            row_bytes(out)[rows] = row_bytes(value)
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
    """Of all datasets in it."""
    return data.fingerprints if isinstance(data, Mixture) else (data.fingerprint,)


def stored_bytes(data: Mixture | Dataset) -> float:
    """Mean bytes of a sample's records."""
    sets = data.datasets if isinstance(data, Mixture) else (data,)
    total = sum(int(s.payload_bytes.sum()) for one in sets for s in one.streams)
    return total / max(1, sum(map(len, sets)))


AnyEngine: TypeAlias = Engine | MixedEngine


def make_engine(
    data: Dataset | Mixture,
    order: Order | None,
    *,
    memory: LoaderMemory,
    cache: Cache | int | str | None,
    batch_rows: int,
    pin: Callable[[Any], object] | None,
    direct: DirectAccess | None,
    share: float,
) -> AnyEngine:
    """What makes the batches of a dataset or a mixture, which has no use for `direct` and `share`.

    `cache`: as a loader was given it; else as Engine.
    """
    options: dict[str, Any] = {
        "cache_bytes": cache_budget(cache),
        "prefetch_bytes": int(memory.prefetch_bytes),
        "pin": pin,
        "batch_rows": batch_rows,
        "cache": cache if isinstance(cache, Cache) else None,
    }
    if isinstance(data, Mixture):
        return MixedEngine(data, order, **options)
    return Engine(data, order, **options, direct=direct, share=share)


AnySession: TypeAlias = Session | MixedSession
