"""Memory of a cache, cut into pages of one size; a block is a chain of pages.

Readers copy without a lock. A page's stamp rises when the page is given to a new block, before a
byte of it is written: who finds the stamp of a block's first page unchanged after its copy has
copied the right bytes. Free pages are used again in the order in which they were freed, a block's
first page never after its others, so that one stamp speaks for the chain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from hpstore.codec.galois import Bytes
from hpstore.loaders.cache.block_source import Sizes, Targets
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.units import MIB, div_ceil, round_up

Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]

NO_PAGE = -1
LEAST_PAGE_BYTES, MOST_PAGE_BYTES = 256, MIB
TABLE_BYTES = 8  # of each page: what follows it, and its stamp
_PAGE_COST_BYTES = 64  # what handling one more page costs, in bytes of copying


def choose_page_bytes(sources: Iterable[tuple[Sizes, int]]) -> int:
    """The page size that wastes least for blocks of these (sizes, count), weighed by their bytes.

    Blocks of one size are cut into equal pages without any waste.
    """
    samples = [_sampled(sizes, count) for sizes, count in sources]
    candidates: set[int] = set()
    for sizes, _ in samples:
        mean = int(sizes.mean())
        pieces = div_ceil(mean, MOST_PAGE_BYTES)
        single = len(np.unique(sizes)) == 1
        page = div_ceil(mean, pieces) if single else round_up(mean // 16, 64)
        candidates.add(min(max(page, LEAST_PAGE_BYTES), MOST_PAGE_BYTES))
    candidates |= {page for page in (512, 1024, 4096, 16384) if page < max(candidates)}

    def cost(page: int) -> float:
        waste = 0.0
        for sizes, weight in samples:
            pages = np.ceil(sizes / page)
            waste += weight * float((pages * (page + _PAGE_COST_BYTES)).sum() / sizes.sum())
        return waste

    return min(sorted(candidates, reverse=True), key=cost)


def _sampled(sizes: Sizes, count: int) -> tuple[npt.NDArray[np.float64], int]:
    """Some of the sizes, and the bytes that they stand for."""
    if isinstance(sizes, int):
        return np.array([max(sizes, 1)], np.float64), max(sizes, 1) * count
    some = np.maximum(sizes[:: max(1, count // 4096)], 1)
    return some.astype(np.float64), max(int(sizes.sum()), 1)


@overload
def pages_needed(sizes: int, page_bytes: int) -> int: ...
@overload
def pages_needed(sizes: Int64s, page_bytes: int) -> Int64s: ...
def pages_needed(sizes: int | Int64s, page_bytes: int) -> int | Int64s:
    """Pages of blocks; an empty one has one, too, so that it can be somewhere."""
    if isinstance(sizes, int):
        return max(1, -(-sizes // page_bytes))
    return np.maximum(-(-sizes // page_bytes), 1)


@dataclass(frozen=True, slots=True)
class FoundPages:
    """Blocks as a reader found them: first page of each (NO_PAGE: not there), and its stamp."""

    heads: Int32s
    stamps: UInt32s


class Pages:
    """Pages over `memory`. Only the holder of the cache's lock calls take() and give_back().

    `tables`: (2, pages) int32 in memory that other processes map, else made here.
    """

    def __init__(self, memory: Bytes, page_bytes: int, tables: Int32s | None = None) -> None:
        self.page_bytes = page_bytes
        self.page_count = len(memory) // page_bytes
        if tables is None:
            tables = np.zeros((2, self.page_count), np.int32)
        self.rows = memory[: self.page_count * page_bytes].reshape(self.page_count, page_bytes)
        self._following: Int32s = tables[0]
        self._stamps: UInt32s = tables[1].view(np.uint32)

    def pages_each(self, sizes: Int64s) -> Int64s:
        """Pages that blocks of these sizes take."""
        found: Int64s = pages_needed(sizes, self.page_bytes)
        return found

    # --- reading: any thread, any process ----------------------------------------------------

    def find(self, first: Int32s, blocks: Int64s) -> FoundPages:
        """Where blocks are; `first`: first page of every block. Beside a writer it may be late."""
        heads = first[blocks]
        stamps = self._stamps[heads]  # NO_PAGE gives some stamp, which nobody looks at
        return FoundPages(np.where(first[blocks] == heads, heads, NO_PAGE), stamps)

    def copy(self, found: FoundPages, sizes: Int64s, targets: Targets) -> npt.NDArray[np.bool_]:
        """Copy what was found into targets[i]; which of them were copied whole.

        Other targets may hold anything afterwards.
        """
        there = found.heads >= 0
        if len(there):
            counts = self.pages_each(sizes)
            single = int(counts.max()) == 1
            if isinstance(targets, np.ndarray) and self._gathers(sizes, targets):
                self._gather(np.maximum(found.heads, 0), counts, targets)
            else:
                rows = self.rows
                heads = found.heads.tolist()
                if single:
                    for i in np.flatnonzero(there).tolist():
                        targets[i][:] = rows[heads[i], : len(targets[i])]
                else:
                    self._copy_chains(found, counts, targets)
        good: npt.NDArray[np.bool_] = there & (self._stamps[found.heads] == found.stamps)
        return good

    def _gathers(self, sizes: Int64s, targets: Bytes) -> bool:
        """Whether all targets are whole pages side by side: then one call copies them."""
        return (
            targets.ndim == 2
            and targets.shape[1] > 0
            and targets.flags.c_contiguous
            and targets.shape[1] % self.page_bytes == 0
            and bool((sizes == targets.shape[1]).all())
        )

    def _gather(self, heads: Int32s, counts: Int64s, targets: Bytes) -> None:
        ids = heads if int(counts[0]) == 1 else self._walk(heads, counts)
        out = targets.reshape(-1, self.page_bytes)
        np.take(self.rows, ids, axis=0, out=out, mode="clip")

    def _copy_chains(self, found: FoundPages, counts: Int64s, targets: Targets) -> None:
        ids = self._walk(np.maximum(found.heads, 0), counts)
        ends = np.cumsum(counts)
        for i in np.flatnonzero(found.heads >= 0).tolist():
            target, end = targets[i], int(ends[i])
            mine = ids[end - int(counts[i]) : end]
            whole = len(target) // self.page_bytes
            cut = whole * self.page_bytes
            if whole:
                out = target[:cut].reshape(whole, self.page_bytes)
                np.take(self.rows, mine[:whole], axis=0, out=out, mode="clip")
            if cut < len(target):
                target[cut:] = self.rows[mine[whole], : len(target) - cut]

    def _walk(self, heads: Int32s, counts: Int64s) -> Int32s:
        """Pages of all chains, one chain after the other. Numbers are always of pages."""
        ends = np.cumsum(counts)
        ids = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
        starts, current = ends - counts, heads
        alive = np.arange(len(heads))
        step = 0
        while len(alive):
            ids[starts[alive] + step] = current
            step += 1
            more = counts[alive] > step
            alive = alive[more]
            current = np.maximum(self._following[current[more]], 0)
        return ids

    # --- writing: under the cache's lock -------------------------------------------------------

    def chain(self, ids: Int32s, counts: Int64s) -> Int32s:
        """Make chains of fresh pages, `counts` of them each; the first page of each."""
        following = np.empty(len(ids), np.int32)
        following[:-1] = ids[1:]
        ends = np.cumsum(counts)
        following[ends - 1] = NO_PAGE
        self._stamps[ids] += np.uint32(1)
        self._following[ids] = following
        heads: Int32s = ids[ends - counts]
        return heads

    def renew(self, ids: Int32s) -> None:
        """Whoever still copies these pages is to notice that they are lost."""
        self._stamps[ids] += np.uint32(1)

    def chained(self, heads: Int32s, counts: Int64s) -> Int32s:
        """All pages of some chains."""
        return self._walk(heads, counts) if len(heads) else heads

    def write(self, head: int, block: Bytes) -> None:
        """Copy a block into its chain, which nobody reads yet."""
        page, at, end = head, 0, len(block)
        while at < end:
            part = block[at : at + self.page_bytes]
            self.rows[page, : len(part)] = part
            at += self.page_bytes
            page = int(self._following[page])


class FreePages:
    """Which pages are free, the longest free first. Under the cache's lock.

    Pages are ready for new blocks when all copies that had begun before they were freed are over:
    copies of this process; those of others look at stamps.
    """

    def __init__(self, count: int) -> None:
        self._ring = np.arange(max(count, 1), dtype=np.int32)
        self._head, self.free_count, self.ready_count = 0, count, count
        self._resting: deque[tuple[int, int]] = deque()  # (ticket, pages)
        self._tickets = 0
        self._copying: dict[int, None] = {}  # tickets, the oldest first

    def begin_copy(self) -> int:
        """Somebody copies pages from now on; a ticket for end_copy()."""
        self._tickets += 1
        self._copying[self._tickets] = None
        return self._tickets

    def end_copy(self, ticket: int) -> bool:
        """The copy is over; whether pages have become ready by that."""
        del self._copying[ticket]
        oldest = next(iter(self._copying), self._tickets + 1)
        before = self.ready_count
        while self._resting and self._resting[0][0] < oldest:
            self.ready_count += self._resting.popleft()[1]
        return self.ready_count > before

    def take(self, count: int) -> Int32s:
        """So many pages; as many must be ready."""
        if count > self.ready_count:
            raise ValueError(f"{count} pages taken of {self.ready_count}")
        at = np.arange(self._head, self._head + count) % len(self._ring)
        self._head = (self._head + count) % len(self._ring)
        self.free_count -= count
        self.ready_count -= count
        taken: Int32s = self._ring[at]
        return taken

    def give_back(self, ids: Int32s) -> None:
        """Pages that no block has any more."""
        start = self._head + self.free_count
        self._ring[np.arange(start, start + len(ids)) % len(self._ring)] = ids
        self.free_count += len(ids)
        if self._copying:
            self._resting.append((self._tickets, len(ids)))
        else:
            self.ready_count += len(ids)
