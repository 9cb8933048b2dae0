"""Plain cache policies that adapt: ARC, LIRS and W-TinyLFU, of equal blocks.

They are what other caches do, request by request, and serve to be compared with.
On traces ARC and LIRS agree with libcachesim 0.3.5 to the last hits.
W-TinyLFU counts blocks exactly, not in a sketch, and differs from there by up to 2.5 points.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from hpstore.loaders.policy.plain_queues import oldest


class ArcPolicy:
    """ARC (N. Megiddo, D. Modha, FAST 2003): blocks seen once and blocks seen more often, in two
    LRUs whose shares follow the hits in what either of them has given up.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # blocks of the first queue
        self._once: OrderedDict[int, int] = OrderedDict()
        self._often: OrderedDict[int, int] = OrderedDict()
        self._once_gone: OrderedDict[int, int] = OrderedDict()
        self._often_gone: OrderedDict[int, int] = OrderedDict()

    def request(self, block: int) -> bool:
        """Whether it hits."""
        if block in self._once:
            del self._once[block]
            self._often[block] = 1
            return True
        if block in self._often:
            self._often.move_to_end(block)
            return True
        first, second = len(self._once_gone), len(self._often_gone)
        if block in self._once_gone:
            self._target = min(self._capacity, self._target + max(1.0, second / first))
            self._replace(often=False)
            del self._once_gone[block]
            self._often[block] = 1
        elif block in self._often_gone:
            self._target = max(0.0, self._target - max(1.0, first / second))
            self._replace(often=True)
            del self._often_gone[block]
            self._often[block] = 1
        else:
            self._make_room()
            self._once[block] = 1
        return False

    def _make_room(self) -> None:
        recent = len(self._once) + len(self._once_gone)
        known = recent + len(self._often) + len(self._often_gone)
        if recent >= self._capacity:
            if len(self._once) < self._capacity:
                self._once_gone.popitem(last=False)
                self._replace(often=False)
            else:
                self._once.popitem(last=False)
        elif known >= self._capacity:
            if known >= 2 * self._capacity:
                self._often_gone.popitem(last=False)
            self._replace(often=False)

    def _replace(self, *, often: bool) -> None:
        """One block leaves; `often`: the request was for one that the second queue gave up."""
        count = len(self._once)
        above = count > self._target or (often and count == int(self._target))
        if count and (above or not self._often):
            block, _ = self._once.popitem(last=False)
            self._once_gone[block] = 1
        else:
            block, _ = self._often.popitem(last=False)
            self._often_gone[block] = 1


class LirsPolicy:
    """LIRS (S. Jiang, X. Zhang, SIGMETRICS 2002): blocks whose last two requests lie close together
    have 99 % of the room, all others share a queue of 1 %.

    The stack of recent requests is no longer than twice the capacity: of those that left the cache
    the first ones are forgotten.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._most_close = capacity - max(1, capacity // 100)
        self._close: set[int] = set()
        self._stack: OrderedDict[int, int] = OrderedDict()
        self._queue: OrderedDict[int, int] = OrderedDict()  # resident, not close
        self._gone: OrderedDict[int, int] = OrderedDict()  # in the stack, not resident

    def request(self, block: int) -> bool:
        """Whether it hits."""
        if block in self._close:
            last = oldest(self._stack) == block
            self._stack.move_to_end(block)
            if last:
                self._prune()
            return True
        if block in self._queue:
            again = block in self._stack
            self._stack[block] = 1
            self._stack.move_to_end(block)
            self._queue.move_to_end(block)
            if again:
                del self._queue[block]
                self._draw_close(block)
            return True
        again = self._gone.pop(block, 0) == 1
        if again:
            del self._stack[block]
        if len(self._close) + len(self._queue) >= self._capacity:
            self._evict()
        self._stack[block] = 1
        if again or len(self._close) < self._most_close:
            self._draw_close(block)
        else:
            self._queue[block] = 1
        while len(self._stack) > 2 * self._capacity and self._gone:
            forgotten, _ = self._gone.popitem(last=False)
            del self._stack[forgotten]
        return False

    def _draw_close(self, block: int) -> None:
        self._close.add(block)
        if len(self._close) > self._most_close:
            self._demote()

    def _demote(self) -> None:
        block, _ = self._stack.popitem(last=False)
        self._close.discard(block)
        self._queue[block] = 1
        self._prune()

    def _prune(self) -> None:
        """The stack ends with a close block."""
        while self._stack and (block := oldest(self._stack)) not in self._close:
            del self._stack[block]
            self._gone.pop(block, None)

    def _evict(self) -> None:
        if not self._queue:
            self._demote()
        block, _ = self._queue.popitem(last=False)
        if block in self._stack:
            self._gone[block] = 1


class TinyLfuPolicy:
    """W-TinyLFU (G. Einziger, R. Friedman, B. Manes, ACM ToS 2017): a window LRU of 1 %, behind it
    an LRU of two segments that lets in what was asked for more often than what would leave.

    Counts end at 15 and are halved after 10 requests per block of capacity.
    """

    def __init__(self, capacity: int, blocks: int) -> None:
        self._most_window = max(1, capacity // 100)
        self._most_main = capacity - self._most_window
        self._most_safe = self._most_main * 8 // 10
        self._counts = np.zeros(blocks, np.uint8)
        self._made, self._period = 0, 10 * capacity
        self._window: OrderedDict[int, int] = OrderedDict()
        self._trial: OrderedDict[int, int] = OrderedDict()
        self._safe: OrderedDict[int, int] = OrderedDict()

    def request(self, block: int) -> bool:
        """Whether it hits."""
        self._count(block)
        for queue in (self._window, self._safe):
            if block in queue:
                queue.move_to_end(block)
                return True
        if block in self._trial:
            del self._trial[block]
            self._safe[block] = 1
            if len(self._safe) > self._most_safe:
                back, _ = self._safe.popitem(last=False)
                self._trial[back] = 1
            return True
        self._window[block] = 1
        if len(self._window) > self._most_window:
            self._admit(self._window.popitem(last=False)[0])
        return False

    def _count(self, block: int) -> None:
        if self._counts[block] < 15:
            self._counts[block] += 1
        self._made += 1
        if self._made >= self._period:
            self._counts >>= 1
            self._made //= 2

    def _admit(self, block: int) -> None:
        if len(self._trial) + len(self._safe) < self._most_main:
            self._trial[block] = 1
            return
        if not self._most_main:
            return
        queue = self._trial or self._safe
        victim = oldest(queue)
        if self._counts[block] > self._counts[victim]:
            del queue[victim]
            self._trial[block] = 1
