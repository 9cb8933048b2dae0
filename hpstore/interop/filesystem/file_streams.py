"""Streams of the fsspec file system: reads of one version; writes that show as wholes or never."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, BinaryIO

from hpstore.errors import VersionConflict
from hpstore.interop.filesystem.unclosed_streams import put_aside, remember
from hpstore.interop.filesystem.write_buffer import Spool
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.runtime.buffers import HUGE_BYTES
from hpstore.runtime.fresh_bytes import fresh_bytes
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
        rest, memory = fresh_bytes(max(0, self.size - self._position))
        count = self.readinto(memory) if rest else 0
        return rest[:count]

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
        self,
        reader: PooledReader,
        path: str,
        buffer_bytes: int = READ_BUFFER_BYTES,
        fs: Any = None,
    ) -> None:
        self._file = _ObjectFile(reader, path)
        super().__init__(self._file, buffer_bytes)
        self.path, self.fs, self.blocksize = path, fs, buffer_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        rest = self.size - self.tell()
        count = rest if size is None or size < 0 else min(size, rest)
        if count < HUGE_BYTES or (size is not None and size < -1):  # which is an error
            return super().read(size)
        found, memory = fresh_bytes(count)
        return found[: self.readinto(memory.data)]

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        """In another process: the same version at the same position, opened there."""
        if self.fs is None or self.closed:
            raise TypeError(f"the stream over {self.path} is closed, or of no file system")
        where = (self.fs, self.path, self.version, self.tell(), self.blocksize)
        return type(self.fs).reopened, where

    @property
    def details(self) -> dict[str, Any]:
        """What info() says of the file, as other file systems' streams have it."""
        facts: dict[str, Any] = self.fs.info(self.path)
        return facts

    @property
    def version(self) -> str:
        """The version that is read, as ObjectInfo.version."""
        return self._file.version

    @property
    def size(self) -> int:
        """Bytes in the object."""
        return self._file.size


class WholeOrNothing(io.IOBase):
    """A stream that leaves a `with` block with its bytes stored, or by an exception with none."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what was written."""

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


class WriteStream(WholeOrNothing, io.BufferedIOBase):
    """A stream whose bytes become an object when it is closed, durable as `Pool.put` says.

    Nothing is visible before. Leaving a `with` block by an exception and discard() leave
    everything as it was. So does close() after a write that failed, and raises OSError. When
    close() raises, the put was not acknowledged. With
    `autocommit=False` (a transaction) close() only ends the writing, and commit() puts.

    One that is forgotten without close() is put when it is collected, or at the end of the process,
    as other file systems do and their clients rely on: with a warning, and not after a write that
    failed, while an exception is handled, or in a fork's child.

    `fileno()` is a real descriptor of the bytes that wait: `os.fsync` on it is allowed, and says
    nothing about the object. One thread at a time.
    """

    _spool: Spool | None = None

    def __init__(
        self,
        path: str,
        spool: Spool,
        put: Callable[[BinaryIO], object],
        *,
        autocommit: bool = True,
        mode: str = "wb",
        fs: Any = None,
    ) -> None:
        super().__init__()
        self.path = self.name = path
        self.mode, self.autocommit, self.fs = mode, autocommit, fs
        self.blocksize = READ_BUFFER_BYTES
        self._put, self._failed, self._pid = put, False, os.getpid()
        self._spool = spool
        remember(self)

    @property
    def details(self) -> dict[str, Any]:
        """What is known of the file that it will be."""
        return {"name": self.path, "size": None, "type": "file"}

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # Any: the buffer protocol has no type before 3.12
        spool = self._bytes()
        try:
            return spool.write(data)
        except (TypeError, ValueError):
            raise  # nothing was written
        except BaseException:
            self._failed = True  # a part may have been
            raise

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
            if self._failed:
                raise OSError(
                    errno.EIO,
                    "a write failed, so nothing is stored and what was there stays",
                    self.path,
                )
            if self.autocommit:
                self.commit()
        except BaseException:
            self.discard()
            raise

    @property
    def unfinished(self) -> bool:
        """Whether it waits to be closed and put, by this process."""
        mine = self._pid == os.getpid() and self.autocommit and not self._failed
        return mine and not self.closed and self._spool is not None

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
        spool, why = self._spool, ""
        if spool is None or self.closed:
            self.discard()
            return
        if not self.unfinished:
            why = "a write failed, or it belongs to a transaction or to another process"
        elif sys.exc_info()[0] is not None or sys.is_finalizing():
            why = "an exception is under way, or the interpreter ends"
        if why:
            self.discard()
            said = f"nothing was stored: {why}"
        else:
            super().close()  # writes down what is buffered
            self._spool = None
            said = put_aside(self.path, spool, self._put)
        _log.warning("the stream to %s was never closed: %s", self.path, said)
        warnings.warn(f"unclosed {self!r}: {said}", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<hpstore write stream {self.path!r}>"


class UpdateStream(WriteStream):
    """A WriteStream that begins with the bytes of an object, and can be read: modes a and r+.

    All of them are copied into the spool first, and put again at the end.
    """

    def readable(self) -> bool:
        return "+" in self.mode

    def read(self, size: int | None = -1) -> bytes:
        if not self.readable():
            raise io.UnsupportedOperation(f"mode {self.mode!r} does not read")
        return self._bytes().file.read(-1 if size is None else size)

    def readinto(self, buffer: Any) -> int:  # Any: the buffer protocol has no type before 3.12
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        return len(found)

    def read1(self, size: int = -1) -> bytes:
        return self.read(size)

    def write(self, data: Any) -> int:  # Any: as above
        if "a" in self.mode:
            self.seek(0, io.SEEK_END)
        return super().write(data)


class TextWriter(WholeOrNothing, io.TextIOWrapper):
    """Text over a WriteStream, with the same promise: an exception discards."""

    def __init__(self, stream: WriteStream, **layout: Any) -> None:
        super().__init__(stream, **layout)
        self.path = stream.path
        remember(self)

    @property
    def unfinished(self) -> bool:
        """As of the stream below."""
        below = getattr(self, "buffer", None)
        return isinstance(below, WriteStream) and below.unfinished

    def discard(self) -> None:
        """Forget what was written. Idempotent."""
        with contextlib.suppress(ValueError):  # detached: the bytes are somebody else's
            stream = self.buffer
            assert isinstance(stream, WriteStream)  # made by us alone
            stream.discard()

    def __del__(self) -> None:
        """Hand the text to the stream below, which decides whether it is stored."""
        with contextlib.suppress(ValueError, OSError):  # closed, detached or failed
            self.flush()
