"""Batches from process to process over a socket: nothing in shared memory, nothing that has a name.

What is received is memory of the receiver's own, to keep or to write into. Large arrays and tensors
go as they lie (pickle protocol 5, PEP 574), the rest pickled. Both ends are processes of one
program: what is unpickled comes out of no file and over no network.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

_HEAD = struct.Struct("<QQ")  # bytes of the pickle, number of arrays beside it
_ASIDE_BYTES = 16 * 1024  # from here on an array goes beside the pickle
_VECTORS = 512  # in one call; the system takes 1024
# what pickling raises for what it cannot send
UNSENDABLE = (pickle.PicklingError, AttributeError, TypeError)


# Any below: whatever is sent
class _Pickler(pickle.Pickler):
    """Plain tensors by way of numpy: torch's own form is a whole file for each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        if value.device.type != "cpu" or value.requires_grad or value.is_nested:
            return NotImplemented
        if value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented
        whole = value.contiguous()
        return _tensor, (whole.view(-1).view(torch.uint8).numpy(), value.dtype, value.shape)


def _tensor(memory: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(memory).view(dtype).view(shape)


class WorkerChannel:
    """One end. One thread at a time sends, one receives. `descriptor` stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor

    def send(self, value: Any) -> None:
        """Raises what pickling raises, before anything is sent; OSError when nobody is there."""
        aside: list[memoryview] = []

        def keep(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _ASIDE_BYTES:
                return True  # with the rest
            aside.append(raw)
            return False

        written = io.BytesIO()
        _Pickler(written, 5, buffer_callback=keep).dump(value)
        pickled = written.getbuffer()
        head = _HEAD.pack(pickled.nbytes, len(aside))
        sizes = np.array([raw.nbytes for raw in aside], "<u8").tobytes()
        _all(os.writev, self._fd, [memoryview(head + sizes), pickled, *aside])

    def stop(self) -> None:
        """What receive() at the other end takes for the end."""
        _all(os.writev, self._fd, [memoryview(_HEAD.pack(0, 0))])

    def receive(self) -> Any:
        """Raises EOFError at the end, or when the other end is gone; what unpickling raises."""
        pickled_bytes, count = _HEAD.unpack(self._read(_HEAD.size))
        if not pickled_bytes:
            raise EOFError
        sizes = np.frombuffer(self._read(8 * count), "<u8").tolist()
        arrays = [np.empty(size, np.uint8) for size in (pickled_bytes, *sizes)]
        _all(os.readv, self._fd, [array.data for array in arrays])
        return pickle.loads(arrays[0].data, buffers=arrays[1:])

    def _read(self, nbytes: int) -> bytearray:
        made = bytearray(nbytes)
        _all(os.readv, self._fd, [memoryview(made)])
        return made


def _all(call: Callable[[int, Any], int], fd: int, parts: Sequence[memoryview]) -> None:
    """Read or write all of them, whatever the system does at a time. Raises EOFError, OSError."""
    left = [part.cast("B") for part in parts if part.nbytes]
    while left:
        done = call(fd, left[:_VECTORS])
        if not done:
            raise EOFError
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]


def survives(value: Any) -> bool:
    """Whether a value of this process arrives as one when it is sent to another."""
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # noqa: BLE001 (whatever a user's class does when it is copied)
        return False
    return True
