"""Boxes of tensors: planned, placed, packed, and read back in any part; numpy is the oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpstore.checkpoint.format.items import (
    Box,
    Item,
    decode_items,
    encode_items,
    require_cover,
    whole,
)
from hpstore.checkpoint.format.pack import Known, Segment, digests_of, pack
from hpstore.checkpoint.format.segment_codecs import CODECS
from hpstore.checkpoint.format.segment_plan import (
    SMALL_ALIGNMENT,
    SMALL_ITEM_BYTES,
    VOTES_BYTES,
    Chunk,
    Held,
    assign,
    assign_within,
    chunks_of,
    compacted,
    place,
)
from hpstore.checkpoint.restore.read_items import reads_for
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError
from hpstore.format.checksum import digest128
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.runtime.buffers import aligned_array
from hpstore.units import round_up
from tests.property.boxes import (
    DTYPES,
    Draw,
    cells,
    deliver_all,
    item_of,
    name_of,
    parts,
    shapes,
    tilings,
)


def mask(shape: Sequence[int], box: Box) -> np.ndarray[Any, Any]:
    found = np.zeros(shape, bool)
    found[cells(box)] = True
    return found


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


def test_a_cover_of_steps_costs_no_look_at_all_pairs() -> None:
    """Whoever writes the metadata of a checkpoint chooses the boxes: here 20,000, of which no two
    have the same length. 200 million pairs would take minutes."""
    rows = 10_000
    shape = (rows, rows + 1)
    left = [Box(offsets=(row, 0), sizes=(1, row + 1)) for row in range(rows)]
    right = [Box(offsets=(row, row + 1), sizes=(1, rows - row)) for row in range(rows)]
    for axes in ((0, 1), (1, 0)):
        boxes = [
            Box(
                offsets=(box.offsets[axes[0]], box.offsets[axes[1]]),
                sizes=(box.sizes[axes[0]], box.sizes[axes[1]]),
            )
            for box in [*left, *right]
        ]
        turned = (shape[axes[0]], shape[axes[1]])
        require_cover([item_of(box, turned) for box in boxes], ["t"])
        swapped = boxes[:-2] + [boxes[-2]] * 2  # one of them twice, of another size than the lost
        with pytest.raises(CheckpointError, match="exactly once"):
            require_cover([item_of(box, turned) for box in swapped], ["t"])


def test_boxes_as_many_as_a_shape_has_elements_but_not_all_of_them_are_refused() -> None:
    """One lost and another doubled of the same size: the sum of their elements is right."""
    boxes = unit_grid(30, 30)
    boxes[17] = boxes[600]
    with pytest.raises(CheckpointError, match="exactly once"):
        require_cover([item_of(box, (30, 30)) for box in boxes], ["t"])


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


@given(holdings(), st.sampled_from([0, 10**6, 10**7]), st.sampled_from([10**5, 10**8]))
def test_boxes_for_one_manifest_are_sent_by_those_who_must(
    held: list[list[Held]], within_bytes: int, slice_bytes: int
) -> None:
    """Each box once, by its first holder, in one slice of a rank; or it says that they are too
    many."""
    mine = assign_within(held, within_bytes, slice_bytes)
    boxes = {box for some in held for box in some}
    if mine is None:
        padded = sum(box[2] + SMALL_ALIGNMENT + ALIGNMENT_BYTES for box in boxes)
        assert padded > min(within_bytes, slice_bytes / 2, VOTES_BYTES / len(held))
        return
    for box in boxes:
        first = next(rank for rank, some in enumerate(held) if box in some)
        writers = [rank for rank, some in enumerate(mine) for n in some if held[rank][n] == box]
        assert writers == [first]
    chunks = [
        [
            chunks_of(f"{held[rank][n]}", torch.zeros(held[rank][n][2], dtype=torch.uint8))[0]
            for n in some
        ]
        for rank, some in enumerate(mine)
    ]
    slices = [place(some, slice_bytes) for some in chunks if some]
    assert all(len(some) == 1 for some in slices)
    assert sum(some[0].size for some in slices) <= within_bytes


@given(st.integers(1, 6), st.lists(st.integers(0, 10**6), max_size=20))
def test_replicas_are_spread_evenly(world: int, sizes: list[int]) -> None:
    """What all ranks hold is shared out: no two loads differ by more than the largest box."""
    held: list[Held] = [(f"t{n}", (), size) for n, size in enumerate(sizes)]
    loads = [sum(sizes[n] + SMALL_ALIGNMENT for n in some) for some in assign([list(held)] * world)]
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
    for place_of in sorted({(item.offset, item.length) for item in large}):  # views share one
        if data.draw(st.booleans()):
            memory[place_of[0] + data.draw(st.integers(0, place_of[1] - 1))] ^= 1
            changed.add(place_of)
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
