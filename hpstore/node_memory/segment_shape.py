"""How a segment is laid out: a table of where pages lie, then room for them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hpstore.runtime.buffers import HUGE_BYTES
from hpstore.units import round_up

MOST_PAGES = 1 << 32
MOST_SEGMENT_BYTES = 1 << 46
ENTRY_BYTES = 8  # int64: 0 where the page is not there, else its slot + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """Of one stream's pages in the memory of a node.

    There are twice as many slots as pages. What a process that was killed has claimed is never
    used again, as a device may still write there: such pages come into the second half, which
    takes no memory until then.
    """

    pages: int
    page_bytes: int

    @property
    def slots(self) -> int:
        """Room for so many pages."""
        return 2 * self.pages

    @property
    def needed_bytes(self) -> int:
        """Memory when all pages are there."""
        return self.pages * self.page_bytes

    @property
    def table_bytes(self) -> int:
        """Where slots begin."""
        return round_up(self.pages * ENTRY_BYTES, HUGE_BYTES)

    @property
    def slot_bytes(self) -> int:
        """Of all slots, in whole huge pages."""
        return round_up(self.slots * self.page_bytes, HUGE_BYTES)

    @property
    def file_bytes(self) -> int:
        """Of the file."""
        return self.table_bytes + self.slot_bytes

    def is_sane(self) -> bool:
        """Whether a file can have it: a process may ask for anything."""
        few = 0 < self.pages <= MOST_PAGES and 0 < self.page_bytes <= MOST_SEGMENT_BYTES
        return few and self.file_bytes <= MOST_SEGMENT_BYTES
