"""Batches on their way to a GPU: copied on a side stream, beside the step."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpstore.loaders.dataset.batch_values import Ragged, jagged
from hpstore.loaders.gpu.device_ring import DeviceRing, DeviceSlot
from hpstore.loaders.gpu.gpu_device import Gpu, Mark


# Any below: batches are the user's
class Arriving:
    """A batch whose copies were enqueued."""

    def __init__(
        self, batch: Any, mark: Mark, ring: DeviceRing | None, slot: DeviceSlot | None
    ) -> None:
        self._batch, self._mark, self._ring, self._slot = batch, mark, ring, slot

    def wait(self) -> Any:
        """The batch; what is enqueued on the current stream from now on comes after its copies."""
        memory = () if self._slot is None else (self._slot.memory,)
        self._mark.order((*_tensors(self._batch), *memory))
        if self._ring is not None:
            self._ring.passed()
        return self._batch


class Transfer:
    """Copies batches to a GPU on a stream of its own. Thread-safe.

    The memory that a batch is copied from is kept until its copies are through, which the end of
    this object waits for. `ring_bytes`: of GPU memory that copies go to, 0 for torch's allocator.
    """

    def __init__(self, gpu: Gpu, ring_bytes: int = 0) -> None:
        self._gpu = gpu
        self.ring = DeviceRing(gpu, ring_bytes) if ring_bytes else None
        self._sent: deque[tuple[Mark, Any]] = deque()
        self.seconds = 0.0  # that the GPU took for copies, of those that were seen to be through
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards _sent, and the order in which marks are made
        weakref.finalize(self, _arrive, self._sent, self._pid).atexit = False

    def send(self, batch: Any) -> Arriving:
        """Enqueue the copies; does not wait for them."""
        with self._lock:
            with self._gpu.side():
                slot: DeviceSlot | None = None
                started = self._gpu.start()
                try:
                    slot = self._slot_for(batch)
                    there = _mapped(batch, self._upload(slot))
                finally:  # the first copies may be under way when a later one is refused
                    mark = self._gpu.mark(started)
                    self._sent.append((mark, batch))
                    if slot is not None:
                        slot.all_lent()
            while self._sent and self._sent[0][0].done():
                self.seconds += self._sent.popleft()[0].seconds()
        return Arriving(there, mark, self.ring, slot)

    def _slot_for(self, batch: Any) -> DeviceSlot | None:
        if self.ring is None:
            return None
        return self.ring.take([tensor for tensor in _tensors(batch) if self._goes_there(tensor)])

    def _goes_there(self, tensor: torch.Tensor) -> bool:
        """Whether its copy lies in the ring; sparse ones are torch's own."""
        return tensor.layout is torch.strided and not self._gpu.is_there(tensor)

    def _upload(self, slot: DeviceSlot | None) -> Callable[[torch.Tensor], torch.Tensor]:
        gpu = self._gpu

        def lent(tensor: torch.Tensor) -> torch.Tensor:
            assert slot is not None
            into = slot.lend(gpu, tensor) if self._goes_there(tensor) else None
            return gpu.upload(tensor, into)

        return gpu.upload if slot is None else lent

    def settle(self) -> None:
        """Wait until all copies are through, and let go of what they were made from, and the ring.

        Raises what the GPU raises. In a forked child nothing is copied, and the lock may be held by
        a thread that is not there.
        """
        if os.getpid() == self._pid:
            with self._lock:
                _arrive(self._sent, self._pid)
            if self.ring is not None:
                self.ring.close()


def _arrive(sent: deque[tuple[Mark, Any]], pid: int) -> None:
    while sent and os.getpid() == pid:
        try:
            sent[0][0].wait_on_host()
        finally:
            sent.popleft()


def _mapped(value: Any, upload: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest with its tensors on the GPU."""
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            return upload(value)
        values, offsets = _parts(value)
        return jagged(upload(values), upload(offsets), offsets)
    if isinstance(value, Ragged):
        return Ragged(upload(value.values), upload(value.offsets))
    if isinstance(value, dict):
        return {key: _mapped(one, upload) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(one, upload) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, upload) for one in value)
    return value


def _parts(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and offsets: Any, as torch's stubs do not know the latter."""
    return nested.values(), nested.offsets()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            yield from _parts(value)
        else:
            yield value
    elif isinstance(value, Ragged):
        yield from (value.values, value.offsets)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
