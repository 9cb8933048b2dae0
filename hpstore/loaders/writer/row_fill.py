"""Putting the values of a batch into their records, in memory that is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.fields import Array
from hpstore.loaders.dataset.many_ranges import copy_rows
from hpstore.loaders.dataset.record_layout import FEW_ROWS, Int64s, Record
from hpstore.loaders.dataset.value_rows import ValueRows

Fill = Callable[[Bytes, Int64s, int], None]
"""(memory, where records begin in it, row of the batch that is the first of them)."""


def batch_fill(
    record: Record,
    batch: Mapping[str, Array],
    values: Sequence[Sequence[Bytes]],
    offsets: Int64s,
) -> Fill:
    """What fills in the rows of a batch. `values`: of the ragged fields; `offsets`: where these
    begin in each record, (n, ragged fields + 1)."""
    fixed = {
        record.offsets[name]: np.ascontiguousarray(batch[name], record.fields[name].storage)
        .reshape(len(offsets), -1)
        .view(np.uint8)
        for name in record.fixed
    }

    def fill(out: Bytes, starts: Int64s, first: int) -> None:
        last = first + len(starts)
        for offset, rows in fixed.items():
            if len(starts) < FEW_ROWS:
                copy_values(list(rows[first:last]), out, starts + offset)
                continue
            nbytes = np.full(len(starts), rows.shape[1], np.int64)
            begins = np.arange(first, last) * rows.shape[1]
            copy_rows(ValueRows.of(rows.reshape(-1), begins, nbytes), out, starts + offset)
        for column, places in zip(values, offsets.T, strict=False):
            copy_values(column[first:last], out, starts + places[first:last])

    return fill


def rows_fill(rows: ValueRows) -> Fill:
    """What fills in whole records."""

    def fill(out: Bytes, starts: Int64s, first: int) -> None:
        copy_rows(rows[first : first + len(starts)], out, starts)

    return fill


def copy_values(values: Sequence[Bytes], out: Bytes, starts: Int64s) -> None:
    """Copy value i to byte `starts[i]` of `out`."""
    if isinstance(values, ValueRows):
        copy_rows(values, out, starts)
        return
    view = out.data
    for start, value in zip(starts.tolist(), values, strict=True):
        view[start : start + len(value)] = value.data
