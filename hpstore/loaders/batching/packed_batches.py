"""Batches of packed sequences: documents are read as any samples are, then laid into rows."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpstore.errors import ConfigError
from hpstore.loaders.batching.batch_maker import Engine, Session
from hpstore.loaders.batching.mixed_batches import MixedEngine, MixedSession
from hpstore.loaders.batching.packing import DOCUMENT_IDS, POSITION_IDS, Packing
from hpstore.loaders.dataset.batch_values import Batch, Ragged
from hpstore.loaders.dataset.fields import Array, Field
from hpstore.loaders.sampling.batch_plan import BatchPiece
from hpstore.loaders.sampling.packed_order import Cuts, PackedOrder, SequenceOrder, runs
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.window_shuffle import windows_of
from hpstore.runtime.closing import Closing
from hpstore.units import MIB

KEPT_BYTES = 64 * MIB  # of long documents, of which the next batches have more; one at least


class LongDocuments:
    """Documents that a batch has begun or ended in, for the next one. Thread-safe."""

    def __init__(self, budget_bytes: int = KEPT_BYTES) -> None:
        self._budget, self._bytes = budget_bytes, 0
        self._kept: OrderedDict[int, list[Array]] = OrderedDict()
        self._lock = threading.Lock()  # guards all

    def get(self, document: int) -> list[Array] | None:
        """Its values, of each field; shared."""
        with self._lock:
            found = self._kept.get(document)
            if found is not None:
                self._kept.move_to_end(document)
            return found

    def keep(self, document: int, values: list[Array]) -> None:
        """Until others need the room."""
        with self._lock:
            if document in self._kept:
                return
            self._kept[document] = values
            self._bytes += sum(one.nbytes for one in values)
            while self._bytes > self._budget and len(self._kept) > 1:
                _, old = self._kept.popitem(last=False)
                self._bytes -= sum(one.nbytes for one in old)


class PackedSession:
    """As Session, for sequences. `bases`: where each source's documents begin among all."""

    def __init__(
        self,
        inner: Session | MixedSession,
        order: SequenceOrder,
        packing: Packing,
        fields: Mapping[str, Field],
        bases: Sequence[int],
        source_field: str | None,
        long: LongDocuments,
        most_awaited: int = 0,
    ) -> None:
        """`most_awaited`: documents of a batch whose pages there is surely room for."""
        self._inner, self._packing, self._bases, self._long = inner, packing, bases, long
        self._most_awaited = most_awaited
        self.order, self.counts, self._source_field = order, inner.counts, source_field
        self._own = dict(fields)
        self.fields = dict(fields)
        if source_field is not None:
            self.fields[source_field] = Field("int64")

    def make(self, piece: BatchPiece) -> tuple[Indices, Batch]:
        """As Session.make; indices are numbers of sequences through all epochs."""
        began = time.perf_counter()
        numbers = piece.indices(self.order)
        made = self._batch(numbers, piece)
        took = time.perf_counter() - began
        self.counts.make_seconds += took
        return numbers, made

    def batch(self, indices: Indices) -> Batch:
        """As Session.batch."""
        return self._batch(indices, None)

    def _batch(self, numbers: Indices, piece: BatchPiece | None) -> Batch:
        row = self._packing.length
        out = {
            name: np.zeros((len(numbers), row), made.storage) for name, made in self._own.items()
        }
        out[self._packing.field].fill(self._packing.pad)
        out[DOCUMENT_IDS].fill(-1)
        found = self.order.split(numbers)
        for source in np.unique(found.source).tolist():
            rows = np.flatnonzero(found.source == source)
            sequences = self.order.sources[source]
            for run in runs(found.sample[rows], sequences.length):
                epoch, first = divmod(int(found.sample[rows[run.start]]), sequences.length)
                cuts = sequences.cuts(epoch, first, first + run.stop - run.start)
                follows = piece is not None and epoch == piece.epoch and first >= piece.start
                follows = follows and cuts.start >= 0
                lengths, values = self._read(cuts, source, epoch, piece if follows else None)
                some = rows[run]
                whole = len(some) == len(numbers)
                target = out if whole else {n: made[some] for n, made in out.items()}
                self._fill(cuts, lengths, values, target)
                if not whole:
                    for name, made in target.items():
                        out[name][some] = made
        batch: Batch = {name: torch.from_numpy(made) for name, made in out.items()}
        if self._source_field is not None:
            batch[self._source_field] = torch.from_numpy(found.source)
        return batch

    def _read(
        self, cuts: Cuts, source: int, epoch: int, piece: BatchPiece | None
    ) -> tuple[Indices, list[Array]]:
        """Lengths of the documents, and their values back to back, of each field.

        `piece`: whose documents follow in the order, so that their pages are waited for.
        """
        documents = cuts.documents + self._bases[source]
        ends = {0, len(documents) - 1}
        known = {at: self._long.get(int(documents[at])) for at in ends}
        kept = {at: values for at, values in known.items() if values is not None}
        left = np.array([at for at in range(len(documents)) if at not in kept], np.int64)
        lengths = np.zeros(len(documents), np.int64)
        for at, values in kept.items():
            lengths[at] = len(values[0])
        parts: list[list[Array]] = [[] for _ in self._packing.names]
        if len(left):
            batch = self._documents(documents[left], cuts.start + int(left[0]), epoch, piece)
            read = [batch[name] for name in self._packing.names]
            for values, one in zip(parts, read, strict=True):
                assert isinstance(one, Ragged)
                values.append(one.values.numpy())
                offsets = one.offsets.numpy()
            lengths[left] = np.diff(offsets)
            for at in ends - kept.keys():
                self._keep(int(documents[at]), [v[0] for v in parts], offsets, at - int(left[0]))
        if 0 in kept:
            parts = [[one, *values] for one, values in zip(kept[0], parts, strict=True)]
        if len(documents) > 1 and len(documents) - 1 in kept:
            last = kept[len(documents) - 1]
            parts = [[*values, one] for one, values in zip(last, parts, strict=True)]
        return lengths, [v[0] if len(v) == 1 else np.concatenate(v) for v in parts]

    def _keep(self, document: int, values: list[Array], offsets: Array, at: int) -> None:
        """A document of several sequences, for the next batch."""
        low, high = int(offsets[at]), int(offsets[at + 1])
        if high - low > self._packing.length:
            self._long.keep(document, [one[low:high].copy() for one in values])

    def _documents(
        self, documents: Indices, start: int, epoch: int, piece: BatchPiece | None
    ) -> Batch:
        if piece is not None and isinstance(self._inner, Session):
            # a batch of many short ones may lie in more pages than are kept: those are read singly
            ahead = min(len(documents), self._most_awaited)
            return self._inner.part(piece, epoch, start, documents, ahead)
        return self._inner.batch(documents)

    def _fill(
        self, cuts: Cuts, lengths: Indices, values: list[Array], out: Mapping[str, Array]
    ) -> None:
        """Lay stretches of documents into rows (n, length) of each field."""
        count = cuts.count
        ends = np.cumsum(count)
        before = ends - count
        at = np.arange(int(ends[-1]))
        place = np.repeat(cuts.place - before, count) + at
        starts = np.cumsum(lengths) - lengths
        source = np.repeat(starts[cuts.document] + cuts.begin - before, count) + at
        # where a stretch goes beyond its document its last place is the separator
        behind = (ends - 1)[cuts.begin + count > lengths[cuts.document]]
        blanks = [self._packing.separator or 0, *(0 for _ in self._packing.beside)]
        for name, one, blank in zip(self._packing.names, values, blanks, strict=True):
            taken = np.zeros(len(at), one.dtype)
            if len(one):
                np.take(one, source, out=taken, mode="clip")
            laid = _narrowed(name, taken, out[name].dtype)
            laid[behind] = blank
            out[name].reshape(-1)[place] = laid
        rows = cuts.place // self._packing.length
        number = np.arange(len(rows)) - np.searchsorted(rows, rows)
        out[DOCUMENT_IDS].reshape(-1)[place] = np.repeat(number, count)
        out[POSITION_IDS].reshape(-1)[place] = at - np.repeat(before, count)

    def needed_from(self, piece: BatchPiece | None) -> None:
        """As Session.needed_from."""
        inner, order = self._inner, self.order
        if piece is None or not isinstance(inner, Session) or not isinstance(order, PackedOrder):
            inner.needed_from(piece)
            return
        place = (piece.epoch, 0)
        if inner.own:  # else nothing is let go, and nothing need be found
            place = (piece.epoch, order.document_at(piece.epoch, piece.start))
        inner.needed_from(piece, place)

    def leave(self, *, dropped: bool = False) -> None:
        """As Session.leave."""
        self._inner.leave(dropped=dropped)

    def close(self) -> None:
        """As Session.close."""
        self._inner.close()


class PackedEngine(Closing):
    """As Engine, for sequences of the documents that `inner` reads."""

    def __init__(
        self,
        inner: Engine | MixedEngine,
        order: SequenceOrder,
        packing: Packing,
        fields: Mapping[str, Field],
        bases: Sequence[int],
        source_field: str | None,
        most_awaited: int,
    ) -> None:
        self._most_awaited = most_awaited
        self._inner, self.order, self._packing = inner, order, packing
        self._fields, self._bases, self._source_field = fields, bases, source_field
        self._long = LongDocuments()
        self.pid, self.counts = inner.pid, inner.counts

    @property
    def mode(self) -> str:
        """How documents are read."""
        return self._inner.mode

    def expect(self, steady: int, most: int) -> None:
        """Nothing: documents are dropped as soon as they are laid into sequences."""

    def start(self, epoch: int, position: int) -> PackedSession:
        """As Engine.start."""
        document = 0
        if isinstance(self.order, PackedOrder) and windows_of(self.order.documents) is not None:
            document = self.order.document_at(epoch, position)
        return PackedSession(
            self._inner.start(epoch, document),
            self.order,
            self._packing,
            self._fields,
            self._bases,
            self._source_field,
            self._long,
            self._most_awaited,
        )

    def stats(self) -> dict[str, Any]:
        """Of the documents."""
        return self._inner.stats()

    def stop(self) -> None:
        """As Engine.stop."""
        self._inner.stop()

    def close(self) -> None:
        """As Engine.close."""
        self._inner.close()


def _narrowed(name: str, taken: Array, dtype: np.dtype[Any]) -> Array:
    """Values as another dtype. Raises ConfigError for one that it does not hold."""
    if len(taken) and not np.can_cast(taken.dtype, dtype):
        most, least = int(taken.max()), int(taken.min())
        limits = np.iinfo(dtype)
        if most > limits.max or least < limits.min:
            raise ConfigError(
                f"packing: {most if most > limits.max else least} of field {name!r} does not fit "
                f"{dtype.name}: give a wider dtype, or None for that of the field"
            )
    return taken.astype(dtype)
