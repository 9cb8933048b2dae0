"""Plain cache policies that keep queues: LRU, LFU, 2Q, S3-FIFO and SIEVE, of equal blocks.

They are what other caches do, request by request, and serve to be compared with.
Each is written from its paper; parameters are the papers' own.
On traces LRU, LFU, SIEVE and 2Q agree with libcachesim 0.3.5 to the last hit,
S3-FIFO to 0.2 points.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict


def oldest(queue: OrderedDict[int, int]) -> int:
    """Block at the end that leaves; it stays there."""
    return next(iter(queue))


class LruPolicy:
    """The least recently used block leaves."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queue: OrderedDict[int, int] = OrderedDict()

    def request(self, block: int) -> bool:
        """Whether it hits."""
        if block in self._queue:
            self._queue.move_to_end(block)
            return True
        if len(self._queue) >= self._capacity:
            self._queue.popitem(last=False)
        self._queue[block] = 1
        return False


class LfuPolicy:
    """The least frequently used block leaves, of equals the least recent; counts leave with it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._now = 0
        self._keys: dict[int, tuple[int, int]] = {}  # requests, time of the last one
        self._heap: list[tuple[tuple[int, int], int]] = []  # those that changed since are stale

    def request(self, block: int) -> bool:
        """Whether it hits."""
        self._now += 1
        before = self._keys.get(block)
        if before is None and len(self._keys) >= self._capacity:
            self._evict()
        key = (1 if before is None else before[0] + 1, self._now)
        self._keys[block] = key
        if before is None:
            heapq.heappush(self._heap, (key, block))
        return before is not None

    def _evict(self) -> None:
        # an entry of the heap is no larger than its block's key: that is put right when it is first
        while True:
            key, block = self._heap[0]
            if self._keys[block] == key:
                heapq.heappop(self._heap)
                del self._keys[block]
                return
            heapq.heapreplace(self._heap, (self._keys[block], block))


class TwoQueuePolicy:
    """2Q (T. Johnson, D. Shasha, VLDB 1994): a FIFO of a quarter for newcomers, an LRU for blocks
    that came again within half a cache after they had left it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._most_new, self._most_gone = max(1, capacity // 4), capacity // 2
        self._new: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._gone: OrderedDict[int, int] = OrderedDict()

    def request(self, block: int) -> bool:
        """Whether it hits."""
        if block in self._new:
            return True
        if block in self._main:
            self._main.move_to_end(block)
            return True
        again = block in self._gone
        if len(self._new) + len(self._main) >= self._capacity:
            self._evict()
        if again:
            self._gone.pop(block, None)
            self._main[block] = 1
        else:
            self._new[block] = 1
        return False

    def _evict(self) -> None:
        if len(self._new) > self._most_new or not self._main:
            block, _ = self._new.popitem(last=False)
            self._gone[block] = 1
            if len(self._gone) > self._most_gone:
                self._gone.popitem(last=False)
        else:
            self._main.popitem(last=False)


class S3FifoPolicy:
    """S3-FIFO (J. Yang et al., SOSP 2023): a FIFO of a tenth for newcomers, a main FIFO for those
    with two hits there or that came again, both with two bits a block, and a memory of who left.

    Until the first block leaves, newcomers that the small queue has no room for go to the main one.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._most_small = max(1, capacity // 10)
        self._most_main, self._most_gone = capacity - self._most_small, capacity * 9 // 10
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._gone: OrderedDict[int, int] = OrderedDict()
        self._full = False

    def request(self, block: int) -> bool:
        """Whether it hits."""
        for queue in (self._small, self._main):
            if block in queue:
                queue[block] = min(3, queue[block] + 1)
                return True
        again = self._gone.pop(block, 0)
        while len(self._small) + len(self._main) >= self._capacity:
            self._full = True
            self._evict()
        if again or (not self._full and len(self._small) >= self._most_small):
            self._main[block] = 0
        else:
            self._small[block] = 0
        return False

    def _evict(self) -> None:
        if len(self._main) <= self._most_main:
            while self._small:
                block, hits = self._small.popitem(last=False)
                if hits < 2:
                    self._gone[block] = 1
                    if len(self._gone) > self._most_gone:
                        self._gone.popitem(last=False)
                    return
                self._main[block] = 0
        while True:
            block, hits = self._main.popitem(last=False)
            if not hits:
                return
            self._main[block] = hits - 1


class SievePolicy:
    """SIEVE (Y. Zhang et al., NSDI 2024): one FIFO, one bit a block, a hand that passes by blocks
    whose bit is set and takes the bit away.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._visited: dict[int, bool] = {}
        self._newer: dict[int, int] = {}  # neighbours in the queue; -1 is both of its ends
        self._older: dict[int, int] = {}
        self._newer[-1] = self._older[-1] = -1  # of -1: the oldest and the newest
        self._hand = -1

    def request(self, block: int) -> bool:
        """Whether it hits."""
        if block in self._visited:
            self._visited[block] = True
            return True
        if len(self._visited) >= self._capacity:
            self._evict()
        newest = self._older[-1]
        self._newer[newest] = self._older[-1] = block
        self._older[block], self._newer[block] = newest, -1
        self._visited[block] = False
        return False

    def _evict(self) -> None:
        block = self._hand if self._hand >= 0 else self._newer[-1]
        while self._visited[block]:
            self._visited[block] = False
            block = self._newer[block] if self._newer[block] >= 0 else self._newer[-1]
        self._hand = self._newer[block]
        newer, older = self._newer.pop(block), self._older.pop(block)
        self._older[newer], self._newer[older] = older, newer
        del self._visited[block]
