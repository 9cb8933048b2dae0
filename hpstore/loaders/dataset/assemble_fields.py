"""From records to values: strided views of fixed fields, values of one record. No reading here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.fields import Array
from hpstore.loaders.dataset.record_layout import Int64s, Record
from hpstore.loaders.dataset.record_stream import Stream


def field_views(stream: Stream, records: Bytes) -> dict[str, Array]:
    """Fixed fields of records (n, stride) uint8, each as (n, *shape); views, no copy.

    `stride` is at least the record's fixed bytes, rows are contiguous. What is written into the
    views is written into `records`.
    """
    found: dict[str, Array] = {}
    for name in stream.record.fixed:
        field, offset = stream.record.fields[name], stream.record.offsets[name]
        dtype = field.storage
        first = records[:, offset : offset + dtype.itemsize].view(dtype)
        inner = np.empty((1, *field.inner_shape), dtype).strides[1:]
        found[name] = np.lib.stride_tricks.as_strided(
            first, (len(records), *field.inner_shape), (records.strides[0], *inner)
        )
    return found


def field_bytes(layout: Record, records: Sequence[Bytes], ragged: Int64s) -> dict[str, list[Bytes]]:
    """Bytes of every field of records, by field; views. `ragged`: (n, r) lengths."""
    found: dict[str, list[Bytes]] = {}
    for name in layout.fixed:
        start = layout.offsets[name]
        end = start + layout.fields[name].row_bytes
        found[name] = [record[start:end] for record in records]
    starts = layout.ragged_starts(ragged)
    for column, name in enumerate(layout.ragged):
        low = starts[:, column]
        ends = (low + ragged[:, column]).tolist()
        found[name] = [r[a:b] for r, a, b in zip(records, low.tolist(), ends, strict=True)]
    return found
