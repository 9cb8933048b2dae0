"""What a keeper keeps: segments, who uses them, who fills which page. One thread, no sockets."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hpstore.node_memory.segment_shape import ENTRY_BYTES, SegmentShape
from hpstore.runtime.budget import available_bytes
from hpstore.units import format_bytes

_log = logging.getLogger(__name__)
Int64s = npt.NDArray[np.int64]
MOST_SEGMENTS = 512
LOW_SHARE = 0.05  # of the memory that there was: with less available, what is unused is freed
_BLOCK_BYTES = 512  # of st_blocks
# who maps a file that another process cuts short dies by SIGBUS
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Refused(Exception):
    """What was asked for is not given, and why."""


@dataclass(slots=True, eq=False)
class KeptSegment:
    """Pages of one stream of a dataset."""

    number: int
    key: str
    name: str  # of the dataset
    pool: str
    shape: SegmentShape
    descriptor: int
    table: Int64s
    keep_seconds: float
    unused_since: float
    users: dict[int, int] = field(default_factory=dict)  # session -> its process
    claims: dict[int, int] = field(default_factory=dict)  # page -> the session that reads it
    moved: dict[int, int] = field(default_factory=dict)  # page -> its slot, when it is another
    spare: int = 0  # slots of the reserve that are taken
    dropped: bool = False  # who uses it goes on; it is not handed out again

    @property
    def taken_bytes(self) -> int:
        """Memory that it has now."""
        return int(os.fstat(self.descriptor).st_blocks) * _BLOCK_BYTES

    @property
    def promised_bytes(self) -> int:
        """Memory that it has, or will have when its users have filled it."""
        return max(self.taken_bytes, self.shape.needed_bytes if self.users else 0)

    @property
    def there(self) -> int:
        """Pages that are complete."""
        return int(np.count_nonzero(self.table))

    def slot_of(self, page: int) -> int:
        """Where a page is read into; -1 when the reserve is used up."""
        return self.moved.get(page, page)

    def retire(self, page: int) -> None:
        """A device may still write into this page's slot: it gets another one, if there is any."""
        if self.spare < self.shape.pages:
            self.moved[page] = self.shape.pages + self.spare
            self.spare += 1
        else:
            self.moved[page] = -1


class Keeper:
    """Segments by key. `clock`: seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._segments: dict[int, KeptSegment] = {}
        self._next = 0
        self._most = available_bytes()

    @property
    def empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._segments

    def taken_bytes(self) -> int:
        """Memory of all segments."""
        return sum(segment.taken_bytes for segment in self._segments.values())

    # --- what loaders ask for -----------------------------------------------------------------

    def attach(
        self,
        session: int,
        process: int,
        *,
        key: str,
        name: str,
        pool: str,
        shape: SegmentShape,
        bound_bytes: int,
        keep_seconds: float,
    ) -> KeptSegment:
        """The segment of a key, made where there is none. `bound_bytes`: for all that is kept.

        Raises Refused.
        """
        found = self._found(key, shape)
        if found is None:
            self._make_room(shape.needed_bytes, bound_bytes)
            found = self._make(key, name, pool, shape)
        found.users[session] = process
        found.keep_seconds = keep_seconds
        return found

    def _found(self, key: str, shape: SegmentShape) -> KeptSegment | None:
        for segment in self._segments.values():
            if segment.key == key and segment.shape == shape and not segment.dropped:
                if segment.spare < shape.pages:
                    return segment
                self._drop(segment)  # processes were killed while they filled it: no slots left
        return None

    def _make_room(self, needed: int, bound: int) -> None:
        """Free unused segments, those that were used last at last. Raises Refused, and frees none
        where that would not be enough.
        """
        in_use = sum(s.promised_bytes for s in self._segments.values() if s.users)
        if in_use + needed > bound:
            raise Refused(_above(needed, in_use, bound))
        unused = sorted(
            (s for s in self._segments.values() if not s.users), key=lambda s: s.unused_since
        )
        kept = sum(segment.promised_bytes for segment in self._segments.values())
        while unused and (kept + needed > bound or len(self._segments) >= MOST_SEGMENTS):
            gone = unused.pop(0)
            kept -= gone.promised_bytes
            self._drop(gone)
        if kept + needed > bound or len(self._segments) >= MOST_SEGMENTS:
            raise Refused(_above(needed, kept, bound))

    def _make(self, key: str, name: str, pool: str, shape: SegmentShape) -> KeptSegment:
        descriptor = os.memfd_create("hpstore-node", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, shape.file_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            table = mmap.mmap(descriptor, shape.pages * ENTRY_BYTES)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise Refused(f"a file of {shape.file_bytes} bytes cannot be made: {error}") from error
        self._next += 1
        made = self._segments[self._next] = KeptSegment(
            number=self._next,
            key=key,
            name=name,
            pool=pool,
            shape=shape,
            descriptor=descriptor,
            table=np.frombuffer(table, np.int64),
            keep_seconds=0.0,
            unused_since=self._clock(),
        )
        return made

    def claim(self, session: int, number: int, pages: Int64s) -> Int64s:
        """Slots to read pages into, -1 for what is there or is read by another. Raises Refused."""
        segment = self._of(session, number)
        if ((pages < 0) | (pages >= segment.shape.pages)).any():
            raise Refused("there are no such pages")
        slots = np.full(len(pages), -1, np.int64)
        for at, page in enumerate(pages.tolist()):
            slot = segment.slot_of(page)
            free = slot >= 0 and not segment.table[page]
            if free and segment.claims.setdefault(page, session) == session:
                slots[at] = slot
        return slots

    def publish(self, session: int, number: int, pages: Int64s) -> None:
        """Pages are complete and verified. What this session has not claimed is left out."""
        segment = self._of(session, number)
        for page in pages.tolist():
            if segment.claims.get(page) == session:
                segment.table[page] = segment.slot_of(page) + 1
                del segment.claims[page]

    def release(self, session: int, number: int, pages: Int64s) -> None:
        """Pages are not read after all, and nothing writes into their slots any more."""
        segment = self._of(session, number)
        for page in pages.tolist():
            if segment.claims.get(page) == session:
                del segment.claims[page]

    def leave(self, session: int) -> None:
        """A session has ended, or its process. What it claimed may still be written."""
        for segment in list(self._segments.values()):
            if segment.users.pop(session, None) is None:
                continue
            for page in [p for p, by in segment.claims.items() if by == session]:
                del segment.claims[page]
                segment.retire(page)
            if not segment.users:
                segment.unused_since = self._clock()
                if segment.dropped or segment.keep_seconds <= 0:
                    self._drop(segment)

    def _of(self, session: int, number: int) -> KeptSegment:
        segment = self._segments.get(number)
        if segment is None or session not in segment.users:
            raise Refused(f"this process does not use a segment {number}")
        return segment

    # --- what ends ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Free what was unused for as long as it is kept, and all of it when memory is short."""
        now, available = self._clock(), available_bytes()
        self._most = max(self._most, available)
        low = available < LOW_SHARE * self._most
        for segment in list(self._segments.values()):
            if not segment.users and (low or now - segment.unused_since >= segment.keep_seconds):
                _log.info("dataset %r is freed (memory is short: %s)", segment.name, low)
                self._drop(segment)

    def free(self, name: str | None) -> tuple[int, int]:
        """Free a dataset, or all: (bytes that are free, bytes that go with their users)."""
        freed = later = 0
        for segment in list(self._segments.values()):
            if name is None or name in (segment.name, segment.key):
                nbytes = segment.taken_bytes
                freed, later = (freed, later + nbytes) if segment.users else (freed + nbytes, later)
                self._drop(segment)
        return freed, later

    def _drop(self, segment: KeptSegment) -> None:
        """It is found no more. Its memory goes with the last process that maps it."""
        segment.dropped = True
        if not segment.users:
            del self._segments[segment.number]
            segment.table = np.empty(0, np.int64)
            os.close(segment.descriptor)

    def listing(self) -> list[dict[str, Any]]:
        """Datasets for people: JSON."""
        now = self._clock()
        return [
            {
                "dataset": segment.name,
                "pool": segment.pool,
                "key": segment.key,
                "bytes": segment.taken_bytes,
                "pages": segment.there,
                "pages_of": segment.shape.pages,
                "processes": sorted(set(segment.users.values())),
                "unused_seconds": 0.0 if segment.users else round(now - segment.unused_since, 1),
                "keep_seconds": segment.keep_seconds,
                "dropped": segment.dropped,
            }
            for segment in self._segments.values()
        ]


def _above(needed: int, kept: int, bound: int) -> str:
    return (
        f"{format_bytes(needed)} more than the {format_bytes(kept)} of datasets in use are "
        f"above the bound of {format_bytes(bound)}"
    )
