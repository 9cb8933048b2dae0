"""Fills slabs ahead of the batches: all pages in turn where they fit, else window after window."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hpstore.closing import Closing
from hpstore.loaders.layout import Int64s
from hpstore.loaders.slab import NEVER, Slab
from hpstore.loaders.stored import StoredData
from hpstore.loaders.windows import WindowOrder

_log = logging.getLogger(__name__)
CHUNK_PAGES = 64
WINDOWS_KEPT = 3  # those that a batch begins and ends in, and the one that is filled


@dataclass(frozen=True, slots=True)
class Fill:
    """Pages to load of each stream, by its number, and when they may go."""

    pages: Mapping[int, Int64s]
    expire: int


def everything(slabs: Mapping[int, Slab]) -> Iterator[Fill]:
    """All pages of all streams, in chunks, streams in turn."""
    counts = {number: len(slab.pages.start) for number, slab in slabs.items()}
    for first in range(0, max(counts.values(), default=0), CHUNK_PAGES):
        yield Fill(
            {n: np.arange(first, min(first + CHUNK_PAGES, count)) for n, count in counts.items()
             if first < count},
            NEVER,
        )  # fmt: skip


def in_windows(
    data: StoredData, order: WindowOrder, slabs: Mapping[int, Slab], epoch: int, position: int
) -> Iterator[Fill]:
    """The windows from a position on, of this epoch and all that follow."""
    stripes = data.stripes()
    while order.length:
        while position < order.length:
            window = order.window_of(epoch, position)
            pages = {n: _pages_of(slab, stripes, window.stripes) for n, slab in slabs.items()}
            yield Fill(pages, epoch * order.length + window.stop)
            position = window.stop
        epoch, position = epoch + 1, 0


def everything_in_windows(
    data: StoredData, order: WindowOrder, slabs: Mapping[int, Slab], epoch: int, position: int
) -> Iterator[Fill]:
    """All pages, those of the windows to come in this epoch first."""
    if position < order.length:
        for fill in in_windows(data, order, slabs, epoch, position):
            yield Fill(fill.pages, NEVER)
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


def _pages_of(slab: Slab, stripes: Int64s, chosen: Int64s) -> Int64s:
    """Pages in which a sample of one of these stripes begins, ascending."""
    low, high = page_bounds(slab.pages.first_sample, stripes)
    runs = [
        np.arange(a, b) for a, b in zip(low[chosen].tolist(), high[chosen].tolist(), strict=True)
    ]
    found: Int64s = np.unique(np.concatenate(runs)) if runs else np.empty(0, np.int64)
    return found


class Filler(Closing):
    """Loads what `fills` says, on a thread of its own, until it is closed."""

    def __init__(self, slabs: Mapping[int, Slab], fills: Iterable[Fill]) -> None:
        self._slabs, self._fills = slabs, fills
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpstore-fill", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for fill in self._fills:
                for number, pages in fill.pages.items():
                    if self._closed.is_set() or not self._slabs[number].load(pages, fill.expire):
                        return
        except Exception:  # noqa: BLE001 (logged; those who wait go on without slabs)
            _log.exception("filling ends; records are read one by one from here on")
            for slab in self._slabs.values():
                slab.close()

    def stop(self) -> None:
        """Stop, without waiting for the page that is being read. Idempotent."""
        self._closed.set()
        for slab in self._slabs.values():
            slab.close()

    def close(self) -> None:
        """Stop. Idempotent; waits for the page that is being read."""
        self.stop()
        self._thread.join()


__all__ = ["WINDOWS_KEPT", "Fill", "Filler", "everything", "everything_in_windows",
           "in_windows", "page_bounds", "stripes_kept"]  # fmt: skip
