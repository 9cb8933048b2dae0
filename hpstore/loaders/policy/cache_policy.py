"""The cache's policy: one score for every block, its expected next use. Pure, numpy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.block_stats import Table
from hpstore.loaders.policy.cache_plan import Bools, CachePlan, Floats, Int32s, Int64s, WantedBlocks
from hpstore.loaders.policy.next_use import Outlook
from hpstore.loaders.policy.policy_checks import STATE_VERSION, check_arrays, check_sizes
from hpstore.loaders.policy.resident_set import EXACT, Residents
from hpstore.loaders.policy.unique_blocks import distinct, in_order

_CANDIDATES = 8  # for every victim
_TOGETHER = 32  # newcomers set against drawn residents; up to 8 times as many if so many win
_SCAN = 4096  # foretold requests looked at in one go
_FLIGHT = np.uint8(1)


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
        self,
        sizes: int | Int64s,
        blocks: int,
        capacity_bytes: int,
        *,
        jobs: int = 1,
        seed: int = 0,
        request_cost_bytes: int = 0,
    ) -> None:
        total = check_sizes(sizes, blocks, jobs, capacity_bytes)
        self.blocks, self.jobs, self.capacity_bytes = blocks, jobs, capacity_bytes
        self._sizes, self._cost = sizes, request_cost_bytes
        self._equal_bytes = sizes if isinstance(sizes, int) else 0
        self._smallest = sizes if isinstance(sizes, int) else int(sizes.min())
        self._table = Table(blocks)
        most = capacity_bytes // self._smallest if self._smallest else blocks
        self._residents = Residents(self._table, min(blocks, most))
        self._used = 0
        self._together = _TOGETHER
        self._state = np.zeros(blocks, np.uint8)
        self._in_flight = 0
        self._pins = np.empty(0, np.uint8)  # until the first pin
        self._pinned = 0
        share = min(1.0, capacity_bytes / max(total, 1))
        self._outlook = Outlook(
            blocks,
            jobs,
            table=self._table,
            capacity_share=share,
            seed=seed,
            soft=request_cost_bytes > 0,
        )
        self._counters = dict.fromkeys(
            (
                "requests",
                "hits",
                "late",
                "repeats",
                "admissions",
                "evictions",
                "bypasses",
                "prefetches",
            ),
            0,
        )

    @property
    def resident_bytes(self) -> int:
        """Bytes of residents, blocks in flight among them. Never above the capacity."""
        return self._used

    @property
    def index_bytes(self) -> int:
        """Bytes of memory that the policy's arrays take."""
        return (
            self._table.nbytes
            + self._residents.nbytes
            + self._state.nbytes
            + self._pins.nbytes
            + self._outlook.nbytes
        )

    @property
    def expert(self) -> str:
        """Who judges blocks of unknown order now."""
        return self._outlook.expert

    @property
    def counters(self) -> Mapping[str, int]:
        """Since construction: requests, hits, late, repeats, admissions, evictions, bypasses,
        mismatches (orders that were not kept), switches (of experts), prefetches.
        """
        return self._counters | {
            "mismatches": self._outlook.mismatches,
            "switches": self._outlook.switches,
        }

    def residents(self) -> Int64s:
        """Blocks in the cache, blocks in flight among them, in no order."""
        return self._residents.listed().astype(np.int64)

    def contains(self, blocks: Int64s) -> Bools:
        """bool[n]: which blocks are resident or in flight."""
        return self._residents.contains(self._checked(blocks))

    def begin_epoch(self, job: int, requests: int | None = None) -> None:
        """A job starts a pass over its data: nothing is "seen" by it yet.

        `requests`: how many it will make in this pass; None: as many as in its last one, in the
        first as many as there are blocks. Optional: without it there are no phase bits.
        """
        self._check_job(job)
        self._outlook.begin_epoch(job, requests)

    def expect(self, job: int, blocks: Int64s | None, *, drawn: bool = False) -> None:
        """The coming requests of a job, int64[n], after those that it was told before.

        Tell at least one epoch, better two, for one rank of W up to 2 W epochs; 8 bytes a request
        until it has been made. `drawn`: of an order otherwise unknown, batches that its sampler has
        drawn already; behind them counts what is learned. While requests of one kind are left,
        others count as of that kind. Draws of less than 1/32 of a cache of more than 4,096 blocks
        only serve to prefetch.

        Every access() is checked against it. After a mismatch (counted) the job's order is unknown
        and what is told is ignored, until None comes: it forgets the past and what was foretold,
        e.g. before telling a new order after a seek.
        """
        self._check_job(job)
        told = None if blocks is None else self._checked(blocks)
        self._outlook.expect(job, told, drawn=drawn)

    def expected(self, job: int) -> int:
        """Requests foretold and not made yet; 0 when the job's order is unknown."""
        self._check_job(job)
        return self._outlook.futures[job].queued

    def mismatched(self, job: int) -> bool:
        """Whether the job has left its foretold order since the last expect(job, None)."""
        self._check_job(job)
        return self._outlook.futures[job].mismatched

    def access(self, job: int, blocks: Int64s) -> CachePlan:
        """One batch of requests of a job: blocks int64[n] in their order, repeats among them.

        The plan holds from now on. Call dropped() for what could not be fetched.
        """
        self._check_job(job)
        asked = self._checked(blocks)
        if not len(asked):
            return _nothing()
        once = distinct(asked)
        observed = self._outlook.observe(job, asked, once)
        missed = ~observed.resident
        newcomers = once.blocks[missed]
        admit = evict = np.empty(0, np.int64)
        if len(newcomers):
            waits = self._outlook.newcomers(newcomers, missed, observed)
            admit, evict = self._exchange(newcomers, waits)
        hit = np.empty(len(asked), np.bool_)
        late, again = np.zeros(len(asked), np.bool_), np.zeros(len(asked), np.bool_)
        if len(once.blocks) < len(asked):
            hit[once.order] = observed.resident.repeat(once.counts)
            np.logical_not(hit, out=again)
            again[once.first] = False
            self._counters["repeats"] += int(np.count_nonzero(again))
        else:
            hit[once.order] = observed.resident
        if self._in_flight:
            np.logical_and(hit, self._state[asked] & _FLIGHT, out=late)
            hit &= ~late
            self._counters["late"] += int(np.count_nonzero(late))
        self._counters["requests"] += len(asked)
        self._counters["hits"] += int(np.count_nonzero(hit))
        self._counters["bypasses"] += len(newcomers) - len(admit)
        return CachePlan(hit=hit, late=late, again=again, admit=admit, evict=evict)

    def next_wanted(self, job: int, budget_bytes: int, *, requests: int = 65_536) -> WantedBlocks:
        """Blocks that a job will ask for, by deadline, of its next `requests`: up to a budget.

        Do no harm: a block is only fetched when it fits, or when residents used later than it can
        make room. Empty when the order is unknown.
        """
        self._check_job(job)
        future = self._outlook.futures[job]
        found, spent = [], 0
        for start in range(0, min(requests, future.queued), _SCAN):
            coming = future.upcoming(start, min(_SCAN, requests - start)).astype(np.int64)
            found.append(coming[~self._residents.contains(coming)])
            spent += int(self._bytes_of(in_order(found[-1])).sum())
            if spent > budget_bytes:
                break
        wanted = in_order(np.concatenate(found)) if found else np.empty(0, np.int64)
        wanted = wanted[np.cumsum(self._bytes_of(wanted)) <= budget_bytes]
        return self._send_for(wanted, self._outlook.waits(wanted, job))

    def favourites(self, budget_bytes: int) -> WantedBlocks:
        """For a restart with free room: blocks that are not resident, soonest expected use first.

        As next_wanted(), but never evicts. One pass over all blocks: 0.2 s at 10 million.
        """
        absent = np.ones(self.blocks, np.bool_)
        absent[self._residents.listed()] = False
        blocks = np.flatnonzero(absent)
        waits = self._outlook.waits(blocks)
        blocks, waits = blocks[np.isfinite(waits)], waits[np.isfinite(waits)]
        rising = np.argsort(waits, kind="stable")
        blocks, waits = blocks[rising], waits[rising]
        room = min(budget_bytes, self.capacity_bytes - self._used)
        fits = np.cumsum(self._bytes_of(blocks)) <= room
        return self._send_for(blocks[fits], waits[fits])

    def arrived(self, blocks: Int64s) -> None:
        """Blocks of a Wanted are here: residents like others from now on."""
        here = np.unique(self._checked(blocks))
        self._land(here[self._state[here] & _FLIGHT != 0])

    def dropped(self, blocks: Int64s) -> None:
        """Blocks left the cache for other reasons: failed fetch, disk gone.

        Absent ones are no error.
        """
        gone = np.unique(self._checked(blocks))
        gone = gone[self._residents.contains(gone)]
        self._land(gone[self._state[gone] & _FLIGHT != 0])
        self._remove(gone)

    def hold(self, blocks: Int64s) -> Int64s:
        """Blocks found in the cache at a start (a disk of the last run): those that fit stay.

        Returns those that do not fit, for the caller to remove. Already resident ones are kept.
        """
        found = in_order(self._checked(blocks))
        found = found[~self._residents.contains(found)]
        fits = np.cumsum(self._bytes_of(found)) <= self.capacity_bytes - self._used
        self._add(found[fits])
        return found[~fits]

    def pin(self, blocks: Int64s) -> None:
        """Residents that must not be evicted for now; counted, up to 255 times each.

        Raises ValueError, with nothing changed, beyond that.
        """
        once, _, counts, _ = distinct(self._checked(blocks))
        if not len(self._pins):
            self._pins = np.zeros(self.blocks, np.uint8)
        pins = self._pins[once] + counts
        if (pins > 255).any():
            raise ValueError(f"block {once[pins > 255][0]} is pinned more than 255 times")
        self._pinned += int((self._pins[once] == 0).sum())
        self._pins[once] = pins

    def unpin(self, blocks: Int64s) -> None:
        """Takes back one pin() of each. Raises ValueError for a block that has none."""
        once, _, counts, _ = distinct(self._checked(blocks))
        pins = self._pins[once] - counts if len(self._pins) else -counts
        if (pins < 0).any():
            raise ValueError(f"block {once[pins < 0][0]} is not pinned so often")
        self._pinned -= int((pins == 0).sum())
        if len(once):
            self._pins[once] = pins

    def expected_use(self, blocks: Int64s) -> Floats:
        """When blocks are needed next: float32[n], ln of requests of all jobs from now.

        inf: never. The score of every decision; tiers compare it to keep the soonest nearest.
        """
        return self._outlook.waits(self._checked(blocks))

    def state_arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What was learned, by name: numpy arrays to store with numpy.savez, never pickled.

        Not foretold orders: they are told again.
        """
        draws = (self._residents.draws, self._together)
        made = np.array([STATE_VERSION, self.blocks, self.jobs, *draws])
        found = {"policy": made, "residents": self._residents.listed(), **self._outlook.state()}
        return {name: np.array(array) for name, array in found.items()}

    def restore(
        self, arrays: Mapping[str, npt.NDArray[np.generic]], *, residents: Int64s | None = None
    ) -> None:
        """Continue from state_arrays() of a policy of equal construction.

        `residents`: blocks that are really there; None: those of the arrays. What does not fit is
        left out. Nothing is in flight or pinned. Raises ConfigError (nothing changed) when arrays
        are missing, have other shapes or were made for another number of blocks or jobs.
        """
        check_arrays(arrays, self.blocks, self.jobs)
        self._outlook.check(arrays)
        there = arrays["residents"].astype(np.int64) if residents is None else residents
        there = self._checked(there)
        self._outlook.load(arrays)
        self._residents.clear()
        self._residents.draws, self._together = arrays["policy"].astype(np.int64)[3:].tolist()
        self._used = self._in_flight = self._pinned = 0
        self._state[:] = 0
        self._pins = np.empty(0, np.uint8)
        self.hold(there)
        self._outlook.begin_with()

    def _exchange(self, newcomers: Int64s, waits: Floats) -> tuple[Int64s, Int64s]:
        """Newcomers that come in and residents that leave for them, done; soonest first.

        The soonest newcomer is set against the latest resident, and so on, as long as the
        newcomer is needed sooner than all that leave for it.
        """
        if self._cost:
            waits = waits + self._dearness(newcomers)
        if self._total(newcomers) <= self.capacity_bytes - self._used:
            rank = np.argsort(waits, kind="stable")
            self._add(newcomers[rank])
            return newcomers[rank], np.empty(0, np.int64)
        came, gone = [], []
        exact = self._residents.count <= EXACT
        together = len(newcomers) if exact else self._together
        while len(newcomers):
            victims, latest = self._candidates(together)
            if self.capacity_bytes - self._used < self._smallest:
                # mostly few newcomers have a chance, and nothing else is to be done
                chance = waits < np.maximum.reduce(latest, initial=-np.inf)
                newcomers, waits = newcomers[chance], waits[chance]
                if not len(newcomers):
                    break
            rank = np.argsort(waits, kind="stable")
            newcomers, waits = newcomers.take(rank), waits.take(rank)
            tried = min(together, len(newcomers))
            taken, evict = self._contest(newcomers[:tried], waits[:tried], victims, latest)
            came.append(newcomers[:taken])
            gone.append(evict)
            if taken < tried:
                break
            newcomers, waits = newcomers[taken:], waits[taken:]
            together *= 2
        if not exact:
            won = sum(map(len, came))
            self._together = min(max(_TOGETHER, 1 << won.bit_length()), 8 * _TOGETHER)
        if len(came) == 1:
            return came[0], gone[0]
        nothing = [np.empty(0, np.int64)]
        return np.concatenate(came or nothing), np.concatenate(gone or nothing)

    def _candidates(self, together: int) -> tuple[Int64s, Floats]:
        """Residents that may leave, in no order, and their expected use."""
        if self._residents.count <= EXACT:
            found = self._residents.listed()
        else:
            found = self._drawn(together)
        drawn = found.astype(np.int64)  # the only kind of index that numpy does not convert
        if self._in_flight:
            drawn = drawn[self._state[drawn] & _FLIGHT == 0]
        if self._pinned:
            drawn = drawn[self._pins[drawn] == 0]
        waits = self._outlook.waits(drawn)
        return drawn, waits + self._dearness(drawn) if self._cost else waits

    def _drawn(self, together: int) -> Int32s:
        """Of many residents: those that go first, and drawn ones where they are too few."""
        first = self._outlook.leavers(together)
        if len(first) >= together:
            return first
        drawn = self._residents.draw(_CANDIDATES * (together - len(first)))
        return np.unique(np.concatenate((first, drawn))) if len(first) else drawn

    def _contest(
        self, newcomers: Int64s, waits: Floats, victims: Int64s, latest: Floats
    ) -> tuple[int, Int64s]:
        """How many of the newcomers, in order, came in, and who left for them."""
        # of equal blocks one for one; of others a few small ones may leave for a large one
        limit = len(newcomers) if self._equal_bytes else 4 * len(newcomers) + 16
        if len(victims) > limit:
            last = np.argpartition(latest, len(victims) - limit)[len(victims) - limit :]
            victims, latest = victims.take(last), latest.take(last)
        rank = np.argsort(-latest, kind="stable")
        leaving, soonest = victims.take(rank), latest.take(rank)
        room = self.capacity_bytes - self._used
        if self._equal_bytes and room < self._equal_bytes:
            count = min(len(newcomers), len(leaving))
            taken = _run(waits[:count] < soonest[:count])
            self._residents.swap(leaving[:taken], newcomers[:taken])
            self._counters["admissions"] += taken
            self._counters["evictions"] += taken
            return taken, leaving[:taken]
        short = np.cumsum(self._bytes_of(newcomers)) - room
        freed = np.cumsum(self._bytes_of(leaving))
        needed = np.where(short > 0, np.searchsorted(freed, short) + 1, 0)
        # the soonest of those that must leave decides; without enough of them nobody comes
        decides = np.append(soonest, np.float32(-np.inf))[np.maximum(needed, 1) - 1]
        taken = _run((waits < decides) | (needed == 0))
        evict = leaving[: needed[taken - 1]] if taken else leaving[:0]
        self._remove(evict)
        self._add(newcomers[:taken])
        return taken, evict

    def _send_for(self, wanted: Int64s, waits: Floats) -> WantedBlocks:
        fetch, evict = self._exchange(wanted, waits)
        self._state[fetch] |= _FLIGHT
        self._in_flight += len(fetch)
        self._counters["prefetches"] += len(fetch)
        return WantedBlocks(fetch=fetch, evict=evict)

    def _land(self, blocks: Int64s) -> None:
        self._state[blocks] &= ~_FLIGHT
        self._in_flight -= len(blocks)

    def _add(self, blocks: Int64s) -> None:
        self._residents.add(blocks)
        self._used += self._total(blocks)
        self._counters["admissions"] += len(blocks)

    def _remove(self, blocks: Int64s) -> None:
        self._residents.remove(blocks)
        self._used -= self._total(blocks)
        self._counters["evictions"] += len(blocks)

    def _total(self, blocks: Int64s) -> int:
        if isinstance(self._sizes, int):
            return len(blocks) * self._sizes
        return int(self._sizes[blocks].sum())

    def _bytes_of(self, blocks: Int64s | Int32s) -> Int64s:
        if isinstance(self._sizes, int):
            return np.full(len(blocks), self._sizes, np.int64)
        return self._sizes[blocks]

    def _dearness(self, blocks: Int64s | Int32s) -> Floats:
        """What a request saved is worth, against one of no cost besides its bytes: ln, negated."""
        sizes = np.maximum(self._bytes_of(blocks), 1)
        dear: Floats = -np.log1p(self._cost / sizes).astype(np.float32)
        return dear

    def _check_job(self, job: int) -> None:
        if not 0 <= job < self.jobs:
            raise ValueError(f"job {job}: there are 0 .. {self.jobs - 1}")

    def _checked(self, blocks: npt.ArrayLike) -> Int64s:
        asked = np.ascontiguousarray(blocks, np.int64).reshape(-1)
        # one pass: negative numbers are large ones without a sign
        if len(asked) and int(np.maximum.reduce(asked.view(np.uint64))) >= self.blocks:
            raise ValueError(
                f"blocks {asked.min()} .. {asked.max()}: there are 0 .. {self.blocks - 1}"
            )
        return asked


def _nothing() -> CachePlan:
    none, blocks = np.empty(0, np.bool_), np.empty(0, np.int64)
    return CachePlan(hit=none, late=none, again=none, admit=blocks, evict=blocks)


def _run(flags: Bools) -> int:
    """How many are set before the first that is not."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first
