"""Where the bytes of a put come from: memory, a file, or another object being laid out anew."""

from __future__ import annotations

import io
import os
import stat
import threading
from typing import BinaryIO, Protocol, cast

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import HpstoreError
from hpstore.runtime.budget import inside_a_lease


class PutSource(Protocol):
    """Bytes that can be read again from any place, as a put that is replanned does. `leases`:
    reading them takes memory of the pool's, as much as a batch of the put at a time."""

    size: int
    leases: bool

    def view(self, start: int, end: int) -> Bytes | None:
        """The bytes in place, valid until the put is over, or None when they must be copied."""

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes from `start`, filling `out`."""


class MemorySource:
    """The caller's memory; it must not change until the put returns."""

    leases = False

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
    """A regular file, read by position, all of it, wherever it stands; it must not change until the
    put returns. What Python has buffered of writes is written first. Raises TypeError for what has
    no bytes by position, such as a pipe.
    """

    leases = False

    def __init__(self, file: BinaryIO) -> None:
        if isinstance(file, io.BufferedRandom):
            file.flush()
        self._file = file.fileno()
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise TypeError("data is not a regular file: read() it, and pass its bytes")
        self.size = status.st_size
        if not self.size and os.pread(self._file, 1, 0):  # of /proc and such
            raise TypeError("the size of this file is not known: read() it, and pass its bytes")

    def view(self, start: int, end: int) -> Bytes | None:
        return None

    def read_into(self, start: int, out: Bytes) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self._file, [out[done:].data], start + done)
            if not count:
                raise HpstoreError("the source file became shorter while it was read")
            done += count


class OpenedObject(Protocol):
    """What Pool.open() returns, of any pool."""

    @property
    def pinned(self) -> bool:
        """Whether it reads one version, and no other."""

    @property
    def size(self) -> int:
        """Bytes in the object."""

    def read_into(self, buffer: object, offset: int = 0) -> int:
        """Fill a buffer from the object."""


class VersionSource:
    """One version of an object, of this pool or another; read by one thread at a time."""

    leases = True

    def __init__(self, opened: OpenedObject) -> None:
        if not opened.pinned:
            raise TypeError(
                "data is an object that may be replaced while it is read: open(key, version=...)"
            )
        self._opened, self.size = opened, opened.size
        self._turn = threading.Lock()

    def view(self, start: int, end: int) -> Bytes | None:
        return None

    def read_into(self, start: int, out: Bytes) -> None:
        with self._turn, inside_a_lease():
            count = self._opened.read_into(out, start)
        if count != len(out):
            raise HpstoreError("the object became shorter while it was read")


def as_source(data: object) -> PutSource:
    """A source for what `put` was given: bytes-like, an open binary file, an opened object."""
    if hasattr(data, "pinned"):
        return VersionSource(cast(OpenedObject, data))
    if isinstance(data, io.BytesIO):
        return MemorySource(data.getbuffer())
    if hasattr(data, "fileno") and hasattr(data, "read"):
        file = getattr(data, "file", data)  # of tempfile.NamedTemporaryFile
        if not isinstance(file, io.RawIOBase | io.BufferedReader | io.BufferedRandom):
            raise TypeError(
                f"data is a {type(data).__name__}, whose bytes are not those of its file: open it "
                "in mode 'rb', or give what read() returns"
            )
        return FileSource(file)  # type: ignore[arg-type]  # raw or buffered, as open() gives it
    return MemorySource(data)
