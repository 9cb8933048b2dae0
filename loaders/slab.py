"""Pages of one stream in memory: filled ahead of the batches, gathered from in one call."""

from __future__ import annotations

import logging
import threading
from functools import partial

import numpy as np
import torch

from hpstore.buffers import aligned_array
from hpstore.codec.galois import Bytes
from hpstore.loaders.layout import Int64s
from hpstore.loaders.pages import read_pages
from hpstore.loaders.stored import StoredData
from hpstore.loaders.stream import Locations, Stream
from hpstore.units import round_up

_log = logging.getLogger(__name__)
NEVER = 1 << 62


class Slab:
    """Room for `capacity` pages of a stream. Thread-safe.

    Pages come by load() and stay until somebody needs the room and `expire` has passed. Records
    of one size lie at equal distances, so that a batch is one gather.
    """

    def __init__(self, data: StoredData, stream: Stream, capacity: int) -> None:
        self._data, self._stream = data, stream
        self.pages = data.pages(stream)
        plan = stream.fixed
        self.stride = plan.stride if plan is not None and plan.per_page else 0
        used = plan.per_page * plan.stride if plan is not None and plan.per_page else 0
        self._page_bytes = used or round_up(stream.unit_bytes, 64)
        count = len(self.pages.start)
        self.capacity = min(capacity, count)
        self._memory: Bytes = aligned_array(self.capacity * self._page_bytes)
        self._rows = (
            torch.from_numpy(self._memory).view(-1, self.stride)
            if self.stride and len(self._memory)
            else None
        )
        self._slot = np.full(count, -1, np.int64)  # of each page
        self._failed = np.zeros(count, bool)
        self._free = list(range(self.capacity))
        self._expiry: dict[int, int] = {}  # page -> when it may go
        self._now = 0
        self._closed = False
        self._moved = threading.Condition()  # guards all of the above but the memory

    @staticmethod
    def bytes_needed(stream: Stream, pages: int) -> int:
        """Memory for so many pages."""
        return pages * round_up(stream.unit_bytes, 64)

    def load(self, pages: Int64s, expire: int = NEVER) -> bool:
        """Read pages that are not there, waiting for room; False when the slab was closed.

        They may be given up when advance() has passed `expire`. A page that cannot be read is
        noted: who needs it reads its records one by one, and gets the error.
        """
        missing: list[int] = []
        with self._moved:
            for page in pages.tolist():
                if self._slot[page] >= 0:
                    self._expiry[page] = max(self._expiry[page], expire)
                elif not self._failed[page]:
                    missing.append(page)
        at = 0
        while at < len(missing):
            run = self._reserve(missing[at:])
            if not run:
                return False
            self._read(run, expire)
            at += len(run)
        return True

    def _reserve(self, wanted: list[int]) -> list[tuple[int, int]]:
        """(page, slot) for as many of `wanted` as there is room for; waits for one."""
        with self._moved:
            while not self._closed:
                if len(self._free) < len(wanted):
                    self._give_up()
                if self._free:
                    count = min(len(self._free), len(wanted))
                    return [(page, self._free.pop()) for page in wanted[:count]]
                self._moved.wait()
        return []

    def _give_up(self) -> None:
        for page in [p for p, expire in self._expiry.items() if expire <= self._now]:
            self._free.append(int(self._slot[page]))
            self._slot[page] = -1
            del self._expiry[page]

    def _read(self, run: list[tuple[int, int]], expire: int) -> None:
        """Read pages into their slots; each can be used as soon as it is there."""
        places = dict(run)

        def target(page: int) -> Bytes:
            start = places[page] * self._page_bytes
            return self._memory[start : start + self._page_bytes]

        def arrived(page: int) -> None:
            with self._moved:
                self._slot[page] = places.pop(page)
                self._expiry[page] = expire
                self._moved.notify_all()

        numbers = np.array(sorted(places), np.int64)
        try:
            shard = partial(self._data.reader, self._stream)
            read_pages(shard, self._stream, self.pages, numbers, target, arrived)
        except Exception as error:  # noqa: BLE001 (raised again to who reads a record of these)
            self._data.pool.metrics.count("page_load_error_total", len(places))
            if not self._failed.any():
                _log.warning("pages that cannot be read are read record by record: %s", error)
            with self._moved:
                for page, slot in places.items():
                    self._failed[page] = True
                    self._free.append(slot)
                self._moved.notify_all()

    def wait(self, pages: Int64s) -> None:
        """Wait until pages that somebody loads are there, or have failed, or nobody loads more."""
        with self._moved:
            self._moved.wait_for(
                lambda: self._closed or bool(((self._slot[pages] >= 0) | self._failed[pages]).all())
            )

    def resident(self, places: Locations) -> Int64s:
        """The slot of each record's page, -1 where it is not in memory."""
        return np.where(places.page >= 0, self._slot[places.page], -1)

    def gather(self, slots: Int64s, places: Locations, out: Bytes) -> None:
        """Records of one size whose pages are there into `out` (n, stride)."""
        assert self._rows is not None
        inside = places.start % self._stream.unit_bytes // self.stride
        rows = torch.from_numpy(slots * (self._page_bytes // self.stride) + inside)
        torch.index_select(self._rows, 0, rows, out=torch.from_numpy(out))

    def views(self, slots: Int64s, places: Locations) -> list[Bytes]:
        """Records whose pages are there, as views of the slab; copy them before they expire."""
        starts = slots * self._page_bytes + places.start % self._stream.unit_bytes
        ends = starts + places.length
        memory = self._memory
        return [memory[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def advance(self, now: int) -> None:
        """What expires by `now` may be given up."""
        with self._moved:
            self._now = max(self._now, now)
            self._moved.notify_all()

    def close(self) -> None:
        """Nobody waits any more. The memory goes with the last view of it."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()


__all__ = ["NEVER", "Slab"]
