"""The most that any cache could have hit, known afterwards: the ceiling for every policy."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.cache_plan import Bools, Int64s


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


def _held_at_once(requests: Int64s, hit: Bools) -> int:
    """The most blocks that a cache held at one time for hits to come, as its hits show.

    `hit` bool[n]: which of its requests it hit. A block that hits lay there since its last request,
    or since before the first one.
    """
    since = np.full(len(requests), -1, np.int64)  # the last request of the same block
    following = next_uses(requests)
    again = np.flatnonzero(following < len(requests))
    since[following[again]] = again
    change = np.zeros(len(requests) + 1, np.int64)  # [i]: kept from request i - 1 on
    np.add.at(change, since[hit] + 1, 1)
    np.add.at(change, np.flatnonzero(hit) + 1, -1)
    return int(np.cumsum(change).max(initial=0))


def most_hits(
    requests: npt.ArrayLike, capacity_blocks: int, *caches: Bools, counted: int = 0
) -> int:
    """Hits of MIN in requests[counted:]: no fewer than any of `caches` had there.

    `caches` bool[n] each: which requests caches hit that were measured on them. A bound for these
    must grant MIN what they had: it begins with the best of what requests[:counted] asked for and
    of what they held before, and it has room for as many blocks as they held at one time. That is
    more than `capacity_blocks` where blocks are smaller than their mean, where a batch under way
    has blocks beside the cache's, or where requests are a sample.
    """
    asked = np.ascontiguousarray(requests, np.int64)
    before, window = asked[:counted], asked[counted:]
    room, held = capacity_blocks, [before]
    blocks, first = np.unique(window, return_index=True)
    for cache in caches:
        hit = np.asarray(cache, np.bool_)[counted:]
        room = max(room, _held_at_once(window, hit))
        held.append(blocks[hit[first]])
    begun = np.unique(np.concatenate(held))  # asked for once each: no hits among them
    return int(belady(np.concatenate((begun, window)), room).sum())


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
        """Hits over the hits of MIN on the same requests, at most 1; None when MIN has none.

        The first half of the log warms both up and is not counted.
        """
        limit = len(self._blocks)
        at = np.arange(max(0, self.count - limit), self.count) % limit
        half, hits = len(at) // 2, self._hits[at]
        room = max(1, round(self._capacity / self._every))
        most = most_hits(self._blocks[at], room, hits, counted=half)
        return int(hits[half:].sum()) / most if most else None
