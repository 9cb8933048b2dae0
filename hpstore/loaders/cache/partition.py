"""Who shares a cache: sources come and go, and the memory is divided between them by their bytes.

A source that comes or goes changes the page size and everybody's share: memory is then empty once.
What was learned, and the disk, stay.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpstore.errors import ConfigError
from hpstore.format.untrusted_bytes import MALFORMED
from hpstore.loaders.cache.block_source import BlockSource, Sizes, check_source, sizes_of
from hpstore.loaders.cache.cache_core import Core
from hpstore.loaders.cache.disk_tier import DiskTier
from hpstore.loaders.cache.memory_tier import MemoryTier
from hpstore.loaders.cache.page_allocator import (
    NO_PAGE,
    FreePages,
    Pages,
    choose_page_bytes,
    pages_needed,
)
from hpstore.loaders.cache.policy_interface import Arrays, MakePolicy, Policy
from hpstore.loaders.cache.saved_policy import load_learned, save_learned
from hpstore.loaders.cache.source_state import (
    AHEAD,
    MOST_JOBS,
    ReaderJob,
    Room,
    SourceState,
    see_off,
)
from hpstore.loaders.policy import SampledLog
from hpstore.units import format_bytes

_log = logging.getLogger(__name__)

LOG_LENGTH = 1 << 17  # requests to compare with MIN, which takes about 0.1 s
# one part in so many, at most, at least, and without a disk, is promised to nobody: evicted blocks
# rest there
MOST_SPARE_SHARE, SPARE_SHARE, LEAST_SPARE_SHARE = 8, 32, 64


class Division:
    """Attaches sources to a core. Thread-safe; attaching reads the disk tier."""

    def __init__(
        self, core: Core, memory: MemoryTier, disk: DiskTier | None, make_policy: MakePolicy
    ) -> None:
        self._core, self._memory, self._disk = core, memory, disk
        self._make_policy = make_policy
        self._numbers = 0
        self._turn = threading.Lock()  # guards _numbers; one attaches at a time, I/O included

    def attach(
        self, source: BlockSource, job: str, batch_blocks: int, *, readable: bool = True
    ) -> tuple[SourceState, ReaderJob]:
        """A new reader of a source. Raises ConfigError when the memory is too small for it.

        `readable`: the cache itself may read the source, to prefetch; else others read it.
        """
        check_source(source)
        core = self._core
        with self._turn:
            with core.lock:
                see_off(core.leaving)
                others = self._check_room(source, batch_blocks)
                old = core.stocks.get(source.name)
            if old is None or old.identity != source.identity:
                self._add(source, others, batch_blocks)
            with core.lock:
                stock = core.stocks[source.name]
                stock.batch_blocks = max(stock.batch_blocks, batch_blocks)
                free = [n for n in range(MOST_JOBS) if n not in stock.jobs]
                if not free:
                    raise ConfigError(
                        f"{MOST_JOBS} loaders share the cache of {source.name!r} already: close one"
                    )
                made = stock.jobs[free[0]] = ReaderJob(free[0], job, source if readable else None)
                stock.choose_source()
                core.wanted.notify_all()
                return stock, made

    def detach(self, stock: SourceState, job: ReaderJob) -> None:
        """A reader is gone. What it brought stays for the next one."""
        with self._core.lock:
            stock.leave(job)

    def save(self) -> None:
        """Write what was learned beside the disk tier."""
        if self._disk is None or not self._disk.alive:
            return
        for stock in list(self._core.stocks.values()):
            with self._core.lock:
                arrays = dict(stock.policy.state_arrays())
            if stock.disk is not None:
                save_learned(stock.disk, stock.identity, arrays, self._core.tally)

    # --- dividing -----------------------------------------------------------------------------

    def _check_room(self, source: BlockSource, batch_blocks: int) -> list[SourceState]:
        """The sources that stay beside this one: those that somebody reads.

        Raises ConfigError, with the least memory that would do.
        """
        others = [s for s in self._core.stocks.values() if s.jobs and s.name != source.name]
        sharing = [(s.sizes, s.block_count, s.batch_blocks) for s in others]
        sharing.append((source.sizes, source.block_count, batch_blocks))
        page = choose_page_bytes((sizes, count) for sizes, count, _ in sharing)
        least = page * sum(claim(*one, page).least for one in sharing)
        least = -(-least * MOST_SPARE_SHARE // (MOST_SPARE_SHARE - 1)) + 2 * page
        have = len(self._memory.data)
        if have < least:
            raise ConfigError(
                f"memory_bytes {have} is too small to cache {source.name!r}: batches of "
                f"{batch_blocks} blocks, in pages of {page} bytes, need at least {least} "
                f"({format_bytes(least)}) beside {len(others)} other sources. Nothing was changed."
            )
        return others

    def _add(self, source: BlockSource, others: list[SourceState], batch_blocks: int) -> None:
        """Take a source in, instead of those that are not among the others."""
        core = self._core
        for stock in core.stocks.values():
            if stock not in others and stock.disk is not None:
                stock.disk.leave()
        part = self._disk.part(source) if self._disk is not None else None
        learned = None if part is None else load_learned(part, source.identity, core.tally)
        with core.lock:
            core.landed.wait_for(lambda: core.writing == 0)
            for stock in core.stocks.values():
                if stock not in others:
                    stock.replaced = True
                    stock.first[:] = NO_PAGE
                    self._memory.forget(f"first{stock.number}")
                    core.tally.add(source_replaced_total=int(stock.name == source.name))
            first = self._memory.table(f"first{self._numbers}", (source.block_count,))
            made = SourceState(self._numbers, source, first, part)
            made.batch_blocks = batch_blocks
            self._numbers += 1
            core.stocks = {s.name: s for s in [*others, made]}
            weights = self._divide(made, learned)
        if self._disk is not None:
            self._disk.share_out(weights)

    def _divide(self, made: SourceState, learned: Arrays | None) -> dict[str, int]:
        """Lay the memory out anew, empty, and share it out. Under the lock.

        The weights of the disk's parts, by stem.
        """
        core, stocks = self._core, list(self._core.stocks.values())
        core.layout += 1
        if core.layout > 1:
            # who still looks at the old tables must find nothing in them: first that, then stamps
            for stock in stocks:
                stock.first[:] = NO_PAGE
                name = f"first{stock.number}"
                stock.first = self._memory.table(name, (stock.block_count,))
            core.room.pages.renew(np.arange(core.room.pages.page_count, dtype=np.int32))
            core.tally.add(redivided_total=1)
        page = choose_page_bytes((s.sizes, s.block_count) for s in stocks)
        tables = self._memory.table("pages", (2, len(self._memory.data) // page))
        pages = Pages(self._memory.data, page, tables)
        core.room = Room(pages, FreePages(pages.page_count))
        spare = _spare_pages(pages, stocks if self._disk is not None else [])
        core.spill_limit = spare * page
        claims = [claim(s.sizes, s.block_count, s.batch_blocks, page) for s in stocks]
        for stock, share in zip(stocks, divided(claims, pages.page_count - spare), strict=True):
            kept = learned if stock is made else stock.policy.state_arrays()
            self._renew(stock, pages, share * page, kept)
        return {
            s.disk.file.stem: one.pages
            for s, one in zip(stocks, claims, strict=True)
            if s.disk is not None
        }

    def _renew(
        self, stock: SourceState, pages: Pages, capacity_bytes: int, learned: Arrays | None
    ) -> None:
        """An empty share of the memory, with what was learned before."""
        stock.first[:] = NO_PAGE
        stock.marks &= np.uint8(0xFF ^ AHEAD)
        stock.ahead_bytes = 0
        for flight in stock.flights.values():
            flight.keep = flight.ahead = False
        stock.policy = self._make(stock, pages, capacity_bytes)
        each = pages.pages_each(sizes_of(stock.sizes, np.arange(min(stock.block_count, 4096))))
        capacity_blocks = capacity_bytes / (float(each.mean()) * pages.page_bytes)
        stock.log = SampledLog(capacity_blocks, limit=LOG_LENGTH)
        if learned is not None:
            try:
                stock.policy.restore(learned, residents=np.empty(0, np.int64))
            except MALFORMED as error:  # ConfigError is one
                stock.policy = self._make(stock, pages, capacity_bytes)
                self._core.tally.add(learned_refused_total=1)
                _log.warning("what the cache had learned of %s is not used: %s", stock.name, error)
        if stock.disk is not None and stock.disk.used_bytes:
            stock.warming = True

    def _make(self, stock: SourceState, pages: Pages, capacity_bytes: int) -> Policy:
        sizes = pages_needed(stock.sizes, pages.page_bytes) * pages.page_bytes
        return self._make_policy(sizes, stock.block_count, capacity_bytes, jobs=MOST_JOBS)


def _spare_pages(pages: Pages, stocks: list[SourceState]) -> int:
    """Pages for a batch of each source that leaves for the disk, within limits.

    What leaves for nowhere gives its pages up at once, long before what displaced it is here.
    """
    if not stocks:
        return max(1, pages.page_count // LEAST_SPARE_SHARE)
    batch = sum(stock.batch_bytes for stock in stocks)
    wanted = min(-(-batch // pages.page_bytes), pages.page_count // MOST_SPARE_SHARE)
    return max(1, wanted, pages.page_count // SPARE_SHARE)


@dataclass(frozen=True, slots=True)
class PageClaim:
    """Pages of all blocks of a source, and the least that hold a batch of them."""

    pages: int
    least: int


def claim(sizes: Sizes, count: int, batch_blocks: int, page_bytes: int) -> PageClaim:
    """For a batch: its largest block, or as many of the mean size."""
    each = np.asarray(pages_needed(sizes, page_bytes))
    total = int(each.sum()) if each.ndim else int(each) * count
    return PageClaim(total, max(int(each.max()), -(-min(batch_blocks, count) * total // count)))


def divided(claims: Sequence[PageClaim], pages: int) -> list[int]:
    """Pages for each: a batch first, the rest by their bytes."""
    rest, total = pages - sum(one.least for one in claims), sum(one.pages for one in claims)
    return [one.least + rest * one.pages // total for one in claims]
