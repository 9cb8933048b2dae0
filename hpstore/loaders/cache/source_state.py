"""What the cache knows of one source: where its blocks are, who reads it, what is on its way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpstore.codec.galois import Bytes
from hpstore.loaders.cache.block_source import BlockSource, bytes_of, total_bytes
from hpstore.loaders.cache.disk_tier import DiskPart
from hpstore.loaders.cache.page_allocator import FoundPages, FreePages, Int32s, Pages
from hpstore.loaders.cache.policy_interface import Policy
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.policy import SampledLog
from hpstore.units import KIB, MIB

MOST_JOBS = 16  # that share one source
FETCHED, AHEAD = 1, 2  # marks of a block: read from its source before; prefetched, not asked for
LOOK_BATCHES = 32  # how far ahead of its turn a batch may come

CALL_SECONDS = 0.05  # one prefetch call; a demand may have to wait for it
LEAST_CALL_BYTES, MOST_CALL_BYTES = 256 * KIB, 8 * MIB


@dataclass(slots=True, eq=False)
class BlockFetch:
    """A block that one thread is fetching. Under the cache's lock."""

    keep: bool  # it goes into memory when it is there
    ahead: bool = False  # a prefetch
    asked: bool = False  # somebody asked for it meanwhile
    told: bool = False  # the policy waits for it to arrive
    waiting: int = 0
    data: Bytes | None = None  # a copy for those who wait
    done: bool = False


@dataclass(slots=True, eq=False)
class Room:
    """Pages and which of them are free; another one after every change of the page size."""

    pages: Pages
    free: FreePages

    def take(self, sizes: Int64s) -> Int32s:
        """First pages for blocks of these sizes: as many from the first on as there is room for."""
        counts = self.pages.pages_each(sizes)
        fitting = int(np.searchsorted(np.cumsum(counts), self.free.ready_count, side="right"))
        counts = counts[:fitting]
        return self.pages.chain(self.free.take(int(counts.sum())), counts)


@dataclass(slots=True, eq=False)
class Asked:
    """What a batch of requests found.

    `fetch`: what the asker has to fetch, `late`: what others fetch, as (request, block, flight).
    `again`: requests for blocks of `fetch`, with the request that fetches them.
    """

    room: Room
    found: FoundPages
    ticket: int  # of the copy of what was found
    fetch: list[tuple[int, int, BlockFetch]] = field(default_factory=list)
    late: list[tuple[int, int, BlockFetch]] = field(default_factory=list)
    again: list[tuple[int, int]] = field(default_factory=list)


class ReaderJob:
    """One reader of a source: its number for the policy, and the order that it foretold."""

    def __init__(self, number: int, name: str, source: BlockSource | None) -> None:
        self.number, self.name = number, name
        self.source = source  # None: another process reads it
        self.position = 0  # requests made
        self.early = 0  # batches that wait for their turn
        self.heard = 0  # messages about its order, from a process that shares the cache
        self.left_at = -1  # how many of them had come when the last order was left
        self.last_epoch: int | None = None  # that was foretold
        self.idle = False  # nothing is wanted ahead until it moves
        self._told: deque[Int64s] = deque()
        self._start = 0  # position of the first of _told
        self._end = 0
        self._by_batch = False  # every one of _told is a batch
        self._moved_at: float | None = None
        self._rate = 0.0  # requests a second

    @property
    def foretold(self) -> bool:
        """Whether anything is known of what comes next."""
        return self.position < self._end

    def seconds_ahead(self, stock: SourceState) -> float:
        """How long what was prefetched will last, about."""
        mean = max(1.0, total_bytes(stock.sizes, stock.block_count) / stock.block_count)
        return stock.ahead_bytes / (max(self._rate, 1e-3) * mean)

    def tell(self, blocks: Int64s, *, batch: bool = False) -> None:
        """The requests after those told before: of an epoch, or one `batch`."""
        if not self._told:
            self._start = self._end = self.position
            self._by_batch = batch
        self._told.append(blocks)
        self._end += len(blocks)

    def forget(self) -> None:
        """Nothing is foretold."""
        self._told.clear()
        self._start = self._end = self.position
        self.last_epoch = None

    def moved(self, count: int, now: float) -> None:
        """So many requests were made."""
        self.position += count
        if self._moved_at is not None:
            rate = count / max(now - self._moved_at, 1e-6)
            self._rate += 0.1 * (rate - self._rate)
        self._moved_at = now
        while self._told and self._start + len(self._told[0]) <= self.position:
            self._start += len(self._told.popleft())

    def turn_of(self, blocks: Int64s) -> int | None:
        """The position at which these come next, if they do within some batches."""
        count = len(blocks)
        if not count or self.position >= self._end:
            return None
        if self._by_batch:
            return self._turn_of_batch(blocks)
        coming = self._coming(LOOK_BATCHES * count)
        if np.array_equal(coming[:count], blocks):
            return self.position
        found = np.flatnonzero(coming[: max(0, len(coming) - count + 1)] == blocks[0])
        for place in (count - 1, count // 2):  # popular blocks are first in many batches
            found = found[coming[found + place] == blocks[place]]
        for at in found[:8].tolist():
            if np.array_equal(coming[at : at + count], blocks):
                return self.position + int(at)
        return None

    def _turn_of_batch(self, blocks: Int64s) -> int | None:
        """The same where every batch is told by itself: a short one may be a part of another."""
        at = self._start
        for told in self._told:
            if at >= self.position and np.array_equal(told, blocks):
                return at
            at += len(told)
        return None

    def _coming(self, count: int) -> Int64s:
        """At most `count` requests from here on."""
        at, parts = self.position - self._start, []
        for told in self._told:
            parts.append(told[at : at + count])
            at, count = 0, count - len(parts[-1])
            if not count:
                break
        return np.concatenate(parts) if len(parts) > 1 else parts[0]


class FetchTurn:
    """When a batch may ask, of those that are made side by side."""

    def __init__(self, job: ReaderJob, blocks: Int64s) -> None:
        self._job, self._blocks, self._at = job, blocks, job.turn_of(blocks)

    def has_come(self) -> bool:
        """True, too, for one that nobody foretold."""
        if self._at is not None and self._job.position > self._at:
            # another batch of the same blocks has taken it
            self._at = self._job.turn_of(self._blocks)
        return self._at is None or self._at == self._job.position or not self._job.foretold


class SourcePace:
    """How fast a source answers, from the calls made of it: averages that forget."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._latencies: deque[float] = deque(maxlen=64)

    def add(self, nbytes: int, seconds: float) -> None:
        """One call."""
        rate = nbytes / max(seconds, 1e-6)
        old = self.bytes_per_second
        self.bytes_per_second = rate if not old else old + 0.1 * (rate - old)
        self._latencies.append(seconds)

    def call_bytes(self) -> int:
        """Bytes of one prefetch call: a demand that waits for it does not wait long."""
        wanted = int(self.bytes_per_second * CALL_SECONDS)
        return min(max(wanted, LEAST_CALL_BYTES), MOST_CALL_BYTES)

    def window_bytes(self) -> int:
        """Bytes to have fetched and not used yet: what comes in while two slow calls take."""
        slowest = max(self._latencies, default=0.0)
        return max(2 * self.call_bytes(), int(2 * self.bytes_per_second * slowest))


class SourceState:
    """The blocks of one source in this cache. Everything is under the cache's lock.

    `first`: first page of each block, NO_PAGE where it is not in memory; other processes may map
    it. `source` is None where only other processes can read it.
    """

    def __init__(
        self, number: int, source: BlockSource, first: Int32s, disk: DiskPart | None
    ) -> None:
        self.number, self.name, self.identity = number, source.name, source.identity
        self.sizes, self.block_count = source.sizes, source.block_count
        self.source: BlockSource | None = None
        sizes = source.sizes
        self.largest_bytes = sizes if isinstance(sizes, int) else int(sizes.max())
        self.first, self.disk = first, disk
        self.marks: npt.NDArray[np.uint8] = np.zeros(source.block_count, np.uint8)
        self.flights: dict[int, BlockFetch] = {}
        self.jobs: dict[int, ReaderJob] = {}
        self.policy: Policy  # made when the memory is shared out
        self.log: SampledLog  # with it
        self.batch_blocks = 1
        self.pace = SourcePace()
        self.ahead_bytes = 0  # prefetched or on their way, and not asked for
        self.paused_until = 0.0  # after a prefetch that failed
        self.warming = False  # after a restart: bring the favourites from the disk
        self.favourites: Int64s = np.empty(0, np.int64)  # those that are still to be brought
        self.replaced = False  # by another identity of the same name: no more use of the cache

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch, about."""
        return self.batch_blocks * total_bytes(self.sizes, self.block_count) // self.block_count

    def choose_source(self) -> None:
        """Prefetches read the source of a reader that is there."""
        sources = [job.source for job in self.jobs.values() if job.source is not None]
        self.source = sources[0] if sources else None

    def leave(self, job: ReaderJob) -> None:
        """A reader is gone; what it brought stays for the next one. Under the cache's lock."""
        if self.jobs.pop(job.number, None) is not None and not self.replaced:
            self.policy.expect(job.number, None)
            self.choose_source()

    def clear_ahead(self, blocks: Int64s) -> Int64s:
        """Those that a prefetch brought and no request has asked for; their credit comes back."""
        marked: Int64s = blocks[self.marks[blocks] & AHEAD != 0]
        if len(marked):
            marked = np.unique(marked)
            self.marks[marked] &= np.uint8(0xFF ^ AHEAD)
            self.ahead_bytes -= bytes_of(self.sizes, marked)
        return marked


Leaving: TypeAlias = deque[tuple[SourceState, ReaderJob]]


def see_off(leaving: Leaving) -> None:
    """Readers that were dropped, not closed, are gone. Under the cache's lock, which the garbage
    collector, who had dropped them, cannot take: it may run in a thread that has it."""
    while leaving:
        stock, job = leaving.popleft()
        stock.leave(job)


@dataclass(slots=True, eq=False)
class Fetched:
    """A block that was fetched: by whom it is awaited, and its bytes."""

    block: int
    flight: BlockFetch
    data: Bytes


@dataclass(frozen=True, slots=True)
class Landing:
    """Blocks of one call on their way into the pages that were taken for them."""

    stock: SourceState
    room: Room
    fetched: Sequence[Fetched]
    kept: Sequence[Fetched]
    heads: Int32s  # of the kept
