"""Where records lie, which ranges are read, tables by block: against slow and obvious oracles."""

from __future__ import annotations

import struct
import threading
from itertools import pairwise

import google_crc32c
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpstore.loaders.dataset.block_table import BlockTable, Runs, Table
from hpstore.loaders.dataset.coalesce import plan_spans
from hpstore.loaders.dataset.fields import Field, FieldKind
from hpstore.loaders.dataset.index_tables import (
    SIDE_MAGIC,
    decode_tables,
    encode_tables,
    table_starts,
)
from hpstore.loaders.dataset.record_layout import (
    LARGE_RECORD_BYTES,
    UNIT_CHOICES,
    FieldLayout,
    FixedPlan,
    Record,
    choose_unit,
    choose_unit_for_mean,
    even_rows,
    group_fields,
    place,
    shard_capacity,
    stride_of,
)
from hpstore.loaders.dataset.shard_layout import index_bytes, zarr_index
from hpstore.units import KIB, MIB

units = st.sampled_from([4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB])
dtypes = st.sampled_from(["uint8", "float16", "float32", "int64", "complex128", "bfloat16", "bool"])


@given(
    st.lists(st.integers(0, 200_000), max_size=60),
    units,
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 100_000),
)
@example([0, 0, 5, 0], 4 * KIB, 1, 4 * KIB)
def test_records_of_many_sizes_lie_apart_aligned_and_inside_pages(
    lengths: list[int], unit: int, alignment: int, cursor: int
) -> None:
    """In order, no overlap, no page border inside one that fits a page, 4 KiB for large ones."""
    capacity = 4 * MIB
    starts = place(lengths, cursor, capacity, unit, alignment)
    at = cursor
    for length, start in zip(lengths, starts, strict=False):
        assert start >= at
        assert start % (4 * KIB if length >= LARGE_RECORD_BYTES else alignment) == 0
        assert start + max(length, 1) <= capacity
        if length <= unit:
            assert start // unit == (start + max(length, 1) - 1) // unit
            assert start - at < unit
        else:
            assert start - at < 4 * KIB
        at = start + max(length, 1)
    if len(starts) < len(lengths):
        assert at + lengths[len(starts)] + unit + 4 * KIB > capacity  # the next did not fit


@given(st.integers(65, 3 * MIB), units, st.sampled_from([1, 2, 4, 8]), st.integers(1, 300))
def test_fixed_records_lie_where_the_general_rule_puts_them(
    length: int, unit: int, alignment: int, rows: int
) -> None:
    """Arithmetic addressing against placing one after the other, in units of the stride."""
    length = max(length // alignment, 1) * alignment
    plan = FixedPlan(length=length, stride=stride_of(length, alignment), unit_bytes=unit)
    starts = plan.starts(np.arange(rows, dtype=np.int64)).tolist()
    assert starts == [plan.start(row) for row in range(rows)]
    at = 0
    for start in starts:
        expected = at
        if plan.stride <= unit and expected % unit + plan.stride > unit:
            expected = -(-expected // unit) * unit
        assert start == expected
        at = start + plan.stride
    pages = np.arange(starts[-1] // unit + 2, dtype=np.int64)
    for page, first in zip(pages.tolist(), plan.first_rows(pages).tolist(), strict=True):
        slow = next((row for row, start in enumerate(starts) if start >= page * unit), rows)
        assert min(first, rows) == slow
    assert plan.payload_bytes(rows) >= starts[-1] + length
    capacity = shard_capacity(8 * MIB, unit, 3, length)
    assert capacity % (3 * unit) == 0
    full = plan.shard_rows(capacity)
    assert plan.start(full - 1) + length <= capacity
    assert plan.start(full) + length > capacity


@given(st.integers(65, 20 * MIB))
@example(600 * KIB)
@example(17_000)
@example(3 * MIB // 2)
@example(5 * MIB)
def test_pages_pad_at_most_a_tenth_or_the_record_crosses_them(length: int) -> None:
    """The unit of records of one size; 1 MiB whenever that is good enough."""
    stride = stride_of(length, 1)
    unit = choose_unit(stride)
    assert unit in UNIT_CHOICES
    padding = [u % stride / u for u in UNIT_CHOICES if u >= max(stride, MIB)]
    if stride <= unit and min(padding) <= 0.1:
        assert unit % stride <= 0.1 * unit
        assert unit == MIB or stride > MIB or MIB % stride > 0.1 * MIB
    if stride > unit:
        assert unit == MIB
        assert all(share > 0.1 for share in padding)


@given(st.floats(0, 1e9), st.sampled_from(UNIT_CHOICES))
def test_the_page_of_mixed_sizes_is_within_the_limit_of_memory(mean: float, limit: int) -> None:
    """Never above the limit; above 1 MiB only where half a record a page is a tenth at most."""
    unit = choose_unit_for_mean(mean, limit=limit)
    assert unit <= limit
    assert unit <= MIB or mean / 2 <= 0.1 * unit


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Fixed and ragged fields, mixed."""
    fields: dict[str, Field] = {}
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["fixed", "rows", "bytes", "str"]))
        if kind in ("bytes", "str"):
            fields[f"f{number}"] = Field(kind)
        elif kind == "rows":
            fields[f"f{number}"] = Field(draw(dtypes), (None, draw(st.integers(1, 3))))
        else:
            fields[f"f{number}"] = Field(draw(dtypes), (draw(st.integers(65, 99)),))
    return Record(fields)


@given(records(), st.data())
def test_fields_of_a_record_follow_each_other_aligned(record: Record, data: st.DataObject) -> None:
    """Fixed ones first, each at a multiple of its itemsize, gaps below one; then the ragged."""
    at = 0
    for name in record.fixed:
        field, start = record.fields[name], record.offsets[name]
        assert start % field.storage.itemsize == 0
        assert at <= start < at + field.storage.itemsize
        at = start + field.row_bytes
    assert record.fixed_bytes == at
    lengths = [
        data.draw(st.integers(0, 50)) * record.fields[name].row_bytes for name in record.ragged
    ]
    found = record.ragged_starts(np.array([lengths], np.int64).reshape(1, -1))[0].tolist()
    for name, length, start in zip(record.ragged, lengths, found, strict=False):
        item = record.fields[name].storage.itemsize
        assert start % item == 0
        assert at <= start < at + item
        at = start + length
    assert found[-1] == at


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.sampled_from(["auto", *FieldLayout]))
def test_every_large_field_is_in_one_stream(large: list[bool], layout: str) -> None:
    """Scalars are in none; "auto" keeps up to four together."""
    fields = {f"f{i}": Field("uint8", (100,) if big else ()) for i, big in enumerate(large)}
    found, streams = group_fields(fields, layout)
    inside = [name for record in streams.values() for name in record.fields]
    assert inside == [n for n, f in fields.items() if f.kind is not FieldKind.SCALAR]
    if layout == "auto":
        assert found == (FieldLayout.ROWS if sum(large) <= 4 else FieldLayout.COLUMNS)
    if found is FieldLayout.ROWS:
        assert len(streams) == min(1, sum(large))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(0, 9)), max_size=40),
    st.integers(0, 50),
)
@example([(0, 0, 5), (0, 1, 5)], 4)
@example([(0, 0, 5), (0, 1, 5)], 5)
def test_spans_hold_every_record_and_read_nothing_twice(
    asked: list[tuple[int, int, int]], gap: int
) -> None:
    """Records, also repeated ones, are where `position` says; ranges ascend and do not meet."""
    places = [(shard, 10 * slot, length) for shard, slot, length in asked]
    known: dict[tuple[int, int], int] = {}
    places = [(s, a, known.setdefault((s, a), n)) for s, a, n in places]
    shard, start, length = (np.array([p[i] for p in places], np.int64) for i in range(3))
    plan = plan_spans(shard.astype(np.int32), start, length, gap)
    content = np.random.default_rng(0).integers(0, 256, (4, 5000), np.uint8)
    buffer = np.zeros(plan.total, np.uint8)
    for s, a, b, to in zip(plan.shard, plan.start, plan.end, plan.target, strict=True):
        buffer[to : to + b - a] = content[s, a:b]
    for (s, a, n), at in zip(places, plan.position.tolist(), strict=True):
        assert np.array_equal(buffer[at : at + n], content[s, a : a + n])
    distinct = sorted(set(places))
    apart = [a[0] != b[0] or b[1] - a[1] - a[2] > gap for a, b in pairwise(distinct)]
    assert len(plan.shard) == (1 + sum(apart) if places else 0)
    for one in range(len(plan.shard) - 1):
        if plan.shard[one] == plan.shard[one + 1]:
            assert plan.start[one + 1] - plan.end[one] > gap
        else:
            assert plan.shard[one] < plan.shard[one + 1]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 16),
    st.integers(0, 2000),
    st.lists(st.lists(st.integers(0, 10**6), max_size=80), max_size=5),
)
def test_a_table_by_blocks_gives_what_the_whole_array_gives(
    cuts: list[int], block_rows: int, budget: int, requests: list[list[int]]
) -> None:
    """Any rows in any order, with room for all blocks or for two, against plain indexing."""
    total = sum(cuts)
    values = np.arange(total) * 3
    pairs = np.arange(2 * total, dtype=np.uint16).reshape(total, 2)
    first = np.concatenate([[0], np.cumsum(cuts)])
    reads: list[int] = []

    def load(wanted: dict[int, Runs]) -> list[list[list[Table]]]:
        found: list[list[list[Table]]] = []
        for cut, runs in wanted.items():
            reads.extend(count for _, count in runs)
            lows = [(int(first[cut]) + a, int(first[cut]) + a + n) for a, n in runs]
            assert all(a + n <= cuts[cut] for a, n in runs)
            found.append([[values[a:b], pairs[a:b]] for a, b in lows])
        return found

    table = BlockTable(
        cuts,
        [(values.dtype, ()), (pairs.dtype, (2,))],
        load,
        block_rows=block_rows,
        budget_bytes=budget,
    )
    for request in requests if total else []:
        rows = np.array([n % total for n in request], np.int64)
        found = table.get(rows)
        assert np.array_equal(found[0], values[rows])
        assert np.array_equal(found[1], pairs[rows])
    if total and budget >= 2000 and requests:
        before = len(reads)
        table.get(np.array([n % total for n in requests[-1]], np.int64))
        assert len(reads) == before or budget < total * 12  # kept, when there is room


@given(st.lists(st.integers(0, 3), max_size=5))
@example([2, 2, 1])
@example([1, 2])
def test_a_row_of_even_cuts_is_found_by_division(cuts: list[int]) -> None:
    """Wherever all cuts but the last have as many rows, and it no more; else a search finds it."""
    rows = np.array(cuts, np.int64)
    even, all_rows = even_rows(rows), np.arange(rows.sum())
    if even:
        starts = np.concatenate([[0], np.cumsum(rows)])
        assert np.array_equal(all_rows // even, np.searchsorted(starts, all_rows, "right") - 1)
    alike = len(set(cuts[:-1])) <= 1
    assert bool(even) == (bool(cuts) and alike and 0 < cuts[-1] <= cuts[0])


@pytest.mark.parametrize("cuts", [[995], [500, 495], [495, 500]])
def test_a_table_that_is_all_there_gives_the_same_rows(cuts: list[int]) -> None:
    """Its blocks came last to first; what a cut leaves free in its last block is no row."""
    values, starts = np.arange(sum(cuts)), [0, *np.cumsum(cuts).tolist()]

    def load(wanted: dict[int, Runs]) -> list[list[list[Table]]]:
        return [
            [[values[starts[cut] + a : starts[cut] + a + n]] for a, n in runs]
            for cut, runs in wanted.items()
        ]

    table = BlockTable(cuts, [(values.dtype, ())], load, block_rows=10)
    for row in reversed(values.tolist()):
        assert table.get(np.array([row]))[0].tolist() == [row]
    found = table.get(values)[0]
    assert np.array_equal(found, values)
    found[:] = -1  # a copy
    assert np.array_equal(table.get(values)[0], values)


def test_a_table_is_read_by_many_threads_at_once() -> None:
    """Room for two blocks, four threads with different blocks: each gets its own rows."""
    values = np.arange(1000)

    def load(wanted: dict[int, Runs]) -> list[list[list[Table]]]:
        return [[[values[a : a + n]] for a, n in runs] for runs in wanted.values()]

    table = BlockTable([1000], [(values.dtype, ())], load, block_rows=10, budget_bytes=1)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            rows = rng.integers(0, 1000, 30)
            if not np.array_equal(table.get(rows)[0], rows):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@given(st.lists(st.integers(0, 2**60), max_size=50), st.integers(1, 2**40))
def test_the_index_is_that_of_zarr(starts: list[int], nbytes: int) -> None:
    """Offset and length of every chunk, u64 little-endian, then their crc32c."""
    raw = b"".join(struct.pack("<QQ", start, nbytes) for start in starts)
    found = zarr_index(np.array(starts, np.int64), nbytes)
    assert found == raw + struct.pack("<I", google_crc32c.value(raw))
    assert len(found) == index_bytes(len(starts), 1)


@given(st.integers(0, 50), st.lists(st.sampled_from(["<u4", "<u8"]), min_size=1, max_size=4))
def test_tables_survive_their_bytes(rows: int, kinds: list[str]) -> None:
    """decode is the inverse of encode; each table stands at a multiple of 8."""
    types = [np.dtype(kind) for kind in kinds]
    rng = np.random.default_rng(rows)
    tables = [rng.integers(0, 2**31, rows).astype(dtype) for dtype in types]
    data = encode_tables(SIDE_MAGIC, tables)
    found = decode_tables(SIDE_MAGIC, data, types, rows, where="x")
    assert all(np.array_equal(a, b) for a, b in zip(found, tables, strict=True))
    assert all(start % 8 == 0 for start in table_starts(types, rows))
