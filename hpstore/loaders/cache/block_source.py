"""What a cache stands in front of: numbered blocks of bytes that can be read again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, TypeAlias

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError
from hpstore.loaders.dataset.record_layout import Int64s

Sizes: TypeAlias = "int | Int64s"
Targets: TypeAlias = "Sequence[Bytes] | Bytes"  # n arrays, or the rows of one


class MemoryLost(Exception):
    """A read that has not ended may still write into the targets, so they must not be used before
    it ends. `late`: such reads. None: they are not known, so the targets are never used again."""

    def __init__(self, late: Sequence[Future[None]] | None = None) -> None:
        super().__init__()
        self.late = late


class BlockSource(Protocol):
    """Blocks 0 <= i < block_count that never change under one `identity`. Thread-safe.

    `name` says what it is (dataset and stream), `identity` which bytes it holds: fingerprint,
    stream, generation. Equal identities mean equal bytes in every process. `sizes`: bytes of
    each block, or of all.
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    @property
    def sizes(self) -> Sizes: ...

    @property
    def block_count(self) -> int: ...

    def read(self, blocks: Int64s, targets: Targets) -> None:
        """Fill targets[i] with the verified bytes of blocks[i]; no block comes twice.

        Raises what reading raises, and MemoryLost when the targets may still be written into.
        """


def check_source(source: BlockSource) -> None:
    """Raises ConfigError for sizes that no cache can hold."""
    sizes = np.atleast_1d(np.asarray(source.sizes, np.int64))
    if isinstance(source.sizes, int):
        good = source.sizes >= 0
    else:
        good = sizes.shape == (source.block_count,) and bool((sizes >= 0).all())
    if not good or not 0 < source.block_count < 1 << 31:
        raise ConfigError(
            f"{source.name!r} cannot be cached: {source.block_count} blocks of {sizes.shape} sizes "
            "(every block needs a size, and there may be 1 to 2**31 - 1)"
        )


def sizes_of(sizes: Sizes, blocks: Int64s) -> Int64s:
    """Bytes of these blocks."""
    if isinstance(sizes, int):
        return np.full(len(blocks), sizes, np.int64)
    return sizes[blocks]


def bytes_of(sizes: Sizes, blocks: Int64s) -> int:
    """Bytes of all of these blocks."""
    return sizes * len(blocks) if isinstance(sizes, int) else int(sizes[blocks].sum())


def total_bytes(sizes: Sizes, count: int) -> int:
    """Bytes of all blocks."""
    return sizes * count if isinstance(sizes, int) else int(sizes.sum())
