"""Read the bytes that tensors want from the segments of a checkpoint, and nothing else.

A plan says for each wanted box of a tensor which stored ranges it needs; ranges are coalesced, read
ahead over all devices, verified block by block below, and copied straight to where they belong.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from hpstore.checkpoint.format.items import FRAME_BYTES, Box, Item, by_name
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.format.segment_plan import Chunk
from hpstore.checkpoint.restore.byte_meter import ByteMeter
from hpstore.checkpoint.restore.range_targets import (
    FramedTarget,
    GatherTarget,
    ItemCheck,
    ItemDigest,
    MemoryTarget,
    TensorTarget,
    raw_bytes,
)
from hpstore.checkpoint.state.scalars import dtype_named
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointMismatch, IntegrityError
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.pool.pool import Pool
from hpstore.runtime.threads import WorkerThreads
from hpstore.units import KIB, MIB

_log = logging.getLogger(__name__)
GAP_BYTES = 64 * KIB  # ranges nearer than a checksummed block are read as one
BATCH_BYTES = 8 * MIB  # memory that a strided read gathers rows in
_READERS = 4
_WARM_BYTES = 512 * KIB  # hashed while it is still in the processor's cache


@dataclass(slots=True, kw_only=True)
class RangeRead:
    """One range of a segment that somebody wants."""

    segment: int
    start: int
    end: int
    landing: TensorTarget
    item: Item
    hashed: bool  # compared with the item's hash once it is complete


def _stored_read(
    item: Item, low: int, high: int, landing: TensorTarget, *, hashed: bool
) -> RangeRead:
    """The read that gives raw bytes [low, high) of an item."""
    if not item.codec:
        return RangeRead(
            segment=item.segment,
            start=item.offset + low,
            end=item.offset + high,
            landing=landing,
            item=item,
            hashed=hashed,
        )
    first, last = low // FRAME_BYTES, -(-high // FRAME_BYTES)
    total = raw_bytes(item)
    raw = [min(FRAME_BYTES, total - n * FRAME_BYTES) for n in range(first, last)]
    start = item.offset + sum(item.frames[:first])
    lengths = item.frames[first:last]
    framed = FramedTarget(item.codec, lengths, raw, low - first * FRAME_BYTES, landing, high - low)
    return RangeRead(
        segment=item.segment,
        start=start,
        end=start + sum(lengths),
        landing=framed,
        item=item,
        hashed=hashed,
    )


def _row_major(sizes: Sequence[int]) -> list[int]:
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    return strides


def reads_for(wanted: Chunk, items: Sequence[Item]) -> list[RangeRead]:
    """What must be read to fill a box from the stored boxes of its tensor. Pure.

    Raises CheckpointMismatch when they do not cover it.
    """
    found: list[RangeRead] = []
    covered = 0
    for item in items:
        common = wanted.box.overlap(item.box)
        if common is not None:
            covered += common.count
            found += _reads_of(wanted, item, common)
    if covered != wanted.box.count:
        raise CheckpointMismatch(
            f"{wanted.name!r}: the checkpoint holds {covered} of the {wanted.box.count} elements "
            f"wanted at {wanted.box.offsets}"
        )
    return found


def _reads_of(wanted: Chunk, item: Item, common: Box) -> list[RangeRead]:
    """Reads for what one stored box gives to a wanted one."""
    width = dtype_named(item.dtype).itemsize
    target = wanted.tensor
    is_all = common == item.box
    digest = ItemDigest(item) if is_all and item.digest else None
    if is_all and common == wanted.box and _plain(target, item.dtype):  # most of all reads
        return [_plain_read(target, item, 0, common.count * width, digest)]
    for axis, (low, origin, size) in enumerate(
        zip(common.offsets, wanted.box.offsets, common.sizes, strict=True)
    ):
        target = target.narrow(axis, low - origin, size)
    strides = _row_major(item.box.sizes)
    inner = [a - b for a, b in zip(common.offsets, item.box.offsets, strict=True)]
    first = sum(map(lambda at, stride: at * stride, inner, strides)) * width
    last = (
        first + width + width * sum((n - 1) * s for n, s in zip(common.sizes, strides, strict=True))
    )
    if (last - first) == common.count * width and _plain(target, item.dtype):
        return [_plain_read(target, item, first, last, digest)]
    return _gathered(target, item, (first, last), strides, digest)


def _plain_read(
    target: torch.Tensor, item: Item, low: int, high: int, digest: ItemDigest | None
) -> RangeRead:
    """The read of raw bytes [low, high) straight into a tensor that lies as they do."""
    # not reshape(-1): that keeps the stride of a single element, which has any
    flat = target.detach().as_strided((target.numel(),), (1,)).view(torch.uint8).numpy()
    return _stored_read(item, low, high, MemoryTarget(flat, digest), hashed=digest is not None)


def _plain(target: torch.Tensor, dtype: str) -> bool:
    return (
        target.device.type == "cpu"
        and target.is_contiguous()
        and target.dtype == dtype_named(dtype)
        and not target.is_conj()
        and not target.is_neg()
    )


def _gathered(
    target: torch.Tensor,
    item: Item,
    span: tuple[int, int],
    strides: list[int],
    digest: ItemDigest | None,
) -> list[RangeRead]:
    """Row batches: neighbouring rows as one range, far ones each for itself."""
    dtype = dtype_named(item.dtype)
    width, total = dtype.itemsize, raw_bytes(item)
    if target.dim() == 0:
        where = (digest, 0, total) if digest else None
        landing = GatherTarget(target, dtype, (), width, where)
        return [_stored_read(item, *span, landing, hashed=digest is not None)]
    row = strides[0] * width
    tail = width * (
        1 + sum((n - 1) * s for n, s in zip(target.shape[1:], strides[1:], strict=True))
    )
    rows = max(1, BATCH_BYTES // row) if row - tail < GAP_BYTES else 1
    found = []
    for first in range(0, target.shape[0], rows):
        count = min(rows, target.shape[0] - first)
        low = span[0] + first * row
        length = (count - 1) * row + tail
        where = (digest, low, total) if digest else None
        landing = GatherTarget(target.narrow(0, first, count), dtype, strides, length, where)
        found.append(_stored_read(item, low, low + length, landing, hashed=digest is not None))
    return found


def coalesced(reads: Iterable[RangeRead]) -> list[tuple[int, int]]:
    """Ranges that cover sorted reads of one segment, near ones joined. Pure."""
    ranges: list[tuple[int, int]] = []
    for read in reads:
        if ranges and read.start - ranges[-1][1] <= GAP_BYTES:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], read.end))
        elif read.end > read.start:
            ranges.append((read.start, read.end))
    return ranges


class SegmentReads:
    """Gives the bytes of a segment, which come in order, to the reads that want them."""

    def __init__(self, reads: Sequence[RangeRead]) -> None:
        self._reads = sorted(reads, key=lambda r: (r.start, r.end))
        self.hashed = all(read.hashed for read in reads)
        self.ranges = coalesced(self._reads)
        self._active: list[RangeRead] = []
        self._next = self._at = 0
        self.seen: Callable[[int], None] | None = None  # told the bytes that come

    def split(self) -> list[SegmentReads]:
        """Two halves of about the same size for two threads; one when no border lies between. It
        cuts no item, each of which is hashed in order: tied ones are read side by side."""
        wanted = sum(high - low for low, high in self.ranges) // 2
        seen = end = closed = 0
        for n, read in enumerate(self._reads):
            if n and seen >= wanted and read.start >= closed:
                halves = [SegmentReads(self._reads[:n]), SegmentReads(self._reads[n:])]
                for half in halves:
                    half.seen = self.seen
                return halves
            seen += read.end - max(read.start, end) if read.end > end else 0
            end, closed = max(end, read.end), max(closed, read.item.offset + read.item.length)
        return [self]

    def deliver(self, offset: int, data: Bytes) -> None:
        """Bytes of the segment at `offset`. When they begin anew, so does everything."""
        if offset < self._at:
            self._active, self._next = [], 0
        end = self._at = offset + len(data)
        while self._next < len(self._reads) and self._reads[self._next].start < end:
            self._active.append(self._reads[self._next])
            self._next += 1
        still = []
        for read in self._active:
            low, high = max(read.start, offset), min(read.end, end)
            if low < high:
                read.landing.take(low - read.start, data[low - offset : high - offset])
            if read.end > end:
                still.append(read)
        self._active = still
        if self.seen is not None:
            self.seen(len(data))


Warm = Callable[[Segment], Bytes | None]  # memory that still holds a segment, as it was written


def run_reads(
    pool: Pool,
    segments: Sequence[Segment],
    reads: Iterable[RangeRead],
    warm: Warm | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Fill everything that `reads` want; returns the bytes asked of the pool.

    `progress` gets the stored bytes that have come, and all of them, by the threads that read.
    Segments are read several at a time. Raises IntegrityError, TooManyErasures, ObjectNotFound;
    targets are then partly filled.
    """
    by_segment: dict[int, list[RangeRead]] = {}
    for read in reads:
        by_segment.setdefault(read.segment, []).append(read)

    scatters = {number: SegmentReads(mine) for number, mine in by_segment.items()}
    meter = None
    if progress is not None:
        ranges = [span for scatter in scatters.values() for span in scatter.ranges]
        meter = ByteMeter(progress, sum(high - low for low, high in ranges))
        for scatter in scatters.values():
            scatter.seen = meter.add

    def one(number: int) -> int:
        return _read_segment(pool, segments[number], scatters[number], warm)

    if len(scatters) <= 1:
        count = sum(map(one, scatters))
    else:
        with WorkerThreads(_READERS, "hpstore-restore") as threads:
            count = sum(threads.map(one, scatters))
    if meter is not None:
        meter.end()
    return count


def _read_segment(pool: Pool, segment: Segment, scatter: SegmentReads, warm: Warm | None) -> int:
    if not scatter.ranges:
        return 0
    if segment.data is not None:  # it came with the manifest
        _give(scatter, segment.data)
        return sum(high - low for low, high in scatter.ranges)
    memory = warm(segment) if warm is not None and scatter.hashed else None
    if memory is not None and _from_memory(segment, memory, scatter.split()):
        return 0
    with _opened(pool, segment) as reader:
        reader.read_ranges(scatter.ranges, scatter.deliver)
    return sum(high - low for low, high in scatter.ranges)


@contextmanager
def _opened(pool: Pool, segment: Segment) -> Iterator[PooledReader]:
    """A segment as the manifest names it. Raises IntegrityError when it is another version."""
    with pool.open(segment.key) as reader:
        if reader.version != segment.version or reader.size != segment.size:
            raise IntegrityError(
                f"segment {segment.key} is version {reader.version} of {reader.size} bytes; the "
                f"manifest names version {segment.version} of {segment.size}"
            )
        yield reader


def _require_there(pool: Pool, segments: Sequence[Segment], warm: Warm | None) -> None:
    """Open and close segments that are not in memory. Raises what reading them would raise when
    too much of one is lost; damage in the middle shows when it is read."""

    def look(segment: Segment) -> None:
        if segment.data is None and (warm is None or warm(segment) is None):
            with _opened(pool, segment):
                return

    with WorkerThreads(_READERS, "hpstore-restore") as threads:
        list(threads.map(look, segments))


def _from_memory(segment: Segment, memory: Bytes, parts: Sequence[SegmentReads]) -> bool:
    """Take a segment from the staging buffer, hashes compared; False when they do not match."""
    try:
        with WorkerThreads(len(parts), "hpstore-restore") as threads:
            list(threads.map(_give, parts, itertools.repeat(memory)))  # one hashes, another copies
    except IntegrityError as error:
        _log.warning(
            "segment %s is read from the pool, memory does not serve: %s", segment.key, error
        )
        return False
    return True


def _give(scatter: SegmentReads, memory: Bytes) -> None:
    for low, high in scatter.ranges:
        for at in range(low, high, _WARM_BYTES):
            scatter.deliver(at, memory[at : min(high, at + _WARM_BYTES)])


def bytes_read(item: Item, target: bytearray) -> list[RangeRead]:
    """The reads that give all of an item's bytes."""
    if not item.length:
        return []
    flat: Bytes = np.frombuffer(target, np.uint8)
    return [_stored_read(item, 0, len(target), MemoryTarget(flat, ItemDigest(item)), hashed=True)]


def check_items(
    pool: Pool,
    segments: Sequence[Segment],
    items: Sequence[Item],
    seen: Callable[[int], None] | None = None,
) -> list[str]:
    """Read all items and compare them with their hashes; the names of those that differ.

    `seen` is told how many raw bytes were looked at, again when they are read again. Takes no
    memory beyond the pool's own. Raises as run_reads().
    """
    damaged: list[str] = []
    for number in range(len(segments)):
        mine = [item for item in items if item.segment == number and item.length]
        reads = [
            _stored_read(item, 0, raw_bytes(item), ItemCheck(item, damaged, seen), hashed=True)
            for item in mine
        ]
        try:
            run_reads(pool, segments, reads)
        except IntegrityError as error:
            _log.warning("%s", error)
            damaged += [item.name for item in mine]
    return sorted(set(damaged))


def fill_chunks(
    pool: Pool,
    segments: Sequence[Segment],
    items: Iterable[Item],
    wanted: Iterable[Chunk],
    warm: Warm | None = None,
    *,
    begins: Callable[[], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Fill wanted boxes from a checkpoint's items; returns the bytes asked of the pool.

    With `begins` all segments are opened first, and it is called before the first byte is written:
    what is raised before that has changed nothing.
    """
    stored: Mapping[str, Sequence[Item]] = by_name(items)
    reads: list[RangeRead] = []
    for chunk in wanted:
        if prod(chunk.box.sizes):
            reads += reads_for(chunk, stored[chunk.name])
    if begins is not None:
        _require_there(pool, [segments[n] for n in sorted({r.segment for r in reads})], warm)
        begins()
    return run_reads(pool, segments, reads, warm, progress)
