"""Which rank writes which box, and where it goes in that rank's segments. Pure decisions.

A box that several ranks hold (replicas) is written once, by the one with the least to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from hpstore.checkpoint.format.items import Box, Item, whole
from hpstore.checkpoint.state.plain_tensors import require_savable
from hpstore.errors import CheckpointError
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.units import KIB, MIB, round_up

SMALL_ITEM_BYTES = 64 * KIB  # smaller ones are packed at 64 B, so a scalar does not cost 4 KiB
SMALL_ALIGNMENT = 64
WITHIN_BYTES = 1792 * KIB  # of tensors in a manifest, which has room for names in 2 MiB: one call
VOTES_BYTES = 16 * MIB  # of memory that messages with tensors may take on each rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One box of a tensor that this rank holds, with its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def chunks_of(name: str, tensor: torch.Tensor) -> list[Chunk]:
    """The boxes of a tensor that are on this rank: all of a plain one, the shard of a DTensor.

    Raises CheckpointError for a shard that is no plain tensor in memory: several that wrap others
    have one address, 0, and one of them would be saved for all.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "__create_chunk_list__"):
        if type(tensor).__name__ == "ShardedTensor":
            raise CheckpointError(f"{name!r} is a ShardedTensor; use FSDP2 (fully_shard) instead")
        return [Chunk(name=name, dtype=dtype, shape=shape, box=whole(shape), tensor=tensor)]
    if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        raise CheckpointError(
            f"{name!r} is a DTensor of partial values, whose sum over the ranks is not made yet: "
            "save x.redistribute(placements=[Replicate()]), or wrap x.to_local() in per_rank(). "
            "What was committed before is untouched."
        )
    found = []
    for part in tensor.__create_chunk_list__():
        box = Box(offsets=tuple(part.offsets), sizes=tuple(part.sizes))
        index = MetadataIndex(name, part.offsets)
        shard = tensor.__get_tensor_shard__(index)  # type: ignore[attr-defined]  # DCP's protocol
        if tuple(shard.shape) != box.sizes:
            raise CheckpointError(
                f"{name!r}: the local shard on this rank has shape {tuple(shard.shape)}, where the "
                f"DTensor's placements say {box.sizes} at {box.offsets} of {shape}. Shards of "
                "uneven sizes that torch.chunk would not make cannot be told apart "
                "(pytorch#144109): redistribute it, or wrap the local tensor in per_rank(). What "
                "was committed before is untouched."
            )
        if not shard.is_meta:  # such a one is a place that a restore has made
            require_savable(shard, f"the shard of {name!r}")
        if box.count or not tensor.numel():
            found.append(Chunk(name=name, dtype=dtype, shape=shape, box=box, tensor=shard.detach()))
    return found


Held = tuple[str, tuple[int, ...], int]  # name, offsets, bytes: what a rank says of a chunk


def assign(held: Sequence[Sequence[Held]]) -> list[list[int]]:
    """By rank, the indices of the chunks that it writes. Balanced by bytes, each box once.

    The largest boxes are given out first, each to the least loaded of its holders.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, chunks in enumerate(held):
        for index, (name, offsets, nbytes) in enumerate(chunks):
            holders.setdefault((name, offsets), []).append((rank, index))
            sizes[name, offsets] = nbytes
    loads = [0] * len(held)
    mine: list[list[int]] = [[] for _ in held]
    for box in sorted(holders, key=lambda b: (-sizes[b], b)):
        rank, index = min(holders[box], key=lambda place: (loads[place[0]], place[0]))
        loads[rank] += sizes[box] + SMALL_ALIGNMENT
        mine[rank].append(index)
    return [sorted(indices) for indices in mine]


def assign_within(
    held: Sequence[Sequence[Held]], within_bytes: int, slice_bytes: int
) -> list[list[int]] | None:
    """As assign(), where the manifest holds the bytes of all; None when they are too many.

    Each box is written by its first holder: what rank 0 holds, who puts the manifest, need not be
    sent. `slice_bytes`: what any rank can stage at once.
    """
    mine: list[list[int]] = [[] for _ in held]
    seen: set[tuple[str, tuple[int, ...]]] = set()
    sizes = [0] * len(held)
    for rank, chunks in enumerate(held):
        for index, (name, offsets, nbytes) in enumerate(chunks):
            if (name, offsets) not in seen:
                seen.add((name, offsets))
                mine[rank].append(index)
                sizes[rank] += round_up(nbytes, SMALL_ALIGNMENT)
                sizes[rank] += ALIGNMENT_BYTES if nbytes >= SMALL_ITEM_BYTES else 0
    staged = max(size + ALIGNMENT_BYTES * len(some) for size, some in zip(sizes, mine, strict=True))
    sent = max(sizes[1:], default=0) * len(held)  # messages are as long as the longest
    fits = sum(sizes) <= within_bytes and staged <= slice_bytes and sent <= VOTES_BYTES
    return mine if fits else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What is staged at once and written as one segment: items and the tensors they come from."""

    items: tuple[Item, ...]
    tensors: Sequence[torch.Tensor]  # by item
    copies: tuple[int, ...]  # indices of the items to copy: each place once, none that is empty
    small_count: int  # of the copies: the first are of items smaller than SMALL_ITEM_BYTES
    size: int


def place(chunks: Sequence[Chunk], limit_bytes: int | None = None) -> list[Slice]:
    """Places for chunks in one segment, or in several when a slice may not pass `limit_bytes`.

    In a slice the small ones come first, packed; large ones begin at 4 KiB. Chunks that are views
    of the same memory share a place. A chunk larger than the limit is a slice of its own.
    """
    groups: list[list[Chunk]] = [[]]
    filled = 0
    for chunk in chunks:
        cost = round_up(chunk.nbytes, SMALL_ALIGNMENT) + ALIGNMENT_BYTES
        if limit_bytes is not None and groups[-1] and filled + cost > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(chunk)
        filled += cost
    return [_slice(group) for group in groups]


def fits_within(slices: Sequence[Slice], limit_bytes: int) -> bool:
    """Whether the manifest can hold the bytes of all tensors: one put is then all of a save."""
    return len(slices) <= 1 and sum(part.size for part in slices) <= limit_bytes


def _slice(chunks: list[Chunk]) -> Slice:
    order = sorted(range(len(chunks)), key=lambda n: chunks[n].nbytes >= SMALL_ITEM_BYTES)
    placed: dict[int, Item] = {}
    places: dict[tuple[object, ...], int] = {}
    copies = []
    at = 0
    for n in order:
        chunk, length = chunks[n], chunks[n].nbytes
        tensor = chunk.tensor
        same = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        offset = (places.get(same) if tensor.data_ptr() else None) if length else at
        if offset is None:
            offset = round_up(
                at, ALIGNMENT_BYTES if length >= SMALL_ITEM_BYTES else SMALL_ALIGNMENT
            )
            at = offset + length
            places[same] = offset
            copies.append(n)
        placed[n] = Item(
            name=chunk.name,
            dtype=chunk.dtype,
            shape=chunk.shape,
            box=chunk.box,
            offset=offset,
            length=length,
        )
    return Slice(
        items=tuple(placed[n] for n in range(len(chunks))),
        tensors=[chunk.tensor for chunk in chunks],
        copies=tuple(copies),
        small_count=sum(chunks[n].nbytes < SMALL_ITEM_BYTES for n in copies),
        size=at,
    )


def compacted(items: Iterable[Item]) -> tuple[list[tuple[Item, Item]], int]:
    """New places for the items that stay, in their order in memory; pairs (before, after), size.

    No item moves up, so memory can be moved in this order in place. Shared places stay shared.
    """
    moved: dict[tuple[int, int], int] = {}
    pairs, at = [], 0
    for item in sorted(items, key=lambda i: (i.offset, i.length)):
        where = moved.get((item.offset, item.length)) if item.length else at
        if where is None:
            big = item.length >= SMALL_ITEM_BYTES
            where = round_up(at, ALIGNMENT_BYTES if big else SMALL_ALIGNMENT)
            moved[item.offset, item.length] = where
            at = where + item.length
        pairs.append((item, replace(item, offset=where)))
    return pairs, at
