"""From records to values: strided views of fixed fields, values of one record. No reading here."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.fields import Array
from hpstore.loaders.stream import Stream

Raw = Array | bytes | str


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


def record_values(stream: Stream, record: Bytes, lengths: Iterable[int]) -> dict[str, Raw]:
    """Values of one record from its bytes and ragged lengths: views; bytes and str as objects."""
    layout = stream.record
    found: dict[str, Raw] = {}
    for name in layout.fixed:
        field, offset = layout.fields[name], layout.offsets[name]
        found[name] = field.as_value(record[offset : offset + field.row_bytes])
    at = layout.fixed_bytes
    for name, length in zip(layout.ragged, lengths, strict=True):
        field = layout.fields[name]
        at = -(-at // field.storage.itemsize) * field.storage.itemsize
        found[name] = field.as_value(record[at : at + length])
        at += length
    return found


__all__ = ["Raw", "field_views", "record_values"]
