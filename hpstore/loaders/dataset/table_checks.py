"""Whether the tables beside a dataset's records fit its manifest, before they are followed.

Their hashes are those that the manifest names; who wrote the manifest may have written them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from hpstore.codec.galois import Bytes
from hpstore.errors import IntegrityError
from hpstore.loaders.dataset.index_tables import Table
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Stream

UNPROVEN_PAGES = 1 << 20
"""Of a stream; 1 TiB of pages of 1 MiB. Tables of more are made once their shards are there."""


def check_pages(
    stream: Stream, tables: Sequence[Table], size_of: Callable[[int], int], where: str
) -> None:
    """Raise IntegrityError unless page tables are as long as the stream has pages, and say what
    they can. Without tables: unless shards that are said to have very many pages are as large,
    by `size_of(shard)`."""
    pages = int(stream.page_starts[-1])
    if not tables and pages > UNPROVEN_PAGES:
        for shard, payload in enumerate(stream.payload_bytes.tolist()):
            if size_of(shard) < payload:  # an index may follow
                raise IntegrityError(f"{where}: shard {shard} has fewer than {payload} bytes")
    counted = tables[0] if stream.fixed is None and tables else None
    stored = tables[-1] if stream.compression and tables else None
    if (
        any(len(table) != pages for table in tables)
        or (counted is not None and int(counted.sum(dtype="u8")) != stream.row_starts[-1])
        or (stored is not None and bool((stored > stream.unit_bytes).any()))
    ):
        raise _odd(stream, where, "page")


def check_places(stream: Stream, shard: Int64s, start: Int64s, length: Int64s, where: str) -> None:
    """Raise IntegrityError unless records lie within their shards."""
    if (start < 0).any() or (start + length > stream.payload_bytes[shard]).any():
        raise _odd(stream, where, "side")


def check_range(rows: Int64s, count: int, where: str) -> None:
    """Raise IndexError unless all are samples of a dataset that has so many."""
    if len(rows) and (rows.min() < 0 or rows.max() >= count):
        bad = rows[(rows < 0) | (rows >= count)][0]
        raise IndexError(f"sample {bad} of {where}, which has {count}")


def matches(checksums: Sequence[int], number: int, found: Bytes) -> bool:
    """Whether a record is the one that its checksum was made of."""
    return bool(xxhash.xxh3_64_intdigest(found.data) == checksums[number])


def _odd(stream: Stream, where: str, kind: str) -> IntegrityError:
    return IntegrityError(
        f"{where}: the {kind} tables of stream {stream.name!r} do not fit the manifest. Nothing "
        "was changed; write the data set again."
    )
