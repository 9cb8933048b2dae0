"""Whole tensors of a step one after the other, in bounded memory, each verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import Item, by_name
from hpstore.checkpoint.restore.whole_tensors import load_tensors
from hpstore.checkpoint.state.scalars import dtype_named
from hpstore.errors import CheckpointError
from hpstore.pool.pool import Pool
from hpstore.units import MIB

GROUP_BYTES = 256 * MIB  # small tensors are read together: each read alone costs milliseconds
ByteProgress = Callable[[int, int], None]  # bytes done, bytes in all


class TensorStream:
    """Tensors of a step in a known order. At most GROUP_BYTES, or one tensor, are in memory.

    Every block is verified by the pool and every item by its hash; take() raises IntegrityError,
    RedundancyError. `change`: what is done to each tensor on its way.
    """

    def __init__(
        self,
        pool: Pool,
        manifest: Manifest,
        names: Sequence[str],
        progress: ByteProgress | None,
        change: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._pool, self._manifest, self._progress = pool, manifest, progress
        self._items = by_name(manifest.items)
        absent = [name for name in names if name not in self._items]
        if absent:
            raise CheckpointError(f"step {manifest.step} refers to {absent[:4]} but holds none")
        self._names, self._change = list(names), change
        self._place = {name: n for n, name in enumerate(self._names)}
        self._read: dict[str, torch.Tensor] = {}
        self._done = 0
        self.total_bytes = sum(map(self.nbytes, self._names))

    def item(self, name: str) -> Item:
        """A tensor's first item, which says its dtype and shape."""
        return self._items[name][0]

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in memory."""
        return tensor_bytes(self.item(name))

    def take(self, name: str) -> torch.Tensor:
        """The tensor; the caller owns it. Cheap in the order that was said."""
        if name not in self._read:
            names = self._group(self._place[name])
            self._read = load_tensors(self._pool, self._manifest, names, None)
        found = self._read.pop(name)
        self._done += self.nbytes(name)
        if self._progress is not None:
            self._progress(self._done, self.total_bytes)
        return found if self._change is None else self._change(name, found)

    def _group(self, first: int) -> list[str]:
        group, total = [self._names[first]], self.nbytes(self._names[first])
        for name in self._names[first + 1 :]:
            total += self.nbytes(name)
            if total > GROUP_BYTES:
                break
            group.append(name)
        return group


def counted(progress: ByteProgress, items: Sequence[Item]) -> Callable[[int], None]:
    """Adds up raw bytes of items for a progress callback."""
    return counting(
        progress, sum(item.box.count * dtype_named(item.dtype).itemsize for item in items)
    )


def counting(progress: ByteProgress, total: int) -> Callable[[int], None]:
    """Adds up bytes for a progress callback, which is never told of more than `total`."""
    done = 0

    def seen(count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        progress(done, total)

    return seen


def tensor_bytes(item: Item) -> int:
    """Bytes of the whole tensor that an item is of."""
    count = 1
    for size in item.shape:
        count *= size
    return count * dtype_named(item.dtype).itemsize
