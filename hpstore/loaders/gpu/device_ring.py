"""Memory of a GPU for batches, used again once the user has dropped them: opt-in.

torch's allocator does the same for most programs. A ring is one fixed piece of GPU memory instead,
which neither grows nor fragments, whatever else the program allocates.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

import torch

from hpstore.loaders.dataset.batch_values import slot_bytes
from hpstore.loaders.gpu.gpu_device import Gpu, Mark
from hpstore.units import MIB, round_up

_log = logging.getLogger(__name__)
_ALIGNMENT = 256  # of tensors, as torch's allocator has it or better


class DeviceSlot:
    """Memory for one batch. Tensors over it hold it; `fence`: who had it before is past that."""

    def __init__(self, memory: torch.Tensor, returned: deque[DeviceSlot]) -> None:
        self.memory = memory
        self.fence: Mark | None = None
        self._returned = returned
        self._used = self._held = 0

    def lend(self, gpu: Gpu, like: torch.Tensor) -> torch.Tensor:
        """An undefined tensor of the same kind over the next bytes. One thread."""
        part = self.memory[self._used : self._used + like.nbytes]
        self._used += round_up(like.nbytes, _ALIGNMENT)
        self._held += 1
        made = gpu.lend(part, self._gone)
        return made.view(like.dtype).view(like.shape)

    def all_lent(self) -> None:
        """Nothing more is lent: it comes back when the last tensor over it has gone."""
        self._gone()

    def begin(self) -> None:
        """For another batch."""
        self._used, self._held = 0, 1  # until all is lent

    def _gone(self) -> None:
        self._returned.append(self)  # nothing more: this may run in the midst of anything

    def dropped(self) -> bool:
        """One holder less; True when none is left."""
        self._held -= 1
        return not self._held


class DeviceRing:
    """Slots of up to `limit_bytes` in all. Thread-safe; take() never waits.

    A slot that was dropped is written again behind what had been enqueued on the user's stream at
    the next passed(). `outside_total` counts batches for which no slot was free.
    """

    def __init__(self, gpu: Gpu, limit_bytes: int) -> None:
        self.limit_bytes, self._gpu = limit_bytes, gpu
        self.made_bytes = self.outside_total = 0
        self._free: list[DeviceSlot] = []
        self._returned: deque[DeviceSlot] = deque()
        self._lock = threading.Lock()  # guards all of the above but the returned ones

    def take(self, tensors: Sequence[torch.Tensor]) -> DeviceSlot | None:
        """Inside side(): a slot with room for these; None when all are out."""
        needed = sum(round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors)
        if not needed:
            return None
        slot = self._found(needed)
        if slot is None:
            self.outside_total += 1
            if self.outside_total == 1:
                _log.warning(
                    "the ring of %d MiB for batches on the GPU is in use, or too small for one of "
                    "%d MiB: further ones come from torch's allocator. Drop batches, or raise "
                    "GpuTransfer.ring_bytes.",
                    self.limit_bytes // MIB,
                    needed // MIB,
                )
            return None
        if slot.fence is not None:
            self._gpu.behind(slot.fence)
            slot.fence = None
        slot.begin()
        return slot

    def _found(self, needed: int) -> DeviceSlot | None:
        size = slot_bytes(needed)
        with self._lock:
            fitting = [slot for slot in self._free if slot.memory.nbytes >= needed]
            if fitting:
                best = min(fitting, key=lambda slot: slot.memory.nbytes)
                self._free.remove(best)
                return best
            while self._free and self.made_bytes + size > self.limit_bytes:
                self.made_bytes -= self._free.pop(0).memory.nbytes  # too small for today's batches
            if self.made_bytes + size > self.limit_bytes:
                return None
            self.made_bytes += size
            try:
                return DeviceSlot(self._gpu.allocate(size), self._returned)
            except BaseException:
                self.made_bytes -= size
                raise

    def passed(self) -> None:
        """On the user's thread: what was dropped until now may be written again, by copies that
        come after everything the user's stream was given until now."""
        gone = self._dropped()
        if gone:
            fence = self._gpu.fence()
            for slot in gone:
                slot.fence = fence
            with self._lock:
                self._free += gone

    def _dropped(self) -> list[DeviceSlot]:
        """What finalizers have noted since the last call. By the user's thread."""
        gone = []
        while self._returned:
            slot = self._returned.popleft()
            if slot.dropped():
                gone.append(slot)
        return gone

    def close(self) -> None:
        """Let go of all memory; of a batch that somebody has it goes with its last tensor. By the
        user's thread, while nobody takes."""
        gone = self._dropped()
        with self._lock:
            for slot in (*self._free, *gone):
                self.made_bytes -= slot.memory.nbytes
            self._free.clear()
