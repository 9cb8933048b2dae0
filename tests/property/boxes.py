"""Strategies for boxes of tensors that several property tests share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from hpstore.checkpoint.format.items import Box, Item, whole
from hpstore.checkpoint.restore.range_targets import FramedTarget
from hpstore.checkpoint.restore.read_items import SegmentReads
from hpstore.codec.galois import Bytes
from hpstore.errors import IntegrityError

Draw = st.DrawFn


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


@st.composite
def parts(draw: Draw, shape: tuple[int, ...], smallest: int = 0) -> Box:
    """Any box inside a shape."""
    offsets = [draw(st.integers(0, n - smallest)) for n in shape]
    sizes = [draw(st.integers(smallest, n - o)) for n, o in zip(shape, offsets, strict=True)]
    return Box(offsets=tuple(offsets), sizes=tuple(sizes))


@st.composite
def tilings(draw: Draw, shape: tuple[int, ...], cuts: int = 6) -> list[Box]:
    """Boxes that cover a shape exactly once: a box is cut in two, again and again."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, cuts))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [axis for axis, n in enumerate(box.sizes) if n > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(1, box.sizes[axis] - 1))
        for start, count in ((0, at), (at, box.sizes[axis] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += start
            sizes[axis] = count
            boxes.append(Box(offsets=tuple(offsets), sizes=tuple(sizes)))
    return draw(st.permutations(boxes))


def item_of(box: Box, shape: tuple[int, ...], name: str = "t") -> Item:
    return Item(name=name, dtype="uint8", shape=shape, box=box, offset=0, length=box.count)


def deliver_all(segments: dict[int, Bytes], reads: Sequence[Any], draw: Any = None) -> None:
    """Give all reads their bytes, in pieces of any length.

    With `draw` it begins anew once, after pieces that were wrong (right ones, where compressed).
    """
    for number, memory in segments.items():
        mine = [read for read in reads if read.segment == number]
        if not mine:
            continue
        scatter = SegmentReads(mine)
        pieces = []
        for low, high in scatter.ranges:
            cuts = sorted(draw(st.sets(st.integers(low, high), max_size=4))) if draw else []
            edges = [low, *cuts, high]
            pieces += [(a, b) for a, b in itertools.pairwise(edges) if a < b]
        first = draw(st.integers(0, len(pieces))) if draw else 0
        framed = any(isinstance(read.landing, FramedTarget) for read in mine)
        wrong = memory if framed else memory ^ np.uint8(1)
        with contextlib.suppress(IntegrityError):
            for low, high in pieces[:first]:
                scatter.deliver(low, wrong[low:high])
        for low, high in pieces:
            scatter.deliver(low, memory[low:high])
