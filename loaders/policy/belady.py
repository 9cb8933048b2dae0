"""The most that any cache could have hit, known afterwards: the ceiling for every policy."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.plans import Bools, Int64s


def next_uses(requests: Int64s) -> Int64s:
    """int64[n]: index of the next request of the same block; n where there is none."""
    rank = np.argsort(requests, kind="stable")
    ranked = requests[rank]
    found = np.full(len(requests), len(requests), np.int64)
    same = ranked[1:] == ranked[:-1]
    found[rank[:-1][same]] = rank[1:][same]
    return found


def belady(requests: npt.ArrayLike, capacity_blocks: int) -> Bools:
    """bool[n]: which requests hit under MIN with bypass, one by one. Equal blocks only.

    What is asked for latest leaves; a newcomer that is asked for later still does not come in
    (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).
    About 1 us a request.
    """
    asked = np.ascontiguousarray(requests, np.int64)
    count = len(asked)
    blocks, following = asked.tolist(), next_uses(asked).tolist()
    due: dict[int, int] = {}  # resident blocks and their next use
    latest: list[int] = []  # heap of next uses, negated; those that have passed are stale
    hits = bytearray(count)
    for at, block in enumerate(blocks):
        use = following[at]
        if block in due:
            hits[at] = 1
        elif len(due) >= capacity_blocks:
            # a stale entry lies in the past, and so never before one that is not
            if not latest or -latest[0] <= use:
                continue
            del due[blocks[-heapq.heappop(latest)]]
        if use == count:
            due.pop(block, None)  # never again: its place is free
        else:
            due[block] = use
            heapq.heappush(latest, -use)
    return np.frombuffer(hits, np.bool_)


class SampledLog:
    """Requests of every n-th block, by hash, and whether they hit: to be compared with MIN.

    A sample of blocks against the same share of the capacity behaves as the whole (miniature
    simulation). Keeps the last `limit` requests, 9 bytes each.
    """

    def __init__(self, capacity_blocks: float, *, every: int = 16, limit: int = 1 << 20) -> None:
        self._capacity, self._every = capacity_blocks, every
        self._blocks = np.empty(limit, np.int32)
        self._hits = np.empty(limit, np.bool_)
        self.count = 0

    def record(self, blocks: Int64s, hit: Bools) -> None:
        """A batch of requests."""
        # Knuth's multiplicative hash: neighbours go to different places
        chosen = (blocks * 2_654_435_761 % 2**32) < 2**32 // self._every
        blocks, hit = blocks[chosen], hit[chosen]
        limit = len(self._blocks)
        at = (self.count + np.arange(len(blocks))) % limit
        self._blocks[at], self._hits[at] = blocks, hit
        self.count += len(blocks)

    def share_of_min(self) -> float | None:
        """Hits over the hits of MIN on the same requests, None when that has none.

        MIN starts empty; the first half of the log warms both up and is not counted.
        """
        limit = len(self._blocks)
        at = np.arange(max(0, self.count - limit), self.count) % limit
        best = belady(self._blocks[at], max(1, round(self._capacity / self._every)))
        half = len(at) // 2
        most = int(best[half:].sum())
        return int(self._hits[at][half:].sum()) / most if most else None


__all__ = ["SampledLog", "belady", "next_uses"]
