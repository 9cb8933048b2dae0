"""Where bytes lie: the pieces of any range tile it, columns have room, plans cover what is read."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpstore.errors import ConfigError
from hpstore.format.geometry import (
    ALIGNMENT_BYTES,
    BLOCK_BYTES,
    MAX_UNIT_BYTES,
    SMALL_OBJECT_BYTES,
    Code,
    Geometry,
    block_span,
    plan_geometry,
)
from hpstore.objects.read.read_plan import plan_rebuild, plan_window, run_bytes, windows
from hpstore.objects.write.stripe_writer import in_one_call, plan_batches
from hpstore.units import KIB, MIB

# small units and sizes make every border case; real sizes make the arithmetic large
units = st.integers(1, 40).map(lambda n: n * ALIGNMENT_BYTES) | st.sampled_from([MIB, 8 * MIB])
widths = st.tuples(st.integers(1, 12), st.integers(1, 4))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Any coded object of up to 40 stripes, often ending near a border."""
    (data, parity), unit = draw(widths), draw(units)
    stripe = data * unit
    size = draw(st.integers(0, 40)) * stripe + draw(
        st.integers(-3, 3) | st.integers(0, stripe) | st.sampled_from([ALIGNMENT_BYTES, unit])
    )
    return Geometry(data=data, parity=parity, unit_bytes=unit, size=max(0, size))


@st.composite
def survivors(draw: st.DrawFn, geometry: Geometry) -> frozenset[int]:
    """Columns that are available: all but a few, sometimes one too few."""
    every = range(geometry.width)
    lost = draw(st.sets(st.sampled_from(every), max_size=geometry.parity + 1))
    return frozenset(every) - lost


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Geometry, int, int]:
    """An object and a range of it, short or long."""
    geometry = draw(geometries())
    start = draw(st.integers(0, geometry.size))
    length = draw(st.integers(0, 3 * BLOCK_BYTES) | st.integers(0, 4 * geometry.stripe_bytes))
    return geometry, start, min(geometry.size, start + length)


@given(ranges())
def test_pieces_tile_the_range(case: tuple[Geometry, int, int]) -> None:
    """In object order, without gap or overlap, none empty, each inside one unit of its column."""
    geometry, start, end = case
    at = start
    for piece in geometry.pieces(start, end):
        assert piece.object_offset == at
        assert piece.length > 0
        assert 0 <= piece.column < geometry.data
        assert piece.column_offset + piece.length <= geometry.column_bytes
        unit = piece.column_offset // geometry.unit_bytes
        assert (piece.column_offset + piece.length - 1) // geometry.unit_bytes == unit
        at += piece.length
    assert at == max(start, end)


@given(geometries(), st.data())
def test_a_byte_is_where_the_slow_oracle_puts_it(geometry: Geometry, data: st.DataObject) -> None:
    """One byte at a time: stripe by division, unit by division, offset by remainder."""
    if not geometry.size:
        return
    offset = data.draw(st.integers(0, geometry.size - 1))
    stripe, inside = divmod(offset, geometry.data * geometry.unit_bytes)
    left = geometry.size - stripe * geometry.data * geometry.unit_bytes
    full = left >= geometry.data * geometry.unit_bytes
    shrunk = -(-left // geometry.data)
    shrunk = -(-shrunk // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    column, rest = divmod(inside, geometry.unit_bytes if full else shrunk)
    (piece,) = geometry.pieces(offset, offset + 1)
    assert (piece.column, piece.column_offset) == (column, stripe * geometry.unit_bytes + rest)


@given(geometries())
def test_no_two_bytes_share_a_place(geometry: Geometry) -> None:
    """Pieces of the whole object do not overlap within their columns."""
    runs = sorted((p.column, p.column_offset, p.length) for p in geometry.pieces(0, geometry.size))
    for (column, offset, length), (following, start, _) in itertools.pairwise(runs):
        assert column != following or offset + length <= start


@given(geometries())
def test_columns_are_aligned_and_large_enough(geometry: Geometry) -> None:
    """A multiple of 4 KiB, room for every byte, less than a page of padding a unit and stripe."""
    room = geometry.column_bytes * geometry.data
    assert geometry.column_bytes % ALIGNMENT_BYTES == 0
    assert geometry.size <= room < geometry.size + geometry.data * ALIGNMENT_BYTES
    assert geometry.block_count * BLOCK_BYTES >= geometry.column_bytes
    assert (geometry.block_count - 1) * BLOCK_BYTES < max(geometry.column_bytes, 1)


@given(geometries())
@example(Geometry(data=4, parity=2, unit_bytes=MIB, size=200_000))
def test_the_last_stripe_shrinks(geometry: Geometry) -> None:
    """Its unit is the smallest aligned one that holds the rest; full stripes keep theirs."""
    rest = geometry.size % geometry.stripe_bytes
    assert geometry.last_unit_bytes * geometry.data >= rest
    assert max(0, geometry.last_unit_bytes - ALIGNMENT_BYTES) * geometry.data <= rest
    assert geometry.last_unit_bytes <= geometry.unit_bytes
    assert (geometry.last_unit_bytes == 0) == (rest == 0)
    sizes = [geometry.unit_bytes_of(s) for s in range(geometry.stripe_count)]
    assert sum(sizes) == geometry.column_bytes
    assert all(size == geometry.unit_bytes for size in sizes[: geometry.full_stripe_count])
    starts = [geometry.column_offset_of(s) for s in range(geometry.stripe_count)]
    assert starts == [sum(sizes[:i]) for i in range(len(sizes))]


@given(geometries(), st.sampled_from([BLOCK_BYTES, 4 * BLOCK_BYTES, MIB, 4 * MIB]))
def test_batches_tile_the_columns(geometry: Geometry, column_bytes: int) -> None:
    """Stripes and column bytes without gap or overlap, each batch beginning on a 64 KiB block."""
    stripe = offset = 0
    for batch in plan_batches(geometry, column_bytes):
        assert (batch.first, batch.column_offset) == (stripe, offset)
        assert batch.first < batch.last
        assert batch.column_offset % BLOCK_BYTES == 0
        assert batch.column_bytes == sum(
            geometry.unit_bytes_of(s) for s in range(batch.first, batch.last)
        )
        stripe, offset = batch.last, offset + batch.column_bytes
    assert stripe == geometry.stripe_count
    assert offset == geometry.column_bytes


@given(geometries(), st.sampled_from([BLOCK_BYTES, MIB, 4 * MIB]))
def test_batches_are_about_as_large_as_asked(geometry: Geometry, column_bytes: int) -> None:
    """Never above what was asked by more than fifteen units and one block: memory is bounded."""
    limit = max(column_bytes, geometry.unit_bytes) + 15 * geometry.unit_bytes + BLOCK_BYTES
    assert all(b.column_bytes <= limit for b in plan_batches(geometry, column_bytes))


@given(ranges(), st.integers(1, 4 * MIB))
def test_windows_tile_the_range(case: tuple[Geometry, int, int], column_bytes: int) -> None:
    """Without gap or overlap; all borders but the ends lie between stripes."""
    geometry, start, end = case
    at = start
    for first, last in windows(geometry, start, end, column_bytes):
        assert first == at < last
        assert last == end or last % geometry.stripe_bytes == 0
        span = -(-last // geometry.stripe_bytes) - first // geometry.stripe_bytes
        assert span <= max(1, column_bytes // geometry.unit_bytes)
        at = last
    assert at == max(start, end)


def check_run(geometry: Geometry, run: tuple[int, int]) -> None:
    """Whole checksummed blocks of a column."""
    assert 0 <= run[0] < run[1] <= geometry.column_bytes
    assert run[0] % BLOCK_BYTES == 0
    assert run[1] % BLOCK_BYTES == 0 or run[1] == geometry.column_bytes


@given(ranges(), st.data())
def test_a_window_plan_covers_its_pieces(
    case: tuple[Geometry, int, int], data: st.DataObject
) -> None:
    """Every piece lies in a run that is read or decoded; runs are whole blocks."""
    geometry, start, end = case
    available = data.draw(survivors(geometry))
    plan = plan_window(geometry, start, end, available)
    touched = {piece.column for piece in geometry.pieces(start, end)}
    if plan is None:
        assert touched - available
        assert len(available) < geometry.data
        return
    assert list(plan.pieces) == list(geometry.pieces(start, end))
    runs = {**plan.reads, **plan.lost}
    assert len(runs) == len(plan.reads) + len(plan.lost)
    assert plan.lost.keys() == touched - available
    assert plan.reads.keys() <= available
    for piece in plan.pieces:
        low, high = runs[piece.column]
        assert low <= piece.column_offset
        assert piece.column_offset + piece.length <= high
    for run in runs.values():
        check_run(geometry, run)
    assert plan.bytes == sum(high - low for low, high in runs.values())


@st.composite
def degraded(draw: st.DrawFn) -> tuple[Geometry, int, int, frozenset[int]]:
    """A range of several stripes' worth of units, and survivors that lack some of its columns."""
    (data, parity), unit = draw(widths), draw(units)
    stripes = draw(st.integers(1, 6))
    geometry = Geometry(
        data=data,
        parity=parity,
        unit_bytes=unit,
        size=stripes * data * unit + draw(st.integers(0, data * unit)),
    )
    start = draw(st.integers(0, geometry.size - 1))
    end = draw(st.integers(start + 1, geometry.size))
    touched = sorted({piece.column for piece in geometry.pieces(start, end)})
    lost = draw(st.sets(st.sampled_from(touched), min_size=1, max_size=parity))
    more = draw(st.sets(st.integers(0, geometry.width - 1), max_size=parity - len(lost)))
    return geometry, start, end, frozenset(range(geometry.width)) - lost - more


@given(degraded())
def test_a_degraded_plan_has_k_columns_over_the_whole_lost_run(
    case: tuple[Geometry, int, int, frozenset[int]],
) -> None:
    """`have` are k available columns, each read over all that is decoded; others are not read."""
    geometry, start, end, available = case
    plan = plan_window(geometry, start, end, available)
    assert plan is not None
    touched = {piece.column for piece in plan.pieces}
    assert plan.lost.keys() == touched - available
    assert len(plan.have) == len(set(plan.have)) == geometry.data
    assert set(plan.have) <= available
    assert list(plan.have) == sorted(plan.have)
    assert plan.reads.keys() == set(plan.have)  # what is read anyway is decoded from
    assert touched & available <= set(plan.have)
    (lost,) = set(plan.lost.values())
    for column in plan.have:
        check_run(geometry, plan.reads[column])
        assert plan.reads[column][0] <= lost[0]
        assert lost[1] <= plan.reads[column][1]
    for piece in plan.pieces:
        low, high = plan.reads.get(piece.column, lost)
        assert low <= piece.column_offset
        assert piece.column_offset + piece.length <= high


@given(degraded())
def test_a_degraded_plan_reads_no_more_than_it_must(
    case: tuple[Geometry, int, int, frozenset[int]],
) -> None:
    """Each column's run is what its own pieces and the lost run need, and no block more."""
    geometry, start, end, available = case
    plan = plan_window(geometry, start, end, available)
    healthy = plan_window(geometry, start, end, frozenset(range(geometry.width)))
    assert plan is not None
    assert healthy is not None
    runs = [healthy.reads[column] for column in plan.lost]
    (lost,) = set(plan.lost.values())
    assert lost == (min(low for low, _ in runs), max(high for _, high in runs))
    for column, (low, high) in plan.reads.items():
        own = healthy.reads.get(column, lost)
        assert (low, high) == (min(own[0], lost[0]), max(own[1], lost[1]))


@given(ranges())
def test_a_healthy_plan_reads_less_than_two_blocks_too_much_a_column(
    case: tuple[Geometry, int, int],
) -> None:
    """No read amplification beyond the borders of checksummed blocks, and no parity is read."""
    geometry, start, end = case
    plan = plan_window(geometry, start, end, frozenset(range(geometry.width)))
    assert plan is not None
    first, last = geometry.stripe_at(start), geometry.stripe_at(max(end - 1, 0))
    for column, (low, high) in plan.reads.items():
        assert column < geometry.data
        most = sum(geometry.unit_bytes_of(s) for s in range(first, last + 1))
        assert high - low < most + 2 * BLOCK_BYTES


@given(geometries(), st.data())
def test_a_rebuild_plan_reads_what_is_there_and_makes_the_rest(
    geometry: Geometry, data: st.DataObject
) -> None:
    """A wanted column that is available is read; others are decoded from k, over the same run."""
    columns = st.sets(st.integers(0, geometry.width - 1))
    available = data.draw(survivors(geometry) | columns.map(frozenset))
    wanted = tuple(data.draw(columns))
    low, high = 0, geometry.column_bytes
    plan = plan_rebuild(geometry, low, high, available, wanted)
    lost = set(wanted) - available
    if plan is None:
        assert lost
        assert len(available) < geometry.data
        return
    assert plan.lost.keys() == lost
    assert len(plan.have) == (geometry.data if lost else 0)
    assert plan.reads.keys() == set(plan.have) | (set(wanted) & available)
    assert plan.reads.keys() <= available
    assert {*plan.reads.values(), *plan.lost.values()} <= {(low, high)}


@given(st.integers(1, 32), st.integers(16 * MIB, 1 << 34))
def test_eight_runs_fit_the_memory_budget(width: int, memory_bytes: int) -> None:
    """Unless the smallest run, one block a column, is already more."""
    run = run_bytes(width, memory_bytes)
    assert run % BLOCK_BYTES == 0
    assert BLOCK_BYTES <= run <= 4 * MIB
    assert 8 * width * run <= memory_bytes or run == BLOCK_BYTES


@given(st.integers(0, 10 * MIB), widths, st.integers(0, 20))
def test_a_new_object_keeps_full_parity_and_narrows(
    size: int, width: tuple[int, int], usable: int
) -> None:
    """k' = min(k, usable - m); up to 128 KiB it is m + 1 whole copies."""
    data, parity = width
    if usable <= parity:
        return
    geometry = plan_geometry(size, data=data, parity=parity, unit_bytes=MIB, usable=usable)
    assert geometry.parity == parity
    assert geometry.width <= usable
    if size <= SMALL_OBJECT_BYTES:
        assert (geometry.code, geometry.data) == (Code.COPIES, 1)
        assert geometry.column_bytes >= size
        assert geometry.fewest_to_acknowledge() == parity + 1
    else:
        assert (geometry.code, geometry.data) == (Code.RS_CAUCHY, min(data, usable - parity))
        assert geometry.fewest_to_acknowledge() == max(geometry.data + 1, parity + 1)


@given(st.integers(0, 100 * MIB), st.integers(0, MIB), st.integers(0, 10 * ALIGNMENT_BYTES))
def test_a_block_span_is_the_smallest_cover(start: int, length: int, beyond: int) -> None:
    """Whole blocks, cut at the end of the column."""
    column = -(-(start + length + beyond) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    low, high = block_span(start, start + length, column)
    assert low <= start < low + BLOCK_BYTES
    assert start + length <= high < start + length + BLOCK_BYTES
    assert high <= column
    assert low % BLOCK_BYTES == 0
    assert high % BLOCK_BYTES == 0 or high == column


@pytest.mark.parametrize(
    "shape",
    [
        {"data": 0},
        {"parity": 0},
        {"parity": 9},
        {"data": 31},
        {"data": -1},
        {"size": -1},
        {"unit_bytes": 0},
        {"unit_bytes": 4095},
        {"unit_bytes": 5000},
        {"unit_bytes": MAX_UNIT_BYTES + 4096},
        {"code": Code.COPIES},
    ],
)
def test_impossible_shapes_are_refused(shape: dict[str, int]) -> None:
    """ConfigError, at construction."""
    good = {"data": 4, "parity": 2, "unit_bytes": 64 * KIB, "size": 10}
    with pytest.raises(ConfigError):
        Geometry(**{**good, **shape})  # type: ignore[arg-type]  # code is given by name


@given(geometries(), st.sampled_from([BLOCK_BYTES, 4 * BLOCK_BYTES, MIB, 4 * MIB]))
def test_a_shrunk_last_stripe_is_a_batch_of_its_own(geometry: Geometry, column_bytes: int) -> None:
    """Whole stripes are then written in place, as only a batch with part of one is copied. Objects
    whose columns are one call each are always copied."""
    if geometry.unit_bytes % BLOCK_BYTES or not geometry.last_unit_bytes:
        return
    if in_one_call(geometry, column_bytes):
        return
    *others, last = plan_batches(geometry, column_bytes)
    assert (last.first, last.last) == (geometry.full_stripe_count, geometry.stripe_count)
    assert all(batch.last <= geometry.full_stripe_count for batch in others)
