"""A shard while it is filled: records into a buffer, checksums, the zarr index behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.fields import Array
from hpstore.loaders.dataset.record_layout import (
    PAYLOAD_ALIGNMENT,
    FixedPlan,
    Int64s,
    Record,
    place_many,
    shard_capacity,
)
from hpstore.runtime.buffers import aligned_array
from hpstore.units import round_up

INDEX_ENTRY_BYTES = 16  # u64 offset, u64 length
CRC_BYTES = 4
UInt64s = npt.NDArray[np.uint64]
Fill = Callable[[Bytes, Int64s, int], None]  # (payload, starts, first row of the batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullShard:
    """A shard that is ready to be stored. `buffer` goes back to the builder after the put."""

    rows: int
    data: Bytes  # payload, then the index
    payload_bytes: int
    checksums: UInt64s
    starts: UInt64s | None  # with ragged fields: payload offset of every record
    lengths: npt.NDArray[np.uint32] | None  # (rows, ragged fields)
    buffer: Bytes


def zarr_index(starts: Int64s, nbytes: int) -> bytes:
    """A zarr v3 shard index: one inner chunk of `nbytes` at each start, and its crc32c."""
    table = np.empty((len(starts), 2), "<u8")
    table[:, 0] = starts
    table[:, 1] = nbytes
    raw = table.tobytes()
    return raw + int(google_crc32c.value(raw)).to_bytes(CRC_BYTES, "little")


def index_bytes(rows: int, fixed_fields: int) -> int:
    """Bytes of the indices behind a payload."""
    return fixed_fields * (rows * INDEX_ENTRY_BYTES + CRC_BYTES)


def record_checksums(view: memoryview, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """XXH3-64 of each record."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[start:end]) for start, end in zip(starts, ends, strict=True)]


class ShardBuffers:
    """The memory of one stream's shards: at most two, the one being put and the one being filled.

    Fresh ones are zero; used ones are taken again as they are, so who leaves gaps clears them.
    """

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    def take(self, nbytes: int) -> Bytes:
        """A page-aligned buffer of at least `nbytes`."""
        while self._free:
            found = self._free.pop()
            if len(found) >= nbytes:
                return found
        return aligned_array(nbytes)

    def give_back(self, buffer: Bytes) -> None:
        """The shard in it is stored."""
        self._free = [buffer]


class FixedShard:
    """Fills shards of records of one size. One thread at a time."""

    def __init__(
        self, record: Record, unit_bytes: int, *, shard_bytes: int, data: int, indexed: bool
    ) -> None:
        self.record, self.plan = record, FixedPlan.of(record, unit_bytes)
        self.buffers = ShardBuffers()
        capacity = shard_capacity(shard_bytes, unit_bytes, data, self.plan.length)
        self.full_rows = self.plan.shard_rows(capacity)
        # records longer than a page need not end where the capacity does
        self._capacity = shard_capacity(
            1, unit_bytes, data, self.plan.payload_bytes(self.full_rows)
        )
        self._indexed = indexed
        self._room = index_bytes(self.full_rows, len(record.fixed)) if indexed else 0
        self._checksums = np.empty(self.full_rows, np.uint64)
        self.rows = 0
        self._buffer: Bytes | None = None

    @property
    def free_rows(self) -> int:
        """Rows that still fit."""
        return self.full_rows - self.rows

    def add(self, batch: Mapping[str, Array], first: int, count: int) -> None:
        """Append rows [first, first + count) of a batch; `count` is at most free_rows."""
        if self._buffer is None:
            self._buffer = self.buffers.take(self._capacity + self._room)
        for name in self.record.fixed:
            self._copy(name, batch[name][first : first + count])
        rows = np.arange(self.rows, self.rows + count, dtype=np.int64)
        starts = self.plan.starts(rows).tolist()
        length = self.plan.length
        found = record_checksums(self._buffer.data, starts, [s + length for s in starts])
        self._checksums[self.rows : self.rows + count] = found
        self.rows += count

    def _copy(self, name: str, values: Array) -> None:
        """One copy: the part of the first page, whole pages, the part of the last."""
        assert self._buffer is not None
        made, plan = self.record.fields[name], self.plan
        per_page = plan.per_page or self.full_rows
        pages = -(-self.full_rows // per_page)
        inner = np.empty((1, *made.inner_shape), made.storage).strides[1:]
        target: Array = np.ndarray(
            (pages, per_page, *made.inner_shape),
            made.storage,
            self._buffer.data,
            self.record.offsets[name],
            (plan.unit_bytes, plan.stride, *inner),
        )
        at, done = self.rows, 0
        while done < len(values):
            page, slot = divmod(at, per_page)
            whole = (len(values) - done) // per_page
            if slot == 0 and whole:
                count = whole * per_page
                part = values[done : done + count]
                target[page : page + whole] = part.reshape(whole, per_page, *made.inner_shape)
            else:
                count = min(per_page - slot, len(values) - done)
                target[page, slot : slot + count] = values[done : done + count]
            at, done = at + count, done + count

    def take(self) -> FullShard:
        """The shard with what is in it now, whole stripes when it is full; begins the next one."""
        assert self._buffer is not None
        buffer, rows = self._buffer, self.rows
        size = self._capacity if rows == self.full_rows else self.plan.payload_bytes(rows)
        end = self.plan.start(rows - 1) + self.plan.length
        buffer[end:size] = 0  # rows of the shard before, when this one is the last and shorter
        at = size
        for name in self.record.fixed if self._indexed else ():
            starts = self.plan.starts(np.arange(rows, dtype=np.int64)) + self.record.offsets[name]
            at = _append(buffer, at, zarr_index(starts, self.record.fields[name].row_bytes))
        self._buffer, self.rows = None, 0
        return FullShard(
            rows=rows,
            data=buffer[:at],
            payload_bytes=size,
            buffer=buffer,
            starts=None,
            checksums=self._checksums[:rows].copy(),
            lengths=None,
        )


def _append(buffer: Bytes, at: int, data: bytes) -> int:
    buffer[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return at + len(data)


class RaggedShard:
    """Fills shards of records of many sizes. One thread at a time."""

    def __init__(
        self, record: Record, unit_bytes: int, *, shard_bytes: int, data: int, indexed: bool
    ) -> None:
        self.record, self.unit_bytes, self._data = record, unit_bytes, data
        self.buffers = ShardBuffers()
        self._capacity = shard_capacity(shard_bytes, unit_bytes, data)
        self._indexed = indexed and bool(record.fixed)
        self._buffer: Bytes | None = None
        self._reset()

    def _reset(self) -> None:
        self._buffer, self._cursor = None, 0
        self._starts: list[int] = []
        self._checksums: list[int] = []
        self._lengths: list[Int64s] = []

    @property
    def rows(self) -> int:
        """Rows in the shard being filled."""
        return len(self._starts)

    def _room(self, capacity: int) -> int:
        """Upper bound of the index: no record is shorter than its fixed fields."""
        if not self._indexed:
            return 0
        return index_bytes(capacity // self.record.fixed_bytes + 1, len(self.record.fixed))

    def add(self, lengths: Int64s, tables: Int64s, fill: Fill, first: int) -> int:
        """Append records [first, ...) of a batch until one does not fit; returns how many.

        `lengths`: of all records; `tables`: (rows, ragged) lengths of their values. Zero with rows
        in the shard means: take() it and go on. A record longer than a shard makes its shard
        longer.
        """
        capacity = self._capacity
        if self._buffer is None:
            capacity = shard_capacity(capacity, self.unit_bytes, self._data, int(lengths[first]))
            self._buffer = self.buffers.take(capacity + self._room(capacity))
        starts = place_many(
            lengths[first:], self._cursor, capacity, self.unit_bytes, self.record.alignment
        )
        count = len(starts)
        if not count:
            return 0
        ends = starts + lengths[first : first + count]
        before = np.concatenate([[self._cursor], ends[:-1]])
        for row in np.flatnonzero(starts > before).tolist():
            self._buffer[before[row] : starts[row]] = 0
        begins, stops = starts.tolist(), ends.tolist()
        if self.record.has_gaps:
            for start, stop in zip(begins, stops, strict=True):
                self._buffer[start:stop] = 0
        fill(self._buffer, starts, first)
        self._cursor = max(stops[-1], begins[-1] + 1)
        self._starts += begins
        self._checksums += record_checksums(self._buffer.data, begins, stops)
        self._lengths.append(tables[first : first + count])
        return count

    def take(self, *, last: bool) -> FullShard:
        """The shard with what is in it now, whole stripes unless it is the `last`."""
        assert self._buffer is not None
        buffer, starts = self._buffer, np.array(self._starts, np.int64)
        stripe = 1 if last else self.unit_bytes * self._data
        size = round_up(round_up(self._cursor, PAYLOAD_ALIGNMENT), stripe)
        buffer[self._cursor : size] = 0
        at = size
        for name in self.record.fixed if self._indexed else ():
            offsets = starts + self.record.offsets[name]
            at = _append(buffer, at, zarr_index(offsets, self.record.fields[name].row_bytes))
        full = FullShard(
            rows=len(starts),
            data=buffer[:at],
            payload_bytes=size,
            buffer=buffer,
            checksums=np.array(self._checksums, np.uint64),
            starts=starts.astype(np.uint64),
            lengths=np.concatenate(self._lengths).astype(np.uint32),
        )
        self._reset()
        return full
