"""Damage is a fact about rows of blocks: a row with k sound blocks is read, and mended."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import TooManyErasures
from hpstore.format.column_header import HEADER_BYTES
from hpstore.format.geometry import BLOCK_BYTES, Geometry
from hpstore.format.keys import parse_column_name
from hpstore.objects.read.erasures import Erasures, rows_of, split_window
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB

WIDTHS = [(2, 1), (4, 2), (8, 3)]
Damage = set[tuple[int, int]]  # (column, block)


def column_files(harness: Harness) -> dict[int, tuple[str, str]]:
    """Column -> (device, path), past the code under test."""
    found = {}
    for url, path in harness.columns("k"):
        name = parse_column_name(path.rsplit("/", 1)[-1])
        assert name is not None
        found[name.column] = (url, path)
    return found


def readable(geometry: Geometry, damage: Damage, gone: set[int]) -> np.ndarray:
    """Which bytes theory allows to read, byte by byte: slow and obvious."""
    bad: defaultdict[int, set[int]] = defaultdict(set)
    for column, block in damage:
        bad[block].add(column)
    good = np.zeros(geometry.size, bool)
    for piece in geometry.pieces(0, geometry.size):
        first = piece.column_offset // BLOCK_BYTES
        last = (piece.column_offset + piece.length - 1) // BLOCK_BYTES
        for block in range(first, last + 1):
            lost = bad[block] | gone
            if piece.column in lost and geometry.width - len(lost) < geometry.data:
                continue
            low = max(piece.column_offset, block * BLOCK_BYTES)
            high = min(piece.column_offset + piece.length, (block + 1) * BLOCK_BYTES)
            shift = piece.object_offset - piece.column_offset
            good[low + shift : high + shift] = True
    return good


def get(pool: Pool, start: int, end: int) -> bytes | None:
    try:
        return pool.get("k", start=start, end=end)
    except TooManyErasures:
        return None


@st.composite
def damaged(draw: st.DrawFn) -> tuple[int, int, int, int, list[tuple[int, int]], int]:
    """k, m, unit, size, (column, block) pairs, whole columns that are lost."""
    k, m = draw(st.sampled_from(WIDTHS))
    unit = draw(st.sampled_from([16 * KIB, 64 * KIB, 128 * KIB]))
    size = draw(st.integers(130 * KIB, 1_500_000))
    pairs = draw(st.lists(st.tuples(st.integers(0, k + m - 1), st.integers(0, 30)), max_size=12))
    return k, m, unit, size, pairs, draw(st.integers(0, m))


@given(case=damaged(), data=st.data())
def test_what_has_k_sound_blocks_in_its_row_is_read_and_mended(
    case: tuple[int, int, int, int, list[tuple[int, int]], int],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """PROTOCOL 7, r1: every byte that theory allows is read, no other; a scrub mends all of it."""
    k, m, unit, size, pairs, lost = case
    harness = Harness(
        Path(tmp_path_factory.mktemp("rows")), data=k, parity=m, devices=k + m, unit_bytes=unit
    )
    body = np.random.default_rng(size).bytes(size)
    with harness.open() as pool:
        pool.put("k", body)
    geometry = Geometry(data=k, parity=m, unit_bytes=unit, size=size)
    files = column_files(harness)
    damage = {(c, b % geometry.block_count) for c, b in pairs}
    for column, block in damage:
        harness.flip(*files[column], HEADER_BYTES + block * BLOCK_BYTES + 5)
    gone = set(data.draw(st.permutations(range(k + m)))[:lost])
    harness.lose([files[column][0] for column in gone])
    good = readable(geometry, damage, gone)
    with harness.open() as pool:
        for _ in range(4):
            a, b = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
            assert get(pool, a, b) == (body[a:b] if good[a:b].all() else None)
        with pool.open("k") as reader:  # one that stays open serves the rest of it
            for start in range(0, size, 50_000):
                end = min(size, start + 50_000)
                if good[start:end].all():
                    buffer = bytearray(end - start)
                    reader.read_into(buffer, start)
                    assert bytes(buffer) == body[start:end]
    harness.bring_back()
    with harness.open() as pool:
        report = pool.scrub(resume=False)
        everything = readable(geometry, damage, set()).all()
        rows = defaultdict(set)
        for column, block in damage:
            rows[block].add(column)
        if all(len(columns) <= m for columns in rows.values()):
            assert report.damaged_columns == len({column for column, _ in damage})
            assert pool.scrub(resume=False).clean
        if everything:
            assert pool.get("k") == body
        elif damage:
            assert "k" in report.unreadable


@given(
    size=st.integers(1, 1_000_000),
    unit=st.sampled_from([4 * KIB, 64 * KIB, 192 * KIB]),
    k=st.integers(1, 5),
    data=st.data(),
)
def test_parts_of_a_window_cover_it_in_order_and_do_not_mix(
    size: int, unit: int, k: int, data: st.DataObject
) -> None:
    """Parts with damaged rows lie in one run of rows with the same damage; others have none."""
    geometry = Geometry(data=k, parity=2, unit_bytes=unit, size=size)
    start = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(start + 1, size))
    erasures = Erasures()
    pairs = st.tuples(st.integers(0, k + 1), st.integers(0, geometry.block_count - 1))
    damage: list[tuple[int, int]] = data.draw(st.lists(pairs, max_size=6))
    for column, block in damage:
        erasures.mark_blocks(column, [block], ValueError())
    parts = split_window(geometry, start, end, erasures)
    assert [parts[0][0], *[b for _, b in parts]] == [start, *[a for a, _ in parts[1:]], end]
    for a, b in parts:
        assert a < b
        low, high = rows_of(geometry, list(geometry.pieces(a, b)))
        blocks = range(low // BLOCK_BYTES, -(-high // BLOCK_BYTES))
        sets = {frozenset(c for c, bad in damage if bad == block) for block in blocks}
        assert sets == {frozenset()} or len(blocks) == 1 or len(sets) == 1


def test_a_damaged_block_counts_once_however_often_it_is_read(tmp_path: Path) -> None:
    """Health evidence is a block, not a read of it."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool:
        pool.put("k", bytes(600_000))
        harness.flip(*column_files(harness)[0], HEADER_BYTES + 10)
        with pool.open("k") as reader:
            for _ in range(3):
                reader.read_into(bytearray(1000))
        assert pool.metrics.value("block_mismatch_total") == 1
