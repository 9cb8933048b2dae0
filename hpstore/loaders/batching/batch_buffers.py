"""Memory of batches, used again once the user has dropped them.

Fresh memory costs 2 to 10 times a copy into memory that is there already, so batches are made in
slots. A slot is never overwritten under its user: it comes back when the last tensor over it has
gone, and while all are out, batches are made in ordinary memory.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.batch_values import slot_bytes
from hpstore.loaders.dataset.fields import Array
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.closing import Closing
from hpstore.units import MIB

_log = logging.getLogger(__name__)


class BatchSlot:
    """Memory for one batch. It belongs to who took it, until release() or hand_out()."""

    __slots__ = ("_held", "_references", "_ring", "memory")

    def __init__(self, memory: Bytes, ring: Slots | None) -> None:
        self.memory = memory
        self._ring = ring
        self._held = 0
        self._references: list[weakref.ref[Array]] = []

    def hand_out(self, arrays: Sequence[Array]) -> None:
        """Give the slot to whoever holds any of these arrays over it, or a tensor over one."""
        ring = self._ring
        if ring is None:
            return
        self._held = len(arrays)
        returned = ring._returned

        def gone(_: object) -> None:
            returned.append(self)  # nothing more: this may run in the midst of anything

        self._references = [weakref.ref(array, gone) for array in arrays]
        if not arrays:
            self.release()

    def release(self) -> None:
        """Give it back now. Nobody else holds a view of it."""
        if self._ring is not None:
            self._held = 1
            self._ring._returned.append(self)

    def lose(self) -> None:
        """Somebody may still write into it: it is never used again, others take its place."""
        if self._ring is not None:
            self._ring.forget(self)

    def dropped(self) -> bool:
        """One array less; True when none is left."""
        self._held -= 1
        if self._held:
            return False
        self._references = []
        return True


_NOTHING: Bytes = np.empty(0, np.uint8)


class Slots(Closing):
    """Slots up to `limit_bytes` in all. Thread-safe; take() never waits.

    `pin` is given fresh memory, to page-lock it. `ordinary_total` counts batches for which no slot
    was free. `least`: so many there may always be, whatever they take: those that are made ahead
    and a few that the user has. Without them the same bytes would be ordinary memory. `steady`:
    so many are made, within the limit, before one is used again: a loader takes its memory at its
    start, and does not clear and page-lock more of it in the midst of training.
    """

    def __init__(self, limit_bytes: int, pin: Callable[[Bytes], object] | None = None) -> None:
        self.limit_bytes, self._pin = limit_bytes, pin
        self.made_bytes = self.ordinary_total = 0
        self.least = self.steady = 0
        self._count = 0  # slots that there are
        self._free: list[BatchSlot] = []
        # those that are out: while the user has a slot only its own finalizer refers to it, and the
        # garbage collector would take both together
        self._out: set[BatchSlot] = set()
        self._returned: deque[BatchSlot] = deque()
        self._lock = threading.Lock()  # guards all of the above but the returned ones

    def take(self, nbytes: int) -> BatchSlot:
        """A slot of at least `nbytes`, contents undefined; ordinary memory when all are out.

        Raises what `pin` raises.
        """
        gone: list[BatchSlot] = []  # whose memory goes when the lock is free: it may be page-locked
        with self._lock:
            self._collect()
            fitting = [slot for slot in self._free if len(slot.memory) >= nbytes]
            size = slot_bytes(nbytes)
            within = self.made_bytes + size <= self.limit_bytes
            if fitting and not (within and self._count < self.steady):
                # of equal ones the last to come back, which the processor's cache may still hold
                best = min(reversed(fitting), key=lambda slot: len(slot.memory))
                self._free.remove(best)
                self._out.add(best)
                return best
            while self._free and self.made_bytes + size > self.limit_bytes:
                gone.append(self._free.pop(0))  # too small for today's batches
                self._gone(gone[-1])
            if self.made_bytes + size > self.limit_bytes and self._count >= self.least:
                self.ordinary_total += 1
                if self.ordinary_total == 1:
                    _log.warning(
                        "the memory for batches is in use (%d batches, together %d MiB) and held "
                        "by the user: further ones are made in ordinary memory, which is slower. "
                        "Drop batches, or raise LoaderMemory.prefetch_bytes.",
                        self._count,
                        self.made_bytes // MIB,
                    )
                return BatchSlot(np.empty(nbytes, np.uint8), None)
            self.made_bytes += size
            self._count += 1
        gone.clear()
        memory = aligned_array(size, populate=True)
        made = BatchSlot(memory, self)
        try:
            if self._pin is not None:
                self._pin(memory)
        except BaseException:
            with self._lock:
                self._gone(made)
            raise
        with self._lock:
            self._out.add(made)
        return made

    def forget(self, slot: BatchSlot) -> None:
        """A slot that does not come back: its memory goes when the last writer is done."""
        with self._lock:
            self._out.discard(slot)
            self._gone(slot)

    def close(self) -> None:
        """Let go of all memory: of a batch that somebody has it goes with its last array.

        Nobody takes a slot any more. Idempotent.
        """
        with self._lock:
            slots = [*self._free, *self._out]  # those that have come back since are out still
            kept = [slot.memory for slot in slots]
            for slot in slots:
                slot.memory = _NOTHING
        del kept  # not under the lock

    def _gone(self, slot: BatchSlot) -> None:
        self.made_bytes -= len(slot.memory)
        self._count -= 1

    def _collect(self) -> None:
        """What finalizers have noted since the last call."""
        while self._returned:
            slot = self._returned.popleft()
            if slot.dropped():
                self._out.discard(slot)
                self._free.append(slot)
