"""Streams of the fsspec file system: reads of one version; writes that show as wholes or never."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, BinaryIO

from hpstore.errors import VersionConflict
from hpstore.interop.spool import Spool
from hpstore.pooled import PooledReader
from hpstore.units import KIB

_log = logging.getLogger(__name__)
READ_BUFFER_BYTES = 256 * KIB  # 4 checksummed blocks; larger reads go past the buffer


class _ObjectFile(io.RawIOBase):
    """One version of an object, unbuffered."""

    def __init__(self, reader: PooledReader, path: str) -> None:
        super().__init__()
        self._reader, self.name, self.mode = reader, path, "rb"
        self.size, self.version = reader.size, reader.version
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check_open()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence {whence} is not 0, 1 or 2")
        base = (0, self._position, self.size)[whence]
        if base + offset < 0:
            raise ValueError(f"seek before the beginning ({base + offset})")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:  # Any: the buffer protocol has no type before 3.12
        self._check_open()
        count = self._reader.read_into(buffer, self._position)
        if self._reader.version != self.version:
            raise VersionConflict(
                f"{self.name} was replaced while it was read (version {self.version}, now "
                f"{self._reader.version}); nothing of the new one was handed out. Open it again."
            )
        self._position += count
        return count

    def readall(self) -> bytes:
        rest = bytearray(max(0, self.size - self._position))
        count = self.readinto(rest) if rest else 0
        return bytes(memoryview(rest)[:count])

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the stream is closed")

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
            super().close()


class ReadStream(io.BufferedReader):
    """A verified, seekable, buffered stream over one version of an object.

    When the object is replaced underneath, reading goes on from the version that was opened, or
    raises VersionConflict when that is gone: two versions are never mixed. Other errors are those
    of `Pool.read_into`. Several threads may use it one after another. close() releases the files.
    It has no descriptor.
    """

    def __init__(
        self, reader: PooledReader, path: str, buffer_bytes: int = READ_BUFFER_BYTES
    ) -> None:
        self._file = _ObjectFile(reader, path)
        super().__init__(self._file, buffer_bytes)
        self.path = path

    @property
    def version(self) -> str:
        """The version that is read, as ObjectInfo.version."""
        return self._file.version

    @property
    def size(self) -> int:
        """Bytes in the object."""
        return self._file.size


class _WholeOrNothing(io.IOBase):
    """A stream that leaves a `with` block with its bytes stored, or by an exception with none."""

    def discard(self) -> None:
        """Forget what was written."""
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class WriteStream(_WholeOrNothing, io.BufferedIOBase):
    """A stream whose bytes become an object when it is closed, durable as `Pool.put` says.

    Nothing is visible before. Leaving a `with` block by an exception, discard() and being
    forgotten without close() leave everything as it was. When close() raises, the put was not
    acknowledged. With `autocommit=False` (a transaction) close() only ends the writing, and
    commit() puts.

    `fileno()` is a real descriptor of the bytes that wait: `os.fsync` on it is allowed, and says
    nothing about the object. One thread at a time.
    """

    _spool: Spool | None = None

    def __init__(
        self, path: str, spool: Spool, put: Callable[[BinaryIO], object], *, autocommit: bool = True
    ) -> None:
        super().__init__()
        self.path = self.name = path
        self.mode, self.autocommit = "wb", autocommit
        self._put = put
        self._spool = spool

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # Any: the buffer protocol has no type before 3.12
        return self._bytes().write(data)

    def tell(self) -> int:
        return self._bytes().file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._bytes().file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        return self._bytes().file.truncate(size)

    def fileno(self) -> int:
        return self._bytes().fileno()

    def flush(self) -> None:
        """Hand buffered bytes to the descriptor. Nothing becomes visible or durable."""
        if not self.closed and self._spool is not None:
            self._spool.file.flush()

    def _bytes(self) -> Spool:
        if self.closed or self._spool is None:
            raise ValueError(f"the stream to {self.path} is closed")
        return self._spool

    def close(self) -> None:
        """End the writing and, unless in a transaction, put. Idempotent, also after a failure."""
        if self.closed:
            return
        try:
            super().close()
            if self.autocommit:
                self.commit()
        except BaseException:
            self.discard()
            raise

    def commit(self) -> None:
        """Put the bytes of a closed stream. Durable on return. Nothing to do when discarded."""
        if not self.closed:
            raise ValueError(f"the stream to {self.path} is still open: close it, then commit")
        spool, self._spool = self._spool, None
        if spool is not None:
            try:
                self._put(spool.file)
            finally:
                spool.close()

    def discard(self) -> None:
        """Forget the bytes; no object is made. Idempotent."""
        spool, self._spool = self._spool, None
        if spool is not None:
            spool.close()
        super().close()

    def __del__(self) -> None:
        forgotten = self._spool is not None and not self.closed
        self.discard()
        if forgotten:
            _log.warning("the stream to %s was never closed: nothing was stored", self.path)
            message = f"unclosed {self!r}: nothing was stored"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<hpstore write stream {self.path!r}>"


class TextWriter(_WholeOrNothing, io.TextIOWrapper):
    """Text over a WriteStream, with the same promise: an exception discards."""

    def discard(self) -> None:
        """Forget what was written. Idempotent."""
        with contextlib.suppress(ValueError):  # detached: the bytes are somebody else's
            stream = self.buffer
            assert isinstance(stream, WriteStream)  # made by us alone
            stream.discard()

    def __del__(self) -> None:
        """Leave it to the stream below, which discards; TextIOWrapper would close it."""


__all__ = ["READ_BUFFER_BYTES", "ReadStream", "TextWriter", "WriteStream"]
