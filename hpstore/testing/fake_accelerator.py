"""A stand-in for a GPU: CPU tensors count as the device's, copies run when a test orders them.

It satisfies checkpoint's `Accelerator` by its shape alone; testing lies below checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from hpstore.codec.galois import Bytes

Pair = tuple[torch.Tensor, torch.Tensor]  # (to, from)


class FakeArrival:
    """Copies that have not run. They read their sources when they do, as those of a stream do."""

    def __init__(self, owner: FakeAccelerator, pairs: list[Pair]) -> None:
        self._owner, self._pairs = owner, pairs
        self._lock = threading.Lock()  # guards _pairs

    @property
    def pending(self) -> bool:
        """Whether they are still to run."""
        with self._lock:
            return bool(self._pairs)

    def wait_on_host(self) -> None:
        """Run them, unless they have."""
        self._owner.note("wait")
        self._run()

    def order_stream(self) -> None:
        """Run them: what the caller does next is later work of the stream."""
        self._owner.note("order")
        self._run()

    def _run(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
            for target, source in pairs:
                target.copy_(source)


class FakeAccelerator:
    """Records what staging asks of it in `events`: "pin", "unpin", "copy", "wait", "order".

    Thread-safe. `pinned`: bytes of memory that is page-locked now, by address.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pinned: dict[int, int] = {}
        self.arrivals: list[FakeArrival] = []
        self._held: set[int] = set()
        # guards all of them; the collector may unpin on a thread that holds it
        self._lock = threading.RLock()

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let these tensors, and all that share their memory, be on the device."""
        with self._lock:
            self._held.update(t.untyped_storage().data_ptr() for t in tensors)

    def note(self, event: str) -> None:
        """Record an event."""
        with self._lock:
            self.events.append(event)

    @property
    def pending(self) -> int:
        """Calls of copy() whose copies have not run."""
        with self._lock:
            arrivals = list(self.arrivals)
        return sum(arrival.pending for arrival in arrivals)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether take() was called for its memory."""
        with self._lock:
            return tensor.untyped_storage().data_ptr() in self._held

    def pin(self, memory: Bytes) -> None:
        """Raises ValueError for memory that is page-locked already."""
        address = memory.ctypes.data
        with self._lock:
            self.events.append("pin")
            if address in self.pinned:
                raise ValueError(f"pin of {len(memory)} bytes that are page-locked")
            self.pinned[address] = len(memory)

    def unpin(self, address: int) -> None:
        """Raises ValueError where no page-locked memory begins."""
        with self._lock:
            self.events.append("unpin")
            if self.pinned.pop(address, None) is None:
                raise ValueError(f"unpin of {address:#x}, where nothing is page-locked")

    def copy(self, pairs: list[Pair]) -> FakeArrival:
        """Record the copies; nothing is read before a caller waits for them or orders them."""
        arrival = FakeArrival(self, list(pairs))
        with self._lock:
            self.events.append("copy")
            self.arrivals.append(arrival)
        return arrival
