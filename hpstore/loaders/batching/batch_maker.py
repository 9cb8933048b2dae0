"""What makes the batches of a native dataset: slots, slabs and who fills them, for one loader."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpstore.loaders.batching.assembler import Assembler
from hpstore.loaders.batching.batch_buffers import Slots
from hpstore.loaders.batching.batch_counters import Counts, PoolReads
from hpstore.loaders.batching.cached_reads import CachedReads, CachedRun
from hpstore.loaders.batching.gather_copy import How
from hpstore.loaders.batching.node_pages import NodePageMemory
from hpstore.loaders.batching.page_budget import PageBudget, memory_for
from hpstore.loaders.batching.page_memory import PageMemory
from hpstore.loaders.batching.page_prefetch import (
    PagePrefetcher,
    everything,
    everything_in_windows,
    in_windows,
    page_bounds,
    stripes_kept,
)
from hpstore.loaders.cache import Cache
from hpstore.loaders.dataset.batch_values import Batch
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.record_stream import Stream
from hpstore.loaders.sampling.batch_plan import BatchPiece
from hpstore.loaders.sampling.order import Order, SubsetOrder
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.window_shuffle import WindowOrder, subset_stripes, windows_of
from hpstore.runtime.closing import Closing
from hpstore.units import KIB

if TYPE_CHECKING:
    from hpstore.loaders.gpu.direct_reader import DirectAccess

SINGLE_BYTES = 23 * KIB
"""What a read of one record costs beyond its bytes, as bytes of sequential reading. From 43,000
records of 12 KiB a second read one by one and 124,000 by windows (docs/data.md)."""


@dataclass(slots=True, eq=False)
class Session:
    """What makes the batches of one run through the order. make() is for many threads."""

    order: Order | None
    fields: Mapping[str, Field]
    counts: Counts
    assembler: Assembler
    slabs: Mapping[int, PageMemory]
    filler: PagePrefetcher | None
    own: bool  # slabs and filler are of this run alone
    ordered: bool  # pages come in its order
    cached: CachedRun | None = None
    hurried: range = range(0)  # positions of its first epoch that are read before windows are
    epoch: int = 0  # the first
    _head: BatchPiece | None = None  # what the trainer gets next
    _left: bool = False

    def make(self, piece: BatchPiece) -> tuple[Indices, Batch]:
        """The samples of a piece, and which they are. Raises what reading raises."""
        began = time.perf_counter()
        if self.cached is not None:
            self.cached.reached(piece.epoch)
        indices = piece.indices(self.order)
        ahead = len(indices)
        if self.order is not None:  # rows that pad an epoch are from its begin: not filled again
            ahead = max(0, min(ahead, self.order.length - piece.start))
        made = self._batch(indices, ahead, lambda: self._urgent(piece, piece.epoch, piece.start))
        took = time.perf_counter() - began
        self.counts.make_seconds += took
        return indices, made

    def part(
        self, piece: BatchPiece, epoch: int, start: int, indices: Indices, ahead: int
    ) -> Batch:
        """Samples that are needed for a piece of another order: of a mixture, or of sequences.

        `epoch`, `start`: where they begin in this order; the first `ahead` of them follow there.
        """
        if self.cached is not None:
            self.cached.reached(epoch)
        return self._batch(indices, ahead, lambda: self._urgent(piece, epoch, start))

    def _urgent(self, piece: BatchPiece, epoch: int, start: int) -> bool:
        """Whether its records are read singly, beside those who fill pages in another order.

        Singly they cost the device several times as much: only what the trainer waits for. Where a
        run begins inside a window, all of which would be read before its first batch, likewise.
        """
        if self._left:
            return True
        hurried = epoch == self.epoch and start in self.hurried
        hurried |= self.filler is not None and not self.filler.begun  # nothing comes before it
        return self._head is piece and (hurried or not self.ordered)

    def batch(self, indices: Indices) -> Batch:
        """A batch of these samples, in this order."""
        return self._batch(indices, 0, lambda: True)

    def _batch(self, indices: Indices, awaited: int, urgent: Callable[[], bool]) -> Batch:
        try:
            return self.assembler.batch(indices, awaited=awaited, urgent=urgent)
        finally:
            if self.filler is not None:
                self.filler.begin()

    def needed_from(self, piece: BatchPiece | None, place: tuple[int, int] | None = None) -> None:
        """This piece is the next to be handed out: what only earlier ones needed may go.

        `place`: the (epoch, position) where it begins, if it is one of another order.
        """
        self._head = piece
        if self.own and self.order is not None and piece is not None:
            epoch, start = (piece.epoch, piece.start) if place is None else place
            for slab in self.slabs.values():
                slab.advance(epoch * self.order.length + start)
        if not self.ordered or self.hurried:  # the head is urgent, others are not
            for slab in self.slabs.values():
                slab.look_again()

    def leave(self, *, dropped: bool = False) -> None:
        """End the run: what is filled for it alone is no longer needed. Does not wait. Idempotent.

        `dropped`: called by the garbage collector, possibly on a thread that holds a cache's lock.
        """
        self._left = True
        if self.own and self.filler is not None:
            self.filler.stop()
        if self.cached is not None:
            self.cached.let_go() if dropped else self.cached.leave()
        for slab in self.slabs.values():
            slab.look_again()

    def close(self) -> None:
        """The same, and wait until nothing is being read for it. Idempotent."""
        self.leave()
        if self.own and self.filler is not None:
            self.filler.close()


class Engine(Closing):
    """Batches of `data` in `order`. start() and close() are for one thread.

    Datasets that fit `budget` are kept in memory as they are read; with a window shuffle the
    windows to come are, if the part of their samples that this loader uses (`share`) makes that
    cheaper than record by record; otherwise records are read as they are needed. `batch_rows`:
    samples of the largest batch. With a `cache` records are read through it.
    """

    def __init__(
        self,
        data: Dataset,
        order: Order | None,
        *,
        batch_rows: int,
        budget: PageBudget,
        prefetch_bytes: int,
        pin: Callable[[Any], object] | None = None,
        cache: Cache | None = None,
        direct: DirectAccess | None = None,
        share: float = 1.0,
    ) -> None:
        self.direct = direct  # reads straight to the GPU, where they are possible
        self._data, self.order, self._batch_rows = data, order, batch_rows
        self.pid = os.getpid()  # its threads live in this process
        self._slots = Slots(prefetch_bytes, pin)
        self._slabs: dict[int, PageMemory] = {}  # of all runs
        self._filler: PagePrefetcher | None = None
        # of single runs; a thread outlives its filler where the run was dropped
        self._fillers: weakref.WeakSet[PagePrefetcher] = weakref.WeakSet()
        self._filling: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.counts = Counts()
        self._reads = PoolReads([data.pool])
        self._decoded_before = self._decode_seconds()
        # records larger than a page are read by themselves: pages of them are of no use
        self._paged = [s for s in data.streams if s.fixed is None or s.fixed.per_page]
        self._node = None if cache is not None or not self._paged else budget.node(data)
        self.cached: CachedReads | None = None
        if cache is not None:
            self.mode = "cached"
            self.cached = CachedReads(cache, data, batch_rows=batch_rows)
        elif budget.keeps_all(self._paged, self._node):
            self.mode = "resident"
        elif self._windows() is not None and share >= worth_reading(_record_bytes(self._paged)):
            self.mode = "window"
        else:
            self.mode = "records"
        if self.mode != "resident" and self._node is not None:
            self._node.close()
            self._node = None

    def _windows(self) -> WindowOrder | None:
        """The windows of the order, when they are of this dataset's stripes: pages of others would
        be waited for that nobody loads."""
        windows = windows_of(self.order)
        if windows is None:
            return None
        stripes = self._data.stripes()
        if isinstance(self.order, SubsetOrder):
            if (np.diff(self.order.mapping) < 0).any():
                return None
            stripes = subset_stripes(stripes, self.order.mapping)
        same = np.array_equal(np.diff(stripes), windows.samples_by_stripe)
        return windows if same else None

    def _hurried(self, windows: WindowOrder, epoch: int, position: int) -> range:
        """Where batches that a run begins with are read record by record, before windows are.

        To the end of a window that it begins in the midst of. At the start of an epoch the first
        batch alone, where its records are cheaper than the windows that hold them: of large records
        these are several, and the next one would be read at the same time.
        """
        if position:
            return range(position, windows.window_of(epoch, position).stop)
        last = min(self._batch_rows, windows.length) - 1
        share = (last + 1) / windows.window_of(epoch, last).stop
        return range(share < worth_reading(_record_bytes(self._paged)))

    def expect(self, steady: int, most: int) -> None:
        """So many batches are always, and at most, ahead or held by a user who keeps none."""
        streams = max(1, len(self._data.streams))
        self._slots.steady, self._slots.least = steady * streams, most * streams

    def start(self, epoch: int, position: int) -> Session:
        """Get ready for the pieces from a position on. leave() the session when it is over."""
        data, order, windows = self._data, self.order, self._windows()
        fresh = self.mode == "resident" and self._filler is None
        ordered = windows is not None and (fresh or self.mode == "window")
        hurried = range(0)
        if ordered and windows is not None and position < windows.length:
            hurried = self._hurried(windows, epoch, position)
        held = windows is None or len(hurried) > 0  # then the first batch goes first
        if fresh:
            self._slabs = {s.number: memory_for(data, s, self._node) for s in self._paged}
            fills = everything(self._slabs)
            if windows is not None:
                fills = everything_in_windows(
                    data, windows, self._slabs, epoch, position, batch_rows=self._batch_rows
                )
            self._filler = PagePrefetcher(
                self._slabs, fills, held=held, filling=self.counts.filling
            )
        slabs, filler, own = self._slabs, self._filler, False
        if self.mode == "window" and windows is not None:
            stripes, counts = data.stripes(), windows.samples_by_stripe
            kept = stripes_kept(counts[counts > 0], windows.window_stripes, self._batch_rows)
            slabs = {}
            for stream in self._paged:
                low, high = page_bounds(data.pages(stream).first_sample, stripes)
                pages = int(np.sort(high - low)[::-1][:kept].sum())
                slabs[stream.number] = PageMemory(data, stream, pages)
            # where all pages fit they stay: a filler that need not wait for room would never rest
            fits = all(slab.capacity == len(slab.pages.start) for slab in slabs.values())
            chosen = everything_in_windows if fits else in_windows
            fills = chosen(data, windows, slabs, epoch, position, batch_rows=self._batch_rows)
            filler = PagePrefetcher(slabs, fills, held=held, filling=self.counts.filling)
            self._fillers.add(filler)
            self._filling.update(filler.threads)
            own = True
        cached = None if self.cached is None else self.cached.begin()
        assembler = Assembler(
            data,
            self._slots,
            slabs,
            self.counts,
            None if cached is None else cached.read,
            self.direct if cached is None else None,
        )
        return Session(
            order,
            data.fields,
            self.counts,
            assembler,
            slabs,
            filler,
            own=own,
            ordered=ordered,
            cached=cached,
            hurried=hurried,
            epoch=epoch,
        )

    def _decode_seconds(self) -> float:
        return sum(stream.decoding.seconds for stream in self._data.streams)

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        counts, decoded = self.counts, self._decode_seconds() - self._decoded_before
        direct = {} if self.direct is None else {"direct": self.direct.stats()}
        return (
            direct
            | self._reads.stats()
            | counts.stalls(decoded)
            | {
                "mode": self.mode,
                "pages_in_memory": sum(slab.kept for slab in self._slabs.values()),
                "pages_to_keep": sum(slab.capacity for slab in self._slabs.values()),
                "pages_adopted": sum(
                    slab.adopted_total
                    for slab in self._slabs.values()
                    if isinstance(slab, NodePageMemory)
                ),
                "node_memory": "off" if self._node is None else self._node.described(),
                "records_gathered": self.counts.gathered_total,
                "records_read": self.counts.read_total,
                "shards_reopened": self._data.shards_reopened,
                "copied_past_the_cache": counts.copies[How.PAST_THE_CACHE],
                "copied_through_the_cache": counts.copies[How.THROUGH_THE_CACHE],
                "joined_by_numpy": counts.copies[How.BY_NUMPY],
                "batches_in_ordinary_memory": self._slots.ordinary_total,
                "batch_memory_bytes": self._slots.made_bytes,
            }
        )

    def stop(self) -> None:
        """Stop filling, without waiting. Idempotent."""
        if self.pid != os.getpid():
            return
        if self._node is not None:
            self._node.session.hurry()
        if self._filler is not None:
            self._filler.stop()
        if self.cached is not None:
            self.cached.let_go()
        if self.direct is not None:
            self.direct.stop()

    def close(self) -> None:
        """Stop filling, and wait for pages that are being read, also of runs that were dropped.

        Batches that were handed out stay good. Idempotent.
        """
        if self.cached is not None:
            self.cached.close()
        if self.pid != os.getpid():
            return
        if self._node is not None:
            self._node.session.hurry()
        for filler in list(self._fillers):
            filler.close()
        for thread in list(self._filling):
            thread.join()
        if self._filler is not None:
            self._filler.close()
        if self._node is not None:
            self._node.close()
        if self.direct is not None:
            self.direct.close()
        self._slots.close()


def worth_reading(record_bytes: float) -> float:
    """Share of the samples of whole pages from which on these are cheaper than records. Pure."""
    return record_bytes / (record_bytes + SINGLE_BYTES)


def _record_bytes(streams: Sequence[Stream]) -> float:
    """Mean of what is read of a sample."""
    rows = max((int(s.rows.sum()) for s in streams), default=0)
    return sum(int(s.payload_bytes.sum()) for s in streams) / max(1, rows)
