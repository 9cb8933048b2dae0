"""The staging buffer: every tensor is copied once into aligned, populated, reused memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpstore.buffers import aligned_array
from hpstore.codec.galois import Bytes
from hpstore.geometry import ALIGNMENT_BYTES
from hpstore.units import KIB, MIB, round_up

SMALL_ITEM_BYTES = 64 * KIB  # smaller ones are packed at 64 B, so a scalar does not cost 4 KiB
SMALL_ALIGNMENT = 64
GROWTH = 1.05  # a grown arena gets 5 % more than asked for, so that it grows rarely


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One tensor's place in a segment. Bytes are raw, little-endian, contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def plan_items(tensors: dict[str, torch.Tensor]) -> tuple[list[Item], int]:
    """Places for tensors and the segment's size: small ones packed first, large ones 4 KiB-aligned.

    Tensors that are views of the same memory with the same shape share one place. Pure.
    """
    order = sorted(tensors, key=lambda name: _nbytes(tensors[name]) >= SMALL_ITEM_BYTES)
    items: dict[str, Item] = {}
    places: dict[tuple[object, ...], int] = {}
    at = 0
    for name in order:
        tensor, length = tensors[name], _nbytes(tensors[name])
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if length and same in places:
            offset = places[same]
        else:
            step = ALIGNMENT_BYTES if length >= SMALL_ITEM_BYTES else SMALL_ALIGNMENT
            offset = round_up(at, step)
            at = offset + length
            places[same] = offset
        items[name] = Item(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=offset,
            length=length,
        )
    return [items[name] for name in tensors], at


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Arena:
    """Memory that saves are staged in. One save at a time owns it."""

    def __init__(self) -> None:
        self._memory: Bytes = aligned_array(0)

    @property
    def capacity_bytes(self) -> int:
        """Size now."""
        return len(self._memory)

    def reserve(self, nbytes: int) -> None:
        """Grow to at least `nbytes`; fresh memory is populated here, not during a copy."""
        if nbytes > len(self._memory):
            self._memory = aligned_array(0)  # the old one is freed before the new one is taken
            self._memory = aligned_array(round_up(int(nbytes * GROWTH), MIB), populate=True)

    def view(self, nbytes: int) -> Bytes:
        """The first bytes, page-aligned."""
        return self._memory[:nbytes]

    def tensor(self, item: Item, dtype: torch.dtype) -> torch.Tensor:
        """The memory of an item as a tensor of its dtype and shape."""
        if not item.length:
            return torch.empty(item.shape, dtype=dtype)
        flat = torch.from_numpy(self._memory[item.offset : item.offset + item.length])
        return flat.view(dtype).view(item.shape)

    def stage(self, tensors: dict[str, torch.Tensor], items: list[Item]) -> None:
        """Copy every tensor to its place; waits for CUDA copies."""
        done = set()
        for item in items:
            if item.offset in done or not item.length:
                continue
            done.add(item.offset)
            source = tensors[item.name]
            self.tensor(item, source.dtype).copy_(source)


__all__ = ["Arena", "Item", "plan_items"]
