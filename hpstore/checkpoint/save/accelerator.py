"""What staging asks of a GPU: page-lock the arena, copy on a side stream, order streams by events.

Everything that touches CUDA in staging is here, behind `Accelerator`, so that the code above it
runs in tests on a stand-in where there is no GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError
from hpstore.units import MIB

COPY_BYTES = 64 * MIB  # a larger copy is cut, so that other copies of the step get in between


class Arrival(Protocol):
    """Copies on their way to the host."""

    def wait_on_host(self) -> None:
        """Block until they have arrived."""

    def order_stream(self) -> None:
        """Let work that is enqueued from now on run after them, without blocking the host."""


class Accelerator(Protocol):
    """A kind of device whose copies are asynchronous."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on such a device; others are copied by the host."""

    def pin(self, memory: Bytes) -> None:
        """Page-lock memory, so that copies into it run at full rate and beside the step."""

    def unpin(self, address: int) -> None:
        """Undo pin() of the memory that begins there."""

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        """Enqueue copies (to, from) behind the work already enqueued; does not block."""


# Any below: torch.cuda's streams, events and cudart are untyped
class _CudaArrival:
    def __init__(self, events: list[tuple[Any, torch.device]]) -> None:
        self._events = events

    def wait_on_host(self) -> None:
        for event, _ in self._events:
            event.synchronize()

    def order_stream(self) -> None:
        for event, device in self._events:
            torch.cuda.current_stream(device).wait_event(event)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CudaStaging:
    """Staging from CUDA tensors: one side stream a device, an event at the end, no device-wide
    synchronise. Tensors are kept from reuse by the caching allocator until their copy is done."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def pin(self, memory: Bytes) -> None:
        self._check(_runtime().cudaHostRegister(memory.ctypes.data, len(memory), 0))

    def unpin(self, address: int) -> None:
        self._check(_runtime().cudaHostUnregister(address))

    @staticmethod
    def _check(code: Any) -> None:
        if int(code) != 0:
            raise CheckpointError(f"page-locking the staging buffer failed: CUDA error {int(code)}")

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in pairs:
            # a lazy conjugate would be resolved on the host, before the bytes have arrived
            plain = source.resolve_conj().resolve_neg()
            by_device.setdefault(source.device, []).append((target, plain))
        events = []
        for device, some in by_device.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, source in some:
                    for to, part in cut(target, source):
                        to.copy_(part, non_blocking=True)
                    source.record_stream(stream)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
            events.append((event, device))
        return _CudaArrival(events)


def cut(target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of at most COPY_BYTES of a contiguous copy; others stay whole."""
    count = max(1, COPY_BYTES // source.element_size())
    if source.numel() <= count or not (source.is_contiguous() and target.is_contiguous()):
        return [(target, source)]
    to, part = target.reshape(-1), source.reshape(-1)
    return list(zip(torch.split(to, count), torch.split(part, count), strict=True))
