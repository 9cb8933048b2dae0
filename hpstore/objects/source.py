"""Where the bytes of a put come from: memory, a file, or another object being laid out anew."""

from __future__ import annotations

import io
import os
import threading
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


class FillingSource(MemorySource):
    """Memory that is filled while the put runs: what is final may be written, nothing more.

    The filler calls reach() with growing ends, then finish() or fail(), from any threads; the put
    reads final bytes ahead, and all of them after wait().
    """

    def __init__(self, data: object, start: int) -> None:
        """Bytes below `start` are final last."""
        super().__init__(data)
        self.start = start
        self._end, self._over = start, False
        self._error: BaseException | None = None
        self._changed = threading.Condition()  # guards _end, _over and _error

    def reach(self, end: int) -> None:
        """Bytes [start, end) are final."""
        with self._changed:
            self._end = max(self._end, end)
            self._changed.notify_all()

    def finish(self) -> None:
        """All bytes are final."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The bytes will not come: wait() raises `error`."""
        with self._changed:
            self._error, self._over = self._error or error, True
            self._changed.notify_all()

    def reached(self, end: int) -> bool:
        """Wait for [start, end); False when all is over instead: wait() has the outcome."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._end >= end)
            return not self._over

    def wait(self) -> None:
        """Wait for the end of the filling. Raises what fail() was told."""
        with self._changed:
            self._changed.wait_for(lambda: self._over)
            if self._error is not None:
                raise self._error


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
    return data if isinstance(data, FillingSource) else MemorySource(data)


__all__ = ["FileSource", "FillingSource", "MemorySource", "Source", "as_source"]
