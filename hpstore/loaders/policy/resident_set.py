"""The set of resident blocks: constant time a block, drawable without looking at all of it."""

from __future__ import annotations

import numpy as np

from hpstore.loaders.policy.block_stats import Table
from hpstore.loaders.policy.cache_plan import Bools, Int32s, Int64s

_GOLDEN = 0.6180339887498949
EXACT = 4096
"""Up to so many residents all are compared, above a few for every newcomer."""


class Residents:
    """A dense list of blocks, `most` at a time, and the place of every block in it, in a table."""

    def __init__(self, table: Table, most: int) -> None:
        self._table = table
        self._listed = np.empty(most, np.int32)
        self.count = 0
        self.draws = 0
        self._lattice = np.empty(0, np.int64)
        self._of = 0  # residents when the lattice was laid

    @property
    def nbytes(self) -> int:
        """Bytes of the list."""
        return self._listed.nbytes

    def contains(self, blocks: Int64s) -> Bools:
        """bool[n]."""
        return self._table.places[blocks] >= 0

    def listed(self) -> Int32s:
        """All of them, in no order: a view, to be read before the next change."""
        return self._listed[: self.count]

    def add(self, blocks: Int64s) -> None:
        """Blocks that are absent, each once."""
        stop = self.count + len(blocks)
        self._listed[self.count : stop] = blocks
        self._table.places[blocks] = np.arange(self.count, stop, dtype=np.int32)
        self.count = stop

    def remove(self, blocks: Int64s) -> None:
        """Blocks that are present, each once. Those at the end of the list move into the gaps."""
        all_places = self._table.places
        places = all_places[blocks]
        all_places[blocks] = -1
        left = self.count - len(blocks)
        tail = self._listed[left : self.count]
        moved = tail[all_places[tail] >= 0]
        gaps = places[places < left]
        self._listed[gaps] = moved
        all_places[moved] = gaps
        self.count = left

    def clear(self) -> None:
        """None are left."""
        self._table.places[:] = -1
        self.count = 0

    def swap(self, gone: Int64s, come: Int64s) -> None:
        """As remove() and add(), of equally many: the new take the places of the old."""
        all_places = self._table.places
        places = all_places[gone]
        all_places[gone] = -1
        self._listed[places] = come
        all_places[come] = places

    def draw(self, count: int) -> Int32s:
        """`count` different residents, evenly over the list, at another offset each time.

        A lattice, not random numbers: no block is drawn twice, and nothing needs a generator. The
        offsets are the multiples of the golden ratio, which never come close to one another.
        """
        if count >= self.count:
            return self.listed()
        self.draws += 1
        if len(self._lattice) != count or self._of != self.count:
            self._lattice = np.arange(count) * self.count // count
            self._of = self.count
        # below the least distance of two points
        offset = int((self.draws * _GOLDEN) % 1.0 * (self.count // count))
        return self._listed.take(self._lattice + offset)
