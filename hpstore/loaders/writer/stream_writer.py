"""One stream and one column of a dataset while they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import SomeFailed
from hpstore.loaders.dataset.dataset_manifest import (
    MOST_CUT_ROWS,
    ContentDigest,
    StreamShards,
    column_key,
    pages_key,
    shard_key,
    side_key,
)
from hpstore.loaders.dataset.fields import Array, Field
from hpstore.loaders.dataset.index_tables import (
    PAGE_MAGIC,
    SIDE_MAGIC,
    Table,
    encode_tables,
    object_hash,
    page_dtypes,
)
from hpstore.loaders.dataset.page_compression import compress_pages
from hpstore.loaders.dataset.record_layout import (
    FixedPlan,
    Int64s,
    Record,
    choose_unit,
    choose_unit_for_mean,
)
from hpstore.loaders.dataset.shard_layout import FixedShard, FullShard, RaggedShard
from hpstore.loaders.dataset.value_rows import ValueRows, joined_rows, lengths_of
from hpstore.loaders.writer.row_fill import Fill, batch_fill, rows_fill
from hpstore.loaders.writer.upload_queue import Uploads
from hpstore.pool.pool import Pool
from hpstore.units import MIB, div_ceil

PENDING_BYTES = 64 * MIB  # records of many sizes held back until their page is chosen
PENDING_ROWS = 1 << 14
CLEAR_ROWS = 256  # from here on the page is chosen when a mean twice or half as large chose it, too


SmallObjects = dict[str, object]
"""By key, what is put by one call when a part is finished."""


class StreamWriter:
    """Fills and stores the shards of one stream. One thread at a time."""

    def __init__(
        self,
        pool: Pool,
        place: tuple[str, str, int],
        name: str,
        record: Record,
        *,
        unit_bytes: int | None,
        alike: bool,
        unit_limit: int,
        shard_bytes: int,
        compression: str,
        uploads: Uploads,
        small: SmallObjects,
        content: ContentDigest,
    ) -> None:
        self.record, self._pool, self._place, self._name = record, pool, place, name
        self._compression, self._uploads, self._content = compression, uploads, content
        self._small = small
        self._unit_limit, self._shard_bytes = unit_limit, shard_bytes
        self._shards: list[tuple[int, int, str]] = []  # rows, payload, hash of the side object
        self._pages: list[list[Table]] = []  # tables of each shard's pages
        self._pending: list[ValueRows] = []
        self._pending_tables: list[Int64s] = []
        self._pending_bytes = 0
        self.largest_bytes = 0  # of a record so far
        self._unit = unit_bytes or 0
        self._builder: FixedShard | RaggedShard | None = None
        if not record.ragged:
            stride = FixedPlan.of(record, self._unit or 1).stride
            self._choose(self._unit or choose_unit(stride, limit=unit_limit))
        elif self._unit or alike:
            self._choose(self._unit or choose_unit_for_mean(0.0, limit=unit_limit))

    def _choose(self, unit_bytes: int) -> None:
        self._unit = unit_bytes
        self.largest_bytes = max(self.largest_bytes, self.record.fixed_bytes)
        kind = RaggedShard if self.record.ragged else FixedShard
        self._builder = kind(
            self.record,
            unit_bytes,
            shard_bytes=self._shard_bytes,
            data=self._pool.data,
            indexed=not self._compression,
        )

    def add(self, batch: Mapping[str, Array], ragged: Mapping[str, Sequence[Bytes]]) -> None:
        """Append rows: `batch` holds arrays of the fixed fields, `ragged` bytes of the others."""
        if not self.record.ragged:
            self._add_fixed(batch)
            return
        values = [ragged[name] for name in self.record.ragged]
        tables = np.stack([lengths_of(column) for column in values], axis=1)
        offsets = self.record.ragged_starts(tables)
        fill = batch_fill(self.record, batch, values, offsets)
        lengths = offsets[:, -1]
        self.largest_bytes = max(self.largest_bytes, int(lengths.max(initial=0)))
        if self._builder is None:
            self._hold(lengths, tables, fill)
        else:
            self._add_ragged(lengths, tables, fill)

    def _add_fixed(self, batch: Mapping[str, Array]) -> None:
        builder = self._builder
        assert isinstance(builder, FixedShard)
        total = len(batch[self.record.fixed[0]])
        done = 0
        while done < total:
            count = min(builder.free_rows, total - done)
            builder.add(batch, done, count)
            done += count
            if not builder.free_rows:
                self._store(builder.take())

    def _add_ragged(self, lengths: Int64s, tables: Int64s, fill: Fill) -> None:
        builder = self._builder
        assert isinstance(builder, RaggedShard)
        done = 0
        while done < len(lengths):
            count = builder.add(lengths, tables, fill, done)
            done += count
            if done < len(lengths):
                self._store(builder.take(last=False))

    def _hold(self, lengths: Int64s, tables: Int64s, fill: Fill) -> None:
        """Keep records until their mean size tells the page; large ones tell it at once."""
        nbytes = int(lengths.sum())
        rows = len(lengths) + sum(map(len, self._pending))
        held = nbytes + self._pending_bytes
        if held >= PENDING_BYTES or rows >= PENDING_ROWS or self._is_clear(rows, held):
            self._decide(lengths)
            self._add_ragged(lengths, tables, fill)
            return
        kept = np.zeros(nbytes, np.uint8) if self.record.has_gaps else np.empty(nbytes, np.uint8)
        starts = np.cumsum(lengths) - lengths
        fill(kept, starts, 0)
        self._pending.append(ValueRows.of(kept, starts, lengths))
        self._pending_tables.append(tables)
        self._pending_bytes += nbytes

    def _is_clear(self, rows: int, nbytes: int) -> bool:
        """Whether so many records are enough to choose the page."""
        if rows < CLEAR_ROWS:
            return False
        means = (nbytes / rows / 2, nbytes / rows * 2)
        return len({choose_unit_for_mean(mean, limit=self._unit_limit) for mean in means}) == 1

    def _decide(self, coming: Int64s | None = None) -> None:
        """Choose the page, and place what was held back. `coming`: sizes of what follows."""
        pending, tables = self._pending, self._pending_tables
        rows, nbytes = sum(map(len, pending)), self._pending_bytes
        if coming is not None:
            rows, nbytes = rows + len(coming), nbytes + int(coming.sum())
        self._choose(choose_unit_for_mean(nbytes / max(1, rows), limit=self._unit_limit))
        self._pending, self._pending_tables, self._pending_bytes = [], [], 0
        if pending:
            held = joined_rows(pending)
            self._add_ragged(held.lengths, np.concatenate(tables), rows_fill(held))

    def _store(self, full: FullShard, *, last: bool = False) -> None:
        """Put a shard in the background; the next one is filled meanwhile. What lies beside the
        last one is put with other small objects."""
        name, nonce, stream = self._place
        number = len(self._shards)
        tables: list[Table] = [full.checksums]
        if full.starts is not None and full.lengths is not None:
            tables += [full.starts, *full.lengths.T]
        self._content.add_side(self._name, self.record, tables)
        side = encode_tables(SIDE_MAGIC, tables)
        self._shards.append((full.rows, full.payload_bytes, object_hash(side)))
        pages = self._page_counts(full)
        self._pages.append(pages)
        builder = self._builder
        assert builder is not None
        if last:
            self._small[side_key(name, nonce, stream, number)] = side

        def upload() -> None:
            data = full.data
            if self._compression:
                data, stored = compress_pages(
                    self._compression, data, self._unit, self.record.alignment
                )
                pages.append(stored)
            self._pool.put(shard_key(name, nonce, stream, number), data, unit_bytes=self._unit)
            if not last:
                self._pool.put(side_key(name, nonce, stream, number), side)
            builder.buffers.give_back(full.buffer)

        self._uploads.submit(upload)

    def _page_counts(self, full: FullShard) -> list[Table]:
        """How many records begin in each page, when that is no arithmetic."""
        if full.starts is None:
            return []
        count = div_ceil(full.payload_bytes, self._unit)
        found = np.bincount(
            (full.starts // np.uint64(self._unit)).astype(np.int64), minlength=count
        )
        return [found.astype(np.uint32)]

    def chosen_unit(self) -> int:
        """Bytes of a page, by what has come so far where that is not decided."""
        if self._builder is None:
            self._decide()
        return self._unit

    def finish(self) -> StreamShards:
        """Begin to store the rest; nothing is added any more. Durable when the uploads are settled
        and the small objects are put."""
        self.chosen_unit()
        builder = self._builder
        assert builder is not None
        if builder.rows:
            rest = builder.take() if isinstance(builder, FixedShard) else builder.take(last=True)
            self._store(rest, last=True)
        if self._compression:
            self._uploads.settle()  # what pages take is known then
        return StreamShards(
            unit_bytes=self._unit,
            rows=tuple(rows for rows, _, _ in self._shards),
            payload=tuple(payload for _, payload, _ in self._shards),
            side=tuple(side for _, _, side in self._shards),
            pages=self._add_pages(),
        )

    def _add_pages(self) -> str:
        if not page_dtypes(self.record, self._compression) or not self._pages:
            return ""
        tables = [np.concatenate(parts) for parts in zip(*self._pages, strict=True)]
        data = encode_tables(PAGE_MAGIC, tables)
        self._small[pages_key(*self._place)] = data
        return object_hash(data)


class FieldColumnWriter:
    """Fills and stores the column objects of one scalar field. One thread at a time."""

    def __init__(
        self,
        pool: Pool,
        place: tuple[str, str, str],
        name: str,
        field: Field,
        *,
        uploads: Uploads,
        small: SmallObjects,
        content: ContentDigest,
    ) -> None:
        self.field, self.hashes = field, list[str]()
        self._pool, self._place, self._name = pool, place, name
        self._uploads, self._small, self._content = uploads, small, content
        self._rows = 0
        self._buffer = self._fresh()

    def _fresh(self) -> Array:
        return np.empty((MOST_CUT_ROWS, *self.field.inner_shape), self.field.storage)

    def add(self, values: Array) -> None:
        """Append rows."""
        done = 0
        while done < len(values):
            count = min(MOST_CUT_ROWS - self._rows, len(values) - done)
            self._buffer[self._rows : self._rows + count] = values[done : done + count]
            self._rows += count
            done += count
            if self._rows == MOST_CUT_ROWS:
                key, raw = self._taken()
                self._uploads.submit(partial(self._put, key, raw))
                self._buffer = self._fresh()

    def _put(self, key: str, raw: Bytes) -> None:
        self._pool.put(key, raw)

    def _taken(self) -> tuple[str, Bytes]:
        """The values in the buffer as an object, and its key."""
        raw = self._buffer[: self._rows].reshape(-1).view(np.uint8)
        self._rows = 0
        self._content.add_column(self._name, raw.data)
        key = column_key(*self._place, len(self.hashes))
        self.hashes.append(object_hash(raw.data))
        return key, raw

    def finish(self) -> None:
        """Leave the rest to the small objects; nothing is added any more."""
        if self._rows:
            key, raw = self._taken()
            self._small[key] = raw


def put_small(pool: Pool, objects: SmallObjects) -> None:
    """Put them, and forget them. Durable on return. Raises what kept the first of those that failed
    from being stored."""
    try:
        if objects:
            pool.put_many(objects)
    except SomeFailed as error:
        raise next(iter(error.failed.values()), error) from error
    objects.clear()


def cuts_of(rows: int) -> tuple[int, ...]:
    """Rows of each column object of a part."""
    full, rest = divmod(rows, MOST_CUT_ROWS)
    return (MOST_CUT_ROWS,) * full + ((rest,) if rest else ())
