"""Tables beside the records: checksums, addresses and lengths of a shard, pages of a stream. Pure.

Each is a header of 16 bytes (magic, format, number of tables) and little-endian arrays, each at a
multiple of 8. Rows of a table are read by block: nobody holds a table of 1e9 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hpstore.errors import FormatTooNew, IntegrityError
from hpstore.loaders.dataset.record_layout import Record
from hpstore.units import round_up

SIDE_MAGIC = b"HPSTSIDE"
PAGE_MAGIC = b"HPSTPAGE"
FORMAT = 1
HEADER_BYTES = 16
_ALIGNMENT = 8

Table = npt.NDArray[Any]


def encode_tables(magic: bytes, tables: Sequence[Table]) -> bytes:
    """An object of tables."""
    out = bytearray(magic + FORMAT.to_bytes(4, "little") + len(tables).to_bytes(4, "little"))
    for table in tables:
        raw = np.ascontiguousarray(table, table.dtype.newbyteorder("<")).tobytes()
        out += raw + bytes(-len(raw) % _ALIGNMENT)
    return bytes(out)


def table_starts(dtypes: Sequence[np.dtype[Any]], rows: int) -> list[int]:
    """Where each table begins, and where the object ends."""
    starts, at = [], HEADER_BYTES
    for dtype in dtypes:
        starts.append(at)
        at += round_up(rows * dtype.itemsize, _ALIGNMENT)
    return [*starts, at]


def decode_tables(
    magic: bytes, data: bytes, dtypes: Sequence[np.dtype[Any]], rows: int, *, where: str
) -> list[Table]:
    """All tables of an object. Raises IntegrityError, FormatTooNew."""
    check_header(magic, data, len(dtypes), where=where)
    starts = table_starts(dtypes, rows)
    if len(data) != starts[-1]:
        raise IntegrityError(f"{where} has {len(data)} bytes, {starts[-1]} are recorded")
    return [
        np.frombuffer(data, dtype, rows, start)
        for dtype, start in zip(dtypes, starts, strict=False)
    ]


def check_header(magic: bytes, data: bytes, tables: int, *, where: str) -> None:
    """Raise IntegrityError or FormatTooNew unless the object begins as it should."""
    if len(data) < HEADER_BYTES or data[:8] != magic:
        raise IntegrityError(f"{where} is not what its key says")
    version, count = int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")
    if version > FORMAT:
        raise FormatTooNew(f"{where}: format {version}, this hpstore reads up to {FORMAT}")
    if count != tables:
        raise IntegrityError(f"{where} has {count} tables, not {tables}")


def side_dtypes(record: Record) -> list[np.dtype[Any]]:
    """Tables of a side object: checksums; with ragged fields, record starts and their lengths."""
    checksums = [np.dtype("<u8")]
    if not record.ragged:
        return checksums
    return [*checksums, np.dtype("<u8"), *([np.dtype("<u4")] * len(record.ragged))]


def side_ranges(
    dtypes: Sequence[np.dtype[Any]], rows: int, runs: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Bytes of a side object's header, then of each run (first row, rows) in every table."""
    starts = table_starts(dtypes, rows)
    return [(0, starts[0])] + [
        (start + first * d.itemsize, start + (first + count) * d.itemsize)
        for first, count in runs
        for d, start in zip(dtypes, starts, strict=False)
    ]


def page_dtypes(record: Record, compression: str) -> list[np.dtype[Any]]:
    """Tables of a page object: records that begin in each page; stored bytes of each page."""
    counts = [np.dtype("<u4")] if record.ragged else []
    return counts + ([np.dtype("<u4")] if compression else [])


def object_hash(data: Any) -> str:  # Any: whatever has a buffer
    """Digest of a table object, as the manifest names it."""
    return xxhash.xxh3_64_hexdigest(data)


def check_hash(key: str, data: Any, wanted: str) -> None:  # Any: as object_hash
    """Raise IntegrityError unless the object is the one that the manifest names."""
    if object_hash(data) != wanted:
        raise IntegrityError(f"object {key!r} is not the one that the manifest names", key=key)
