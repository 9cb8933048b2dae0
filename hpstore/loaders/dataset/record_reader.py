"""A dataset in a pool, as arrays: where records lie, their checksums, scalars. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import xxhash

from hpstore.codec.galois import Bytes
from hpstore.errors import AlreadyClosed, ConfigError, IntegrityError, ObjectNotFound
from hpstore.loaders.dataset.block_table import BLOCK_ROWS
from hpstore.loaders.dataset.coalesce import plan_spans, read_spans
from hpstore.loaders.dataset.dataset_manifest import (
    ORDER,
    DatasetManifest,
    column_names,
    pages_key,
    shard_key,
)
from hpstore.loaders.dataset.fields import Array, Field, FieldKind, require_no_text, stored_fields
from hpstore.loaders.dataset.index_objects import IndexObjects
from hpstore.loaders.dataset.index_tables import (
    PAGE_MAGIC,
    Table,
    check_hash,
    decode_tables,
    page_dtypes,
)
from hpstore.loaders.dataset.large_records import PART_BYTES, Lost, aligned_bytes, aligned_rows
from hpstore.loaders.dataset.open_objects import OpenShards
from hpstore.loaders.dataset.page_compression import read_compressed
from hpstore.loaders.dataset.piecewise_read import Target, read_large
from hpstore.loaders.dataset.record_layout import Int64s, group_fields
from hpstore.loaders.dataset.record_stream import (
    Locations,
    PageTable,
    Stream,
    make_pages,
    make_stream,
    stripe_firsts,
)
from hpstore.loaders.dataset.row_scatter import parts_in_reach, scatter_rows
from hpstore.loaders.dataset.table_checks import check_pages, check_places, check_range
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.pool.pool import Pool
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.closing import Closing
from hpstore.units import div_ceil


class StoredData(Closing):
    """The arrays of one dataset or part. Thread-safe; survives a fork.

    All reads raise ObjectNotFound when the dataset was replaced or deleted since it was opened.

    Parameters
    ----------
    pool
        An open pool, which stays the caller's.
    name, manifest
        The dataset.
    wanted
        Names of the fields that are used; streams without one of them are left out. Default: all.

    Attributes
    ----------
    fields, stored
        The fields that are used; these and their masks.
    streams
        Those that hold one of them.

    Raises
    ------
    ConfigError
        There is no such field.
    """

    def __init__(
        self, pool: Pool, name: str, manifest: DatasetManifest, wanted: Sequence[str] | None = None
    ) -> None:
        self.pool, self.name, self.manifest = pool, name, manifest
        self._index = IndexObjects(pool, name, manifest)
        require_no_text(wanted)
        unknown = [field for field in wanted or () if field not in manifest.fields]
        if unknown:
            raise ConfigError(
                f"data set {name!r} has no field {unknown[0]!r}; it has {list(manifest.fields)}"
            )
        names = list(manifest.fields) if wanted is None else list(dict.fromkeys(wanted))
        self.fields = {field: manifest.fields[field] for field in names}
        every, self.stored = manifest.stored, stored_fields(self.fields)
        _, records = group_fields(every, manifest.layout)
        streams = [
            make_stream(number, stream, record, manifest.parts, manifest.data, manifest.compression)
            for number, (stream, record) in enumerate(records.items())
        ]
        self._main = streams[0] if streams else None
        self.streams = tuple(s for s in streams if any(n in self.fields for n in s.record.fields))
        self._sides = {s.number: self._index.side_table(s) for s in self.streams}
        scalars = [n for n, f in self.stored.items() if f.kind is FieldKind.SCALAR]
        columns = column_names(list(every), scalars)
        self._columns = {
            n: self._index.column_table(every[n], column) for n, column in columns.items()
        }
        self._order = self._index.column_table(Field("int64"), ORDER)
        self._pages: dict[int, PageTable] = {}
        self._readers, self._closed = self._closed_shards(), False

    def __len__(self) -> int:
        return self.manifest.rows

    # --- tables ------------------------------------------------------------------------------

    def side_tables(self, stream: Stream, shard: int) -> list[Table]:
        """All of a side object, checked against the manifest: see side_dtypes.

        Parameters
        ----------
        stream, shard
            Which one: a shard of a stream of this dataset.
        """
        return self._index.side_of(stream, shard)

    # --- places ------------------------------------------------------------------------------

    def locate(self, stream: Stream, indices: Int64s, *, checksums: bool = True) -> Locations:
        """Where records lie; vectorised, reads what it needs of the side objects.

        Parameters
        ----------
        stream
            One of `streams`.
        indices
            int64 (n,), 0 <= i < len, any order, repeats allowed; else IndexError.
        checksums
            False: those of records of one size, whose places are arithmetic, are not read but 0.
        """
        rows = np.asarray(indices, np.int64)
        self._check_range(rows)
        shard = stream.shard_of(rows)
        if stream.fixed is not None and not checksums:
            checksum, rest = np.zeros(len(rows), np.uint64), []
        else:
            checksum, *rest = self._sides[stream.number].get(rows, shard)
        if stream.fixed is not None:
            start = stream.fixed.starts(rows - stream.row_starts[shard])
            length = np.full(len(rows), stream.fixed.length, np.int64)
            ragged = np.empty((len(rows), 0), np.int64)
        else:
            start = rest[0].astype(np.int64)
            ragged = np.stack(rest[1:], axis=1).astype(np.int64)
            length = stream.record.ragged_starts(ragged)[:, -1]
            check_places(stream, shard, start, length, f"data set {self.name!r}")
        return Locations(
            shard=shard.astype(np.int32),
            start=start,
            length=length,
            checksum=checksum,
            page=stream.page_of(shard, start, length),
            ragged=ragged,
        )

    def _check_range(self, rows: Int64s) -> None:
        check_range(rows, len(self), f"data set {self.name!r}")

    def pages(self, stream: Stream) -> PageTable:
        """All pages of a stream. Arithmetic for records of one size, else read once and kept.

        Parameters
        ----------
        stream
            One of `streams`.
        """
        found = self._pages.get(stream.number)
        if found is None:
            found = self._pages[stream.number] = self._make_pages(stream)
        return found

    def _make_pages(self, stream: Stream) -> PageTable:
        tables = self._page_tables(stream)  # first: they are as long as the pages are many
        check_pages(
            stream,
            tables,
            lambda shard: self.pool.stat(self.shard_key(stream, shard)).size,
            f"data set {self.name!r}",
        )
        return make_pages(stream, tables)

    def _page_tables(self, stream: Stream) -> list[Table]:
        """The tables of the page objects of all parts, joined."""
        dtypes = page_dtypes(stream.record, stream.compression)
        if not dtypes:
            return []
        found: list[list[Table]] = [[np.empty(0, d)] for d in dtypes]
        for part in self.manifest.parts:
            shards = part.streams[stream.number]
            if not shards.pages:
                continue
            key = pages_key(self.name, part.nonce, stream.number)
            data = self._index.get(key)
            check_hash(key, data, shards.pages)
            count = sum(div_ceil(payload, shards.unit_bytes) for payload in shards.payload)
            tables = decode_tables(PAGE_MAGIC, data, dtypes, count, where=f"object {key!r}")
            for joined, table in zip(found, tables, strict=True):
                joined.append(table)
        return [np.concatenate(joined) for joined in found]

    def stripes(self) -> Int64s:
        """(S + 1): first sample of every stripe of the main stream in which one begins, ascending.

        The last entry is len. The main stream is the dataset's first, whichever fields are used:
        the order of samples does not depend on them. Scalars alone have blocks for stripes.
        """
        if self._main is not None:
            return stripe_firsts(self._main, self.pages(self._main))
        return np.append(np.arange(0, len(self), BLOCK_ROWS, dtype=np.int64), len(self))

    def scalars(self, name: str, indices: Int64s) -> Array:
        """Values of a scalar field, (n, *shape) in storage dtype; a copy.

        Parameters
        ----------
        name
            A field that was opened; else ConfigError.
        indices
            As locate() has them.
        """
        rows = np.asarray(indices, np.int64)
        self._check_range(rows)
        if name not in self._columns:
            raise ConfigError(f"{name!r} is no scalar field that was opened of {self.name!r}")
        return self._columns[name].get(rows)[0]

    def written_as(self, indices: Int64s) -> Int64s | None:
        """The numbers under which samples were written, in their part, before it was shuffled.

        Of an ingest: the number of the record in its source, or block << 32 | number in the block.
        None when the dataset was not shuffled on write.

        Parameters
        ----------
        indices
            As locate() has them.
        """
        if self.manifest.shuffle_seed is None:
            return None
        rows = np.asarray(indices, np.int64)
        self._check_range(rows)
        return self._order.get(rows)[0]

    # --- records -----------------------------------------------------------------------------

    def shard_key(self, stream: Stream, shard: int) -> str:
        """Key of the object that holds a shard's records.

        Parameters
        ----------
        stream, shard
            A shard of a stream of this dataset.
        """
        return shard_key(self.name, stream.nonces[shard], stream.number, stream.numbers[shard])

    @property
    def shards_at_once(self) -> int:
        """Shards that stay open for a thread: one more closes the one used longest ago."""
        return self._readers.limit

    def reader(self, stream: Stream, shard: int) -> PooledReader:
        """A shard, open for reading by the calling thread; the caller must not close it.

        It stays open until the thread has asked for `shards_at_once` other ones, in whatever is
        made of it.

        Parameters
        ----------
        stream, shard
            A shard of a stream of this dataset.
        """
        self._require_open()
        key = self.shard_key(stream, shard)
        try:
            return self._readers.get(key, self.pool.open_many)
        except ObjectNotFound as error:
            raise self._index.gone(key) from error

    def _require_open(self) -> None:
        if self._closed:
            raise AlreadyClosed(f"data set {self.name!r} is closed")

    def open_all(self, stream: Stream, shards: Sequence[int]) -> None:
        """Open together what reader() would open one by one, as far as that stays open.

        Parameters
        ----------
        stream, shards
            Shards of a stream of this dataset.
        """
        self._require_open()
        keys = [self.shard_key(stream, shard) for shard in shards[: self._readers.limit]]
        try:
            self._readers.get_all(keys, self.pool.open_many)
        except ObjectNotFound as error:
            raise self._index.gone(error.key or keys[0]) from error

    def read_records(self, stream: Stream, indices: Int64s) -> tuple[list[Bytes], Locations]:
        """Verified records in the order asked for, views of one buffer, and where they were.

        Parameters
        ----------
        stream, indices
            As locate() has them.

        Raises
        ------
        IntegrityError
            A record does not match its checksum; names the sample.
        """
        rows = np.asarray(indices, np.int64)
        records, places = self.raw_records(stream, rows)
        bad = self.mismatches(records, places)
        if len(bad):
            raise self._mismatch(stream, rows, places, int(bad[0]), len(bad))
        return records, places

    def _mismatch(
        self, stream: Stream, rows: Int64s, places: Locations, bad: int, count: int
    ) -> IntegrityError:
        self.pool.metrics.count("record_mismatch_total", count)
        key = self.shard_key(stream, int(places.shard[bad]))
        return IntegrityError(
            f"data set {self.name!r}: sample {rows[bad]} (record at byte {places.start[bad]} of "
            f"{key!r}) does not match its checksum, although the pool's own checksums hold. "
            "Nothing was changed; write the data set again, or skip the sample."
        )

    def read_large(self, stream: Stream, index: int, targets: Sequence[Target]) -> None:
        """One verified record, piece by piece; takes no memory of the record's size.

        Parameters
        ----------
        stream, index
            The record of one sample.
        targets
            Pairs: first byte in the record, memory to fill. What is in it is undefined where this
            raises, as read_records does.
        """
        rows = np.array([index], np.int64)
        place = self.locate(stream, rows)
        shards = partial(self.reader, stream)
        if not read_large(shards, stream, partial(self.pages, stream), place, targets):
            raise self._mismatch(stream, rows, place, 0, 1)

    def read_direct(self, stream: Stream, indices: Int64s) -> list[Bytes]:
        """As read_records, straight from the devices where that can be; without the places.

        Parameters
        ----------
        stream, indices
            As locate() has them.
        """
        lengths = self.locate(stream, indices).length
        rows, room = aligned_rows(aligned_array(aligned_bytes(lengths)), lengths)
        if self.read_rows(stream, indices, rows, room=room):
            return rows
        return self.read_records(stream, indices)[0]

    def read_rows(
        self,
        stream: Stream,
        indices: Int64s,
        rows: Sequence[Bytes],
        addresses: Int64s | None = None,
        room: Sequence[Bytes] | None = None,
        lost: Lost | None = None,
    ) -> bool:
        """Verified records into memory, where it can be straight from the devices.

        False when a device hangs: `rows` is then lost, its memory must not be used again before
        the reads have ended (PROTOCOL 21). Raises as read_records.

        Parameters
        ----------
        stream, indices
            As locate() has them.
        rows
            Memory of each record, as long as it is.
        addresses
            Where they begin, when that is known.
        room
            As Scatter has it.
        lost
            Called with those reads before False is returned.
        """
        places = self.locate(stream, indices)
        left = np.ones(len(indices), bool)
        if not stream.compression and len(indices):
            self.open_all(stream, np.unique(places.shard).tolist())
            open_shard = partial(self.reader, stream)
            for part in parts_in_reach(places, self.shards_at_once):
                found = scatter_rows(open_shard, places, part, rows, addresses, room)
                if found.late:
                    self.pool.metrics.count("records_abandoned_total", len(indices))
                    if lost is not None:
                        lost(found.late)
                    return False
                left[part] = ~found.good
        self._read_again(stream, indices, np.flatnonzero(left), rows, places.length)
        return True

    def _read_again(
        self, stream: Stream, indices: Int64s, left: Int64s, rows: Sequence[Bytes], lengths: Int64s
    ) -> None:
        """Records that were not read straight from the devices."""
        large = lengths[left] > PART_BYTES
        for row in left[large].tolist():
            self.read_large(stream, int(indices[row]), [(0, rows[row])])
        others = left[~large]
        if len(others):
            records, _ = self.read_records(stream, indices[others])
            for row, record in zip(others.tolist(), records, strict=True):
                rows[row][:] = record

    def raw_records(self, stream: Stream, indices: Int64s) -> tuple[list[Bytes], Locations]:
        """As read_records, without a look at the records' checksums.

        Parameters
        ----------
        stream, indices
            As locate() has them.
        """
        places = self.locate(stream, indices)
        if stream.compression:
            shards = partial(self.reader, stream)
            return read_compressed(shards, stream, self.pages(stream), places), places
        return self._read_plain(stream, places), places

    @staticmethod
    def mismatches(records: Sequence[Bytes], places: Locations) -> Int64s:
        """Which of the records do not match their checksums, ascending.

        Parameters
        ----------
        records, places
            What raw_records() gave.
        """
        digest = xxhash.xxh3_64_intdigest
        found = np.fromiter((digest(record.data) for record in records), np.uint64, len(records))
        return np.flatnonzero(found != places.checksum).astype(np.int64)

    def _read_plain(self, stream: Stream, places: Locations) -> list[Bytes]:
        plan = plan_spans(places.shard, places.start, places.length)
        buffer = np.empty(plan.total, np.uint8)
        for shard in np.unique(plan.shard).tolist():
            read_spans(self.reader(stream, shard), plan, shard, buffer)
        ends = plan.position + places.length
        return [buffer[a:b] for a, b in zip(plan.position.tolist(), ends.tolist(), strict=True)]

    def renew_after_fork(self) -> None:
        """Locks and readers of the parent are not ours."""
        for table in (*self._sides.values(), *self._columns.values(), self._order):
            table.renew()
        self._readers = self._closed_shards()

    def _closed_shards(self) -> OpenShards:
        return OpenShards(self.manifest.data, objects=sum(len(s.numbers) for s in self.streams))

    @property
    def shards_reopened(self) -> int:
        """How often a shard was opened again because too few may be open at a time."""
        return self._readers.reopened_total

    def close(self) -> None:
        """Close what is open, of all threads; none of them reads now. Idempotent."""
        self._closed = True
        self._readers.close()
