"""Many look-ups and range reads side by side, on a few threads that end with the call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hpstore.errors import ObjectNotFound
from hpstore.objects.info import ObjectInfo
from hpstore.pool import Pool
from hpstore.pooled import PooledReader

WORKERS = 8  # as many calls as saturate what was measured: 4-12 on all devices
_SERIAL = 2  # up to here threads cost more than they save


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
        with ThreadPoolExecutor(WORKERS, "hpstore-stat") as threads:
            found = list(threads.map(stat, keys))
    return [info for info in found if info is not None]


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
        with ThreadPoolExecutor(WORKERS, "hpstore-ranges") as threads:
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


def read_slice(reader: PooledReader, start: int | None, end: int | None) -> bytes:
    """A slice of an object, of one version."""
    low, high = slice_bounds(reader.size, start, end)
    buffer = bytearray(high - low)
    count = reader.read_into(buffer, low) if buffer else 0
    return bytes(memoryview(buffer)[:count])


def _attempt(reader: PooledReader, start: int | None, end: int | None) -> bytes | Exception:
    try:
        return read_slice(reader, start, end)
    except Exception as error:  # noqa: BLE001 (handed to the caller)
        return error


__all__ = ["WORKERS", "read_ranges", "read_slice", "share_out", "slice_bounds", "stat_all"]
