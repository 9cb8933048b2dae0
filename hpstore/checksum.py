"""Checksums that bind bytes to their place.

Each 64 KiB block of a column has an xxh3-64, seeded with pool, key, version, column and position,
so that a flipped, misplaced or stale block is caught alike. The table of them has a 128-bit root.
This detects damage; it is not authentication.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpstore.geometry import BLOCK_BYTES

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # odd, so that block * step never repeats below 2^64
ROOT_BYTES = 16
DIGEST_BYTES = 8


def column_seed(pool_id: str, key: str, version: str, layout: str, column: int) -> int:
    """Seed of a column's checksums."""
    return xxhash.xxh3_64_intdigest(f"{pool_id}\0{key}\0{version}\0{layout}\0{column}".encode())


def block_seeds(seed: int, first_block: int, count: int) -> NDArray[np.uint64]:
    """Seeds of consecutive blocks of a column, for those who check them elsewhere."""
    blocks = np.arange(first_block, first_block + count, dtype=np.uint64)
    return np.uint64(seed) + blocks * np.uint64(_STEP)


def block_digests(
    seed: int, first_block: int, data: memoryview, out: NDArray[np.uint64] | None = None
) -> NDArray[np.uint64]:
    """Digests of the consecutive blocks in `data`; the last block may be short.

    Writes into `out` when it is given (length: number of blocks) and returns it.
    """
    count = -(-len(data) // BLOCK_BYTES)
    digests = np.empty(count, np.uint64) if out is None else out
    digest = xxhash.xxh3_64_intdigest
    for index in range(count):
        at = index * BLOCK_BYTES
        digests[index] = digest(
            data[at : at + BLOCK_BYTES], (seed + (first_block + index) * _STEP) & _MASK
        )
    return digests


def bad_blocks(
    seed: int, first_block: int, data: memoryview, table: NDArray[np.uint64]
) -> tuple[int, ...]:
    """The blocks in `data` that do not match the column's `table`, ascending."""
    digests = block_digests(seed, first_block, data)
    wrong = np.nonzero(digests != table[first_block : first_block + len(digests)])[0]
    return tuple(first_block + int(index) for index in wrong)


def table_root(seed: int, table: NDArray[np.uint64]) -> bytes:
    """Root over a column's table."""
    return xxhash.xxh3_128_digest(table.astype("<u8").tobytes(), seed)


def digest128(data: bytes | memoryview) -> bytes:
    """Unseeded 128-bit digest, for records and checkpoint items."""
    return xxhash.xxh3_128_digest(data)


__all__ = [
    "DIGEST_BYTES",
    "ROOT_BYTES",
    "bad_blocks",
    "block_digests",
    "block_seeds",
    "column_seed",
    "digest128",
    "table_root",
]
