"""Fills slabs ahead of the batches: all pages in turn where they fit, else window after window."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hpstore.loaders.batching.page_memory import NEVER, PageMemory, Places
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.sampling.window_shuffle import WindowOrder
from hpstore.runtime.closing import Closing
from hpstore.runtime.stopwatch import Stopwatch
from hpstore.runtime.threads import start_some

_log = logging.getLogger(__name__)
CHUNK_PAGES = 64
FILLS_IN_FLIGHT = 2  # one is read while the last pages of another come
WINDOWS_KEPT = 3  # those that a batch begins and ends in, and the one that is filled


@dataclass(frozen=True, slots=True)
class PageFill:
    """Pages to load of each stream, by its number, and when they may go."""

    pages: Mapping[int, Int64s]
    expire: int


def everything(slabs: Mapping[int, PageMemory]) -> Iterator[PageFill]:
    """All pages of all streams, in chunks, streams in turn."""
    counts = {number: len(slab.pages.start) for number, slab in slabs.items()}
    for first in range(0, max(counts.values(), default=0), CHUNK_PAGES):
        yield PageFill(
            {
                n: np.arange(first, min(first + CHUNK_PAGES, count))
                for n, count in counts.items()
                if first < count
            },
            NEVER,
        )


def in_windows(
    data: StoredData,
    order: WindowOrder,
    slabs: Mapping[int, PageMemory],
    epoch: int,
    position: int,
    *,
    batch_rows: int,
) -> Iterator[PageFill]:
    """The windows from a position on, of this epoch and all that follow, as fills_of() joins them.

    So many samples are a batch.
    """
    stripes = data.stripes()
    while order.length:
        for chosen, stop in fills_of(order, epoch, position, batch_rows):
            pages = {n: _pages_of(slab, stripes, chosen) for n, slab in slabs.items()}
            yield PageFill(pages, epoch * order.length + stop)
        epoch, position = epoch + 1, 0


def fills_of(
    order: WindowOrder, epoch: int, position: int, batch_rows: int
) -> Iterator[tuple[Int64s, int]]:
    """Stripes to fill at once, and the position that they reach, to the end of an epoch. Pure.

    Windows that hold less than a batch are joined: it needs them all, and one after another they
    would leave devices without work. Never more stripes than a large window has: there may not be
    room for more.
    """
    while position < order.length:
        start, windows = position, list[Int64s]()
        while position < order.length and position - start < batch_rows:
            window = order.window_of(epoch, position)
            count = sum(map(len, windows))
            if windows and count + len(window.stripes) > order.window_stripes:
                break
            windows.append(window.stripes)
            position = window.stop
        yield np.concatenate(windows), position


def everything_in_windows(
    data: StoredData,
    order: WindowOrder,
    slabs: Mapping[int, PageMemory],
    epoch: int,
    position: int,
    *,
    batch_rows: int,
) -> Iterator[PageFill]:
    """All pages, those of the windows to come in this epoch first."""
    if position < order.length:
        for fill in in_windows(data, order, slabs, epoch, position, batch_rows=batch_rows):
            yield PageFill(fill.pages, NEVER)
            if fill.expire >= (epoch + 1) * order.length:
                break
    yield from everything(slabs)


def page_bounds(firsts: Int64s, stripes: Int64s) -> tuple[Int64s, Int64s]:
    """[low, high) of the pages in which a sample of each stripe begins, int64[S] both. Pure.

    `firsts`: first sample of every page, then the number of samples; `stripes` alike.
    """
    low = np.searchsorted(firsts, stripes[:-1], "right") - 1
    return low.astype(np.int64), np.searchsorted(firsts, stripes[1:], "left").astype(np.int64)


def stripes_kept(samples: Int64s, window_stripes: int, batch_rows: int) -> int:
    """Stripes that must fit in memory at once so that a batch never waits for room. Pure.

    A batch needs at most the stripes that its samples fill, if these are the smallest ones, and
    the windows at both of its ends whole; one more window is filled meanwhile.
    """
    total = np.cumsum(np.sort(samples))
    spanned = int(np.searchsorted(total, batch_rows)) + 1
    return spanned + WINDOWS_KEPT * window_stripes


def _pages_of(slab: PageMemory, stripes: Int64s, chosen: Int64s) -> Int64s:
    """Pages in which a sample of one of these stripes begins, ascending."""
    low, high = page_bounds(slab.pages.first_sample, stripes)
    runs = [
        np.arange(a, b) for a, b in zip(low[chosen].tolist(), high[chosen].tolist(), strict=True)
    ]
    found: Int64s = np.unique(np.concatenate(runs)) if runs else np.empty(0, np.int64)
    return found


class PagePrefetcher(Closing):
    """Loads what `fills` says, on threads of its own, until it is closed.

    Room is taken in the order of `fills`. A `held` one waits for begin(). `filling` counts the
    seconds of reading.
    """

    def __init__(
        self,
        slabs: Mapping[int, PageMemory],
        fills: Iterator[PageFill],
        *,
        held: bool = False,
        filling: Stopwatch | None = None,
    ) -> None:
        self._slabs, self._fills = slabs, fills
        self._filling = filling or Stopwatch()
        self._begun, self._closed = threading.Event(), threading.Event()
        self._turn = threading.Lock()  # guards _fills, and the order in which room is taken
        if not held:
            self._begun.set()
        threads_made = [
            threading.Thread(target=self._run, name=f"hpstore-fill-{number}", daemon=True)
            for number in range(FILLS_IN_FLIGHT)
        ]
        self._threads = start_some(threads_made)

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """Those that load."""
        return tuple(self._threads)

    @property
    def begun(self) -> bool:
        """False while it is held."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Nobody needs the devices for something more urgent. Idempotent."""
        self._begun.set()

    def _run(self) -> None:
        self._begun.wait()
        try:
            while (found := self._next()) is not None:
                for slab, places in found:
                    with self._filling.running():
                        slab.read(places)
            for slab in self._slabs.values():
                while rest := slab.reserve_rest():
                    with self._filling.running():
                        slab.read(rest)
        except Exception:  # noqa: BLE001 (logged; those who wait go on without slabs)
            _log.exception("filling ends; records are read one by one from here on")
            for slab in self._slabs.values():
                slab.close()

    def _next(self) -> list[tuple[PageMemory, Places]] | None:
        """What this thread reads next; None at the end."""
        with self._turn:
            fill = None if self._closed.is_set() else next(self._fills, None)
            if fill is None:
                return None
            found = []
            for number, pages in fill.pages.items():
                places = self._slabs[number].reserve(pages, fill.expire)
                if places is None:
                    self._end()
                    return None
                found.append((self._slabs[number], places))
        return found

    def _end(self) -> None:
        """A slab has ended: nobody is to wait for pages of others that nobody loads."""
        if not self._closed.is_set():
            _log.warning("filling ends with a slab; records are read one by one from here on")
        self.stop()

    def stop(self) -> None:
        """Stop, without waiting for the page that is being read. Idempotent."""
        # set once: the collector may end a run in the midst of set(), whose lock is held once
        for event in (self._closed, self._begun):
            if not event.is_set():
                event.set()
        for slab in self._slabs.values():
            slab.close()

    def close(self) -> None:
        """Stop. Idempotent; waits for the pages that are being read."""
        self.stop()
        for thread in self._threads:
            thread.join()
