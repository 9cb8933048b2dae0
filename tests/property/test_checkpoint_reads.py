"""Any part of what was stored is read back; indices and merged trees. numpy is the oracle."""

from __future__ import annotations

from collections import Counter, defaultdict, deque, namedtuple
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstore.checkpoint.format.items import Item, whole
from hpstore.checkpoint.format.pack import compress
from hpstore.checkpoint.format.segment_codecs import CODECS
from hpstore.checkpoint.format.segment_plan import Chunk, chunks_of
from hpstore.checkpoint.restore.read_items import SegmentReads, reads_for
from hpstore.checkpoint.restore.saved_step import _box_of
from hpstore.checkpoint.state.merge_trees import Merge
from hpstore.checkpoint.state.state_tree import (
    CollectedTensors,
    Decoding,
    PerRank,
    decode_tree,
    encode_tree,
    tensor_names,
)
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointMismatch, IntegrityError
from hpstore.format.checksum import digest128
from hpstore.runtime.buffers import aligned_array
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
                name="t",
                dtype=name_of(dtype),
                shape=shape,
                box=box,
                segment=number,
                offset=sum(map(len, contents[number])),
                length=len(data),
                digest=digest128(data).hex() if draw(st.booleans()) else "",
            )
        )
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
        patch.setattr("hpstore.checkpoint.restore.read_items.GAP_BYTES", gap)
        patch.setattr("hpstore.checkpoint.restore.read_items.BATCH_BYTES", batch)
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
        patch.setattr("hpstore.checkpoint.format.pack.SMALL_ITEM_BYTES", 1)
        patch.setattr("hpstore.checkpoint.format.pack.FRAME_BYTES", 256)
        patch.setattr("hpstore.checkpoint.restore.read_items.FRAME_BYTES", 256)
        gap, batch = data.draw(st.sampled_from([(0, 1), (8, 64), (2**16, 2**23)]))
        patch.setattr("hpstore.checkpoint.restore.read_items.GAP_BYTES", gap)
        patch.setattr("hpstore.checkpoint.restore.read_items.BATCH_BYTES", batch)
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
    return Item(
        name=chunk.name,
        dtype=chunk.dtype,
        shape=chunk.shape,
        box=whole(chunk.shape),
        offset=0,
        length=count,
    )


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
        patch.setattr(
            "hpstore.checkpoint.restore.read_items.BATCH_BYTES", data.draw(st.sampled_from([1, 99]))
        )
        scatter = SegmentReads(reads_for(chunk, [item]))
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


class Whole:
    """A number of the caller's own."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize(
    "index", [np.int64(2), np.uint8(2), np.array(2), torch.tensor(2), Whole(), np.int32(-1)]
)
def test_a_whole_number_of_any_type_is_an_index(index: Any) -> None:
    """One of numpy, as argmax() gives, was an IndexError; in slices and tuples it was none."""
    tensor = torch.arange(12).reshape(3, 4)
    for one in (index, (index, 1), (..., index), slice(index, None), (slice(None), index)):
        cut, rest = _box_of(one, (3, 4))
        span = tensor[tuple(slice(at, at + n) for at, n in cut)]
        assert torch.equal(span[tuple(rest)], tensor[one])


REFUSED = [np.bool_(True), torch.tensor(True), np.array(True), np.array([1, 2]), torch.tensor([1])]


@pytest.mark.parametrize("index", REFUSED)
def test_a_mask_or_an_array_is_refused(index: Any) -> None:
    """Also beside others, where comparing it with `...` was an error of numpy's."""
    for one in (index, (index, 1), (..., index)):
        with pytest.raises(IndexError):
            _box_of(one, (3, 4))


@pytest.mark.parametrize("index", [True, None, (0, False), 1.0, slice(None, None, -1), [0]])
def test_an_index_that_reads_something_else_is_refused(index: Any) -> None:
    """What torch would take for a mask, a new axis or a gather is an error, not another value."""
    with pytest.raises(IndexError):
        _box_of(index, (3, 4))


Rows = namedtuple("Rows", "a b")
Columns = namedtuple("Columns", "b a")


@dataclass
class Here:
    """A class of one rank."""

    a: int


@dataclass
class There:
    """A class of another rank."""

    a: int


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
        trees.append(encode_tree(state, "", CollectedTensors(rank=rank)))
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


OTHERS: dict[str, tuple[Any, Any]] = {
    "counts": (Counter(a=1, b=2), Counter(b=3, c=4)),
    "fewer counts": (Counter(a=1), Counter()),
    "more names": (defaultdict(int), defaultdict(int, c=4)),
    "another factory": (defaultdict(int, a=1), defaultdict(float, a=1)),
    "another class": (Here(1), There(1)),
    "other fields": (Rows(1, 2), Columns(1, 2)),
    "another length": (deque([1], maxlen=2), deque([1], maxlen=3)),
    "another set": ({1, 2}, {2, 3}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_counts_or_is_of_another_class_is_the_first_ranks(case: str) -> None:
    """A Counter of all names is one that no rank had; fields of one class are not another's."""
    first, second = (encode_tree({"v": v}, "", CollectedTensors()) for v in OTHERS[case])
    merge = Merge()
    assert merge.trees(first, second) == first
    assert [path.partition("/")[0] for path in merge.differing] == ["v"] * len(merge.differing)
    assert merge.differing
    again = Merge()
    assert again.trees(first, first) == first
    assert not again.differing


def test_tensors_and_own_parts_of_all_ranks_stay_in_what_collects() -> None:
    """They were written: a manifest without them would lose them."""
    first = defaultdict(dict, a={"t": torch.ones(1)}, n=1)
    second = defaultdict(dict, b={"t": torch.ones(1), "k": 2}, c=[PerRank(1)], m=3)
    trees = [encode_tree(v, "", CollectedTensors(rank=r)) for r, v in enumerate((first, second))]
    merge = Merge()
    merged = decode_tree(merge.trees(*trees), decoding(1))
    assert merged == {"a": {"t": "a/t"}, "n": 1, "b": {"t": "b/t", "k": 2}, "c": [1]}
    assert merge.differing == [""]
