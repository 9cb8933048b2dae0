"""What a checkpoint holds of a tensor: boxes of it, and where their bytes are. Pure."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from hpstore.errors import CheckpointError

_PRIME = (1 << 127) - 1  # elements and boxes are far fewer
FRAME_BYTES = 1 << 20  # a compressed item is cut into frames of this many bytes, ranges survive


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor: [offset, offset + size) along each axis."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements in it."""
        return prod(self.sizes)

    def moved(self, offsets: Sequence[int]) -> Box:
        """The same sizes at another place."""
        return Box(offsets=tuple(offsets), sizes=self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What both cover; None when that is nothing. A 0-d box covers its one element."""
        if self == other and all(self.sizes):
            return self
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        return Box(offsets=low, sizes=sizes) if all(n > 0 for n in sizes) else None


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box(offsets=(0,) * len(shape), sizes=tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One box of one tensor in a segment. Bytes are raw, little-endian, contiguous.

    `length` counts stored bytes; with a `codec` they are `frames` (stored lengths) of FRAME_BYTES
    raw bytes each; a frame of its raw length is not compressed. `digest`: xxh3-128 of the raw
    bytes, hex, "" until it is known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    offset: int
    length: int
    segment: int = 0  # index into the manifest's segments
    digest: str = ""
    codec: str = ""
    frames: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What tells the items of a checkpoint apart."""
        return self.name, self.box.offsets

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.box.sizes == self.shape


class ItemColumns:
    """Items as columns for JSON: 10,000 items cost milliseconds so, rows would cost ten times that.

    Malformed ones raise KeyError, TypeError or ValueError when they are decoded.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.dtypes: list[str] = []
        self.shapes: list[Sequence[int]] = []
        self.segments: list[int] = []
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.digests: list[str] = []
        # by the number of the item, as text: only shards have a box, only compressed items frames
        self.boxes: dict[str, Sequence[Sequence[int]]] = {}
        self.frames: dict[str, tuple[str, Sequence[int]]] = {}

    def add(
        self,
        items: Sequence[Item],
        *,
        segment: int | None = None,
        digests: Sequence[str] | None = None,
    ) -> None:
        """Append items; with `segment` and `digests` in place of their own."""
        first = len(self.names)
        self.names += [i.name for i in items]
        self.dtypes += [i.dtype for i in items]
        self.shapes += [i.shape for i in items]
        self.segments += [i.segment for i in items] if segment is None else [segment] * len(items)
        self.offsets += [i.offset for i in items]
        self.lengths += [i.length for i in items]
        self.digests += [i.digest for i in items] if digests is None else digests
        for n, item in enumerate(items, first):
            if item.box.sizes != item.shape:
                self.boxes[str(n)] = (item.box.offsets, item.box.sizes)
            if item.codec:
                self.frames[str(n)] = (item.codec, item.frames)

    def extend(self, other: ItemColumns, segments: Sequence[int], shifts: Sequence[int]) -> None:
        """Append another's items; `segments`: what its segments are called here, `shifts`: how
        much later their bytes begin."""
        first = len(self.names)
        self.names += other.names
        self.dtypes += other.dtypes
        self.shapes += other.shapes
        self.segments += [segments[n] for n in other.segments]
        self.offsets += [
            at + shifts[n] for at, n in zip(other.offsets, other.segments, strict=True)
        ]
        self.lengths += other.lengths
        self.digests += other.digests
        self.boxes.update({str(first + int(n)): box for n, box in other.boxes.items()})
        self.frames.update({str(first + int(n)): frames for n, frames in other.frames.items()})

    def json(self) -> dict[str, Any]:  # Any: JSON
        """For json.dumps."""
        return dict(vars(self))

    @classmethod
    def of_json(cls, columns: Mapping[str, Any]) -> ItemColumns:
        """Inverse of json()."""
        made = cls()
        for name in vars(made):
            setattr(made, name, columns[name])
        return made

    def items(self) -> tuple[Item, ...]:
        """The items."""
        rows = zip(
            self.names,
            self.dtypes,
            self.shapes,
            self.segments,
            self.offsets,
            self.lengths,
            self.digests,
            strict=True,
        )
        found = []
        for n, (name, dtype, shape, segment, offset, length, digest) in enumerate(rows):
            codec, frames = self.frames.get(str(n), ("", ()))
            box = self.boxes.get(str(n))
            found.append(
                Item(
                    name=name,
                    dtype=dtype,
                    shape=tuple(shape),
                    box=Box(offsets=tuple(box[0]), sizes=tuple(box[1])) if box else whole(shape),
                    segment=segment,
                    offset=offset,
                    length=length,
                    digest=digest,
                    codec=codec,
                    frames=tuple(frames),
                )
            )
        return tuple(found)

    def require_cover(self, names: Iterable[str]) -> None:
        """As require_cover(items, names); whole tensors, each once, need no look at boxes."""
        if self.boxes or len(set(self.names)) != len(self.names):
            require_cover(self.items(), names)
            return
        there = set(self.names)
        for name in names:
            if name not in there:
                raise CheckpointError(f"no rank wrote tensor {name!r}")


def encode_items(items: Sequence[Item]) -> dict[str, Any]:  # Any: JSON
    """Columns of items for JSON."""
    columns = ItemColumns()
    columns.add(items)
    return columns.json()


def decode_items(columns: Mapping[str, Any]) -> tuple[Item, ...]:  # Any: JSON
    """Inverse of encode_items."""
    return ItemColumns.of_json(columns).items()


def by_name(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Items of each tensor."""
    found: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        found[item.name].append(item)
    return dict(found)


def require_cover(items: Iterable[Item], names: Iterable[str]) -> None:
    """Raise CheckpointError unless items cover each named tensor exactly once.

    This is what keeps a save with a lost result from being committed.
    """
    found = by_name(items)
    for name in names:
        boxes = found.get(name)
        if not boxes:
            raise CheckpointError(f"no rank wrote tensor {name!r}")
        if len({(i.dtype, i.shape) for i in boxes}) != 1:
            raise CheckpointError(f"ranks disagree on the dtype or shape of tensor {name!r}")
        short = next((i for i in boxes if not _holds_its_box(i)), None)
        if short is not None:
            raise CheckpointError(
                f"{short.length} bytes were staged of tensor {name!r} for the box "
                f"{short.box.sizes} at {short.box.offsets} of {short.shape} "
                f"{short.dtype}: that is not all of it"
            )
        if not covers([i.box for i in boxes], boxes[0].shape):
            raise CheckpointError(
                f"the boxes that were written of tensor {name!r} do not cover it exactly once"
            )


def covers(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover a shape exactly once. Pure but for the points it draws."""
    if not all(_is_inside(box, shape) for box in boxes):
        return False
    if sum(box.count for box in boxes) != prod(shape):
        return False
    return len(boxes) < 2 or _same_cells(boxes, shape)


def _same_cells(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether each element of a shape is in as many of the boxes as in the shape itself.

    The work grows with the boxes alone, however they lie. Each is the polynomial with a term
    x^i y^j ... for each of its elements, which has a short form: (x^end - x^start) / (x - 1) for
    each axis. Sums that agree at a point which is drawn after the boxes were chosen are equal,
    but for a chance below 2^-55, with axes of 2^63 elements (Schwartz and Zippel; Motwani and
    Raghavan, Randomized Algorithms, chapter 7).
    """
    points = [2 + secrets.randbelow(_PRIME - 2) for _ in shape]
    powers: list[dict[int, int]] = [{} for _ in shape]

    def power(axis: int, exponent: int) -> int:
        known = powers[axis]
        if exponent not in known:
            known[exponent] = pow(points[axis], exponent, _PRIME)
        return known[exponent]

    def value(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        found = 1
        for axis, (at, count) in enumerate(zip(offsets, sizes, strict=True)):
            found = found * (power(axis, at + count) - power(axis, at)) % _PRIME
        return found

    given = sum(value(box.offsets, box.sizes) for box in boxes)
    return (given - value([0] * len(shape), shape)) % _PRIME == 0


@lru_cache(maxsize=64)
def itemsize_of(dtype: str) -> int:
    """Bytes of one element of a torch dtype, by its name."""
    found: int = getattr(torch, dtype).itemsize
    return found


def _holds_its_box(item: Item) -> bool:
    """Whether the bytes that were staged are as many as the box has."""
    nbytes = item.box.count * itemsize_of(item.dtype)
    if item.codec:
        return len(item.frames) == -(-nbytes // FRAME_BYTES)
    return item.length == nbytes


def _is_inside(box: Box, shape: Sequence[int]) -> bool:
    return all(
        0 <= at <= at + count <= size
        for at, count, size in zip(box.offsets, box.sizes, shape, strict=True)
    )
