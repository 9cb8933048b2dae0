"""Pages of a stream in the memory of the node, which other processes fill and use, too."""

from __future__ import annotations

import hashlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from hpstore.codec.galois import Bytes
from hpstore.loaders.batching.page_memory import NEVER, PageMemory, Places
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.dataset.record_stream import Stream
from hpstore.node_memory.keeper_session import KeeperSession, SegmentUse
from hpstore.node_memory.meeting_place import keeper_directory
from hpstore.node_memory.segment_shape import SegmentShape
from hpstore.runtime.address_range import HUGE_BYTES, AddressRange, make_huge, populate
from hpstore.runtime.closing import Closing
from hpstore.runtime.local_messages import Lost
from hpstore.units import round_up

LOOK_SECONDS = 0.02  # between looks at what other processes have filled
CLAIM_SECONDS = 0.25  # between claims of what a process that was killed has left
STALL_SECONDS = 5.0  # without a page from a process that reads some: it may be stopped
AT_ONCE = 64
_NONE = np.empty(0, np.int64)


class NodePages(Closing):
    """The segments of one dataset for one loader. Thread-safe.

    `bound`: of all that the node may keep for this user, by what is taken; `keep_seconds`: without
    a user.
    """

    def __init__(self, data: StoredData, bound: Callable[[int], int], keep_seconds: float) -> None:
        self._data, self._bound, self._keep = data, bound, keep_seconds
        self.session = KeeperSession(keeper_directory(data.pool.config.settings))
        self._uses: dict[int, SegmentUse | None] = {}
        self._starting = threading.Lock()  # a keeper is started by one thread

    def bound_bytes(self) -> int:
        """Of all that the node may keep, as things are now."""
        self.session.connect()
        return self._bound(self.session.taken_bytes)

    def use(self, stream: Stream, *, start: bool, room: bool = True) -> SegmentUse | None:
        """The segment of a stream, asked for once; None where there is none, or none yet.

        `start` a keeper where none runs: that takes time. Without `room` one that is there already.
        """
        with self._starting:
            if stream.number in self._uses:
                return self._uses[stream.number]
            if not (self.session.start() if start else self.session.connect()):
                if start:
                    self._note(stream, None)
                return None
            return self._note(stream, self._attached(stream, room=room))

    def _note(self, stream: Stream, use: SegmentUse | None) -> SegmentUse | None:
        """What it is for good."""
        if use is None:
            self._data.pool.metrics.count("node_memory_unused_total")
        self._uses[stream.number] = use
        return use

    def _attached(self, stream: Stream, *, room: bool) -> SegmentUse | None:
        return self.session.attach(
            self._key(stream),
            name=self._data.name,
            pool=self._data.pool.config.name,
            shape=shape_of(self._data, stream),
            bound_bytes=self.bound_bytes() if room else 0,
            keep_seconds=self._keep,
        )

    def use_all(self, streams: Iterable[Stream], *, room: bool) -> bool:
        """Whether there is a segment for each of them; waits for a keeper to start, unless there is
        no `room` for what it does not have."""
        return all(self.use(s, start=room, room=room) is not None for s in streams)

    def _key(self, stream: Stream) -> str:
        """What pages are of: the manifest names every part by a nonce, and how it is stored."""
        found = hashlib.blake2b(self._data.manifest.encode(), digest_size=16)
        found.update(f"{self._data.pool.admin.record.pool_id} {stream.number}".encode())
        return found.hexdigest()

    def described(self) -> str:
        """For stats(): whether pages lie in the node's memory, or why not."""
        if any(use is not None for use in self._uses.values()):
            reason = self.session.reason
            return f"shared, left: {reason}" if self.session.over else "shared"
        return self.session.reason

    def close(self) -> None:
        """Leave the keeper. Pages stay mapped as long as they are used. Idempotent."""
        self.session.close()


class NodePageMemory(PageMemory):
    """As PageMemory with room for all pages, which lie in the memory of the node where it is had.

    Slots [0, shared) are those of the segment, which can only be read here; those behind are this
    process's own, for pages that the node's memory does not have and never will.
    """

    def __init__(self, data: StoredData, stream: Stream, node: NodePages) -> None:
        """Raises OSError where so many addresses are not to be had."""
        self._node = node
        self._use: SegmentUse | None = None
        self._asked = False
        self._shape = shape_of(data, stream)
        self._elsewhere: set[int] = set()  # pages that other processes read
        self._window: dict[int, Bytes] = {}  # page that is read -> where, writable
        self._ended = threading.Event()
        self._looked_up: npt.NDArray[np.bool_] = np.zeros(self._shape.pages, bool)
        self.adopted_total = 0  # pages that other processes have filled
        super().__init__(data, stream, self._shape.pages)
        self.join(start=False)

    def _make_memory(self) -> Bytes:
        """Addresses of both halves; the first is mapped when there is a segment."""
        at = self._shape.slot_bytes
        shape = self._shape
        self._own = -(-at // shape.page_bytes)  # the first own slot
        size = (self._own + shape.pages) * shape.page_bytes
        addresses = AddressRange(round_up(size, mmap.PAGESIZE))
        addresses.map_memory(at, len(addresses.array) - at)
        self._addresses = addresses
        self._free = deque(range(self._own, self._own + shape.pages))
        self._fresh = np.zeros(self._own + shape.pages, bool)  # own ones are seldom used
        return addresses.array[:size]

    def join(self, *, start: bool) -> None:
        """Use the segment from here on, and what is in it. `start`: with a keeper if need be."""
        if self._asked:
            return
        use = self._node.use(self._stream, start=start)
        self._asked = start or self._node.session.connected
        if use is not None and self._use is None:
            shape = self._shape
            self._addresses.map_file(0, shape.slot_bytes, use.descriptor, shape.table_bytes)
            self._use = use
            self.look(np.arange(len(self._slot)))

    def look(self, pages: Int64s) -> int:
        """Take over those of these pages, and of those that others read, that are complete in the
        segment; how many there were."""
        use = self._use
        if use is None:
            return 0
        with self._moved:
            if self._elsewhere:
                pages = np.union1d(pages, np.array(sorted(self._elsewhere), np.int64))
            slots = use.table[pages] - 1
            sane = (slots >= 0) & (slots < use.shape.slots) & (self._slot[pages] < 0)
            pages, slots = pages[sane], slots[sane]
            fresh = np.array([page not in self._expiry for page in pages.tolist()], bool)
            found = pages[fresh].tolist()
            if not found:
                return 0
            self._slot[found] = slots[fresh]
            self._expiry.update(dict.fromkeys(found, NEVER))
            self._failed[found] = False
            self._kept += len(found)
            self.adopted_total += len(found)
            self._elsewhere.difference_update(found)
            for missing in self._missing.values():
                missing.difference_update(found)
            self._moved.notify_all()
        return len(found)

    # --- filling ------------------------------------------------------------------------------

    def reserve(self, pages: Int64s, expire: int = NEVER) -> Places | None:
        """Places for those pages that this process is to read: see PageMemory.reserve.

        What another process reads is left to it, see reserve_rest().
        """
        self.join(start=True)
        self.look(pages)
        with self._moved:
            if self._closed:
                return None
            missing = [
                page
                for page in pages.tolist()
                if not (page in self._expiry or self._failed[page] or page in self._elsewhere)
            ]
            self._expiry.update(dict.fromkeys(missing, NEVER))
        self._look_up(pages)
        return self._placed(missing, private=False)

    def _look_up(self, pages: Int64s) -> None:
        """Map pages that others have filled here, by the thread that fills: not in the way of those
        who copy."""
        found = pages[(self._slot[pages] >= 0) & ~self._looked_up[pages]]
        self._looked_up[found] = True
        slots = np.sort(self._slot[found])
        for run in np.split(slots, np.flatnonzero(np.diff(slots) > 1) + 1):
            if len(run) and run[-1] < self._own:
                first, end = run[0] * self._page_bytes, (run[-1] + 1) * self._page_bytes
                populate(self._memory[first:end], write=False)

    def reserve_rest(self) -> Places | None:
        """Wait for pages that other processes read; places for those that do not come. {}: none."""
        moved = claimed = time.monotonic()
        while True:
            now = time.monotonic()
            if self.look(_NONE):
                moved = now
            with self._moved:
                if self._closed:
                    return None
                rest = sorted(self._elsewhere)[:AT_ONCE]
                stalled = now - moved >= STALL_SECONDS or self._node.session.over
                if rest and (stalled or now - claimed >= CLAIM_SECONDS):
                    self._elsewhere.difference_update(rest)
                    self._expiry.update(dict.fromkeys(rest, NEVER))
                    claimed = now
                elif rest:
                    rest = [-1]
            if not rest:
                return {}
            if rest != [-1]:
                places = self._placed(rest, private=stalled)
                if places:
                    return places
            self._ended.wait(LOOK_SECONDS)

    def _placed(self, missing: list[int], *, private: bool) -> Places:
        """Places of pages that are noted as being read; those that another process reads are
        noted as such."""
        if not missing:
            return {}
        slots = np.full(len(missing), -1, np.int64)
        use = self._use
        if use is not None and not private:
            try:
                slots = self._node.session.claim(use, np.array(missing, np.int64))
            except Lost:
                private = True
        private |= use is None
        places: Places = {}
        with self._moved:
            for page, slot in zip(missing, slots.tolist(), strict=True):
                if slot >= 0:
                    places[page] = slot
                elif private:
                    places[page] = self._free.popleft()
                else:
                    del self._expiry[page]
                    self._elsewhere.add(page)
        return places

    def read(self, places: Places) -> None:
        """As PageMemory.read; shared slots are mapped for writing as long as they are read."""
        shared = sorted((slot, page) for page, slot in places.items() if slot < self._own)
        begin = 0
        for at in range(1, len(shared) + 1):
            if at == len(shared) or shared[at][0] != shared[at - 1][0] + 1:
                self._open(shared[begin:at])
                begin = at
        try:
            super().read(places)
        finally:
            for _, page in shared:
                self._window.pop(page, None)

    def _open(self, run: list[tuple[int, int]]) -> None:
        """Map slots in a row for writing: until the last view goes, so a late read has its own."""
        if not run:
            return
        assert self._use is not None
        size = self._page_bytes
        low, high = run[0][0] * size, (run[-1][0] + 1) * size
        first = low // HUGE_BYTES * HUGE_BYTES
        length = round_up(high, HUGE_BYTES) - first
        window = AddressRange(length)
        offset = self._shape.table_bytes + first
        window.map_file(0, length, self._use.descriptor, offset, writable=True)
        mine = window.array[low - first : high - first]
        make_huge(mine)  # else a new process looks up each 4 KiB: half of its first epoch's rate
        populate(mine, write=True)
        for index, (_, page) in enumerate(run):
            self._window[page] = mine[index * size : (index + 1) * size]

    def _target(self, page: int, slot: int) -> Bytes:
        found = self._window.get(page)
        return super()._target(page, slot) if found is None else found[: self._room]

    def _has_arrived(self, page: int, slot: int) -> None:
        """It is complete: others may use it, and it is looked up here for those who copy."""
        if slot < self._own and self._use is not None:
            start = slot * self._page_bytes
            populate(self._memory[start : start + self._page_bytes], write=False)
            self._looked_up[page] = True
            self._node.session.publish(self._use, np.array([page], np.int64))

    def _give_back(self, places: Places) -> None:
        shared = {page: slot for page, slot in places.items() if slot < self._own}
        super()._give_back({p: s for p, s in places.items() if p not in shared})
        if shared:
            with self._moved:
                for page in shared:
                    self._fail(page)
                self._tell()
            if self._use is not None:
                self._node.session.release(self._use, np.array(sorted(shared), np.int64))

    def close(self) -> None:
        """As PageMemory.close."""
        if not self._ended.is_set():
            self._ended.set()
        super().close()


def shape_of(data: StoredData, stream: Stream) -> SegmentShape:
    """Of the segment of a stream."""
    pages = int(stream.page_starts[-1])
    return SegmentShape(pages=max(1, pages), page_bytes=PageMemory.page_bytes(stream))
