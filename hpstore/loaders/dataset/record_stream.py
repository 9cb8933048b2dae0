"""One stream of a published dataset: its shards, its pages, where records lie. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hpstore.loaders.dataset.dataset_manifest import DatasetPart
from hpstore.loaders.dataset.record_layout import FixedPlan, Int64s, Record, even_rows
from hpstore.loaders.dataset.shard_layout import UInt64s
from hpstore.runtime.stopwatch import Stopwatch

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Locations:
    """Where n records of a stream lie; arrays by the order that was asked for."""

    shard: Int32s
    start: Int64s  # payload offset; logical when pages are compressed
    length: Int64s  # bytes of the record
    page: Int64s  # number of the page in the stream; -1 for a record over several
    checksum: UInt64s  # XXH3-64 of the record's bytes
    ragged: Int64s  # (n, r): bytes of each ragged field, in the order of record.ragged


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """All pages of a stream, in order."""

    shard: Int32s
    start: Int64s  # payload offset
    length: Int64s  # bytes in the payload; the last page of a shard may be shorter
    first_sample: Int64s  # (pages + 1): samples [i, i + 1) begin in page i
    stored_start: Int64s  # in the object: equal to start and length unless compressed
    stored_length: Int64s


@dataclass(frozen=True, eq=False, kw_only=True)
class Stream:
    """One stream. `number` is its number in the dataset; arrays are by shard."""

    number: int
    name: str
    record: Record
    unit_bytes: int
    pages_per_stripe: int  # k at writing
    compression: str  # "" for none
    nonces: Sequence[str]  # of each shard's writer
    numbers: Sequence[int]  # of each shard among its writer's
    rows: Int64s
    payload_bytes: Int64s
    side_hashes: Sequence[str]
    decoding: Stopwatch = field(default_factory=Stopwatch)  # compressed pages, by whoever reads it

    @cached_property
    def row_starts(self) -> Int64s:
        """(shards + 1): first sample of each shard."""
        return np.concatenate([[0], np.cumsum(self.rows)]).astype(np.int64)

    @cached_property
    def _even_rows(self) -> int:
        return even_rows(self.rows)

    @cached_property
    def page_starts(self) -> Int64s:
        """(shards + 1): first page of each shard."""
        pages = -(-self.payload_bytes // self.unit_bytes)
        return np.concatenate([[0], np.cumsum(pages)]).astype(np.int64)

    @cached_property
    def fixed(self) -> FixedPlan | None:
        """Addresses by arithmetic; None when there is a ragged field."""
        return None if self.record.ragged else FixedPlan.of(self.record, self.unit_bytes)

    @property
    def shard_count(self) -> int:
        return len(self.rows)

    def shard_of(self, indices: Int64s) -> Int64s:
        """The shard of each sample."""
        if self._even_rows:
            return indices // self._even_rows
        return np.searchsorted(self.row_starts, indices, "right").astype(np.int64) - 1

    def page_of(self, shard: Int64s, start: Int64s, length: Int64s) -> Int64s:
        """Global page of each record; -1 for a record over several."""
        page = start // self.unit_bytes
        crosses = start + length > (page + 1) * self.unit_bytes
        return np.where(crosses, -1, self.page_starts[shard] + page)

    def page_shards(self) -> Int32s:
        """The shard of every page."""
        return np.repeat(np.arange(self.shard_count, dtype=np.int32), np.diff(self.page_starts))

    def page_starts_inside(self, shards: Int32s) -> Int64s:
        """Payload offset of every page."""
        pages = np.arange(len(shards), dtype=np.int64)
        return (pages - self.page_starts[:-1][shards]) * self.unit_bytes

    def fixed_first_samples(self, shards: Int32s, starts: Int64s) -> Int64s:
        """(pages + 1): first sample that begins in or after each page, by arithmetic."""
        assert self.fixed is not None
        rows = np.minimum(self.fixed.first_rows(starts // self.unit_bytes), self.rows[shards])
        return np.append(self.row_starts[:-1][shards] + rows, self.row_starts[-1])


def make_stream(
    number: int,
    name: str,
    record: Record,
    parts: Sequence[DatasetPart],
    data: int,
    compression: str,
) -> Stream:
    """The stream over the shards of all parts."""
    shards = [
        (part.nonce, index, rows, payload, side)
        for part in parts
        for index, (rows, payload, side) in enumerate(
            zip(
                part.streams[number].rows,
                part.streams[number].payload,
                part.streams[number].side,
                strict=True,
            )
        )
    ]
    return Stream(
        number=number,
        name=name,
        record=record,
        unit_bytes=parts[0].streams[number].unit_bytes,
        pages_per_stripe=data,
        compression=compression,
        nonces=[s[0] for s in shards],
        numbers=[s[1] for s in shards],
        rows=np.array([s[2] for s in shards], np.int64),
        payload_bytes=np.array([s[3] for s in shards], np.int64),
        side_hashes=[s[4] for s in shards],
    )


def make_pages(stream: Stream, tables: Sequence[npt.NDArray[Any]]) -> PageTable:
    """All pages of a stream. `tables`: of its page objects, as page_dtypes has them."""
    left = list(tables)
    shards = stream.page_shards()
    start = stream.page_starts_inside(shards)
    length = np.minimum(stream.unit_bytes, stream.payload_bytes[shards] - start)
    if stream.fixed is not None:
        first = stream.fixed_first_samples(shards, start)
    else:
        first = np.concatenate([[0], np.cumsum(left.pop(0), dtype=np.int64)])
    stored_start, stored_length = start, length
    if stream.compression:
        stored_length = left.pop(0).astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(-(-stored_length // 4096) * 4096)])
        stored_start = ends[:-1] - ends[stream.page_starts[:-1]][shards]
    return PageTable(
        shard=shards,
        start=start,
        length=length,
        first_sample=first.astype(np.int64),
        stored_start=stored_start,
        stored_length=stored_length,
    )


def stripe_firsts(stream: Stream, pages: PageTable) -> Int64s:
    """First sample of every stripe in which a sample begins, ascending; the last entry is len."""
    stripe_bytes = stream.unit_bytes * stream.pages_per_stripe
    stripe = pages.stored_start // stripe_bytes
    new = np.ones(len(stripe), bool)
    new[1:] = (np.diff(stripe) != 0) | (np.diff(pages.shard) != 0)
    firsts = np.append(pages.first_sample[:-1][new], pages.first_sample[-1])
    return np.unique(firsts)
