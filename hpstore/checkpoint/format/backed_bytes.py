"""Whether the bytes of a tensor are there, before memory is taken for it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.format.pack import Segment
from hpstore.errors import CheckpointMismatch, IntegrityError
from hpstore.pool.pool import Pool
from hpstore.units import MIB

LARGE_BYTES = 64 * MIB  # smaller tensors are believed: their number is that of a list's entries


class Backed:
    """Holds the shapes in a manifest against its items, and the sizes of segments against the pool.

    A manifest may be untrusted: shapes without data behind them would exhaust the memory.
    """

    def __init__(self, pool: Pool, segments: Sequence[Segment]) -> None:
        self._pool, self._segments = pool, segments
        self._there: set[int] = set()

    def require(self, name: str, items: Sequence[Item]) -> None:
        """Raise CheckpointMismatch, IntegrityError, ObjectNotFound unless the items of a tensor
        make all of it, and segments of large ones have the size that is recorded."""
        shape = items[0].shape
        count = sum(item.box.count for item in items)
        if count < prod(shape):
            raise CheckpointMismatch(
                f"{name!r}: the checkpoint holds {count} of the {prod(shape)} elements that its "
                "shape says. Nothing was changed."
            )
        if sum(item.length for item in items) < LARGE_BYTES and not any(i.codec for i in items):
            return
        for number in {item.segment for item in items if item.length} - self._there:
            segment = self._segments[number]
            if segment.data is not None:
                continue  # it came with the manifest
            size = self._pool.stat(segment.key).size
            if size != segment.size:
                raise IntegrityError(
                    f"segment {segment.key} has {size} bytes, not the {segment.size} that the "
                    "manifest names"
                )
            self._there.add(number)
