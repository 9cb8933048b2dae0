"""Batches of a mixture: each dataset's share by an engine of its own, then put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpstore.loaders.batching.batch_counters import Counts, PoolReads
from hpstore.loaders.batching.batch_maker import Engine, Session
from hpstore.loaders.batching.mixture import Mixture
from hpstore.loaders.batching.page_budget import PageBudget
from hpstore.loaders.cache import Cache
from hpstore.loaders.dataset.batch_values import Batch, BatchValue, Ragged, row_bytes
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.sampling.batch_plan import BatchPiece
from hpstore.loaders.sampling.mixture_order import MixtureOrder
from hpstore.loaders.sampling.order import Order
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.window_shuffle import windows_of
from hpstore.runtime.closing import Closing


@dataclass(slots=True, kw_only=True)
class _Share:
    """What one engine reads. `order`: of a source that is read by windows."""

    data: Dataset
    weight: float
    used: float  # part of its samples
    order: Order | None = None


class MixedSession:
    """As Session: each dataset's share made by a session of its own, then put together."""

    def __init__(
        self,
        mixture: Mixture,
        order: Order | None,
        counts: Counts,
        sessions: Sequence[Session],
        session_of: Indices,
    ) -> None:
        """`order`: of the weights, of a Subset, or none where a sampler decides. `session_of`: the
        number of the session for each of the mixture's parts.
        """
        self._mixture, self._sessions, self._session_of = mixture, sessions, session_of
        self._windowed = windowed(order)
        self.order, self.counts = order, counts
        self.fields = dict(mixture.parts[0].fields)
        if mixture.source_field is not None:
            self.fields[mixture.source_field] = Field("int64")

    def make(self, piece: BatchPiece) -> tuple[Indices, Batch]:
        """As Session.make; indices count through the datasets laid end to end."""
        began = time.perf_counter()
        indices = piece.indices(self.order)
        made = self._batch(indices, piece if self._windowed is not None else None)
        took = time.perf_counter() - began
        self.counts.make_seconds += took
        return indices, made

    def batch(self, indices: Indices) -> Batch:
        """As Session.batch."""
        return self._batch(indices, None)

    def _batch(self, indices: Indices, piece: BatchPiece | None) -> Batch:
        """`piece`: where sources are read by windows, so that their pages are waited for."""
        found = self._mixture.split_parts(indices)
        session_of = self._session_of[found.source]
        places = self._places(piece) if piece is not None else []
        shares: list[tuple[Indices, Batch]] = []
        for number, session in enumerate(self._sessions):
            rows = np.flatnonzero(session_of == number)
            if not len(rows):
                continue
            some = found.sample[rows]
            if piece is None or self._windowed is None:
                shares.append((rows, session.batch(some)))
                continue
            ahead = int(np.searchsorted(rows, self._windowed.length - piece.start))
            shares.append((rows, session.part(piece, *places[number], some, ahead)))
        merged = {
            name: _merged(len(indices), [(rows, part[name]) for rows, part in shares])
            for name in self._mixture.parts[0].stored
        }
        if self._mixture.source_field is not None:
            merged[self._mixture.source_field] = torch.from_numpy(
                self._mixture.split(indices).source
            )
        return merged

    def _places(self, piece: BatchPiece) -> list[tuple[int, int]]:
        """(epoch, position) at which each source stands before a piece."""
        assert self._windowed is not None
        return self._windowed.places(piece.epoch, piece.start)

    def needed_from(self, piece: BatchPiece | None) -> None:
        """As Session.needed_from."""
        if piece is None or self._windowed is None:
            for session in self._sessions:
                session.needed_from(piece)
            return
        for session, place in zip(self._sessions, self._places(piece), strict=True):
            session.needed_from(piece, place)

    def leave(self, *, dropped: bool = False) -> None:
        """As Session.leave."""
        for session in self._sessions:
            session.leave(dropped=dropped)

    def close(self) -> None:
        """As Session.close."""
        for session in self._sessions:
            session.close()


class MixedEngine(Closing):
    """As Engine, for a mixture. Memory for pages and for batches is shared by weight.

    A dataset that several sources are parts of has one engine; read by windows, each source has
    one. `share`: the part of the mixture's samples that this loader reads.
    """

    mode = "mixture"

    def __init__(
        self,
        mixture: Mixture,
        order: Order | None,
        *,
        batch_rows: int,
        budget: PageBudget,
        prefetch_bytes: int,
        pin: Callable[[Any], object] | None = None,
        cache: Cache | None = None,
        share: float = 1.0,
    ) -> None:
        self._mixture, self.order = mixture, order
        self._windowed = windowed(order)
        shares, self._engine_of = _shares(mixture, self._windowed)
        self._engines = [
            Engine(
                one.data,
                one.order,
                batch_rows=batch_rows,
                budget=budget.for_part(one.weight),
                prefetch_bytes=int(prefetch_bytes * one.weight),
                pin=pin,
                cache=cache,
                share=share * one.used,
            )
            for one in shares
        ]
        self.pid = self._engines[0].pid
        self.counts = Counts()
        self._reads = PoolReads(data.pool for data in mixture.parts)

    def expect(self, steady: int, most: int) -> None:
        """Nothing: slots of many small shares would take far more than the budget."""

    def start(self, epoch: int, position: int) -> MixedSession:
        """As Engine.start."""
        places = [(epoch, position)] * len(self._engines)
        if self._windowed is not None:
            places = self._windowed.places(epoch, position)
        sessions = [e.start(*place) for e, place in zip(self._engines, places, strict=True)]
        return MixedSession(self._mixture, self.order, self.counts, sessions, self._engine_of)

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


def windowed(order: Order | None) -> MixtureOrder | None:
    """The order of a mixture whose sources are read by windows."""
    if not isinstance(order, MixtureOrder):
        return None
    return order if any(windows_of(one) is not None for one in order.orders) else None


def _shares(mixture: Mixture, windows: MixtureOrder | None) -> tuple[list[_Share], Indices]:
    """What the engines read, and which of them reads each part."""
    shares: dict[tuple[int, int], _Share] = {}
    engine_of = []
    for number, (source, weight) in enumerate(
        zip(mixture.sources, mixture.schedule.mean_shares(), strict=True)
    ):
        for part in source.parts:
            key = (id(part), -1 if windows is None else number)
            order = None if windows is None else windows.orders[number]
            made = shares.setdefault(key, _Share(data=part, weight=0.0, used=0.0, order=order))
            made.weight += weight * len(part) / max(1, source.samples)
            made.used = min(1.0, made.used + len(source) / max(1, source.samples))
            engine_of.append(list(shares).index(key))
    return list(shares.values()), np.array(engine_of, np.int64)


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
