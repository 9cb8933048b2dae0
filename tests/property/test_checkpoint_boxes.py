"""Boxes of tensors: planned, placed, packed, and read back in any part; numpy is the oracle."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpstore.buffers import aligned_array
from hpstore.checkpoint.codecs import CODECS
from hpstore.checkpoint.items import Box, Item, decode_items, encode_items, require_cover, whole
from hpstore.checkpoint.merging import Merge
from hpstore.checkpoint.packing import Known, Segment, compress, digests_of, pack
from hpstore.checkpoint.planning import (
    SMALL_ALIGNMENT,
    SMALL_ITEM_BYTES,
    Chunk,
    Held,
    assign,
    chunks_of,
    compacted,
    place,
)
from hpstore.checkpoint.reading import Scatter, _Framed, reads_for
from hpstore.checkpoint.restoring import _box_of
from hpstore.checkpoint.tree import (
    Collected,
    Decoding,
    PerRank,
    decode_tree,
    encode_tree,
    tensor_names,
)
from hpstore.checksum import digest128
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError, CheckpointMismatch, IntegrityError
from hpstore.geometry import ALIGNMENT_BYTES
from hpstore.units import round_up

Draw = st.DrawFn
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.complex64,
    torch.complex128, torch.int8, torch.int16, torch.int64, torch.uint8, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip
shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def mask(shape: Sequence[int], box: Box) -> np.ndarray[Any, Any]:
    found = np.zeros(shape, bool)
    found[cells(box)] = True
    return found


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


# --- boxes and items ------------------------------------------------------------------------------


@given(st.data())
def test_overlap_is_what_both_cover(data: st.DataObject) -> None:
    """The overlap of two boxes has the elements that two masks have in common."""
    shape = data.draw(shapes)
    first, second = data.draw(parts(shape)), data.draw(parts(shape))
    common = mask(shape, first) & mask(shape, second)
    found = first.overlap(second)
    assert found == second.overlap(first)
    assert (found is None) == (not common.any())
    if found is not None:
        np.testing.assert_array_equal(mask(shape, found), common)


@st.composite
def any_items(draw: Draw) -> Item:
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    codec = draw(st.sampled_from(["", *CODECS]))
    numbers = st.integers(0, 2**40)
    return Item(
        name=draw(st.text(max_size=5)),
        dtype=name_of(draw(st.sampled_from(DTYPES))),
        shape=shape,
        box=draw(st.one_of(st.just(whole(shape)), parts(shape))),
        offset=draw(numbers),
        length=draw(numbers),
        segment=draw(st.integers(0, 9)),
        digest=draw(st.sampled_from(["", "ab" * 16])),
        codec=codec,
        frames=tuple(draw(st.lists(numbers, max_size=3))) if codec else (),
    )


@given(st.lists(any_items(), max_size=8))
def test_items_survive_json(items: list[Item]) -> None:
    """Columns, JSON, and back: every field of every item, boxes and frames too."""
    assert decode_items(json.loads(json.dumps(encode_items(items)))) == tuple(items)


@st.composite
def covers(draw: Draw) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes of one tensor, exact or with one of them lost, doubled, moved, or of another size."""
    if draw(st.booleans()):
        shape = draw(shapes)
        boxes = draw(tilings(shape))
    else:  # more boxes than are compared one by one
        shape = (draw(st.integers(2, 4)), draw(st.integers(33, 40)))
        boxes = [
            Box(offsets=(a, b), sizes=(1, 1)) for a in range(shape[0]) for b in range(shape[1])
        ]
        row = draw(st.integers(0, shape[0] - 2))
        column = draw(st.integers(0, shape[1] - 1))
        boxes.remove(Box(offsets=(row + 1, column), sizes=(1, 1)))
        boxes[row * shape[1] + column] = Box(offsets=(row, column), sizes=(2, 1))
        boxes = draw(st.permutations(boxes)) if draw(st.booleans()) else boxes
    for _ in range(draw(st.integers(0, 2))):
        n = draw(st.integers(0, max(0, len(boxes) - 1)))
        change = draw(st.sampled_from(["lose", "double", "move", "resize"]))
        if not boxes:
            break
        box = boxes[n]
        axis = draw(st.integers(0, max(0, len(shape) - 1)))
        by = draw(st.sampled_from([-1, 1]))
        if change == "lose":
            boxes.pop(n)
        elif change == "double":
            boxes.append(box)
        elif shape and change == "move":
            boxes[n] = box.moved([o + by * (a == axis) for a, o in enumerate(box.offsets)])
        elif shape:
            sizes = tuple(max(0, s + by * (a == axis)) for a, s in enumerate(box.sizes))
            boxes[n] = Box(offsets=box.offsets, sizes=sizes)
    return shape, boxes


def covers_once(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """The slow truth: counts in every cell, with a margin for what lies outside."""
    counts = np.zeros([n + 4 for n in shape], int)
    for box in boxes:
        counts[cells(box.moved([o + 2 for o in box.offsets]))] += 1
    wanted = np.zeros_like(counts)
    wanted[tuple(slice(2, 2 + n) for n in shape)] = 1
    return bool(boxes) and bool((counts == wanted).all())


def unit_grid(rows: int, columns: int) -> list[Box]:
    return [Box(offsets=(a, b), sizes=(1, 1)) for a in range(rows) for b in range(columns)]


LOST_AND_OVERLAPPED = (
    (2, 40),  # the last one is lost, and the first one covers what the first of row 1 covers, too
    [Box(offsets=(0, 0), sizes=(2, 1)), *unit_grid(2, 40)[1:-1]],
)
OUTSIDE = ((4,), [Box(offsets=(0,), sizes=(2,)), Box(offsets=(3,), sizes=(2,))])


@example(LOST_AND_OVERLAPPED)
@example(OUTSIDE)
@settings(max_examples=100)
@given(covers())
def test_a_cover_is_accepted_only_when_it_is_exact(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """Every cell once: boxes that are lost, doubled, overlapping or outside refuse the commit."""
    shape, boxes = case
    try:
        require_cover([item_of(box, shape) for box in boxes], ["t"])
        accepted = True
    except CheckpointError:
        accepted = False
    assert accepted == covers_once(shape, boxes)


def test_a_cover_of_two_dtypes_is_refused() -> None:
    """Ranks that disagree on the dtype of a tensor have not saved one tensor."""
    halves = [Box(offsets=(0,), sizes=(2,)), Box(offsets=(2,), sizes=(2,))]
    first, second = (item_of(box, (4,)) for box in halves)
    require_cover([first, second], ["t"])
    with pytest.raises(CheckpointError, match="disagree"):
        require_cover([first, replace(second, dtype="int8")], ["t"])
    with pytest.raises(CheckpointError, match="no rank wrote tensor 'other'"):
        require_cover([first, second], ["t", "other"])


# --- who writes what, and where -------------------------------------------------------------------


@st.composite
def holdings(draw: Draw) -> list[list[Held]]:
    """What each rank holds: any boxes, each on some ranks."""
    world = draw(st.integers(1, 5))
    held: list[list[Held]] = [[] for _ in range(world)]
    for n in range(draw(st.integers(0, 12))):
        box: Held = (f"t{n // 2}", (n % 2,), draw(st.integers(0, 10**6)))
        for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
            held[rank].append(box)
    return [draw(st.permutations(some)) for some in held]


@given(holdings())
def test_each_box_is_written_by_one_of_its_holders(held: list[list[Held]]) -> None:
    """Over all ranks every box once, and the same answer on every rank that asks."""
    mine = assign(held)
    assert assign([list(some) for some in held]) == mine
    written = [held[rank][n] for rank, some in enumerate(mine) for n in some]
    assert sorted(written) == sorted({box for some in held for box in some})
    assert all(some == sorted(some) for some in mine)


@given(st.integers(1, 6), st.lists(st.integers(0, 10**6), max_size=20))
def test_replicas_are_spread_evenly(world: int, sizes: list[int]) -> None:
    """What all ranks hold is shared out: no two loads differ by more than the largest box."""
    held: list[Held] = [(f"t{n}", (), size) for n, size in enumerate(sizes)]
    loads = [
        sum(sizes[n] + SMALL_ALIGNMENT for n in some) for some in assign([list(held)] * world)
    ]  # fmt: skip
    assert max(loads) - min(loads) <= max(sizes, default=0) + SMALL_ALIGNMENT


@st.composite
def chunk_lists(draw: Draw) -> list[Chunk]:
    """Tensors of sizes around the border of small and large, some of them views of another."""
    sizes = [0, 1, 63, 64, 65, 4096, SMALL_ITEM_BYTES - 1, SMALL_ITEM_BYTES, 100_000]
    tensors: list[torch.Tensor] = []
    for _ in range(draw(st.integers(0, 10))):
        if tensors and draw(st.integers(0, 3)) == 0:
            tensors.append(draw(st.sampled_from(tensors)))
        else:
            tensors.append(torch.zeros(draw(st.sampled_from(sizes)), dtype=torch.uint8))
    return [chunk for n, tensor in enumerate(tensors) for chunk in chunks_of(f"t{n}", tensor)]


def hashed(memory: Any, items: Sequence[Item]) -> list[Item]:
    digests = digests_of(memory, items)
    return [replace(item, digest=digest) for item, digest in zip(items, digests, strict=True)]


@given(chunk_lists(), st.one_of(st.none(), st.integers(1, 400_000)))
def test_places_are_apart_aligned_and_in_order(chunks: list[Chunk], limit: int | None) -> None:
    """Nothing overlaps but views of the same memory, which have one place; limits are kept."""
    slices = place(chunks, limit)
    names = [item.name for piece in slices for item in piece.items]
    assert names == [chunk.name for chunk in chunks]
    tensors = [tensor for piece in slices for tensor in piece.tensors]
    assert all(a is b.tensor for a, b in zip(tensors, chunks, strict=True))
    for piece in slices:
        copied = [(piece.items[n].offset, piece.items[n].length) for n in piece.copies]
        assert sorted(copied) == sorted({(i.offset, i.length) for i in piece.items if i.length})
        assert limit is None or piece.size <= limit or len(piece.items) == 1
        ends: dict[int, tuple[int, int]] = {}
        for item, tensor in zip(piece.items, piece.tensors, strict=True):
            assert item.length == tensor.nbytes
            assert item.offset + item.length <= piece.size
            if not item.length:
                continue
            large = item.length >= SMALL_ITEM_BYTES
            assert item.offset % (ALIGNMENT_BYTES if large else SMALL_ALIGNMENT) == 0
            place_of = (item.offset, item.length)
            assert ends.setdefault(tensor.data_ptr(), place_of) == place_of
        assert disjoint(list(ends.values()))
    assert limit is not None or len(slices) == 1


def disjoint(places: Sequence[tuple[int, int]]) -> bool:
    at = 0
    for offset, length in sorted(places):
        if offset < at:
            return False
        at = offset + length
    return True


@pytest.mark.parametrize("other", [torch.conj, torch.resolve_conj, torch.Tensor.t])
def test_views_of_other_values_have_their_own_place(other: Any) -> None:
    """A lazily conjugated or transposed view has the address of its base, not its bytes."""
    base = torch.complex(torch.arange(4.0), torch.ones(4)).reshape(2, 2)
    view = base.clone() if other is torch.resolve_conj else other(base)
    [piece] = place([*chunks_of("a", base), *chunks_of("b", view)])
    assert piece.items[0].offset != piece.items[1].offset


@given(chunk_lists(), st.data())
def test_compaction_never_moves_up(chunks: list[Chunk], data: st.DataObject) -> None:
    """What stays, shrunk or not, moves down or stays, apart, and shared places stay shared."""
    [piece] = place(chunks)
    shrunk: dict[tuple[int, int], int] = {}
    staying = []
    for item in piece.items:
        if data.draw(st.booleans()):
            length = shrunk.setdefault(
                (item.offset, item.length), data.draw(st.integers(min(1, item.length), item.length))
            )
            staying.append(replace(item, length=length))
    pairs, size = compacted(staying)
    assert sorted(before.name for before, _ in pairs) == sorted(item.name for item in staying)
    before_after: dict[tuple[int, int], tuple[int, int]] = {}
    for before, after in pairs:
        assert replace(after, offset=before.offset) == before
        if after.length:
            assert after.offset <= before.offset
            assert after.offset + after.length <= size
            place_of = (after.offset, after.length)
            assert before_after.setdefault((before.offset, before.length), place_of) == place_of
    assert disjoint(list(before_after.values()))


# --- packing --------------------------------------------------------------------------------------


def staged(chunks: Sequence[Chunk], rng: np.random.Generator) -> tuple[Bytes, tuple[Item, ...]]:
    """An arena with noise in every place, as staging leaves it."""
    [piece] = place(chunks)
    memory = aligned_array(round_up(max(piece.size, 1), ALIGNMENT_BYTES))
    memory[:] = rng.integers(0, 4, len(memory), np.uint8)
    return memory, piece.items


def known_from(memory: Bytes, items: Sequence[Item], *, probes: bool) -> dict[Any, Known]:
    """What a save of these items leaves for the next one."""
    segment = Segment(key="old", size=len(memory), version="v")
    done = hashed(memory, items)
    before = pack(memory, done, {}, "")
    return {
        item.key: Known(
            item=item, segment=segment, probe=before.probes.get(item.key) if probes else None
        )
        for item in done
        if item.length
    }


@settings(max_examples=40)
@given(chunk_lists(), st.booleans(), st.sampled_from(["", *CODECS]), st.data())
def test_only_what_is_unchanged_is_referenced(
    chunks: list[Chunk], probes: bool, codec: str, data: st.DataObject
) -> None:
    """One flipped byte anywhere makes an item be written; all that is written keeps its bytes."""
    rng = np.random.default_rng(len(chunks))
    memory, items = staged(chunks, rng) if chunks else (aligned_array(4096), ())
    known = known_from(memory, items, probes=probes)
    large = [item for item in items if item.length >= SMALL_ITEM_BYTES]
    changed = set()
    for item in large:
        if data.draw(st.booleans()):
            memory[item.offset + data.draw(st.integers(0, item.length - 1))] ^= 1
            changed.add((item.offset, item.length))
    raw = {i.name: memory[i.offset : i.offset + i.length].tobytes() for i in items}
    packed = pack(memory, items, known, codec)
    kept = {i.name for i in large if (i.offset, i.length) not in changed}
    assert {k.item.name for k in packed.referenced} == kept
    assert {i.name for i in packed.items} == {i.name for i in items} - kept
    for item in hashed(memory, packed.items):
        assert item.offset + item.length <= packed.size
        assert item.digest == digest128(raw[item.name]).hex()
        assert unpacked(memory, item) == raw[item.name]


def unpacked(memory: Bytes, item: Item) -> bytes:
    """An item's raw bytes, read as a restore reads them."""
    out = torch.zeros(item.box.sizes, dtype=torch.uint8)
    deliver_all({0: memory}, reads_for(chunks_of(item.name, out)[0], [item]) if item.length else [])
    return out.numpy().tobytes()


def test_another_shape_or_dtype_is_not_unchanged() -> None:
    """The same bytes under the same name, of another dtype, are written again."""
    chunks = chunks_of("w", torch.zeros(SMALL_ITEM_BYTES, dtype=torch.uint8))
    memory, items = staged(chunks, np.random.default_rng(0))
    known = known_from(memory, items, probes=True)
    assert len(pack(memory, items, known, "").referenced) == 1
    other = [replace(items[0], dtype="int8")]
    assert pack(memory, other, known, "").referenced == ()


# --- reading any part -----------------------------------------------------------------------------


def deliver_all(segments: dict[int, Bytes], reads: Sequence[Any], draw: Any = None) -> None:
    """Give all reads their bytes, in pieces of any length.

    With `draw` it begins anew once, after pieces that were wrong (right ones, where compressed).
    """
    for number, memory in segments.items():
        mine = [read for read in reads if read.segment == number]
        if not mine:
            continue
        scatter = Scatter(mine)
        pieces = []
        for low, high in scatter.ranges:
            cuts = sorted(draw(st.sets(st.integers(low, high), max_size=4))) if draw else []
            edges = [low, *cuts, high]
            pieces += [(a, b) for a, b in itertools.pairwise(edges) if a < b]
        first = draw(st.integers(0, len(pieces))) if draw else 0
        framed = any(isinstance(read.landing, _Framed) for read in mine)
        wrong = memory if framed else memory ^ np.uint8(1)
        with contextlib.suppress(IntegrityError):
            for low, high in pieces[:first]:
                scatter.deliver(low, wrong[low:high])
        for low, high in pieces:
            scatter.deliver(low, memory[low:high])


@st.composite
def stored_tensors(
    draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, values: np.ndarray[Any, Any]
) -> tuple[dict[int, Bytes], list[Item]]:
    """A tensor cut into boxes, somewhere in up to three segments, with gaps."""
    contents: dict[int, list[bytes]] = {n: [] for n in range(3)}
    items = []
    for box in draw(tilings(shape)):
        number = draw(st.integers(0, 2))
        contents[number].append(bytes(draw(st.integers(0, 40))))
        data = values[cells(box)].tobytes()
        items.append(
            Item(
                name="t", dtype=name_of(dtype), shape=shape, box=box, segment=number,
                offset=sum(map(len, contents[number])), length=len(data),
                digest=digest128(data).hex() if draw(st.booleans()) else "",
            )
        )  # fmt: skip
        contents[number].append(data)
    return {
        n: np.frombuffer(b"".join(some), np.uint8).copy() for n, some in contents.items()
    }, items


@st.composite
def targets(draw: Draw, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor to read into: plain, of reversed strides, or every second element of another."""
    kind = draw(st.sampled_from(["plain", "transposed", "strided"]))
    if kind == "transposed":
        return torch.zeros(sizes[::-1], dtype=dtype).permute(list(range(len(sizes)))[::-1])
    if kind == "strided" and sizes:
        wide = torch.zeros(*sizes[:-1], 2 * sizes[-1] + 1, dtype=dtype)
        return wide[..., 1::2]
    return torch.zeros(sizes, dtype=dtype)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> np.ndarray[Any, Any]:
    """Random bits of a dtype as an array of bytes; the last axis is the element."""
    top = 2 if dtype == torch.bool else 256
    return np.random.default_rng(seed).integers(0, top, (*shape, dtype.itemsize), np.uint8)


def bits(tensor: torch.Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=120)
@given(st.data(), shapes, st.sampled_from(DTYPES))
def test_any_part_of_any_tensor_is_read_back(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """From any grid of stored boxes into any kind of target: the bytes that numpy slices out."""
    values = noise(shape, dtype, data.draw(st.integers(0, 99)))
    segments, items = data.draw(stored_tensors(shape, dtype, values))
    box = data.draw(parts(shape))
    target = data.draw(targets(box.sizes, dtype))
    chunk = Chunk(name="t", dtype=name_of(dtype), shape=shape, box=box, tensor=target)
    with pytest.MonkeyPatch.context() as patch:
        # small limits, so that small tensors have several ranges and several batches of rows
        gap, batch = data.draw(st.sampled_from([(0, 1), (8, 64), (2**16, 2**23)]))
        patch.setattr("hpstore.checkpoint.reading.GAP_BYTES", gap)
        patch.setattr("hpstore.checkpoint.reading.BATCH_BYTES", batch)
        deliver_all(segments, reads_for(chunk, items) if box.count else [], data.draw)
    assert bits(target) == values[cells(box)].tobytes()


@settings(max_examples=60)
@given(st.data(), st.sampled_from(CODECS), st.sampled_from(DTYPES))
def test_any_part_of_a_compressed_tensor_is_read_back(
    data: st.DataObject, codec: str, dtype: torch.dtype
) -> None:
    """Frames are decompressed where they are wanted, whatever the pieces they arrive in."""
    shape = data.draw(st.sampled_from([(), (300,), (9, 70), (5, 4, 33)]))
    values = noise(shape, dtype, 1)
    if values.size > 200:  # some frames shrink, some do not
        values[: len(values) // 2] = values[0]
    box = data.draw(parts(shape))
    target = data.draw(targets(box.sizes, dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpstore.checkpoint.packing.SMALL_ITEM_BYTES", 1)
        patch.setattr("hpstore.checkpoint.packing.FRAME_BYTES", 256)
        patch.setattr("hpstore.checkpoint.reading.FRAME_BYTES", 256)
        gap, batch = data.draw(st.sampled_from([(0, 1), (8, 64), (2**16, 2**23)]))
        patch.setattr("hpstore.checkpoint.reading.GAP_BYTES", gap)
        patch.setattr("hpstore.checkpoint.reading.BATCH_BYTES", batch)
        chunk = Chunk(name="t", dtype=name_of(dtype), shape=shape, box=box, tensor=target)
        raw = values.tobytes()
        memory = aligned_array(64 + len(raw))
        memory[64:] = np.frombuffer(raw, np.uint8)
        item = replace(chunk_item(chunk), offset=64, length=len(raw))
        [stored] = compress(memory, [item], codec)
        assert len(stored.frames) == -(-len(raw) // 256)
        assert stored.length == sum(stored.frames) <= len(raw)
        deliver_all({0: memory}, reads_for(chunk, [stored]) if box.count else [], data.draw)
    assert bits(target) == values[cells(box)].tobytes()


def chunk_item(chunk: Chunk) -> Item:
    """All of a chunk's tensor as one item."""
    count = prod(chunk.shape) * chunk.tensor.element_size()
    return Item(name=chunk.name, dtype=chunk.dtype, shape=chunk.shape, box=whole(chunk.shape),
                offset=0, length=count)  # fmt: skip


@given(st.data(), shapes)
def test_a_part_that_was_not_stored_is_a_mismatch(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """With one stored box lost, reading all of the tensor is refused, not filled in part."""
    boxes = data.draw(tilings(shape))
    boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    chunk = chunks_of("t", torch.zeros(shape, dtype=torch.uint8))[0]
    with pytest.raises(CheckpointMismatch, match="holds"):
        reads_for(chunk, [item_of(box, shape) for box in boxes])


@given(st.data(), st.sampled_from(["plain", "strided"]))
def test_other_bytes_than_were_saved_are_noticed(data: st.DataObject, kind: str) -> None:
    """A flipped bit anywhere in an item that is read whole fails its hash; then it may be right."""
    values = noise((6, 10), torch.int16, 3)
    memory = np.frombuffer(values.tobytes(), np.uint8).copy()
    digest = digest128(memory.tobytes()).hex()
    wide = torch.zeros(6, 20, dtype=torch.int16)
    target = torch.zeros(6, 10, dtype=torch.int16) if kind == "plain" else wide[:, ::2]
    chunk = chunks_of("t", target)[0]
    item = replace(chunk_item(chunk), digest=digest)
    damaged = memory.copy()
    damaged[data.draw(st.integers(0, len(memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpstore.checkpoint.reading.BATCH_BYTES", data.draw(st.sampled_from([1, 99])))
        scatter = Scatter(reads_for(chunk, [item]))
    assert scatter.hashed
    with pytest.raises(IntegrityError, match="'t'"):
        scatter.deliver(0, damaged)
    scatter.deliver(0, memory)
    assert bits(target) == values.tobytes()


# --- indices and trees ----------------------------------------------------------------------------

edges = st.one_of(st.none(), st.integers(-9, 9))
axis_indices = st.one_of(
    st.integers(-8, 8),
    st.builds(slice, edges, edges, st.one_of(st.none(), st.integers(1, 4))),
)


@settings(max_examples=150)
@given(st.data(), st.lists(st.integers(0, 7), max_size=3).map(tuple))
def test_an_index_means_what_it_means_to_torch(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Whole numbers, slices with steps, `...`: the same values, or an IndexError from both."""
    tensor = torch.arange(prod(shape)).reshape(shape)
    found = data.draw(st.lists(axis_indices, max_size=len(shape) + 1))
    index: list[Any] = [*found]
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), ...)
    single = len(index) == 1 and data.draw(st.booleans())
    given_index = index[0] if single else tuple(index)
    try:
        wanted = tensor[given_index]
    except IndexError:
        with pytest.raises(IndexError):
            _box_of(given_index, shape)
        return
    cut, rest = _box_of(given_index, shape)
    span = tensor[tuple(slice(at, at + n) for at, n in cut)]
    assert span.shape == tuple(n for _, n in cut)
    assert torch.equal(span[tuple(rest)], wanted)


@pytest.mark.parametrize("index", [True, None, (0, False), 1.0, slice(None, None, -1), [0]])
def test_an_index_that_reads_something_else_is_refused(index: Any) -> None:
    """What torch would take for a mask, a new axis or a gather is an error, not another value."""
    with pytest.raises(IndexError):
        _box_of(index, (3, 4))


leaves = st.one_of(st.integers(), st.text(max_size=3), st.none())
keys = st.sampled_from(["a", "b", "c", 1, 2])


@st.composite
def rank_states(draw: Draw, depth: int = 0) -> Any:
    """A state as one of several ranks has it: some names, values by rank, keys of any type."""
    kind = draw(st.sampled_from(["leaf", "rank", "tensor", "tuple"] + ["dict"] * (depth < 3) * 4))
    if kind == "dict" or depth == 0:
        names = draw(st.sets(keys, max_size=4))
        return {name: draw(rank_states(depth + 1)) for name in sorted(names, key=str)}
    if kind == "rank":
        return PerRank(draw(leaves))
    if kind == "tuple":
        return (draw(leaves), PerRank(draw(leaves)))
    return torch.zeros(1) if kind == "tensor" else draw(leaves)


def names_in(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Leaves of a state by path."""
    if isinstance(state, dict):
        found = {}
        for name, child in state.items():
            found.update(names_in(child, (*path, name)))
        return found
    return {path: state}


@given(st.data(), rank_states())
def test_merged_trees_have_what_each_rank_recorded(data: st.DataObject, first: Any) -> None:
    """Names of both ranks are there; a rank finds its own values, and the first's where shared."""
    second = data.draw(st.one_of(st.just(first), rank_states()))
    trees = []
    for rank, state in enumerate((first, second)):
        trees.append(encode_tree(state, "", Collected(rank=rank)))
    merged = Merge().trees(trees[0], trees[1])
    assert Merge().trees(trees[0], trees[0]) == trees[0]
    mine = [names_in(decode_tree(t, decoding(rank))) for rank, t in enumerate(trees)]
    for rank in (0, 1):
        found = names_in(decode_tree(merged, decoding(rank)))
        if rank == 0:
            assert {path: found.get(path) for path in mine[0]} == mine[0]
        elif same_kinds(first, second):
            assert mine[1].keys() <= found.keys()
            own = {p for p, v in names_in(second).items() if isinstance(v, PerRank)}
            assert {p: found[p] for p in own} == {p: mine[1][p] for p in own}
    if same_kinds(first, second):
        assert set(tensor_names(merged)) == {n for tree in trees for n in tensor_names(tree)}


def same_kinds(first: Any, second: Any) -> bool:
    """Whether what both ranks have is of one type on both, as it is for parts of one job."""
    if isinstance(first, dict) and isinstance(second, dict):
        plain = [all(type(k) is str for k in state) for state in (first, second)]
        common = first.keys() & second.keys()
        return plain[0] == plain[1] and all(same_kinds(first[k], second[k]) for k in common)
    return type(first) is type(second)


def decoding(rank: int) -> Decoding:
    return Decoding(tensor=lambda name: name, rank=rank)  # type: ignore[arg-type, return-value]


def test_the_groups_of_pipeline_stages_are_merged_by_name() -> None:
    """Parameters of another rank join the group with their options; others make a new one."""
    first = {"o": {"state": {}, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}}
    second = {
        "o": {
            "state": {},
            "param_groups": [{"lr": 0.1, "params": ["b", "c"]}, {"lr": 0.2, "params": ["d"]}],
        }
    }
    merge = Merge()
    assert merge.trees(first, second)["o"]["param_groups"] == [
        {"lr": 0.1, "params": ["a", "b", "c"]},
        {"lr": 0.2, "params": ["d"]},
    ]
    assert merge.differing == []
    other = {"o": {"state": {}, "param_groups": [{"lr": 0.3, "params": ["a"]}]}}
    assert merge.trees(first, other) == first
    assert merge.differing == ["o/param_groups/0"]


def test_values_in_which_ranks_differ_are_named() -> None:
    """The first rank's is kept, the path told; equal ones are not."""
    merge = Merge()
    merged = merge.trees({"n": 1, "l": [1, 2], "s": "x"}, {"n": 1, "l": [1, 3], "s": "y"})
    assert merged == {"n": 1, "l": [1, 2], "s": "x"}
    assert merge.differing == ["l/1", "s"]
