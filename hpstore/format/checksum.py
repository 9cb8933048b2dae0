"""Checksums that bind bytes to their place.

Each 64 KiB block of a column has an xxh3-64, seeded with pool, key, version, column and position,
so that a flipped, misplaced or stale block is caught alike. The table of them has a 128-bit root.
Without a pool key this detects damage alone. With one the seed is secret, the root is a MAC, and
blocks of whole copies have MACs, too (docs/decisions/0098).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpstore.format.geometry import BLOCK_BYTES
from hpstore.format.pool_key import PoolKey, Use

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # odd, so that block * step never repeats below 2^64
ROOT_BYTES = 16
DIGEST_BYTES = 8


def column_seed(
    pool_id: str, key: str, version: str, layout: str, column: int, pool_key: PoolKey | None = None
) -> int:
    """Seed of a column's checksums; a secret one in a pool with a key."""
    identity = _identity(pool_id, key, version, layout, column)
    if pool_key is None or pool_key.lost:
        return xxhash.xxh3_64_intdigest(identity)
    return int.from_bytes(pool_key.mac(Use.SEED, identity), "little")


def _identity(pool_id: str, key: str, version: str, layout: str, column: int) -> bytes:
    return f"{pool_id}\0{key}\0{version}\0{layout}\0{column}".encode()


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
    return _differing(first_block, block_digests(seed, first_block, data), table)


def _differing(
    first_block: int, digests: NDArray[np.uint64], table: NDArray[np.uint64]
) -> tuple[int, ...]:
    wrong = np.nonzero(digests != table[first_block : first_block + len(digests)])[0]
    return tuple(first_block + int(index) for index in wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChecks:
    """How the blocks and the table of one column are checked. Thread-safe.

    `seed`: of blocks that xxh3 checks; with `macs` (whole copies in a pool with a key) they have
    MACs instead, the same in all copies. With a key that is lost nothing is checked.
    """

    identity: bytes  # of the column
    layout: bytes  # the same, of all columns
    seed: int
    pool_key: PoolKey | None
    macs: bool

    @classmethod
    def of(
        cls,
        pool_id: str,
        key: str,
        version: str,
        layout: str,
        column: int,
        *,
        copies: bool,
        pool_key: PoolKey | None,
    ) -> ColumnChecks:
        """Those of a column."""
        keyed = pool_key is not None and not pool_key.lost
        return cls(
            identity=_identity(pool_id, key, version, layout, column),
            layout=_identity(pool_id, key, version, layout, -1),
            seed=column_seed(pool_id, key, version, layout, column, pool_key),
            pool_key=pool_key,
            macs=copies and keyed,
        )

    @property
    def blind(self) -> bool:
        """Whether nothing can be checked: the pool's key is lost."""
        return self.pool_key is not None and self.pool_key.lost

    def digests(
        self, first_block: int, data: memoryview, out: NDArray[np.uint64] | None = None
    ) -> NDArray[np.uint64]:
        """As block_digests()."""
        if not self.macs:
            return block_digests(self.seed, first_block, data, out)
        assert self.pool_key is not None
        count = -(-len(data) // BLOCK_BYTES)
        found = np.empty(count, np.uint64) if out is None else out
        begun = self.pool_key.hasher(Use.BLOCK, self.layout)
        for index in range(count):
            block = begun.copy()
            block.update(b"\0%d\0" % (first_block + index))
            block.update(data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])
            found[index] = int.from_bytes(block.digest(), "little")
        return found

    def bad_blocks(
        self, first_block: int, data: memoryview, table: NDArray[np.uint64]
    ) -> tuple[int, ...]:
        """As bad_blocks()."""
        if self.blind:
            return ()
        return _differing(first_block, self.digests(first_block, data), table)

    def root(self, table: NDArray[np.uint64]) -> bytes:
        """Root over the column's table: a MAC in a pool with a key."""
        if self.pool_key is None or self.pool_key.lost:
            return table_root(self.seed, table)
        made = self.pool_key.hasher(Use.TABLE, self.identity)
        made.update(b"\0" + table.astype("<u8").tobytes())
        return made.digest()


def table_root(seed: int, table: NDArray[np.uint64]) -> bytes:
    """Root over a column's table."""
    return xxhash.xxh3_128_digest(table.astype("<u8").tobytes(), seed)


def digest128(data: bytes | memoryview) -> bytes:
    """Unseeded 128-bit digest, for records and checkpoint items."""
    return xxhash.xxh3_128_digest(data)
