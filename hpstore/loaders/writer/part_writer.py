"""The objects of one writer: streams, columns and their part of a manifest, under one nonce."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hpstore.codec.galois import Bytes
from hpstore.errors import HpstoreError
from hpstore.loaders.dataset.dataset_manifest import (
    ORDER,
    ContentDigest,
    DatasetPart,
    column_names,
    object_prefix,
)
from hpstore.loaders.dataset.fields import Array, Field, FieldKind
from hpstore.loaders.dataset.record_layout import Record
from hpstore.loaders.writer.stream_writer import (
    FieldColumnWriter,
    SmallObjects,
    StreamWriter,
    cuts_of,
    put_small,
)
from hpstore.loaders.writer.upload_queue import Uploads
from hpstore.pool.pool import Pool
from hpstore.units import MIB, format_bytes

_log = logging.getLogger(__name__)
SAID_BYTES = 256 * MIB  # samples above it are said: as much as pool and loader take by default


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """How the objects of a part are laid out."""

    fields: Mapping[str, Field]
    records: Mapping[str, Record]
    shard_bytes: int
    unit_bytes: int | None  # None: chosen from the records
    alike: bool  # chosen without a look at them, so that all parts choose the same
    compression: str


class PartWriter:
    """Stores samples that were checked. One thread at a time; nothing of it is visible by itself.

    With `ordered` every sample comes with a number, kept in a column of its own. For parts that
    follow another: `nonce` is the one that was told before, `units` are the pages of its streams.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        options: PartOptions,
        *,
        ordered: bool = False,
        nonce: str = "",
        units: Sequence[int] = (),
    ) -> None:
        self.pool, self.name, self.rows = pool, name, 0
        self._said_bytes = 0
        self.nonce = nonce or new_nonce()
        self._uploads, self._content = Uploads(), ContentDigest()
        self._small: SmallObjects = {}
        fields = options.fields
        limit = pool.config.settings.memory_bytes // (2 * (pool.data + pool.parity))
        self._streams = [
            StreamWriter(
                pool,
                (name, self.nonce, number),
                stream,
                record,
                unit_limit=limit,
                unit_bytes=units[number] if units else options.unit_bytes,
                alike=options.alike,
                shard_bytes=options.shard_bytes,
                uploads=self._uploads,
                small=self._small,
                compression=options.compression,
                content=self._content,
            )
            for number, (stream, record) in enumerate(options.records.items())
        ]
        scalars = [n for n, f in fields.items() if f.kind is FieldKind.SCALAR]
        self._names = column_names(list(fields), scalars)
        column_of = partial(FieldColumnWriter, pool, uploads=self._uploads, small=self._small)
        self._columns = {
            field: column_of(
                (name, self.nonce, column), field, fields[field], content=self._content
            )
            for field, column in self._names.items()
        }
        place, apart = (name, self.nonce, ORDER), ContentDigest()
        self._order = column_of(place, ORDER, Field("int64"), content=apart) if ordered else None

    def append(
        self,
        batch: Mapping[str, Array],
        ragged: Mapping[str, Sequence[Bytes]],
        rows: int,
        order: Array | None = None,
    ) -> None:
        """Append samples. After an exception the part is of no use."""
        for stream in self._streams:
            stream.add(batch, ragged)
        for name, column in self._columns.items():
            column.add(batch[name])
        if self._order is not None and order is not None:
            self._order.add(order)
        self.rows += rows
        self._say_large()

    def _say_large(self) -> None:
        largest = max((stream.largest_bytes for stream in self._streams), default=0)
        if largest > max(self._said_bytes, SAID_BYTES):
            self._said_bytes = 2 * largest  # the next line is of what is much larger
            _log.warning(
                "data set %r has a sample of %s: writing such samples takes the memory of two, "
                "loading them that of three in batches of one: a batch that is ready, one in use, "
                "one just dropped. Split them (windows, frames) where that is too much.",
                self.name,
                format_bytes(largest),
            )

    def chosen_units(self) -> tuple[int, ...]:
        """Bytes of a page of each stream; chosen now where too few records had come to choose."""
        return tuple(stream.chosen_unit() for stream in self._streams)

    def finish(self) -> DatasetPart:
        """Store the rest. All is durable on return."""
        columns = {self._names[n]: column for n, column in self._columns.items()}
        if self._order is not None:
            columns[ORDER] = self._order
        for column in columns.values():
            column.finish()
        streams = tuple(stream.finish() for stream in self._streams)
        try:
            put_small(self.pool, self._small)
        except BaseException:
            self._uploads.close()  # the put of a shard that is under way
            raise
        self._uploads.settle()
        self._uploads.close()
        return DatasetPart(
            nonce=self.nonce,
            rows=self.rows,
            streams=streams,
            cuts=cuts_of(self.rows),
            columns={name: tuple(column.hashes) for name, column in columns.items()},
            content=self._content.hexdigest(),
        )

    def remove(self) -> None:
        """Remove what was stored, as far as that goes now."""
        self._uploads.close()  # its error is why we are here, or nobody asked
        remove_written(self.pool, self.name, self.nonce)


def remove_written(pool: Pool, name: str, nonce: str) -> None:
    """Remove the objects of one writer that nothing names, as far as that goes now."""
    prefix = object_prefix(name, nonce)
    try:
        for key in pool.list(prefix + "/"):
            pool.delete(key)
    except (HpstoreError, OSError) as error:
        _log.warning("objects under %r stay until remove_orphans: %s", prefix, error)


def new_nonce() -> str:
    """What tells the objects of one part from those of others."""
    return secrets.token_hex(8)
