"""Batches on their way to a GPU: copied on a side stream, beside the step."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from hpstore.loaders.batches import Ragged


# Any below: torch.cuda's streams and events are untyped, batches are the user's
class Arriving:
    """A batch whose copies were enqueued."""

    def __init__(self, batch: Any, event: Any, device: torch.device) -> None:
        self._batch, self._event, self._device = batch, event, device

    def wait(self) -> Any:
        """The batch; what is enqueued on the current stream from now on comes after its copies."""
        stream: Any = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        _each(self._batch, lambda tensor: tensor.record_stream(stream))
        return self._batch


class Transfer:
    """Copies batches to `device` on a stream of its own. Thread-safe.

    The memory that a batch is copied from is kept until its copies are through.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._sent: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()  # guards all of the above

    def send(self, batch: Any) -> Arriving:
        """Enqueue the copies; does not wait for them."""
        with self._lock:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                there = _mapped(batch, self._device)
                event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
            self._sent.append((event, batch))
            while self._sent and self._sent[0][0].query():
                self._sent.popleft()
        return Arriving(there, event, self._device)


def _mapped(value: Any, device: torch.device) -> Any:
    """The same nest with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Ragged):
        return Ragged(_mapped(value.values, device), _mapped(value.offsets, device))
    if isinstance(value, dict):
        return {key: _mapped(one, device) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(one, device) for one in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, device) for one in value)
    return value


def _each(value: Any, act: Any) -> None:
    if isinstance(value, torch.Tensor):
        act(value)
    elif isinstance(value, Ragged):
        act(value.values)
        act(value.offsets)
    elif isinstance(value, dict):
        for one in value.values():
            _each(one, act)
    elif isinstance(value, list | tuple):
        for one in value:
            _each(one, act)


__all__ = ["Arriving", "Transfer"]
