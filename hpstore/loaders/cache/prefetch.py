"""Prefetching: what is needed soonest, within a byte credit, when nobody waits for a read."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.cache.block_source import MemoryLost, bytes_of, sizes_of
from hpstore.loaders.cache.cache_core import Core
from hpstore.loaders.cache.page_allocator import pages_needed
from hpstore.loaders.cache.source_state import (
    BlockFetch,
    Fetched,
    ReaderJob,
    Room,
    SourceState,
    see_off,
)
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.closing import Closing
from hpstore.runtime.threads import start_some
from hpstore.units import round_up

_log = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0  # after a prefetch that failed: demands meet the error themselves
JOIN_SECONDS = 5.0
CHORE_SECONDS = 300.0
# credits are at most one part in so many of the memory, and for a batch in so many
WINDOW_SHARE, MOST_WINDOW_SHARE = 8, 4
_ALIGNMENT = 4096  # of targets, for reads that go past the page cache


@dataclass(frozen=True, slots=True)
class PrefetchWork:
    """Blocks for one call, ascending, so that neighbours are read together."""

    stock: SourceState
    room: Room
    blocks: Int64s
    flights: list[BlockFetch]


class Prefetcher(Closing):
    """`threads` threads that fetch what the foretold orders of a core's jobs need next.

    Bytes that were fetched and not asked for, or are on their way, are on credit; without credit
    nothing is fetched. Nothing is begun while a request reads its source. What is wanted is
    decided anew before each call, so that a changed order cancels all but the calls under way.
    """

    def __init__(self, core: Core, threads: int, chore: Callable[[], None]) -> None:
        """`chore`: something to be done every CHORE_SECONDS, beside all this."""
        threads_made = [
            threading.Thread(
                target=_work,
                args=(core, chore if number == 0 else None),
                name=f"hpstore-cache-{number}",
                daemon=True,
            )
            for number in range(threads)
        ]
        self._threads = start_some(threads_made)
        self._stop = weakref.finalize(self, _stop, core, self._threads, os.getpid())

    def close(self) -> None:
        """Begin nothing more; waits for calls under way, with a limit. Idempotent."""
        self._stop()


def _stop(core: Core, threads: list[threading.Thread], pid: int) -> None:
    if pid != os.getpid():
        return
    with core.lock:
        core.closed = True
        core.wanted.notify_all()
        core.landed.notify_all()
    until = time.monotonic() + JOIN_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            _log.warning("a prefetch is still waiting for its source")


def _work(core: Core, chore: Callable[[], None] | None) -> None:
    """Main function of a thread."""
    memory = aligned_array(0)
    due = core.clock.monotonic() + CHORE_SECONDS
    while not core.closed:
        with core.lock:
            work = next_work(core)
            if work is None and not core.closed:
                core.wanted.wait(PAUSE_SECONDS)
        if work is not None:
            memory = _fetch(core, work, memory)
            del work
        if chore is not None and core.clock.monotonic() >= due:
            chore()
            due = core.clock.monotonic() + CHORE_SECONDS


def next_work(core: Core) -> PrefetchWork | None:
    """What to fetch now, if anything. Under the core's lock."""
    see_off(core.leaving)
    if core.demanding:
        return None
    now = core.clock.monotonic()
    ready = [
        (stock, job)
        for stock in core.stocks.values()
        if stock.source is not None and stock.paused_until <= now
        for job in stock.jobs.values()
        if not job.idle
    ]
    # the earliest deadline: whose bytes in hand last for the shortest time
    for stock, job in sorted(ready, key=lambda pair: pair[1].seconds_ahead(pair[0])):
        work = _wanted(core, stock, job)
        if work is not None:
            return work
    return None


def _wanted(core: Core, stock: SourceState, job: ReaderJob) -> PrefetchWork | None:
    pages = core.room.pages
    largest = pages_needed(stock.largest_bytes, pages.page_bytes) * pages.page_bytes
    room = pages.page_count * pages.page_bytes
    window = min(stock.pace.window_bytes(), room // WINDOW_SHARE)
    window = max(window, min(stock.batch_bytes, room // MOST_WINDOW_SHARE), largest)
    call = max(min(stock.pace.call_bytes(), window // 2), largest)
    credit = window - stock.ahead_bytes
    if credit < max(call // 2, largest):  # few large calls, not many small ones
        return None
    if stock.warming:
        blocks = np.sort(_favourites(core, stock, call))
    elif stock.policy.expected(job.number):
        wanted = stock.policy.next_wanted(job.number, min(call, credit))
        if len(wanted.evict):
            core.evict(stock, wanted.evict)
        blocks = np.sort(wanted.fetch)
    else:
        job.idle = True
        return None
    chosen = np.array([b for b in blocks.tolist() if not _is_coming(stock, b)], np.int64)
    if not len(chosen):
        job.idle = not stock.warming
        return None
    flights = [BlockFetch(True, ahead=True) for _ in range(len(chosen))]
    stock.flights.update(zip(chosen.tolist(), flights, strict=True))
    stock.ahead_bytes += bytes_of(stock.sizes, chosen)
    return PrefetchWork(stock, core.room, chosen, flights)


def _favourites(core: Core, stock: SourceState, call_bytes: int) -> Int64s:
    """After a restart: what the policy likes best of what the disk has, in portions.

    They count as coming from the first portion on; half of the memory is left to what is asked for.
    """
    if not len(stock.favourites):
        half = core.room.pages.page_count * core.room.pages.page_bytes // 2
        found = stock.policy.favourites(half).fetch
        there = np.zeros(len(found), bool) if stock.disk is None else stock.disk.holds(found)
        stock.policy.dropped(found[~there])
        stock.favourites = found[there]
    fitting = np.searchsorted(np.cumsum(sizes_of(stock.sizes, stock.favourites)), call_bytes)
    count = max(1, int(fitting))
    portion, stock.favourites = stock.favourites[:count], stock.favourites[count:]
    stock.warming = len(stock.favourites) > 0
    return portion


def _is_coming(stock: SourceState, block: int) -> bool:
    """Whether a block is there or on its way for another reason, and then is to be kept."""
    flight = stock.flights.get(block)
    if flight is not None:
        flight.keep = True
    elif stock.first[block] < 0:
        return False
    stock.policy.arrived(np.array([block], np.int64))
    return True


def _fetch(core: Core, work: PrefetchWork, memory: Bytes) -> Bytes:
    """Fetch, from the disk where it is there, and land; the memory for the next call."""
    stock, blocks = work.stock, work.blocks
    sizes = sizes_of(stock.sizes, blocks)
    ends = np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
    if len(memory) < int(ends[-1]):
        memory = aligned_array(round_up(int(ends[-1]), 1 << 20))
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    targets = [memory[a : a + n] for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]
    left = list(range(len(blocks)))
    landed: list[int] = []
    try:
        left = core.from_disk(stock, blocks, targets)
        source = stock.source  # None: its last reader has gone meanwhile
        if left and source is not None:
            core.read_source(stock, source, blocks[left], [targets[i] for i in left])
        if not left or source is not None:
            landed = list(range(len(blocks)))
    except MemoryLost:  # somebody may still write into it
        memory = aligned_array(0)
        core.tally.add(prefetch_abandoned_total=1)
    except Exception as error:  # noqa: BLE001 (the demand for these blocks meets it)
        with core.lock:
            stock.paused_until = core.clock.monotonic() + PAUSE_SECONDS
        if core.tally.first("prefetch_error_total"):
            _log.warning("a prefetch of %s failed, to be tried again: %s", stock.name, error)
    if landed:
        core.tally.add(prefetch_bytes=int(sizes.sum()), prefetch_total=len(blocks))
        fetched = [Fetched(int(blocks[i]), work.flights[i], targets[i]) for i in range(len(blocks))]
        core.land(stock, work.room, fetched)
    else:
        core.give_up(stock, list(zip(blocks.tolist(), work.flights, strict=True)))
    return memory
