"""A reader of one source through a cache of this process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.cache.block_source import BlockSource, Targets, sizes_of
from hpstore.loaders.cache.cache_core import Core
from hpstore.loaders.cache.cache_counters import CacheTally
from hpstore.loaders.cache.partition import Division
from hpstore.loaders.cache.policy_interface import Bools
from hpstore.loaders.cache.source_state import Asked, Fetched, ReaderJob, SourceState
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.runtime.closing import Closing

_log = logging.getLogger(__name__)


class Attached(Closing):
    """One job's blocks, from memory, the disk or the source. read() is for many threads.

    In a forked child, after the cache is closed, or when the source was replaced under its name,
    it reads the source: counted, said once.
    """

    def __init__(
        self,
        core: Core,
        division: Division,
        source: BlockSource,
        stock: SourceState,
        job: ReaderJob,
    ) -> None:
        self._core, self._division, self._source = core, division, source
        self._stock, self._job = stock, job
        self._pid = os.getpid()
        self._closed = False

    def read(self, blocks: Int64s, targets: Targets) -> None:
        """Fill targets[i] with the bytes of blocks[i]; repeats are allowed.

        `blocks` int64 (n,); `targets` n arrays of uint8, each as long as its block, or the rows of
        one array, which is faster. They belong to this call until it returns. Raises what the
        source raises, MemoryLost, ValueError for blocks or targets that do not fit.
        """
        blocks = np.asarray(blocks, np.int64)
        check_targets(sizes_of_blocks(self._source, blocks), targets)
        if self._beside():
            self._read_directly(blocks, targets, np.arange(len(blocks)))
            return
        asked = self._core.ask(self._stock, self._job, blocks)
        sizes = sizes_of(self._stock.sizes, blocks)
        try:
            good = asked.room.pages.copy(asked.found, sizes, targets)
        except BaseException:
            self._core.give_up(self._stock, [(b, f) for _, b, f in asked.fetch])
            raise
        finally:
            self._core.copied(asked.room, asked.ticket)
        hits = np.flatnonzero(good)
        self._core.tally.add(memory_hit_total=len(hits), memory_hit_bytes=int(sizes[hits].sum()))
        if len(hits) < len(blocks):
            began = time.perf_counter()
            try:
                self._read_missing(asked, blocks, targets, good)
            finally:
                self._core.tally.add(stall_seconds=time.perf_counter() - began)

    def _beside(self) -> bool:
        if self._pid == os.getpid() and not self._core.closed and not self._stock.replaced:
            return False
        if self._pid != os.getpid():
            self._core.tally.renew()
        if self._core.tally.first("passed_by_total"):
            _log.warning(
                "%s is read without its cache from now on (%s)",
                self._source.name,
                (
                    "in a forked process"
                    if self._pid != os.getpid()
                    else "the cache is closed"
                    if self._core.closed
                    else "another data set has taken its place"
                ),
            )
        return True

    def _read_missing(self, asked: Asked, blocks: Int64s, targets: Targets, good: Bools) -> None:
        """What was not in memory: fetched here, by others, or overwritten during the copy."""
        core = self._core
        if asked.fetch:
            self._fetch(asked, targets)
        for i, first in asked.again:
            targets[i][:] = targets[first]
        lost = np.flatnonzero((asked.found.heads >= 0) & ~good).tolist()
        if asked.late:
            lost += self._take_late(asked, blocks, targets)
        if lost:  # rare: read without a word to anybody
            core.tally.add(overtaken_total=len(lost))
            self._read_directly(blocks, targets, np.array(lost, np.int64))
        core.tally.add(again_total=len(asked.again))

    def _fetch(self, asked: Asked, targets: Targets) -> None:
        core, stock = self._core, self._stock
        wanted = np.array([block for _, block, _ in asked.fetch], np.int64)
        mine: Sequence[Bytes] = [targets[i] for i, _, _ in asked.fetch]
        sizes = sizes_of(stock.sizes, wanted)
        try:
            left = core.from_disk(stock, wanted, mine)
            if left:
                with core.demand():
                    core.read_source(stock, self._source, wanted[left], [mine[i] for i in left])
        except BaseException:
            core.give_up(stock, [(block, flight) for _, block, flight in asked.fetch])
            raise
        missed = int(sizes[left].sum())
        core.tally.add(
            miss_total=len(left),
            miss_bytes=missed,
            disk_hit_total=len(wanted) - len(left),
            disk_hit_bytes=int(sizes.sum()) - missed,
        )
        fetched = [
            Fetched(block, flight, data)
            for (_, block, flight), data in zip(asked.fetch, mine, strict=True)
        ]
        core.land(stock, asked.room, fetched)

    def _take_late(self, asked: Asked, blocks: Int64s, targets: Targets) -> list[int]:
        """Requests that others fetched for; those for which they did not."""
        core, stock = self._core, self._stock
        core.wait(stock, asked.late)
        left: list[int] = []
        for i, _, flight in asked.late:
            if flight.data is not None:
                targets[i][:] = flight.data
            else:
                left.append(i)
        if left:
            at = np.array(left, np.int64)
            with core.lock:
                room = core.room
                found = room.pages.find(stock.first, blocks[at])
                ticket = room.free.begin_copy()
            rows = [targets[i] for i in left]
            try:
                good = room.pages.copy(found, sizes_of(stock.sizes, blocks[at]), rows)
            finally:
                core.copied(room, ticket)
            left = at[~good].tolist()
        core.tally.add(late_total=len(asked.late) - len(left))
        return left

    def _read_directly(self, blocks: Int64s, targets: Targets, which: Int64s) -> None:
        """Read some requests where their blocks come from."""
        core = self._core
        if not len(which):
            return
        if self._pid != os.getpid():  # its locks may be held for ever
            read_each_once(self._source, blocks, targets, which)
            return
        with core.demand():
            missed = read_each_once(self._source, blocks, targets, which)
        core.tally.add(
            miss_total=missed, miss_bytes=int(sizes_of(self._source.sizes, blocks[which]).sum())
        )

    # --- what is foretold ---------------------------------------------------------------------

    def expect(self, epoch: int, blocks: Int64s | None) -> None:
        """The requests of an epoch, in their order, int64 (n,); kept, not to be changed.

        Epochs are told one after the other, best two ahead or more. Another epoch than the next
        one, or None, forgets what was told and not yet asked for; so does an epoch told after the
        order was not kept. Nothing foretold: what comes is learned.
        """
        if not self._beside():
            told = None if blocks is None else np.asarray(blocks, np.int64)
            self._core.expect(self._stock, self._job, epoch, told)

    def drawn(self, blocks: Int64s) -> None:
        """Requests that a sampler has drawn, int64 (n,), behind those that it drew before.

        For an order that is not known further than that. Kept, not to be changed. Ignored when
        what was drawn was not asked for; expect(..., None) begins anew.
        """
        if len(blocks) and not self._beside():
            self._core.drawn(self._stock, self._job, np.asarray(blocks, np.int64))

    def begin_epoch(self, requests: int | None = None) -> None:
        """A pass over the data begins; `requests` of it, None: as many as in the last one."""
        if not self._beside():
            self._core.begin_epoch(self._stock, self._job, requests)

    def close(self) -> None:
        """This reader is gone; what it brought stays. Idempotent."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            self._division.detach(self._stock, self._job)

    def let_go(self) -> None:
        """As close(), without a lock and a little later: for the garbage collector."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            self._core.leaving.append((self._stock, self._job))


class Beside(Closing):
    """A reader that was made in a process which is forked from the cache's own: it reads its
    source. The cache's locks may be held for ever there, its memory be written by the parent."""

    def __init__(self, source: BlockSource, tally: CacheTally) -> None:
        self._source, self._tally = source, tally
        if tally.first("passed_by_total"):
            _log.warning("%s is read without its cache (in a forked process)", source.name)

    def read(self, blocks: Int64s, targets: Targets) -> None:
        """As Attached.read."""
        blocks = np.asarray(blocks, np.int64)
        sizes = sizes_of_blocks(self._source, blocks)
        check_targets(sizes, targets)
        missed = read_each_once(self._source, blocks, targets, np.arange(len(blocks)))
        self._tally.add(miss_total=missed, miss_bytes=int(sizes.sum()))

    def expect(self, epoch: int, blocks: Int64s | None) -> None:
        """As Attached.expect: nothing is read ahead."""

    def drawn(self, blocks: Int64s) -> None:
        """As Attached.drawn."""

    def begin_epoch(self, requests: int | None = None) -> None:
        """As Attached.begin_epoch."""

    def close(self) -> None:
        """Nothing is held."""

    def let_go(self) -> None:
        """Nothing is held."""


def read_each_once(source: BlockSource, blocks: Int64s, targets: Targets, which: Int64s) -> int:
    """Read the blocks of some requests from their source, each once; how many blocks that are."""
    unique, first, inverse = np.unique(blocks[which], return_index=True, return_inverse=True)
    chosen = which[first].tolist()
    source.read(unique, [targets[i] for i in chosen])
    for i, at in zip(which.tolist(), inverse.tolist(), strict=True):
        if i != chosen[at]:
            targets[i][:] = targets[chosen[at]]
    return len(unique)


def sizes_of_blocks(source: BlockSource, blocks: Int64s) -> Int64s:
    """Bytes of each. Raises ValueError for blocks that there are not."""
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= source.block_count):
        raise ValueError(f"blocks outside 0 .. {source.block_count - 1} of {source.name!r}")
    return sizes_of(source.sizes, blocks)


def check_targets(sizes: Int64s, targets: Targets) -> None:
    """Raises ValueError when targets are not as long as their blocks."""
    if isinstance(targets, np.ndarray):
        fits = targets.ndim == 2 and len(targets) == len(sizes)
        fits = fits and bool((sizes == targets.shape[1]).all())
    else:
        fits = [len(target) for target in targets] == sizes.tolist()
    if not fits:
        raise ValueError("every target must be as long as its block")
