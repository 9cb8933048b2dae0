"""Bytes of a write stream until they are put: in memory up to a bound, then in a file on disk.

A put needs to know its size and may read its source twice, so a stream has to be kept until it is
closed. The descriptor is real and stays the same number when the bytes move to disk.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile

from hpstore.errors import BudgetExceeded
from hpstore.runtime.budget import ByteBudget
from hpstore.units import MIB

_log = logging.getLogger(__name__)
SPOOL_BYTES = 64 * MIB  # as for columns of remote devices
_BUFFER_BYTES = MIB // 4


class Spool:
    """A file without a name. One thread at a time; `close` frees it, and so does the process' end.

    `memory_bytes` are leased from `budget` for the spool's life in memory; when they are not free
    at once the spool starts on disk. `directory`: where on disk, None for the machine's own place
    for temporary files.
    """

    def __init__(
        self, budget: ByteBudget, *, memory_bytes: int = SPOOL_BYTES, directory: str | None = None
    ) -> None:
        self._budget, self._memory_bytes, self._directory = budget, memory_bytes, directory
        self._pid = os.getpid()
        self._leased = self._lease()
        try:
            number = os.memfd_create("hpstore-spool") if self._leased else self._disk_copy()
            self.file = io.BufferedRandom(io.FileIO(number, "r+b"), _BUFFER_BYTES)
        except BaseException:
            self._release()
            raise

    def _lease(self) -> bool:
        if not hasattr(os, "memfd_create") or self._memory_bytes <= 0:
            return False
        try:
            self._budget.acquire(self._memory_bytes, 0.0)
        except BudgetExceeded:
            _log.info("spools use all of their memory; a stream starts on disk")
            return False
        return True

    def _disk_copy(self) -> int:
        with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
            return os.dup(file.fileno())

    @property
    def on_disk(self) -> bool:
        """Whether the bytes left memory, or never were there."""
        return not self._leased

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append or overwrite at the position. OSError when the disk is full."""
        if self._leased and self.file.tell() + memoryview(data).nbytes > self._memory_bytes:
            self._to_disk()
        return self.file.write(data)

    def fileno(self) -> int:
        """The descriptor, with everything written through the spool behind it."""
        self.file.flush()
        return self.file.fileno()

    def _to_disk(self) -> None:
        """Move to a file on disk under the same descriptor number and position."""
        self.file.flush()
        number, position = self.file.fileno(), self.file.tell()
        with tempfile.TemporaryFile(dir=self._directory, buffering=0) as disk:
            total, done = os.fstat(number).st_size, 0
            while done < total:
                done += os.sendfile(disk.fileno(), number, done, total - done)
            os.lseek(disk.fileno(), position, os.SEEK_SET)
            os.dup2(disk.fileno(), number, inheritable=False)
        self._release()

    def _release(self) -> None:
        if self._leased:
            self._leased = False
            self._budget.release(self._memory_bytes)

    def close(self) -> None:
        """Forget the bytes. Idempotent."""
        self._release()
        if self._pid != os.getpid():
            self.file.raw.close()  # nothing buffered goes into the file that the parent writes on
        self.file.close()
