"""Where the bytes of a put come from: memory, a file, or another object being laid out anew."""

from __future__ import annotations

import io
import os
from typing import BinaryIO, Protocol

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import HpstoreError


class Source(Protocol):
    """Bytes that can be read again from any place, as a put that is replanned does."""

    size: int

    def view(self, start: int, end: int) -> Bytes | None:
        """The bytes in place, valid until the put is over, or None when they must be copied."""

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes from `start`, filling `out`."""


class MemorySource:
    """The caller's memory; it must not change until the put returns."""

    def __init__(self, data: object) -> None:
        view = memoryview(data)  # type: ignore[arg-type]  # raises TypeError for what is no buffer
        if not view.c_contiguous:
            raise ValueError("data must be contiguous in memory")
        self._bytes = np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else _EMPTY
        self.size = view.nbytes

    def view(self, start: int, end: int) -> Bytes | None:
        return self._bytes[start:end]

    def read_into(self, start: int, out: Bytes) -> None:
        out[:] = self._bytes[start : start + len(out)]


_EMPTY: Bytes = np.empty(0, np.uint8)


class FileSource:
    """A regular file, read by position; it must not change until the put returns."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file.fileno()
        self.size = os.fstat(self._file).st_size

    def view(self, start: int, end: int) -> Bytes | None:
        return None

    def read_into(self, start: int, out: Bytes) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self._file, [out[done:].data], start + done)
            if not count:
                raise HpstoreError("the source file became shorter while it was read")
            done += count


def as_source(data: object) -> Source:
    """A source for what `put` was given: bytes-like or an open binary file."""
    if isinstance(data, io.BytesIO):
        return MemorySource(data.getbuffer())
    if hasattr(data, "fileno") and hasattr(data, "read"):
        return FileSource(data)  # type: ignore[arg-type]  # duck-typed binary file
    return MemorySource(data)


__all__ = ["FileSource", "MemorySource", "Source", "as_source"]
