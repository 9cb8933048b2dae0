"""Batches of a native dataset: records gathered or read into a slot, fields as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hpstore.codec import address_of
from hpstore.codec.galois import Bytes
from hpstore.loaders.batching.batch_buffers import Slots
from hpstore.loaders.batching.batch_counters import Counts
from hpstore.loaders.batching.gather_copy import How, Pieces, join
from hpstore.loaders.batching.page_memory import PageMemory
from hpstore.loaders.dataset.assemble_fields import field_views
from hpstore.loaders.dataset.batch_values import Batch, Ragged
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.fields import Array, Field, FieldKind
from hpstore.loaders.dataset.large_records import PART_BYTES, ReadRows, read_parts
from hpstore.loaders.dataset.piecewise_read import LARGE_BYTES, Target
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Locations, Stream
from hpstore.runtime.stopwatch import Stopwatch
from hpstore.units import round_up

if TYPE_CHECKING:
    from hpstore.loaders.gpu.direct_reader import DirectAccess

_ALIGNMENT = 64


class SlotLost(Exception):
    """A read that does not end may still write into a slot: nobody may use it again."""


class Assembler:
    """Makes batches of one dataset. Thread-safe. `slabs`: by stream number, where there is one."""

    def __init__(
        self,
        data: Dataset,
        slots: Slots,
        slabs: Mapping[int, PageMemory],
        counts: Counts,
        cached: ReadRows | None = None,
        direct: DirectAccess | None = None,
    ) -> None:
        """`cached`: reads records in the place of the dataset. `direct`: for what is in no slab,
        straight to a GPU where that works.
        """
        self._data, self._slots, self._slabs, self._cached = data, slots, slabs, cached
        self._direct = direct
        self._scalars = [n for n, f in data.stored.items() if f.kind is FieldKind.SCALAR]
        self._counts = counts

    def batch(self, indices: Int64s, *, awaited: int, urgent: Callable[[], bool]) -> Batch:
        """The samples of `indices` int64 (n,), in this order, as a dict of tensors over a slot.

        Pages of the first `awaited` of them are waited for, where somebody fills them, until it is
        `urgent`. Memory belongs
        to whoever holds the tensors; it is used again when they are gone. Raises IntegrityError
        naming the sample, TooManyErasures, DeviceError.
        """
        found: Batch = {}
        for name in self._scalars:
            found[name] = self._data.stored[name].as_tensor(self._data.scalars(name, indices))
        for stream in self._data.streams:
            slab = self._slabs.get(stream.number)
            rows = None if slab is None else slab.rows_of(indices)
            if slab is not None and rows is not None:
                found.update(self._gathered(stream, slab, rows))
                continue
            places = self._data.locate(stream, indices, checksums=False)  # read_rows has its own
            if awaited and slab is not None:
                ahead = places.page[:awaited]
                with self._counts.awaiting.running():
                    slab.wait(ahead[ahead >= 0], urgent)
            if stream.fixed is None:
                found.update(self._ragged(stream, indices, places))
            elif self._direct is not None and stream.number not in self._slabs:
                found.update(self._on_gpu(self._direct, stream, indices, places))
            else:
                found.update(self._fixed(stream, indices, places))
        return {name: found[name] for name in self._data.stored}

    def _on_gpu(
        self, direct: DirectAccess, stream: Stream, indices: Int64s, places: Locations
    ) -> dict[str, torch.Tensor]:
        """Records of one size as direct.batch makes them."""
        record, names = stream.record, self._names(stream)
        aside = Stopwatch()  # what goes by way of the host counts its reading itself

        def host(rows: Int64s) -> dict[str, torch.Tensor]:
            with aside.running():
                return self._fixed(stream, indices[rows], chosen(places, rows))

        def fields(rows: torch.Tensor) -> dict[str, torch.Tensor]:
            starts = {n: record.offsets[n] for n in names}
            return {
                n: record.fields[n].as_rows(rows[:, a : a + record.fields[n].row_bytes])
                for n, a in starts.items()
            }

        with self._counts.reading.running(aside):
            return direct.batch(self._data, stream, indices, places, host, fields)

    def _gathered(self, stream: Stream, slab: PageMemory, at: Int64s) -> dict[str, torch.Tensor]:
        """Records of one size that are all in memory: `at`, their rows in the slab."""
        self._counts.gathered_total += len(at)
        last = self._whole(stream, slab.stride)

        def fill(rows: Bytes, lost: bool) -> None:
            self._counts.copies[slab.gather_rows(at, rows, last=last)] += 1

        return self._in_slot(stream, len(at), slab.stride, fill)

    def _fixed(self, stream: Stream, indices: Int64s, places: Locations) -> dict[str, torch.Tensor]:
        """Records of one size: gathered as rows, or read."""
        assert stream.fixed is not None
        slab = self._slabs.get(stream.number)
        stride = stream.fixed.stride if slab is not None and slab.stride else stream.fixed.length

        def fill(rows: Bytes, lost: bool) -> None:
            if lost:
                self._read_verified(stream, indices, rows)
            else:
                self._fill(stream, indices, places, rows)

        return self._in_slot(stream, len(indices), stride, fill)

    def _whole(self, stream: Stream, stride: int) -> bool:
        """Rows of this stride are the values of one field, with nothing to be taken apart."""
        names = self._names(stream)
        return len(names) == 1 and stream.record.fields[names[0]].row_bytes == stride

    def _names(self, stream: Stream) -> list[str]:
        return [name for name in stream.record.fixed if name in self._data.fields]

    def _in_slot(
        self, stream: Stream, count: int, stride: int, fill: Callable[[Bytes, bool], None]
    ) -> dict[str, torch.Tensor]:
        """Fields of records of one size, taken apart where there are several. fill(rows, False)
        makes rows (count, stride); after SlotLost fill(rows, True) makes others.
        """
        fields = self._data.fields
        names, whole = self._names(stream), self._whole(stream, stride)
        sizes = [0] if whole else [count * fields[n].row_bytes for n in names]
        starts = _places([count * stride, *sizes])
        slot = self._slots.take(starts[-1])
        try:
            rows = slot.memory[: count * stride].reshape(count, stride)
            try:
                fill(rows, False)
            except SlotLost:  # a hung device may still write into it
                slot.lose()
                slot = self._slots.take(starts[-1])
                rows = slot.memory[: count * stride].reshape(count, stride)
                fill(rows, True)
            if whole:
                arrays = [_typed(rows, fields[names[0]])]
            else:
                views = field_views(stream, rows)
                arrays = [
                    _typed(slot.memory[start : start + views[name].nbytes], fields[name])
                    for name, start in zip(names, starts[1:], strict=False)
                ]
                for name, made in zip(names, arrays, strict=True):
                    np.copyto(made, views[name])
        except BaseException:
            slot.release()
            raise
        slot.hand_out(arrays)
        return {n: fields[n].as_tensor(a) for n, a in zip(names, arrays, strict=True)}

    def _fill(self, stream: Stream, indices: Int64s, places: Locations, rows: Bytes) -> None:
        """Fill rows (n, stride) with records, from memory where they are there."""
        slab = self._slabs.get(stream.number)
        if slab is None or not slab.stride:
            self._read(stream, indices, np.arange(len(indices)), rows)
            return
        with slab.resident(places) as slots:
            have, lack = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
            if not len(lack):
                last = self._whole(stream, slab.stride)
                self._counts.copies[slab.gather(slots, places, rows, last=last)] += 1
            elif len(have):
                part = np.empty((len(have), slab.stride), np.uint8)
                slab.gather(slots[have], chosen(places, have), part, last=False)
                rows[have] = part
        self._counts.gathered_total += len(have)
        if len(lack):
            self._read(stream, indices, lack, rows)

    def _read(self, stream: Stream, indices: Int64s, which: Int64s, rows: Bytes) -> None:
        assert stream.fixed is not None
        length = stream.fixed.length
        targets = [rows[row, :length] for row in which.tolist()]
        with self._counts.reading.running():
            if self._cached is not None:
                whole = len(which) == len(rows) and rows.shape[1] == length
                good = self._cached(stream, indices[which], rows if whole else targets)
            else:
                addresses = address_of(rows.reshape(-1)) + which * rows.shape[1]
                good = self._data.read_rows(stream, indices[which], targets, addresses)
        if not good:
            raise SlotLost
        self._counts.read_total += len(which)

    def _read_verified(self, stream: Stream, indices: Int64s, rows: Bytes) -> None:
        """By way of the pool's memory, where reads straight into rows do not end."""
        assert stream.fixed is not None
        length = stream.fixed.length
        with self._counts.reading.running():
            if length > PART_BYTES:
                for row, index in enumerate(indices.tolist()):
                    self._data.read_large(stream, index, [(0, rows[row, :length])])
            else:
                records, _ = self._data.read_records(stream, indices)
                for row, record in enumerate(records):
                    rows[row, :length] = record
        self._counts.read_total += len(indices)

    def _records(
        self, stream: Stream, indices: Int64s, places: Locations, large: npt.NDArray[np.bool_]
    ) -> Iterator[tuple[list[int], Pieces | list[Bytes]]]:
        """Records of many sizes, in the slab where they are there, and their rows; but for those
        that are `large` (n,) and in no slab.

        They are good until the next are asked for.
        """
        slab, cached = self._slabs.get(stream.number), self._cached
        lack = np.arange(len(indices))
        if slab is not None:
            with slab.resident(places) as slots:
                have, lack, cached = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0), None
                self._counts.gathered_total += len(have)
                yield have.tolist(), slab.pieces(slots[have], chosen(places, have))
        lack = lack[~large[lack]]
        lengths = places.length[lack]
        parts = read_parts(self._data, stream, indices[lack], lengths, cached)
        for part, records in self._counts.reading.timed(parts):
            yield lack[part].tolist(), records
        self._counts.read_total += len(lack)

    def _ragged(self, stream: Stream, indices: Int64s, places: Locations) -> Batch:
        """Records with ragged fields: each field's values back to back."""
        record, fields = stream.record, self._data.fields
        fixed = [n for n in record.fixed if n in fields]
        ragged = [(c, n) for c, n in enumerate(record.ragged) if n in fields]
        sizes = [len(indices) * record.fields[n].row_bytes for n in fixed]
        sizes += [int(places.ragged[:, c].sum()) for c, _ in ragged]
        starts = _places(sizes)
        slot = self._slots.take(starts[-1])
        outs = [
            slot.memory[at : at + size] for at, size in zip(starts, sizes, strict=False)
        ]  # of each field, as long as its values
        found: Batch = {}
        arrays: list[Array] = []
        try:
            pieces = [(record.offsets[n], record.fields[n].row_bytes) for n in fixed]
            moves = [_Move.fixed(len(indices), *piece) for piece in pieces]
            begin = record.ragged_starts(places.ragged)
            moves += [_Move(begin[:, c], places.ragged[:, c]) for c, _ in ragged]
            large = places.length > (PART_BYTES if self._cached is None else LARGE_BYTES)
            for rows, records in self._records(stream, indices, places, large):
                large[rows] = False
                for move, out in zip(moves, outs, strict=True):
                    self._counts.copies[move.run(rows, records, out)] += 1
            for row in np.flatnonzero(large).tolist():
                targets = [m.target(row, out) for m, out in zip(moves, outs, strict=True)]
                with self._counts.reading.running():
                    self._data.read_large(stream, int(indices[row]), targets)
                self._counts.read_total += 1
            for name, out in zip(fixed, outs, strict=False):
                arrays.append(_typed(out, fields[name]))
                found[name] = fields[name].as_tensor(arrays[-1])
            for (column, name), out in zip(ragged, outs[len(fixed) :], strict=True):
                lengths = places.ragged[:, column]
                if fields[name].dtype == "str" and not fields[name].is_json:
                    found[name] = _texts(out, lengths)
                    continue
                arrays.append(_typed(out, fields[name]))
                ends = np.concatenate([[0], np.cumsum(lengths // fields[name].row_bytes)])
                tensor = fields[name].as_tensor(arrays[-1])
                found[name] = Ragged(tensor, torch.from_numpy(ends.astype(np.int64)))
        except BaseException:
            slot.release()
            raise
        slot.hand_out(arrays)
        return found


@dataclass(frozen=True, slots=True)
class _Move:
    """Where the values of a field lie: row i is `length[i]` bytes from `low[i]` of its record; in
    the field's own memory it follows on row i - 1.
    """

    low: Int64s
    length: Int64s

    @classmethod
    def fixed(cls, count: int, low: int, size: int) -> _Move:
        """Rows of one size."""
        return cls(np.full(count, low), np.full(count, size))

    def target(self, row: int, out: Bytes) -> Target:
        """Where this row's values go, for StoredData.read_large."""
        end = int(self.length[: row + 1].sum())
        return int(self.low[row]), out[end - int(self.length[row]) : end]

    def run(self, rows: Sequence[int], records: Pieces | list[Bytes], out: Bytes) -> How:
        """Copy these rows, which ascend. All of them are one call: less is done between its copies,
        where other threads wait for the interpreter's lock.
        """
        if rows and len(rows) == len(self.low):
            return join(_cut(records, self.low, self.length), out)
        some = np.array(rows, np.int64)
        parts = _cut(records, self.low[some], self.length[some])
        ends = np.cumsum(self.length)
        begin = ends - self.length
        places = zip(begin[some].tolist(), ends[some].tolist(), strict=True)
        views = parts.views() if isinstance(parts, Pieces) else parts
        for (start, end), part in zip(places, views, strict=True):
            out[start:end] = part
        return How.USUALLY


def _cut(records: Pieces | list[Bytes], low: Int64s, length: Int64s) -> Pieces | list[Bytes]:
    """Of each record `length[i]` bytes from its byte `low[i]` on."""
    if isinstance(records, Pieces):
        return records.cut(low, length)
    bounds = zip(records, low.tolist(), length.tolist(), strict=True)
    return [record[a : a + n] for record, a, n in bounds]


def _places(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin in a slot, and the bytes of all."""
    at, found = 0, []
    for size in sizes:
        found.append(at)
        at += round_up(size, _ALIGNMENT)
    return [*found, at]


def _texts(values: Bytes, lengths: Int64s) -> list[str]:
    raw, ends = values.tobytes(), np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    return [raw[a:b].decode() for a, b in zip(starts, ends, strict=True)]


def _typed(values: Bytes, field: Field) -> Array:
    made: Array = values.view(field.storage).reshape(-1, *field.inner_shape)
    return made


def chosen(places: Locations, which: Int64s) -> Locations:
    """Locations of some of the records."""
    return Locations(
        shard=places.shard[which],
        start=places.start[which],
        length=places.length[which],
        page=places.page[which],
        checksum=places.checksum[which],
        ragged=places.ragged[which],
    )
