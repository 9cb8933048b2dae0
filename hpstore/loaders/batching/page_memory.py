"""Pages of one stream in memory: filled ahead of the batches, gathered from in one call."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import AlreadyClosed
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.loaders.batching import streaming_copy
from hpstore.loaders.batching.gather_copy import How, Pieces
from hpstore.loaders.dataset.page_compression import fill_pages, read_pages
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.dataset.record_stream import Locations, Stream
from hpstore.runtime.buffers import aligned_array, touch
from hpstore.units import round_up

_log = logging.getLogger(__name__)
Places = dict[int, int]  # page -> its slot
NEVER = 1 << 62
MOST_PADDING = 1.125  # memory for pages over the bytes of their units
TABLE_STRIDE = 512  # bytes of a record from which on a table of 8 bytes a record is no matter


class PageMemory:
    """Room for `capacity` pages of a stream. Thread-safe; one thread at a time reserves.

    Pages come by reserve() and read() and stay until somebody needs the room and `expire` has
    passed. Records of one size lie at equal distances, so that a batch is one gather.
    """

    def __init__(self, data: StoredData, stream: Stream, capacity: int) -> None:
        self._data, self._stream = data, stream
        self.pages = data.pages(stream)
        plan = stream.fixed
        self.stride = plan.stride if plan is not None and plan.per_page else 0
        self._page_bytes = self.page_bytes(stream)
        # whole units can be read into it: otherwise the padding of a page is left out
        self._direct = self._page_bytes >= stream.unit_bytes and not stream.compression
        count = len(self.pages.start)
        self.capacity = min(capacity, count)
        self._room = min(self._page_bytes, stream.unit_bytes)  # of a page, for what is read
        # slots in turn, so that all of the memory is used from the start and none of it comes later
        self._free = deque(range(self.capacity))
        self._fresh = np.ones(self.capacity, bool)  # slots that were never used
        self._memory: Bytes = self._make_memory()
        self._rows = (
            self._memory.reshape(-1, self.stride) if self.stride and len(self._memory) else None
        )
        self._slot = np.full(count, -1, np.int64)  # of each page
        self._failed = np.zeros(count, bool)
        self._held = np.zeros(count, np.int64)  # of each page, by how many it is copied from
        self._expiry: dict[int, int] = {}  # page that is there or being read -> when it may go
        self._kept = 0  # pages that are there and stay
        self._now = 0
        self._closed = False
        self._leaves = NEVER  # when a page may go for which somebody waits
        # guards all of the above but the memory; the collector may end a run, which asks those who
        # wait to look again, on a thread that holds it
        lock = threading.RLock()
        self._moved = threading.Condition(lock)  # a batch's pages came, or cannot; or all is over
        self._missing: dict[int, set[int]] = {}  # by thread in wait(): pages that are not there
        self._room_made = threading.Condition(lock)
        self._table: Int64s | None = None  # row of every record, once all pages are there to stay
        self._making_table = threading.Lock()

    def _make_memory(self) -> Bytes:
        """Memory of all slots, whole records of one size."""
        return aligned_array(self.capacity * self._page_bytes)

    @property
    def kept(self) -> int:
        """Pages that are there to stay."""
        return self._kept

    @staticmethod
    def bytes_needed(stream: Stream, pages: int) -> int:
        """Memory for so many pages."""
        return pages * PageMemory.page_bytes(stream)

    @staticmethod
    def page_bytes(stream: Stream) -> int:
        """Distance of pages in memory, a multiple of the distance of records of one size.

        Room for a whole unit, aligned to 4 KiB, where that costs little, so that units are read
        straight into it; otherwise for the records of a page alone.
        """
        plan, unit = stream.fixed, stream.unit_bytes
        if plan is None or not plan.per_page:
            return round_up(unit, ALIGNMENT_BYTES)
        whole = round_up(unit, math.lcm(plan.stride, ALIGNMENT_BYTES))
        return whole if whole <= unit * MOST_PADDING else plan.per_page * plan.stride

    def reserve(self, pages: Int64s, expire: int = NEVER) -> Places | None:
        """Places for pages that are not there, waiting for room; None when the slab was closed.

        They are to be read(), by any thread, and may be given up when advance() has passed
        `expire`. Room is taken for all of them at once: reads of a part would queue behind those of
        others, and what comes free meanwhile would stay unused. Raises ValueError for more pages
        than there is ever room for.
        """
        with self._moved:
            missing: list[int] = []
            for page in pages.tolist():
                if page in self._expiry:  # there, or about to be
                    self._expiry[page] = max(self._expiry[page], expire)
                elif not self._failed[page]:
                    missing.append(page)
            if len(missing) > self.capacity:
                raise ValueError(f"{len(missing)} pages at once, there is room for {self.capacity}")
            while not self._closed:
                if len(self._free) < len(missing):
                    self._give_up()
                if len(self._free) >= len(missing):
                    self._expiry.update(dict.fromkeys(missing, expire))
                    return {page: self._free.popleft() for page in missing}
                self._leaves = min(self._expiry.values(), default=NEVER)
                self._room_made.wait()
        return None

    def reserve_rest(self) -> Places | None:
        """As reserve(), of what others were to read and have not: there are no others here."""
        return {}

    def _give_up(self) -> None:
        gone = [p for p, e in self._expiry.items() if e <= self._now and not self._held[p]]
        for page in gone:
            if self._slot[page] >= 0:  # else it is being read
                self._free.append(int(self._slot[page]))
                self._slot[page] = -1
                del self._expiry[page]

    def read(self, places: Places) -> None:
        """Read pages into their places; each can be used as soon as it is there.

        A page that cannot be read is noted: who needs it reads its records one by one, and gets the
        error. That the dataset or its pool was closed is no fault of a page: it ends this slab.
        """
        places = dict(places)
        if not places:
            return

        def target(page: int) -> Bytes:
            return self._target(page, places[page])

        def arrived(page: int) -> None:
            slot = places.pop(page)
            with self._moved:
                self._slot[page] = slot
                self._kept += self._expiry[page] == NEVER
                for missing in self._missing.values():
                    missing.discard(page)
                if not all(self._missing.values()):
                    self._moved.notify_all()
                if self._expiry[page] <= self._now:
                    self._room_made.notify_all()
            self._has_arrived(page, slot)

        numbers = np.array(sorted(places), np.int64)
        shard = partial(self._data.reader, self._stream)
        self._touch(places)
        try:
            shards = np.unique(self.pages.shard[numbers])
            self._data.open_all(self._stream, shards.tolist())
            if self._direct:
                late = fill_pages(
                    shard,
                    self._stream,
                    self.pages,
                    numbers,
                    target,
                    arrived,
                    self._data.shards_at_once,
                )
                self._lose(late.tolist(), places)
            else:
                read_pages(shard, self._stream, self.pages, numbers, target, arrived)
        except AlreadyClosed:
            self._give_back(places)
            self.close()
        except Exception as error:  # noqa: BLE001 (raised again to who reads a record of these)
            self._data.pool.metrics.count("page_load_error_total", len(places))
            if not self._failed.any():
                _log.warning("pages that cannot be read are read record by record: %s", error)
            self._give_back(places)

    def _target(self, page: int, slot: int) -> Bytes:
        """Where a page is read into."""
        start = slot * self._page_bytes
        return self._memory[start : start + self._room]

    def _has_arrived(self, page: int, slot: int) -> None:
        """A page is there. Called without the lock, by the thread that has read it."""

    def _touch(self, places: Places) -> None:
        """Clear fresh memory here, while pages of another fill come, not in each read's way."""
        slots = np.array(sorted(places.values()), np.int64)
        fresh = slots[self._fresh[slots]]
        self._fresh[fresh] = False
        for run in np.split(fresh, np.flatnonzero(np.diff(fresh) > 1) + 1):
            if len(run):
                touch(self._memory[run[0] * self._page_bytes : (run[-1] + 1) * self._page_bytes])

    def _give_back(self, places: Places) -> None:
        """Room of pages that could not be read."""
        with self._moved:
            for page, slot in places.items():
                self._fail(page)
                self._free.append(slot)
            self._tell()

    def _lose(self, late: list[int], places: dict[int, int]) -> None:
        """Reads that do not end may still write into these slots: nobody uses them again.

        Where pages come and go, there may then be too little room for those of one batch.
        """
        if not late:
            return
        self._data.pool.metrics.count("page_slots_lost_total", len(late))
        with self._moved:
            for page in late:
                del places[page]
                self._closed |= self._expiry[page] != NEVER
                self._fail(page)
            self._tell()

    def _fail(self, page: int) -> None:
        self._failed[page] = True
        del self._expiry[page]

    def wait(self, pages: Int64s, urgent: Callable[[], bool]) -> None:
        """Wait until pages that somebody loads are there, or have failed, or nobody loads more.

        Or until it is `urgent`: what makes it so is followed by look_again(). Of the pages only the
        last one wakes: to look at each that comes costs those who read them the interpreter's lock.
        """
        me = threading.get_ident()
        with self._moved:
            try:
                while not (self._closed or urgent()):
                    missing = pages[(self._slot[pages] < 0) & ~self._failed[pages]]
                    if not len(missing):
                        return
                    self._missing[me] = set(missing.tolist())
                    self._moved.wait()
            finally:
                self._missing.pop(me, None)

    @contextmanager
    def resident(self, places: Locations) -> Iterator[Int64s]:
        """The slot of each record's page, -1 where it is not in memory.

        Inside none of them is given up: a batch that is made long ahead may find a page there of an
        earlier window, which goes before the batch is handed out.
        """
        if self.capacity == len(self._slot):  # there is room for all: none ever goes
            yield self._slots_of(places)
            return
        with self._moved:
            slots = self._slots_of(places)
            pages = places.page[slots >= 0]
            self._held[pages] += 1  # once a page, however many of its records there are
        try:
            yield slots
        finally:
            with self._moved:
                self._held[pages] -= 1
                if any(self._expiry.get(page, NEVER) <= self._now for page in set(pages.tolist())):
                    self._room_made.notify_all()

    def _slots_of(self, places: Locations) -> Int64s:
        return np.where(places.page >= 0, self._slot[places.page], -1)

    def rows_of(self, indices: Int64s) -> Int64s | None:
        """Where samples lie, for gather_rows(): None unless all of the stream is here to stay.

        Then a batch needs no look at pages (docs/decisions/0018). None also for an index out of
        range.
        """
        table = self._table
        if table is None:
            if self._kept < len(self._slot) or self.stride < TABLE_STRIDE:
                return None
            table = self._make_table()
            if table is None:
                return None
        if len(indices) and int(indices.view(np.uint64).max()) >= len(table):  # or negative
            return None
        rows: Int64s = table[indices]
        return rows

    def _make_table(self) -> Int64s | None:
        """The row of every record; None while another thread makes the table."""
        if not self._making_table.acquire(blocking=False):
            return None
        try:
            first = self.pages.first_sample
            shift = self._slot * (self._page_bytes // self.stride) - first[:-1]
            self._table = np.repeat(shift, np.diff(first)) + np.arange(first[-1])
        finally:
            self._making_table.release()
        return self._table

    def gather(self, slots: Int64s, places: Locations, out: Bytes, *, last: bool = True) -> How:
        """Records of one size whose pages are there, as gather_rows()."""
        inside = places.start % self._stream.unit_bytes // self.stride
        rows = slots * (self._page_bytes // self.stride) + inside
        return self.gather_rows(rows, out, last=last)

    def gather_rows(self, rows: Int64s, out: Bytes, *, last: bool = True) -> How:
        """Records by their rows, of rows_of(), into `out` (n, stride), contiguous.

        `last`: it is not read again at once, to be copied on.
        """
        assert self._rows is not None
        past = streaming_copy.past_the_cache(out.nbytes, len(rows)) if last else None
        if past is None:
            # on this thread alone: torch's index_select wakes others, which starve on few cores
            np.take(self._rows, rows, axis=0, out=out, mode="clip")
            return How.through_the_cache(out.nbytes, len(rows)) if last else How.USUALLY
        assert out.flags.c_contiguous
        records = Pieces(self._memory, rows * self.stride, np.full(len(rows), self.stride))
        past(records.addresses(), records.lengths, out.reshape(-1))
        return How.PAST_THE_CACHE

    def pieces(self, slots: Int64s, places: Locations) -> Pieces:
        """Records whose pages are there, where they lie in the slab; for use inside resident()."""
        starts = slots * self._page_bytes + places.start % self._stream.unit_bytes
        return Pieces(self._memory, starts, places.length)

    def advance(self, now: int) -> None:
        """What expires by `now` may be given up. Wakes nobody for whom there is nothing."""
        with self._room_made:
            self._now = max(self._now, now)
            if self._now >= self._leaves:
                self._leaves = NEVER
                self._room_made.notify_all()

    def look_again(self) -> None:
        """It may have become urgent for those in wait()."""
        with self._moved:
            self._moved.notify_all()

    def close(self) -> None:
        """Nobody waits any more. The memory goes with the last view of it."""
        with self._moved:
            self._closed = True
            self._tell()

    def _tell(self) -> None:
        self._moved.notify_all()
        self._room_made.notify_all()
