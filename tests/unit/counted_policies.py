"""Policies that count requests of all blocks, resident or not, and those that know epochs.

Forward decay (G. Cormode, V. Shkapenyuk, D. Srivastava, B. Xu, "Forward decay", ICDE 2009): a
request at time t weighs 2**(t / H), for ever. So nothing ages.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_DRAWN = 8  # residents looked at for one that leaves


class CountPolicy:
    """The block with the least count leaves.

    A newcomer is judged by its count before this request, and must be `margin` times better: a scan
    then does not displace what was asked for before.
    """

    def __init__(self, capacity: int, *, margin: float, growth: float = 1.0) -> None:
        """`growth`: what a request weighs, the one before it being 1; 1 counts for ever."""
        self._capacity, self._growth, self._margin = capacity, growth, margin
        self._weight = 1.0
        self._keys: dict[int, float] = {}
        self._order: list[int] = []  # a heap of residents
        self._place: dict[int, int] = {}

    def request(self, block: int) -> bool:
        """Whether it hits."""
        self._weight *= self._growth
        before = self._keys.get(block, 0.0)
        self._keys[block] = before + self._weight
        if block in self._place:
            self._sift_down(self._place[block])
            return True
        if len(self._order) >= self._capacity:
            if self._is_worse(before, self._keys[block], self._keys[self._order[0]]):
                return False
            del self._place[self._order[0]]
            last = self._order.pop()
            if self._order:
                self._put(0, last)
                self._sift_down(0)
        self._order.append(block)
        self._sift_up(len(self._order) - 1)
        return False

    def _is_worse(self, before: float, _after: float, least: float) -> bool:
        return before <= least * self._margin

    def _put(self, at: int, block: int) -> None:
        self._order[at] = block
        self._place[block] = at

    def _sift_up(self, at: int) -> None:
        block = self._order[at]
        while at and self._keys[above := self._order[(at - 1) // 2]] > self._keys[block]:
            self._put(at, above)
            at = (at - 1) // 2
        self._put(at, block)

    def _sift_down(self, at: int) -> None:
        block, keys, order = self._order[at], self._keys, self._order
        while (below := 2 * at + 1) < len(order):
            if below + 1 < len(order) and keys[order[below + 1]] < keys[order[below]]:
                below += 1
            if keys[order[below]] >= keys[block]:
                break
            self._put(at, order[below])
            at = below
        self._put(at, block)


class FreshCountPolicy(CountPolicy):
    """Counts fade, and a newcomer is judged by its count now; an equal one is let in, which follows
    a moving working set.
    """

    def __init__(self, capacity: int, *, growth: float) -> None:
        super().__init__(capacity, margin=1.0, growth=growth)

    def _is_worse(self, _before: float, after: float, least: float) -> bool:
        return after < least


class StaticPolicy:
    """The first blocks stay, none leaves: all that can be had of a full reshuffle each epoch."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: set[int] = set()

    def request(self, block: int) -> bool:
        """Whether it hits."""
        if block in self._kept:
            return True
        if len(self._kept) < self._capacity:
            self._kept.add(block)
        return False


class PhasePolicy:
    """Of eight drawn blocks the one leaves that jobs within their epochs need last."""

    def __init__(self, capacity: int, wait: Callable[[int], float], *, margin: float) -> None:
        self._capacity, self._wait, self._margin = capacity, wait, margin
        self._draws = 0
        self._order: list[int] = []
        self._kept: set[int] = set()

    def request(self, block: int) -> bool:
        """Whether it hits."""
        if block in self._kept:
            return True
        if len(self._order) < self._capacity:
            self._order.append(block)
            self._kept.add(block)
            return False
        most, latest = -math.inf, 0
        for _ in range(_DRAWN):
            self._draws = (self._draws * 1_664_525 + 1_013_904_223) & 0xFFFFFFFF
            at = self._draws * len(self._order) >> 32
            wait = self._wait(self._order[at])
            if wait > most:
                most, latest = wait, at
        if self._wait(block) + self._margin < most:
            self._kept.discard(self._order[latest])
            self._order[latest] = block
            self._kept.add(block)
        return False
