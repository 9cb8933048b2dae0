"""Which byte ranges to read for a set of records, and where they land in one buffer."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import IntegrityError
from hpstore.format.geometry import BLOCK_BYTES
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Int32s
from hpstore.objects.read.pooled_reader import PooledReader

GAP_BYTES = BLOCK_BYTES  # the pool verifies that much anyway: reading on is cheaper than again
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Ranges to read, ascending in each shard, and the place of every record in the buffer."""

    shard: Int64s  # of each span
    start: Int64s
    end: Int64s
    target: Int64s  # where each span begins in the buffer, multiples of 64
    position: Int64s  # where each record begins in the buffer, in the order asked for
    total: int  # bytes of the buffer


def plan_spans(shard: Int32s, start: Int64s, length: Int64s, gap: int = GAP_BYTES) -> Spans:
    """Sort records by place and join those with at most `gap` bytes between them. Pure."""
    order = np.lexsort((start, shard))
    shards, starts = shard[order].astype(np.int64), start[order]
    ends = starts + length[order]
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(shards) != 0) | (starts[1:] - ends[:-1] > gap)
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(order)) - 1
    low, high = starts[first], ends[last] if len(order) else starts
    sizes = -(-(high - low) // _ALIGNMENT) * _ALIGNMENT
    target = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    span = np.cumsum(new) - 1
    position = np.empty(len(order), np.int64)
    position[order] = target[span] + starts - low[span]
    return Spans(
        shard=shards[first],
        start=low,
        end=high,
        target=target[:-1],
        position=position,
        total=int(target[-1]),
    )


def read_spans(reader: PooledReader, spans: Spans, shard: int, buffer: Bytes) -> None:
    """Read the spans of one shard into their places."""
    mine = spans.shard == shard
    starts = spans.start[mine].tolist()
    targets = spans.target[mine].tolist()
    ranges = list(zip(starts, spans.end[mine].tolist(), strict=True))

    def deliver(offset: int, found: Bytes) -> None:
        which = bisect_right(starts, offset) - 1
        at = targets[which] + offset - starts[which]
        buffer[at : at + len(found)] = found

    reader.read_ranges([(a, b) for a, b in ranges if a < b], deliver)


@dataclass(frozen=True, slots=True)
class ObjectRanges:
    """Ranges of an object of a known size."""

    key: str
    ranges: list[tuple[int, int]]
    size: int


def read_object_ranges(piece: ObjectRanges, reader: PooledReader | Exception) -> list[Bytes]:
    """Bytes of each of the ranges. IntegrityError when the object has another size."""
    if isinstance(reader, Exception):
        raise reader
    if reader.size != piece.size:
        raise IntegrityError(f"object {piece.key!r} has {reader.size} bytes, not {piece.size}")
    bounds = np.array(piece.ranges, np.int64).reshape(-1, 2)
    lengths = bounds[:, 1] - bounds[:, 0]
    plan = plan_spans(np.zeros(len(bounds), np.int32), bounds[:, 0], lengths)
    buffer = np.empty(plan.total, np.uint8)
    read_spans(reader, plan, 0, buffer)
    places = zip(plan.position.tolist(), lengths.tolist(), strict=True)
    return [buffer[at : at + count] for at, count in places]
