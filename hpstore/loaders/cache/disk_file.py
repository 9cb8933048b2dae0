"""Blocks of one source on a local disk: a sparse file of blocks, and a table of their checksums.

A block's place is fixed by its number, so that no bytes but its own, or none, can ever be found
there; what is read is compared with its checksum in the table. After a crash, a torn write, with
a deleted or damaged file a block is then a miss. Places that are given up are punched out.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from hpstore.codec.galois import Bytes
from hpstore.devices.o_direct import set_direct
from hpstore.loaders.cache.block_source import BlockSource, Sizes, sizes_of
from hpstore.loaders.cache.own_files import open_own
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.closing import Closing
from hpstore.units import round_up

PLACE_BYTES = 4096  # places begin at multiples of it, for O_DIRECT
HEADER_BYTES = 4096
FORMAT = 1
_SLACK_BYTES = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*
_MASK = (1 << 64) - 1
UInt64s = npt.NDArray[np.uint64]


class DiskFile(Closing):
    """`stem`.blocks and `stem`.table of one source. Its owner says who may call what when.

    Table: a header, then 8 bytes a block, little endian: 0 where it is not there, else its xxh3-64,
    seeded with identity and number (1 in place of 0). A table of another identity, block count,
    sizes or format is dropped with its blocks. Raises OSError.
    """

    def __init__(self, stem: str, source: BlockSource) -> None:
        self.stem, self.sizes, self.block_count = stem, source.sizes, source.block_count
        self.checks: UInt64s  # (block_count,), 0 where a block is not there
        self._seed = xxhash.xxh3_64_intdigest(source.identity.encode())
        self._starts = _starts(source.sizes, source.block_count)
        self._end = self._place(self.block_count)
        self._blocks = open_own(f"{stem}.blocks")
        self._table = -1
        try:
            self._table = open_own(f"{stem}.table")
            self.checks = self._load(_header(source))
            self.direct = _try_direct(self._blocks)
        except BaseException:
            self.close()
            raise

    def _load(self, header: bytes) -> UInt64s:
        """What a last run left, or an empty start."""
        if os.pread(self._table, HEADER_BYTES, 0) == header:
            raw = os.pread(self._table, 8 * self.block_count, HEADER_BYTES)
            if os.fstat(self._blocks).st_size == self._end and len(raw) % 8 == 0:
                checks = np.zeros(self.block_count, np.uint64)
                checks[: len(raw) // 8] = np.frombuffer(raw, "<u8")
                self._punch_gaps(checks)
                return checks
        os.ftruncate(self._table, 0)
        os.ftruncate(self._blocks, 0)
        os.ftruncate(self._blocks, self._end)
        punch(self._blocks, 0, PLACE_BYTES)  # fails now where it would fail later
        os.pwrite(self._table, header, 0)
        return np.zeros(self.block_count, np.uint64)

    def _punch_gaps(self, checks: UInt64s) -> None:
        """Give back what a crash left between the blocks that the table knows."""
        there = np.flatnonzero(checks)
        used = self.bytes_of(there)
        if os.fstat(self._blocks).st_blocks * 512 <= used + used // 16 + _SLACK_BYTES:
            return  # the filesystem's own blocks count too
        edges = np.concatenate([[-1], there, [self.block_count]])
        for before, after in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            start, end = self._place(before + 1), self._place(after)
            if start < end:
                punch(self._blocks, start, end - start)

    def _place(self, block: int) -> int:
        """Where a block begins."""
        if isinstance(self._starts, int):
            return block * self._starts
        return int(self._starts[block])

    def bytes_of(self, blocks: Int64s) -> int:
        """Bytes that blocks take on the disk."""
        sizes = sizes_of(self.sizes, blocks)
        return int(places(sizes).sum())

    def gone(self) -> bool:
        """Whether somebody has deleted a file of this."""
        return min(os.fstat(fd).st_nlink for fd in (self._blocks, self._table)) == 0

    def read(self, blocks: Int64s) -> list[Bytes | None]:
        """Bytes of blocks, views of fresh memory; None for those that do not match."""
        sizes = sizes_of(self.sizes, blocks)
        ends = np.cumsum(places(sizes))
        memory = aligned_array(int(ends[-1]) if len(ends) else 0)
        found: list[Bytes | None] = []
        at = 0
        for block, size, end in zip(blocks.tolist(), sizes.tolist(), ends.tolist(), strict=True):
            count = os.preadv(self._blocks, [memory[at:end].data], self._place(block))
            data, at = memory[at : at + size], end
            good = count >= size and self._digest(block, data) == int(self.checks[block])
            found.append(data if good else None)
        return found

    def write(self, block: int, data: Bytes) -> None:
        """Write a block, then say in the table that it is there."""
        size = round_up(len(data), PLACE_BYTES)
        if self.direct and (size != len(data) or data.ctypes.data % PLACE_BYTES):
            padded = aligned_array(size)
            padded[: len(data)] = data
        else:
            padded = data
        at, place = 0, self._place(block)
        while at < len(padded):
            count = os.pwrite(self._blocks, padded[at:].data, place + at)
            if count % PLACE_BYTES and at + count < len(padded):
                raise OSError(errno.ENOSPC, "the disk took a part of a block")
            at += count
        self._enter(block, self._digest(block, data))

    def forget(self, blocks: Sequence[int]) -> None:
        """Give up blocks and their room. The caller has set their checks to 0."""
        for block in blocks:
            self._enter(block, 0)
            start = self._place(block)
            punch(self._blocks, start, self._place(block + 1) - start)

    def _enter(self, block: int, check: int) -> None:
        os.pwrite(self._table, check.to_bytes(8, "little"), HEADER_BYTES + 8 * block)
        self.checks[block] = check

    def _digest(self, block: int, data: Bytes) -> int:
        return xxhash.xxh3_64_intdigest(data.data, (self._seed + block) & _MASK) or 1

    def close(self) -> None:
        """Close the files; they stay for the next run. Idempotent."""
        for name in ("_blocks", "_table"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)


def places(sizes: Int64s) -> Int64s:
    """Room that blocks take; an empty one has a place, too."""
    return -(-np.maximum(sizes, 1) // PLACE_BYTES) * PLACE_BYTES


def _starts(sizes: Sizes, count: int) -> int | Int64s:
    """Where blocks begin, or the distance between two."""
    if isinstance(sizes, int):
        return round_up(max(sizes, 1), PLACE_BYTES)
    ends = np.cumsum(places(sizes))
    return np.concatenate([np.zeros(1, np.int64), ends])


def _header(source: BlockSource) -> bytes:
    """The first bytes of a table; equal for equal blocks."""
    sizes = source.sizes
    shape = str(sizes) if isinstance(sizes, int) else xxhash.xxh3_128_hexdigest(sizes.tobytes())
    facts = {
        "magic": "hpstore cache table",
        "format": FORMAT,
        "name": source.name,
        "identity": source.identity,
        "blocks": source.block_count,
        "sizes": shape,
    }
    text = json.dumps(facts).encode()
    if len(text) > HEADER_BYTES:
        facts["name"] = ""
        facts["identity"] = xxhash.xxh3_128_hexdigest(source.identity.encode())
        text = json.dumps(facts).encode()
    return text.ljust(HEADER_BYTES, b"\0")


def _try_direct(fd: int) -> bool:
    """Turn on O_DIRECT, so that blocks are not kept in memory twice; False where it fails."""
    try:
        set_direct(fd, on=True)
        os.preadv(fd, [aligned_array(PLACE_BYTES).data], 0)
    except OSError:
        set_direct(fd, on=False)
        return False
    return True


@functools.cache
def _fallocate() -> ctypes._NamedFuncPointer:
    found = ctypes.CDLL(None, use_errno=True).fallocate
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    return found


def punch(fd: int, start: int, length: int) -> None:
    """Give a part of a file back to its filesystem; it reads as zeros. Raises OSError."""
    if _fallocate()(fd, _KEEP_SIZE | _PUNCH_HOLE, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot punch a hole: {os.strerror(number)}")
