"""Batches on their way to a GPU: copied on a side stream, beside the step."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from hpstore.loaders.batches import Ragged, jagged
from hpstore.loaders.gpu import Gpu, Mark


# Any below: batches are the user's
class Arriving:
    """A batch whose copies were enqueued."""

    def __init__(self, batch: Any, mark: Mark) -> None:
        self._batch, self._mark = batch, mark

    def wait(self) -> Any:
        """The batch; what is enqueued on the current stream from now on comes after its copies."""
        self._mark.order(_tensors(self._batch))
        return self._batch


class Transfer:
    """Copies batches to a GPU on a stream of its own. Thread-safe.

    The memory that a batch is copied from is kept until its copies are through, which the end of
    this object waits for.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._sent: deque[tuple[Mark, Any]] = deque()
        self.seconds = 0.0  # that the GPU took for copies, of those that were seen to be through
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards _sent, and the order in which marks are made
        weakref.finalize(self, _arrive, self._sent, self._pid).atexit = False

    def send(self, batch: Any) -> Arriving:
        """Enqueue the copies; does not wait for them."""
        with self._lock:
            with self._gpu.side():
                started = self._gpu.start()
                try:
                    there = _mapped(batch, self._gpu)
                finally:  # the first copies may be under way when a later one is refused
                    mark = self._gpu.mark(started)
                    self._sent.append((mark, batch))
            while self._sent and self._sent[0][0].done():
                self.seconds += self._sent.popleft()[0].seconds()
        return Arriving(there, mark)

    def settle(self) -> None:
        """Wait until all copies are through, and let go of what they were made from.

        Raises what the GPU raises. In a forked child nothing is copied, and the lock may be held by
        a thread that is not there.
        """
        if os.getpid() == self._pid:
            with self._lock:
                _arrive(self._sent, self._pid)


def _arrive(sent: deque[tuple[Mark, Any]], pid: int) -> None:
    while sent and os.getpid() == pid:
        try:
            sent[0][0].wait_on_host()
        finally:
            sent.popleft()


def _mapped(value: Any, gpu: Gpu) -> Any:
    """The same nest with its tensors on the GPU."""
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            return gpu.upload(value)
        values, offsets = _parts(value)
        return jagged(gpu.upload(values), gpu.upload(offsets), offsets)
    if isinstance(value, Ragged):
        return Ragged(gpu.upload(value.values), gpu.upload(value.offsets))
    if isinstance(value, dict):
        return {key: _mapped(one, gpu) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(one, gpu) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, gpu) for one in value)
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


__all__ = ["Arriving", "Transfer"]
