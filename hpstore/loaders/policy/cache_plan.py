"""What the policy answers. Arrays are the caller's, freshly made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What one batch of requests means for the cache. n requests, in the order given.

    `hit` bool[n]: resident when the batch came. `late` bool[n]: on its way by a prefetch
    (next_wanted() named it, arrived() has not). `again` bool[n]: an earlier request of this batch
    misses the same block, so that no second fetch is needed. A request with none of the three is
    a miss that must be fetched: every such block is there exactly once.

    `admit` int64[]: missed blocks to keep; they count as resident from now on. `evict` int64[]:
    residents that leave; they count as gone. Both unique and disjoint. An evicted block may be one
    that hits in this very batch: serve the batch first, then give its place away.
    """

    hit: Bools
    late: Bools
    again: Bools
    admit: Int64s
    evict: Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedBlocks:
    """Blocks worth fetching before anybody asks.

    `fetch` int64[]: in order of deadline; they are in flight, count as resident and are never
    evicted until arrived() or dropped(). `evict` int64[]: residents that leave for them, each
    used later than the block that takes its place.
    """

    fetch: Int64s
    evict: Int64s
