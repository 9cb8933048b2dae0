"""Sources for tests of the cache: blocks whose bytes tell their number, that count and can fail."""

from __future__ import annotations

import threading

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.cache import AnyAttached
from hpstore.loaders.cache.block_source import Sizes, Targets, sizes_of
from hpstore.loaders.dataset.record_layout import Int64s


class NumberedSource:
    """Every byte of a block depends on its number, its place in it and on `version`."""

    def __init__(
        self, count: int, sizes: Sizes, *, name: str = "train/0", version: int = 0
    ) -> None:
        self.name, self.version, self.sizes, self.block_count = name, version, sizes, count
        self.fetches = np.zeros(count, np.int64)
        self.calls: list[list[int]] = []
        self.gate: threading.Event | None = None  # reads wait for it
        self.entered = threading.Event()  # a read has begun
        self.failing = False
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        return f"{self.name} of version {self.version}"

    def bytes_of(self, block: int) -> Bytes:
        """What a read of the block gives."""
        size = int(sizes_of(self.sizes, np.array([block]))[0])
        seed = block * 2654435761 + self.version * 97
        return (
            (np.arange(size, dtype=np.uint64) * np.uint64(2 * block + 1) + np.uint64(seed))
            >> np.uint64(3)
        ).astype(np.uint8)

    def read(self, blocks: Int64s, targets: Targets) -> None:
        """As BlockSource.read."""
        with self._lock:
            self.calls.append(blocks.tolist())
            self.fetches[blocks] += 1
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.failing:
            raise OSError(5, "the source fails")
        for block, target in zip(blocks.tolist(), targets, strict=True):
            target[:] = self.bytes_of(block)


def read_checked(reader: AnyAttached, source: NumberedSource, blocks: Int64s) -> None:
    """Read a batch, as rows of one array where they have one size; every byte must be right."""
    sizes = sizes_of(source.sizes, blocks)
    targets: Targets
    if isinstance(source.sizes, int):
        targets = np.full((len(blocks), source.sizes), 0xEE, np.uint8)
    else:
        targets = [np.full(size, 0xEE, np.uint8) for size in sizes.tolist()]
    reader.read(blocks, targets)
    for block, target in zip(blocks.tolist(), targets, strict=True):
        assert np.array_equal(target, source.bytes_of(block)), f"block {block}"


def read_epoch(reader: AnyAttached, source: NumberedSource, order: Int64s, batch: int = 16) -> None:
    """Read an order in batches."""
    for at in range(0, len(order), batch):
        read_checked(reader, source, order[at : at + batch])
