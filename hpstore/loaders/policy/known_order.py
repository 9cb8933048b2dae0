"""Orders that are known: when each block is asked for next."""

from __future__ import annotations

import numpy as np

from hpstore.errors import ConfigError
from hpstore.loaders.policy.cache_plan import Int32s, Int64s

NEVER = np.int32(2**31 - 1)
"""No request is foretold."""

_PIECE = 1 << 18  # requests linked at a time: bounds the memory of a long epoch
_FAR = 2**30  # positions are counted from nearer again above this
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)


class Future:
    """The coming requests of one job, and the next one of every block.

    `following` links every queued request to the next of the same block, so that a request costs
    one look-up however far the order is known. 8 bytes a block and 8 a queued request. Positions
    count requests since the last forget(). Belady's rule needs just this (L. A. Belady, "A study
    of replacement algorithms for a virtual-storage computer", 1966).
    """

    near = False

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self.mismatched = False
        self.forget()

    def forget(self) -> None:
        """Nothing is foretold, and the memory is free."""
        self.head = self.end = 0
        self._links = np.empty((0, 2), np.int32)
        self._next, self._last = self._links.T
        self._queue = self._following = np.empty(0, np.int32)

    @property
    def queued(self) -> int:
        """Requests foretold and not made."""
        return self.end - self.head

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self._links, self._queue, self._following)
        return sum(array.nbytes for array in arrays)

    def append(self, blocks: Int64s) -> None:
        """More requests, behind those that are queued."""
        if self.queued + len(blocks) >= _FAR:
            raise ConfigError(
                f"{self.queued + len(blocks)} requests foretold, {_FAR - 1} are possible: tell "
                "fewer epochs ahead"
            )
        self._reserve(len(blocks))
        for start in range(0, len(blocks), _PIECE):
            self._link(blocks[start : start + _PIECE])

    def advance(self, blocks: Int64s) -> bool:
        """Requests are made, int64[n]; False if others, or in another order, were foretold.

        Requests past the end of what is foretold are no mismatch. Order inside one batch does not
        count.
        """
        count = min(len(blocks), self.queued)
        at = self._at(self.head, self.head + count)
        foretold = self._queue[at].astype(np.int64)
        if not is_kept(foretold, blocks):
            return False
        # of a block that is there twice the last one counts
        self._next[foretold] = self._following[at]
        self.head += count
        return True

    def upcoming(self, start: int, count: int) -> Int32s:
        """Blocks of at most `count` queued requests from the start-th on."""
        low = min(self.head + start, self.end)
        return self._queue[self._at(low, min(low + count, self.end))]

    def next_use(self, blocks: Int64s | Int32s) -> Int32s:
        """int32[n]: position of the next request, NEVER without one."""
        return self._next[blocks]

    def _at(self, start: int, stop: int) -> Int64s | slice:
        """Places of positions in the ring."""
        return _places(start, stop, max(len(self._queue), 1))

    def _reserve(self, more: int) -> None:
        if not len(self._next):
            # side by side: one miss for both of a block
            self._links = np.empty((self._blocks, 2), np.int32)
            self._next, self._last = self._links.T
            self._next[:], self._last[:] = NEVER, -1
        if self.end + more >= _FAR:
            self._count_anew()
        room = self.queued + more
        if room <= len(self._queue):
            return
        queue, following = np.empty(room, np.int32), np.full(room, NEVER)
        old, new = self._at(self.head, self.end), _places(self.head, self.end, room)
        queue[new], following[new] = self._queue[old], self._following[old]
        self._queue, self._following = queue, following

    def _count_anew(self) -> None:
        """Positions from the head on, so that they stay small."""
        # by a multiple of the ring's length: queued requests keep their places
        by = np.int32(self.head - self.head % max(len(self._queue), 1))
        self._next[self._next != NEVER] -= by
        self._following[self._following != NEVER] -= by
        np.maximum(self._last - by, -1, out=self._last)
        self.head, self.end = self.head - int(by), self.end - int(by)

    def _link(self, blocks: Int64s) -> None:
        count = len(blocks)
        positions = np.arange(self.end, self.end + count, dtype=np.int32)
        # equal blocks side by side, by position: one SIMD sort of block and position together
        keyed = blocks.astype(np.uint64) << _HIGH | np.arange(count, dtype=np.uint64)
        keyed.sort()
        rank, block = (keyed & _LOW).astype(np.int64), (keyed >> _HIGH).astype(np.int64)
        again = block[1:] == block[:-1]
        following = np.full(count, NEVER)
        following[rank[:-1][again]] = positions[rank[1:][again]]
        at = self._at(self.end, self.end + count)
        self._queue[at], self._following[at] = blocks, following
        first = np.concatenate(([True], ~again))
        fresh, since = block[first], positions[rank[first]]
        before = self._last[fresh]
        linked = before >= self.head
        self._following[before[linked] % len(self._queue)] = since[linked]
        self._next[fresh[~linked]] = since[~linked]
        last = np.concatenate((~again, [True]))
        self._last[block[last]] = positions[rank[last]]
        self.end += count


def is_kept(foretold: Int64s, made: Int64s) -> bool:
    """Whether what was made begins with what was foretold; the order inside a whole batch of it
    does not count.
    """
    count = len(foretold)
    if np.count_nonzero(foretold == made[:count]) == count:
        return True
    if count < len(made):
        return False
    return bool(np.array_equal(np.sort(foretold), np.sort(made)))


def _places(start: int, stop: int, size: int) -> Int64s | slice:
    """Of positions in a ring of `size`: one slice where they do not go round."""
    low = start % size
    if low + stop - start <= size:
        return slice(low, low + stop - start)
    return np.arange(start, stop) % size
