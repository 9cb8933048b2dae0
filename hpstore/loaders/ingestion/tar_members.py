"""Files of many samples of tars, read by ranges: neighbours together, in the order of the tars."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hpstore.loaders.ingestion.tar_index import MemberTable
from hpstore.units import KIB, MIB

GAP_BYTES = 32 * KIB  # read over: one read of so much costs as much as two
RANGE_BYTES = 4 * MIB


class BadMember(Exception):
    """A file of one of the samples is not as it should be: they are read one by one."""


def read_members(
    files: Sequence[Path], table: MemberTable, takes: Callable[[str], bool]
) -> dict[str, list[memoryview]]:
    """The bytes of each sample's files by ending, over memory of their own.

    Raises OSError, and BadMember where a tar is shorter than it was.
    """
    wanted = [at for at, ending in enumerate(table.endings) if takes(ending)]
    found: dict[str, list[memoryview]] = {}
    if not wanted:
        return found
    starts = table.offsets[:, wanted].reshape(-1)
    sizes = table.sizes[:, wanted].reshape(-1)
    shards = np.repeat(table.shards.astype(np.int64), len(wanted))
    order = np.lexsort((starts, shards))
    views: list[memoryview] = [memoryview(b"")] * len(starts)
    rows, begins = order.tolist(), starts[order].tolist()
    ends, places = (starts + sizes)[order].tolist(), shards[order].tolist()
    shard, descriptor, at = -1, -1, 0
    try:
        while at < len(rows):
            stop, high = _range_end(at, places, begins, ends)
            if places[at] != shard:
                if descriptor >= 0:
                    os.close(descriptor)
                descriptor, shard = -1, places[at]
                descriptor = os.open(files[shard], os.O_RDONLY | os.O_CLOEXEC)
            low = begins[at]
            data = memoryview(_read(descriptor, low, high - low))
            for one in range(at, stop):
                views[rows[one]] = data[begins[one] - low : ends[one] - low]
            at = stop
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    for place, column in enumerate(wanted):
        found[table.endings[column]] = views[place :: len(wanted)]
    return found


def _range_end(
    first: int, places: list[int], begins: list[int], ends: list[int]
) -> tuple[int, int]:
    """Behind which file a range that begins with `first` ends, and at which byte."""
    place, low, high = places[first], begins[first], ends[first]
    at = first + 1
    while at < len(begins) and places[at] == place and begins[at] - high <= GAP_BYTES:
        if ends[at] - low > RANGE_BYTES:
            break
        high = max(high, ends[at])
        at += 1
    return at, high


def _read(descriptor: int, start: int, nbytes: int) -> bytes:
    """All of a range. Raises BadMember where the file ends before it does."""
    pieces: list[bytes] = []
    while nbytes:
        piece = os.pread(descriptor, nbytes, start)
        if not piece:
            raise BadMember
        pieces.append(piece)
        start, nbytes = start + len(piece), nbytes - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
