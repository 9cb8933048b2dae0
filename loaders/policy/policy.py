"""The cache's policy: one score for every block, its expected next use. Pure, numpy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.plans import Floats, Int64s, Plan, Wanted


class CachePolicy:
    """Which blocks stay, which come, which leave. No clocks, files, threads or randomness.

    Blocks are numbered 0 .. blocks - 1. `sizes`: bytes of every block, one number or int64[blocks]
    (not copied, not to be changed). Residents, blocks in flight among them, never take more than
    `capacity_bytes`. `jobs`: how many streams of requests share the cache, numbered from 0; any
    mixture of known and unknown orders. Phase bits ("seen this epoch") are kept for the first 8.

    All bytes count alike, which makes the most of a device's bandwidth. `request_cost_bytes` says
    what a request costs besides its bytes: seconds to the first byte times bandwidth. Large values
    favour small blocks.

    One thread at a time. Equal calls give equal answers; `seed` chooses the sample of blocks on
    which the learner's experts are compared. Blocks outside the range raise ValueError before
    anything has changed; so does an unknown job. ConfigError: no blocks, no jobs, negative sizes,
    or a capacity below the largest block (the message names the minimum).
    """

    def __init__(
        self, sizes: int | Int64s, blocks: int, capacity_bytes: int, *, jobs: int = 1,
        seed: int = 0, request_cost_bytes: int = 0,
    ) -> None:  # fmt: skip
        raise NotImplementedError

    @property
    def resident_bytes(self) -> int:
        """Bytes of residents, blocks in flight among them. Never above the capacity."""
        raise NotImplementedError

    @property
    def counters(self) -> Mapping[str, int]:
        """Since construction: requests, hits, late, repeats, admissions, evictions, bypasses,
        mismatches (orders that were not kept), switches (of experts), prefetches.
        """
        raise NotImplementedError

    def residents(self) -> Int64s:
        """Blocks in the cache, blocks in flight among them, in no order."""
        raise NotImplementedError

    def contains(self, blocks: Int64s) -> npt.NDArray[np.bool_]:
        """bool[n]: which blocks are resident or in flight."""
        raise NotImplementedError

    def begin_epoch(self, job: int, requests: int | None = None) -> None:
        """A job starts a pass over its data: nothing is "seen" by it yet.

        `requests`: how many it will make in this pass; None: as many as in its last one, in the
        first as many as there are blocks. Optional: without it there are no phase bits.
        """
        raise NotImplementedError

    def expect(self, job: int, blocks: Int64s | None) -> None:
        """The coming requests of a job, int64[n], after those that it was told before.

        Tell at least one epoch, better two, for one rank of W up to 2 W epochs; 8 bytes a request
        until it has been made. Every access() is checked against it. After a mismatch (counted)
        the job's order is unknown and what is told is ignored, until None comes: it forgets the
        past and what was foretold, e.g. before telling a new order after a seek.
        """
        raise NotImplementedError

    def expected(self, job: int) -> int:
        """Requests foretold and not made yet; 0 when the job's order is unknown."""
        raise NotImplementedError

    def mismatched(self, job: int) -> bool:
        """Whether the job has left its foretold order since the last expect(job, None)."""
        raise NotImplementedError

    def access(self, job: int, blocks: Int64s) -> Plan:
        """One batch of requests of a job: blocks int64[n] in their order, repeats among them.

        The plan holds from now on. Call dropped() for what could not be fetched.
        """
        raise NotImplementedError

    def next_wanted(self, job: int, budget_bytes: int, *, requests: int = 65_536) -> Wanted:
        """Blocks that a job will ask for, by deadline: at most `budget_bytes`, of the next `requests`.

        Do no harm: a block is only fetched when it fits, or when residents used later than it can
        make room. Empty when the order is unknown.
        """
        raise NotImplementedError

    def favourites(self, budget_bytes: int) -> Wanted:
        """For a restart with free room: blocks that are not resident, soonest expected use first.

        As next_wanted(), but never evicts. One pass over all blocks: 0.2 s at 10 million.
        """
        raise NotImplementedError

    def arrived(self, blocks: Int64s) -> None:
        """Blocks of a Wanted are here: residents like others from now on."""
        raise NotImplementedError

    def dropped(self, blocks: Int64s) -> None:
        """Blocks left the cache for other reasons: failed fetch, disk gone. Absent ones are no error."""
        raise NotImplementedError

    def hold(self, blocks: Int64s) -> Int64s:
        """Blocks found in the cache at a start (a disk of the last run): those that fit are resident.

        Returns those that do not fit, for the caller to remove. Already resident ones are kept.
        """
        raise NotImplementedError

    def pin(self, blocks: Int64s) -> None:
        """Residents that must not be evicted for now; counted, up to 255 times each."""
        raise NotImplementedError

    def unpin(self, blocks: Int64s) -> None:
        """Takes back one pin() of each. Raises ValueError for a block that has none."""
        raise NotImplementedError

    def expected_use(self, blocks: Int64s) -> Floats:
        """When blocks are needed next: float32[n], ln of requests (of all jobs) from now; inf: never.

        The score of every decision; tiers compare it to keep the soonest in the fastest.
        """
        raise NotImplementedError

    def state_arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What was learned, by name: numpy arrays to store with numpy.savez, never pickled.

        Not foretold orders: they are told again.
        """
        raise NotImplementedError

    def restore(
        self, arrays: Mapping[str, npt.NDArray[np.generic]], *, residents: Int64s | None = None
    ) -> None:
        """Continue from state_arrays() of a policy of equal construction.

        `residents`: blocks that are really there; None: those of the arrays. Jobs in other number
        start without phase bits. Raises ConfigError (nothing changed) when arrays are missing, have
        other shapes or were made for another number of blocks.
        """
        raise NotImplementedError


__all__ = ["CachePolicy"]
