"""The staging buffer: every tensor is copied once into aligned, populated, reused memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.format.segment_plan import Slice
from hpstore.checkpoint.save.accelerator import Accelerator
from hpstore.codec.galois import Bytes
from hpstore.runtime.buffers import aligned_array, lock_for_life, shared_array
from hpstore.units import MIB, round_up

GROWTH = 1.01  # more than is asked for, when it has to grow again: state grows by little


class Arena:
    """Memory that saves are staged in. One save at a time owns it.

    Page-aligned, in huge pages where they are given, touched before the first copy, page-locked
    by the `accelerator` when there is one, until release() or the end of the memory. It stays as
    large as the largest slice so far. `shared`: other processes can map it, by `descriptor`.
    """

    def __init__(self, accelerator: Accelerator | None = None, *, shared: bool = False) -> None:
        self._accelerator, self._shared = accelerator, shared
        self.descriptor = -1  # of shared memory
        self._pid = os.getpid()
        self._memory: Bytes = aligned_array(0)
        self._targets: tuple[tuple[Item, ...], list[torch.Tensor]] | None = None
        self._unlock: Callable[[], object] = lambda: None
        self.grown_total = 0

    @property
    def capacity_bytes(self) -> int:
        """Size now."""
        return len(self._memory)

    def reserve(self, nbytes: int) -> None:
        """Grow to at least `nbytes`; fresh memory is populated here, not during a copy."""
        if self._shared and self._pid != os.getpid():  # a fork: this memory is its parent's
            self.release()
            self._pid = os.getpid()
        if nbytes <= len(self._memory):
            return
        wanted = int(nbytes * GROWTH) if len(self._memory) else nbytes
        self.release()  # the old one is freed before the new one is taken
        if self._shared:
            memory, self.descriptor = shared_array(round_up(wanted, MIB))
        else:
            memory = aligned_array(round_up(wanted, MIB), populate=True)
        if self._accelerator is not None:
            self._unlock = lock_for_life(self._accelerator, memory)
        self._memory = memory
        self.grown_total += 1

    def release(self) -> None:
        """Give the memory back."""
        self._unlock()
        self._memory, self._targets = aligned_array(0), None
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def view(self, nbytes: int) -> Bytes:
        """The first bytes, page-aligned."""
        return self._memory[:nbytes]

    def targets(self, staged: Slice) -> list[torch.Tensor]:
        """The memory of each of a slice's items as a tensor of its dtype and shape.

        Kept for the next save, which mostly has the same layout.
        """
        if self._targets is not None and self._targets[0] is staged.items:
            return self._targets[1]
        found = [
            typed(self._memory[item.offset : item.offset + item.length], tensor)
            for item, tensor in zip(staged.items, staged.tensors, strict=True)
        ]
        self._targets = (staged.items, found)
        return found


def typed(memory: Bytes, like: torch.Tensor) -> torch.Tensor:
    """Bytes as a contiguous CPU tensor of the dtype and shape of another."""
    if not len(memory):
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.from_numpy(memory).view(like.dtype).view(like.shape)
