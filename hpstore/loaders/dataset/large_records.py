"""Records of many sizes, some at a time, in memory that is used again.

A batch of large records is tens of MB: read as a whole it would take as much memory once more
beside its slot, and with devices lost several times that for what is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import AlreadyClosed, HpstoreError
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Locations, Stream
from hpstore.pool.pool import Pool
from hpstore.runtime.buffers import Lease, aligned_array, release_after
from hpstore.units import MIB, round_up

PART_BYTES = 8 * MIB
Lost = Callable[[Sequence[Future[None]]], None]  # told of reads that may still write


class ReadRows(Protocol):
    """As Records.read_rows, by way of a cache."""

    def __call__(
        self,
        stream: Stream,
        indices: Int64s,
        rows: Sequence[Bytes] | Bytes,
        lost: Lost | None = None,
    ) -> bool: ...


class Records(Protocol):
    """A dataset in a pool that reads records by their numbers; see StoredData."""

    @property
    def pool(self) -> Pool: ...

    def read_rows(
        self,
        stream: Stream,
        indices: Int64s,
        rows: Sequence[Bytes],
        addresses: Int64s | None = None,
        room: Sequence[Bytes] | None = None,
        lost: Lost | None = None,
    ) -> bool: ...

    def read_records(self, stream: Stream, indices: Int64s) -> tuple[list[Bytes], Locations]: ...


def part_bounds(lengths: Int64s) -> list[tuple[int, int]]:
    """Consecutive [first, last) of all records: PART_BYTES at most, or a single one. Pure."""
    ends, bounds, first = np.cumsum(_steps(lengths)), [], 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + PART_BYTES, side="right"))
        bounds.append((first, max(last, first + 1)))
        first = bounds[-1][1]
    return bounds


def aligned_bytes(lengths: Int64s) -> int:
    """Of memory for aligned_rows."""
    return int(_steps(lengths).sum())


def aligned_rows(memory: Bytes, lengths: Int64s) -> tuple[list[Bytes], list[Bytes]]:
    """Room for records in page-aligned memory: views as long as they are, and up to 4 KiB steps.

    Devices read into the latter without a copy in between.
    """
    steps = _steps(lengths)
    starts = (np.cumsum(steps) - steps).tolist()
    rows = [memory[a : a + n] for a, n in zip(starts, lengths.tolist(), strict=True)]
    return rows, [memory[a : a + n] for a, n in zip(starts, steps.tolist(), strict=True)]


def _steps(lengths: Int64s) -> Int64s:
    return -(-lengths // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def read_parts(
    data: Records,
    stream: Stream,
    indices: Int64s,
    lengths: Int64s,
    read: ReadRows | None = None,
) -> Iterator[tuple[slice, list[Bytes]]]:
    """Verified records of n samples, `lengths` (n,): which of them, and views of each.

    The views are good until the next are asked for. `read`: in the place of data.read_rows.
    Raises as StoredData.read_records.
    """
    for first, last in part_bounds(lengths):
        some, part = indices[first:last], slice(first, last)
        lease, memory = _memory(data.pool, aligned_bytes(lengths[part]))
        rows, room = aligned_rows(memory, lengths[part])
        lost = None if lease is None else partial(release_after, lease)
        try:
            if read is None:
                good = data.read_rows(stream, some, rows, room=room, lost=lost)
            else:
                good = read(stream, some, rows, lost)
        except AlreadyClosed:  # in mid-submission, perhaps: reads before it may go on (PROTOCOL 21)
            raise
        except HpstoreError:  # all reads have ended
            _release(lease)
            raise
        if good:
            try:
                yield part, rows
            finally:
                _release(lease)
        else:  # a device that hangs may still write into it (PROTOCOL 21)
            yield part, data.read_records(stream, some)[0]


def _memory(pool: Pool, nbytes: int) -> tuple[Lease | None, Bytes]:
    """Of the pool's, or ordinary where that is in use, or would be: reads that wait for memory
    while this is held must find some.
    """
    if nbytes > round_up(PART_BYTES, MIB):
        return None, aligned_array(nbytes)
    lease = pool.admin.scratch(nbytes if nbytes <= MIB else max(nbytes, PART_BYTES), "records")
    return lease, aligned_array(nbytes) if lease is None else lease.array


def _release(lease: Lease | None) -> None:
    if lease is not None:
        lease.release()
