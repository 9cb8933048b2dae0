"""Reads from the staging buffer, which a save of another thread may write again at any time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpstore.checkpoint.format.items import Item, whole
from hpstore.checkpoint.format.segment_plan import Chunk
from hpstore.checkpoint.restore import read_items
from hpstore.checkpoint.restore.range_targets import ItemDigest, MemoryTarget
from hpstore.checkpoint.restore.read_items import SegmentReads, reads_for
from hpstore.codec.galois import Bytes
from hpstore.errors import IntegrityError
from hpstore.format.checksum import digest128
from hpstore.units import KIB


def item_at(memory: Bytes, offset: int, rows: int, name: str) -> Item:
    """An item of `rows` rows of 256 floats, as it lies in memory."""
    length = rows * KIB
    return Item(
        name=name,
        dtype="float32",
        shape=(rows, 256),
        box=whole((rows, 256)),
        offset=offset,
        length=length,
        digest=digest128(memory[offset : offset + length].tobytes()).hex(),
    )


def test_what_is_hashed_is_what_was_copied() -> None:
    """A save that begins between the two writes the arena: what it left there was copied, and the
    hash was that of the bytes before."""
    arena = np.arange(KIB, dtype=np.uint16).view(np.uint8)[:KIB]
    wanted = arena.copy()
    target: Bytes = np.zeros(KIB, np.uint8)

    class Interrupted(ItemDigest):
        """A save begins when the hash is done."""

        def take(self, at: int, data: Bytes, total: int) -> None:
            super().take(at, data, total)
            arena[:] = 7

    MemoryTarget(target, Interrupted(item_at(arena, 0, 1, "t"))).take(0, arena)
    assert (target == wanted).all()
    with pytest.raises(IntegrityError, match="does not match"):
        MemoryTarget(target, ItemDigest(item_at(wanted, 0, 1, "t"))).take(0, arena)


@pytest.mark.parametrize("tied", [1, 2, 3])
def test_two_threads_read_tied_items_in_order(monkeypatch: pytest.MonkeyPatch, tied: int) -> None:
    """Tensors of a GPU, here strided ones, come in batches of rows. A segment was cut between two
    batches of tied items, whose hashes then missed a half: such a restore was never a warm one."""
    monkeypatch.setattr(read_items, "BATCH_BYTES", 4 * KIB)
    rows, apart = 32, 8
    memory = np.random.default_rng(1).integers(0, 256, (rows + apart) * KIB, np.uint8)
    items = [item_at(memory, 0, rows, f"tied{number}") for number in range(tied)]
    items.append(item_at(memory, rows * KIB, apart, "other"))
    chunks = []
    for item in items:
        tensor = torch.zeros(256, item.shape[0]).t()  # not as the bytes lie
        chunks.append(
            Chunk(name=item.name, dtype=item.dtype, shape=item.shape, box=item.box, tensor=tensor)
        )
    reads = [r for c, item in zip(chunks, items, strict=True) for r in reads_for(c, [item])]
    parts = SegmentReads(reads).split()
    assert len(parts) == 2
    for part in reversed(parts):  # two threads: any of them may be first
        for low, high in part.ranges:
            for at in range(low, high, KIB):
                part.deliver(at, memory[at : at + KIB])
    for chunk, item in zip(chunks, items, strict=True):
        stored = memory[item.offset : item.offset + item.length].view(np.float32)
        assert torch.equal(
            chunk.tensor.contiguous().reshape(-1).view(torch.int32),
            torch.from_numpy(stored.copy()).view(torch.int32),
        )
