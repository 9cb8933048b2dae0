"""Many look-ups, range reads and deletes side by side, on a few threads that end with the call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ObjectNotFound, TooManyErasures
from hpstore.format.geometry import BLOCK_BYTES
from hpstore.objects.object_info import ObjectInfo
from hpstore.objects.read.pooled_reader import READ_TRIES, PooledReader
from hpstore.pool.pool import Pool
from hpstore.runtime.fresh_bytes import fresh_bytes
from hpstore.runtime.threads import WorkerThreads
from hpstore.units import MIB

WORKERS = 8  # as many calls as saturate what was measured: 4-12 on all devices
MERGED_BYTES = 16 * MIB  # neighbours are merged up to here: a range kept alone keeps no more
_LOOKED_AT = 64  # keys at once: each has k columns open for a moment
_SERIAL = 2  # up to here threads cost more than they save
Span = tuple[int, int]


def slice_bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """[low, high) of a slice of `size` bytes: negative counts from the end, beyond is cut."""
    low, high, _ = slice(start, end).indices(size)
    return low, max(low, high)


def stat_all(pool: Pool, keys: Sequence[str]) -> list[ObjectInfo]:
    """Facts about many objects; those that were deleted meanwhile are left out."""

    def stat(key: str) -> ObjectInfo | None:
        try:
            return pool.stat(key)
        except ObjectNotFound:
            return None

    if len(keys) <= _SERIAL:
        found = [stat(key) for key in keys]
    else:
        with WorkerThreads(WORKERS, "hpstore-stat") as threads:
            found = list(threads.map(stat, keys))
    return [info for info in found if info is not None]


def keys_there(pool: Pool, keys: Sequence[str]) -> list[str]:
    """Those keys of which an object can be opened now, looked at many together."""
    there: list[str] = []
    for at in range(0, len(keys), _LOOKED_AT):
        for key, reader in pool.open_many(keys[at : at + _LOOKED_AT]).items():
            if not isinstance(reader, Exception):
                reader.close()
                there.append(key)
    return there


def read_ranges(
    opener: Callable[[str], PooledReader],
    paths: Sequence[str],
    starts: Sequence[int | None],
    ends: Sequence[int | None],
) -> list[bytes | Exception]:
    """Ranges in the order asked for; an error stands where its range would.

    The ranges of a path are shared out over a few readers, so that an object is looked up
    at most WORKERS times.
    """
    results: list[bytes | Exception] = [b""] * len(paths)

    def read(job: tuple[str, list[int]]) -> None:
        path, wanted = job
        try:
            with opener(path) as reader:
                for index in wanted:
                    results[index] = _attempt(reader, starts[index], ends[index])
        except Exception as error:  # noqa: BLE001 (handed to the caller, range by range)
            for index in wanted:
                results[index] = error

    jobs = share_out(paths)
    if len(jobs) == 1:
        read(jobs[0])
    else:
        with WorkerThreads(WORKERS, "hpstore-ranges") as threads:
            list(threads.map(read, jobs))
    return results


def share_out(paths: Sequence[str]) -> list[tuple[str, list[int]]]:
    """(path, indices of its ranges) for each reader: at most WORKERS of one path."""
    by_path: defaultdict[str, list[int]] = defaultdict(list)
    for index, path in enumerate(paths):
        by_path[path].append(index)
    jobs = []
    for path, indices in by_path.items():
        count = -(-len(indices) // WORKERS)
        jobs += [(path, indices[at : at + count]) for at in range(0, len(indices), count)]
    return jobs


def merge_parts(spans: Sequence[Span]) -> tuple[list[Span], list[int]]:
    """Disjoint runs that cover all spans, sorted; and for each span the run that holds it. Pure.

    Spans are merged when they overlap, or when less than a checksummed block (64 KiB, which is
    read as a whole anyway) is between them and the run stays below MERGED_BYTES.
    """
    runs: list[Span] = []
    run_of = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        low, high = spans[index]
        if runs:
            first, last = runs[-1]
            near = low - last < BLOCK_BYTES and max(high, last) - first <= MERGED_BYTES
            if low < last or near:
                runs[-1] = (first, max(last, high))
                run_of[index] = len(runs) - 1
                continue
        runs.append((low, high))
        run_of[index] = len(runs) - 1
    return runs, run_of


def _empty(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def read_parts(
    reader: PooledReader,
    spans_of: Callable[[int], Sequence[Span]],
    allocate: Callable[[int], Bytes] = _empty,
) -> list[Bytes]:
    """The bytes of all spans [low, high), each (high - low,) uint8, all of one version.

    `spans_of(size)` says them for an object of `size` bytes; it is asked again when the object is
    replaced underneath. Neighbours are read at once, and their arrays are then views of one.
    Raises ValueError, ObjectNotFound, TooManyErasures.
    """
    for _ in range(READ_TRIES):
        version, spans = reader.version, spans_of(reader.size)
        runs, run_of = merge_parts(spans)
        arrays = [allocate(high - low) for low, high in runs]
        try:
            reader.read_ranges(runs, _filler(runs, arrays))
        except ValueError:
            if reader.version == version:
                raise
        if reader.version == version:
            return [
                arrays[run][low - runs[run][0] : high - runs[run][0]]
                for (low, high), run in zip(spans, run_of, strict=True)
            ]
    raise TooManyErasures(f"an object changed {READ_TRIES} times while it was read")


def _filler(runs: Sequence[Span], arrays: Sequence[Bytes]) -> Callable[[int, Bytes], None]:
    """Puts pieces that arrive in the order of the runs into their arrays."""
    at = 0

    def fill(offset: int, found: Bytes) -> None:
        nonlocal at
        if offset < runs[at][0]:
            at = 0  # delivered again from the first
        while offset >= runs[at][1]:
            at += 1
        start = offset - runs[at][0]
        arrays[at][start : start + len(found)] = found

    return fill


def read_slice(reader: PooledReader, start: int | None, end: int | None) -> bytes:
    """A slice of an object, of one version."""
    made = [b""]

    def allocate(nbytes: int) -> Bytes:
        made[0], memory = fresh_bytes(nbytes)
        return memory

    read_parts(reader, lambda size: [slice_bounds(size, start, end)], allocate)
    return made[0]


def _attempt(reader: PooledReader, start: int | None, end: int | None) -> bytes | Exception:
    try:
        return read_slice(reader, start, end)
    except Exception as error:  # noqa: BLE001 (handed to the caller)
        return error
