"""A column file of a pool for direct reads: where its blocks are and what they must be.

Header and table come over host memory and are checked there; the column's bytes go to the GPU,
where `verify` checks them against the table.
"""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from hpstore.devices.file_handles import unlock_and_close
from hpstore.errors import DirectUnavailable, IntegrityError
from hpstore.format.checksum import block_seeds
from hpstore.format.column_header import HEADER_BYTES, ColumnHeader, decode_header, decode_table
from hpstore.format.geometry import BLOCK_BYTES
from hpstore.format.pool_key import PoolKey
from hpstore.loaders.gpu.direct.cufile_queue import DirectArena, DirectEngine
from hpstore.loaders.gpu.direct.gpu_checksums import Blocks
from hpstore.runtime.closing import Closing


class DirectColumn(Closing):
    """One column file, locked against recycling until close(). Thread-safe.

    `file`: its path, or a descriptor that leads to it, which is only used in here. Raises
    FileNotFoundError when it is gone, IntegrityError when header or table is damaged,
    DirectUnavailable when it is being recycled, when the driver does not take it, or when its
    blocks have MACs (whole copies in a pool with a key), which the GPU does not check.
    """

    def __init__(
        self, engine: DirectEngine, file: str | int, *, pool_key: PoolKey | None = None
    ) -> None:
        if isinstance(file, str):
            path, fd = file, os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        else:  # anew: a copy of the descriptor would share its lock and its flags
            path = f"/proc/self/fd/{file}"
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            page = os.pread(fd, HEADER_BYTES, 0)
            self.header: ColumnHeader = decode_header(page, where=path, pool_key=pool_key)
            self._checks = checks = self.header.checks(pool_key)
            if checks.macs or checks.blind:
                raise DirectUnavailable(f"{path} has no checksums that a GPU can check")
            raw = os.pread(fd, self.header.table_bytes, self.header.table_offset)
            if len(raw) < self.header.table_bytes:
                raise IntegrityError(f"{path}: the file ends within its table")
            self._table: NDArray[np.uint64] = decode_table(
                self.header, raw, where=path, checks=checks
            )
            self._file = engine.register_file(fd)
        except BlockingIOError as error:
            raise DirectUnavailable(f"{path} is being recycled: look its key up again") from error
        finally:
            unlock_and_close(fd)
        self._engine, self.path = engine, path

    def read(
        self, start: int, end: int, arena: DirectArena, arena_offset: int, *, lane: str = ""
    ) -> Future[int]:
        """Read column bytes [start, end) into the arena, not verified; see DirectEngine.read.

        `geometry.block_span` gives ranges that can be verified.
        """
        if not 0 <= start < end <= self.header.geometry.column_bytes:
            raise ValueError(
                f"[{start}, {end}) of a column of {self.header.geometry.column_bytes} bytes"
            )
        return self._engine.read(
            self._file, HEADER_BYTES + start, end - start, arena, arena_offset, lane=lane
        )

    def blocks(self, start: int, end: int, arena_offset: int) -> Blocks:
        """What to check of column bytes [start, end), whole blocks, that lie at `arena_offset`."""
        size = self.header.geometry.column_bytes
        whole = end % BLOCK_BYTES == 0 or end == size
        if start % BLOCK_BYTES or not 0 <= start < end <= size or not whole:
            raise ValueError(f"[{start}, {end}) are no whole blocks of a column of {size} bytes")
        starts = np.arange(start, end, BLOCK_BYTES, dtype=np.int64)
        first = start // BLOCK_BYTES
        return Blocks(
            starts=starts - start + arena_offset,
            lengths=np.minimum(end - starts, BLOCK_BYTES),
            seeds=block_seeds(self._checks.seed, first, len(starts)),
            expected=self._table[first : first + len(starts)].astype(np.uint64),
        )

    def close(self) -> None:
        """Let go of the file, after its reads. Idempotent."""
        self._file.close()
