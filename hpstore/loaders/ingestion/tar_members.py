"""Files of many samples of tars, read by ranges: neighbours together, in the order of the tars."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.many_ranges import read_ranges
from hpstore.loaders.dataset.value_rows import Int64s, ValueRows
from hpstore.loaders.ingestion.tar_index import MemberTable
from hpstore.units import KIB

GAP_BYTES = 4 * KIB  # read over: from the page cache that costs as much as another read


class BadMember(Exception):
    """A file of one of the samples is not as it should be: they are read one by one."""


def read_members(
    files: Sequence[Path], table: MemberTable, takes: Callable[[str], bool]
) -> dict[str, ValueRows]:
    """The bytes of each sample's files by ending, over memory of their own.

    Raises OSError, and BadMember where a tar is shorter than it was, or its files overlap.
    """
    wanted = [at for at, ending in enumerate(table.endings) if takes(ending)]
    if not wanted:
        return {}
    starts = table.offsets[:, wanted].reshape(-1)
    sizes = table.sizes[:, wanted].reshape(-1)
    shards = np.repeat(table.shards.astype(np.int64), len(wanted))
    order = np.lexsort((starts, shards))
    starts_read, shards_read = starts[order], shards[order]
    ends_read = starts_read + sizes[order]
    gaps = starts_read[1:] - ends_read[:-1]
    same = shards_read[1:] == shards_read[:-1]
    if (same & (gaps < 0)).any():
        raise BadMember
    first = np.flatnonzero(np.concatenate([[True], ~same | (gaps > GAP_BYTES)]))
    begins = starts_read[first]
    lengths = ends_read[np.concatenate([first[1:], [len(order)]]) - 1] - begins
    places = np.cumsum(lengths) - lengths
    memory = np.empty(int(lengths.sum()), np.uint8)
    _read(files, shards_read[first], begins, memory, places, lengths)
    which = np.searchsorted(first, np.arange(len(order)), "right") - 1  # the range of each file
    found = np.empty(len(order), np.int64)
    found[order] = places[which] + starts_read - begins[which]
    return {
        table.endings[column]: ValueRows.of(
            memory, found[place :: len(wanted)], sizes[place :: len(wanted)]
        )
        for place, column in enumerate(wanted)
    }


def _read(
    files: Sequence[Path],
    shards: Int64s,
    begins: Int64s,
    memory: Bytes,
    places: Int64s,
    lengths: Int64s,
) -> None:
    """Ranges of tars, those of one tar together. Raises BadMember where a tar ends before one."""
    cuts = np.flatnonzero(np.diff(shards)) + 1
    for low, high in pairwise([0, *cuts.tolist(), len(shards)]):
        descriptor = os.open(files[int(shards[low])], os.O_RDONLY | os.O_CLOEXEC)
        try:
            some = slice(low, high)
            read_ranges(descriptor, begins[some], memory, places[some], lengths[some])
        except EOFError:
            raise BadMember from None
        finally:
            os.close(descriptor)
