"""What becomes of a staged slice before it is written: references, compression, compaction.

Items that the previous checkpoint holds unchanged (frozen weights, the base of a LoRA) are
referenced, not written. All of it works in place in the arena, which only ever shrinks here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import xxhash

from hpstore.checkpoint.format.items import FRAME_BYTES, Item
from hpstore.checkpoint.format.segment_plan import SMALL_ITEM_BYTES, compacted
from hpstore.codec.compression import encoder
from hpstore.codec.galois import Bytes
from hpstore.format.checksum import digest128
from hpstore.runtime.threads import WorkerThreads

_SAMPLES = 64  # lines of 64 bytes that a probe looks at
_COMPRESSORS = 4
_FRAMES_AHEAD = 32
Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Raw tensor bytes: an object, or, of a small save, the end of its manifest, without a key."""

    key: str
    size: int
    version: str
    data: Bytes | None = field(default=None, compare=False, repr=False)  # when it has no key


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """An item of the previous checkpoint. `probe` is None when another process staged it."""

    item: Item
    segment: Segment
    probe: int | None


def known_items(segments: Sequence[Segment], items: Iterable[Item]) -> dict[Key, Known]:
    """What a checkpoint that was read holds, for the next save to refer to."""
    return {
        item.key: Known(item=item, segment=segments[item.segment], probe=None)
        for item in items
        if segments[item.segment].key and (item.length >= SMALL_ITEM_BYTES or item.codec)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A slice ready to be written: `items` lie in the first `size` bytes of the arena."""

    items: tuple[Item, ...]  # digests are "" where they are still to be computed
    referenced: tuple[Known, ...]  # with the names of this save
    size: int
    probes: Mapping[Key, int]


def probe(data: Bytes) -> int:
    """A hash of 64 spread lines: it differs for what differs in many places, at no cost."""
    step = max(64, len(data) // _SAMPLES // 64 * 64)
    usable = len(data) // step * step
    lines = np.ascontiguousarray(data[:usable].reshape(-1, step)[:, :64])
    return xxhash.xxh3_64_intdigest(lines.data)


def pack(memory: Bytes, items: Sequence[Item], known: Mapping[Key, Known], codec: str) -> Packed:
    """Find what need not be written, compress, and close the gaps."""
    referenced: list[Known] = []
    staying: list[Item] = []
    probes: dict[Key, int] = {}
    for item in items:
        if item.length < SMALL_ITEM_BYTES:
            staying.append(item)
            continue
        data = memory[item.offset : item.offset + item.length]
        probes[item.key] = probe(data)
        before = known.get(item.key)
        if before is not None and _unchanged(item, data, before, probes[item.key]):
            referenced.append(replace(before, probe=probes[item.key]))
        else:
            staying.append(item)
    if codec:
        staying = compress(memory, staying, codec)
    elif not referenced:
        size = max((i.offset + i.length for i in staying), default=0)
        return Packed(items=tuple(staying), referenced=(), size=size, probes=probes)
    packed, size = _close_gaps(memory, staying)
    return Packed(items=tuple(packed), referenced=tuple(referenced), size=size, probes=probes)


def _unchanged(item: Item, data: Bytes, before: Known, found: int) -> bool:
    """Whether the previous checkpoint holds the very bytes: decided by the 128-bit hash."""
    old = before.item
    if (old.dtype, old.shape, old.box) != (item.dtype, item.shape, item.box):
        return False
    if before.probe is not None and before.probe != found:
        return False
    return digest128(data.data).hex() == old.digest


def _close_gaps(memory: Bytes, items: Sequence[Item]) -> tuple[list[Item], int]:
    pairs, size = compacted(items)
    placed: dict[Key, Item] = {}
    moved: set[int] = set()  # a shared place is moved once: its old bytes may be gone after that
    for before, after in pairs:
        if before.length and before.offset != after.offset and after.offset not in moved:
            _move(memory, before.offset, after.offset, before.length)
            moved.add(after.offset)
        placed[after.key] = after
    return [placed[item.key] for item in items], size


def _move(memory: Bytes, start: int, target: int, length: int) -> None:
    """memmove inside the arena."""
    if not 0 <= target <= start <= start + length <= len(memory):
        raise ValueError(f"move of {length} bytes from {start} to {target} leaves the arena")
    ctypes.memmove(memory.ctypes.data + target, memory.ctypes.data + start, length)


def compress(memory: Bytes, items: Iterable[Item], codec: str) -> list[Item]:
    """Compress large items where they stand; a frame that does not shrink stays raw.

    Returns them with their hashes, frames and stored lengths. Shared places are done once.
    """
    done: dict[tuple[int, int], Item] = {}
    result = []
    with WorkerThreads(_COMPRESSORS, "hpstore-compress") as pool:
        for item in items:
            place = (item.offset, item.length)
            if item.length < SMALL_ITEM_BYTES:
                result.append(item)
                continue
            if place not in done:
                done[place] = _compress_item(memory, item, codec, pool)
            result.append(replace(done[place], name=item.name, box=item.box, shape=item.shape))
    return result


def _compress_item(memory: Bytes, item: Item, codec: str, pool: WorkerThreads) -> Item:
    """Frames are compressed in parallel, a bounded number ahead, and laid down in order.

    No frame is laid down past its own end, so those that follow are untouched.
    """
    encode, width = encoder(codec), getattr(torch, item.dtype).itemsize
    end = item.offset + item.length
    digest = digest128(memory[item.offset : end].data).hex()
    lengths: list[int] = []
    at = item.offset
    for first in range(item.offset, end, _FRAMES_AHEAD * FRAME_BYTES):
        stop = min(end, first + _FRAMES_AHEAD * FRAME_BYTES)
        starts = range(first, stop, FRAME_BYTES)
        frames = [memory[start : min(start + FRAME_BYTES, stop)] for start in starts]
        smaller = pool.map(lambda frame: encode(frame, width), frames)
        for start, frame, small in zip(starts, frames, smaller, strict=True):
            length = min(len(small), len(frame))
            if length < len(frame):
                memory[at : at + length] = np.frombuffer(small, np.uint8)
            else:
                _move(memory, start, at, length)
            lengths.append(length)
            at += length
    return replace(item, length=at - item.offset, digest=digest, codec=codec, frames=tuple(lengths))


def digests_of(memory: Bytes, items: Sequence[Item]) -> list[str]:
    """xxh3-128 of each item's bytes, hex; places are hashed once, what is known is not."""
    known: dict[tuple[int, int], str] = {}
    found = []
    view = memory.data
    for item in items:
        digest = item.digest or known.get((item.offset, item.length), "")
        if not digest:
            digest = digest128(view[item.offset : item.offset + item.length]).hex()
            known[item.offset, item.length] = digest
        found.append(digest)
    return found
