"""Many rows at once are what they are one by one: places, copies, reads, with the library and
without."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset import many_ranges
from hpstore.loaders.dataset.many_ranges import (
    copy_rows,
    decimals,
    jpegs_end,
    ranges_library,
    read_files,
    read_ranges,
)
from hpstore.loaders.dataset.record_layout import LARGE_RECORD_BYTES, place, place_many
from hpstore.loaders.dataset.value_rows import ValueRows, joined_rows
from hpstore.loaders.ingestion.image_checks import any_problem, image_problem
from hpstore.units import KIB

LIBRARY = pytest.mark.parametrize("library", [True, False])
SMALL = st.integers(0, 6000)
EXACT = st.sampled_from([0, 1, 511, 512, 513, 1024, 4095, 4096])  # that fill a page
LARGE = st.integers(LARGE_RECORD_BYTES, 3 * LARGE_RECORD_BYTES)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, library: bool) -> None:
    if not library:
        monkeypatch.setattr(many_ranges, "ranges_library", lambda: None)
    elif many_ranges.ranges_library() is None:
        pytest.skip("installed without a compiler")


@example(lengths=[1024] * 40, cursor=100, capacity=1 << 20, unit=4096, alignment=1)
@example(lengths=[1000, 0, 2096] * 20, cursor=0, capacity=20_000, unit=4096, alignment=8)
@example(lengths=[20_000] * 40, cursor=1, capacity=1 << 20, unit=64 * KIB, alignment=1)
@given(
    lengths=st.lists(SMALL, min_size=16, max_size=200)
    | st.lists(SMALL, max_size=20)
    | st.lists(EXACT, min_size=16, max_size=100)
    | st.lists(LARGE, max_size=60)
    | st.lists(SMALL | LARGE | st.integers(0, 200_000), max_size=60),
    cursor=st.integers(0, 400_000),
    capacity=st.integers(1, 2_000_000),
    unit=st.sampled_from([4 * KIB, 64 * KIB, 256 * KIB, 5000]),
    alignment=st.sampled_from([1, 2, 8]),
)
def test_places_of_many_records_are_those_of_each(
    lengths: list[int], cursor: int, capacity: int, unit: int, alignment: int
) -> None:
    """Against the loop, a record after the other."""
    found = place_many(np.array(lengths, np.int64), cursor, capacity, unit, alignment)
    assert found.tolist() == place(lengths, cursor, capacity, unit, alignment)


def some_rows(values: list[bytes], memories: int) -> ValueRows:
    """These values in so many memories, one after the other, with bytes between them."""
    parts = []
    for number in range(memories):
        mine = values[number::memories]
        memory = np.frombuffer(b"".join(b"#" + one for one in mine) or b"#", np.uint8)
        lengths = np.array([len(one) for one in mine], np.int64)
        starts = np.cumsum(lengths + 1) - lengths
        parts.append(ValueRows.of(memory, starts, lengths))
    return joined_rows(parts)


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 3), st.data())
def test_rows_are_sequences_of_their_values(
    values: list[bytes], memories: int, data: st.DataObject
) -> None:
    rows = some_rows(values, memories)
    wanted = [one for number in range(memories) for one in values[number::memories]]
    assert [one.tobytes() for one in rows] == wanted == [bytes(one) for one in rows.views()]
    assert [rows[row].tobytes() for row in range(len(rows))] == wanted
    low, high = sorted(data.draw(st.tuples(st.integers(0, 30), st.integers(0, 30))))
    assert [one.tobytes() for one in rows[low:high]] == wanted[low:high]
    order = np.array(data.draw(st.permutations(range(len(wanted)))), np.int64)
    assert [one.tobytes() for one in rows.taken(order)] == [wanted[row] for row in order]
    prefix = data.draw(st.binary(max_size=2))
    assert rows.begin_with(prefix).tolist() == [one.startswith(prefix) for one in wanted]


@LIBRARY
@pytest.mark.usefixtures("without")
def test_rows_are_copied_to_their_places(library: bool) -> None:
    rng = np.random.default_rng(0)
    values = [rng.bytes(int(size)) for size in rng.integers(0, 300, 500)]
    rows = some_rows(values, 3)
    starts = np.cumsum(rows.lengths + 2) - rows.lengths
    order = rng.permutation(len(rows))
    out = np.zeros(int((rows.lengths + 2).sum()) + 1, np.uint8)
    copy_rows(rows.taken(order), out, starts[order])
    wanted = b"".join(b"\0\0" + one.tobytes() for one in rows)
    assert out.tobytes() == wanted + b"\0"


@LIBRARY
@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    ("start", "length", "to"),
    [(-1, 1, 0), (0, -1, 0), (5, 6, 0), (11, 0, 0), (0, 5, 6), (0, 5, -1)],
)
def test_what_is_outside_of_memory_is_never_copied(
    library: bool, start: int, length: int, to: int
) -> None:
    rows = ValueRows.of(np.arange(10, dtype=np.uint8), np.array([start]), np.array([length]))
    out: Bytes = np.zeros(10, np.uint8)
    with pytest.raises(IndexError):
        copy_rows(rows, out, np.array([to]))
    assert not out.any()


@LIBRARY
@pytest.mark.usefixtures("without")
def test_files_are_read_whole(library: bool, tmp_path: Path) -> None:
    """One that has grown fills its room, one that has shrunk does not; one that is gone has its
    errno; names of any bytes."""
    names = [os.fsdecode(b"n\xff"), "empty", "grown", "shrunk"]
    for name, size in zip(names, [5, 0, 9, 2], strict=True):
        (tmp_path / name).write_bytes(name.encode(errors="surrogateescape")[:1] * size)
    os.mkfifo(tmp_path / "fifo")  # came in place of a file that was listed
    paths = [str(tmp_path / name) for name in [*names, "gone", ".", "fifo"]]
    rooms = np.array([6, 1, 6, 6, 6, 6, 6])
    out = np.zeros(int(rooms.sum()), np.uint8)
    got = read_files(paths, out, np.cumsum(rooms) - rooms, rooms)
    assert got.tolist()[:5] == [5, 0, 6, 2, -2]
    assert got[5] < 0  # a folder
    assert got[6] < 0  # it is not waited at
    assert out.tobytes()[:13] == b"nnnnn\0\0gggggg"
    assert read_files([], out, np.empty(0, np.int64), np.empty(0, np.int64)).tolist() == []


@LIBRARY
@pytest.mark.usefixtures("without")
def test_ranges_are_read_or_the_end_is_said(library: bool, tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(10_000)
    (tmp_path / "a").write_bytes(data)
    offsets, lengths = np.array([9_000, 0, 5, 10_000]), np.array([1_000, 3, 0, 0])
    starts = np.array([3, 0, 0, 1003])
    out = np.zeros(1003, np.uint8)
    file = os.open(tmp_path / "a", os.O_RDONLY)
    try:
        read_ranges(file, offsets, out, starts, lengths)
        assert out.tobytes() == data[:3] + data[9_000:]
        with pytest.raises(EOFError):
            read_ranges(file, offsets + 1, out, starts, lengths)
        with pytest.raises(IndexError):
            read_ranges(file, offsets, out, starts + 1, lengths)
    finally:
        os.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_ranges(file, offsets, out, starts, lengths)


@given(st.lists(st.sampled_from([b"\xff", b"\0", b"\xd9", b"\xd0", b"\xda", b"\x02", b"abc"])))
def test_jpegs_end_where_their_markers_lead(pieces: list[bytes]) -> None:
    """Of any bytes behind the first marker, as the walk in Python."""
    data = b"\xff\xd8" + b"".join(pieces)
    rows = some_rows([data, data + b"\xff\xd9"], 1)
    found = jpegs_end(rows)
    wanted = [not image_problem(one.tobytes(), ".jpg") for one in rows]
    assert found is None or found.tolist() == wanted
    assert any_problem(rows, lambda _: ".jpg") is not all(wanted)


@LIBRARY
@pytest.mark.usefixtures("without")
def test_of_many_files_a_bad_one_is_seen(library: bool) -> None:
    """Images of several kinds, some too short for any."""
    jpeg, other = b"\xff\xd8\xff\xda\0\2..\xff\xd9", b"BM" + (20).to_bytes(4, "little") + b"." * 14
    endings: list[Any] = [".jpg", ".bmp", ".pgm"]
    good = some_rows([jpeg, other, b"P"], 1)
    assert not any_problem(good, endings.__getitem__)
    for bad in (jpeg[:-1], other[:-1], b"\xff", b""):
        for row in range(3):
            values = [jpeg, other, b"P"]
            values[row] = bad
            wanted = any(image_problem(v, e) for v, e in zip(values, endings, strict=True))
            assert any_problem(some_rows(values, 1), endings.__getitem__) is wanted


@LIBRARY
@pytest.mark.usefixtures("without")
def test_ranges_without_an_offset_each_are_refused(tmp_path: Path) -> None:
    """Before C reads offsets that are not there."""
    (tmp_path / "f").write_bytes(bytes(8))
    out, ones = np.zeros(8, np.uint8), np.ones(4, np.int64)
    with (tmp_path / "f").open("rb") as file, pytest.raises(ValueError, match="1 offsets for 4"):
        read_ranges(file.fileno(), ones[:1], out, ones, ones)


@given(
    st.lists(st.from_regex(rb"-?[0-9]{1,20}\n?", fullmatch=True), min_size=1)
    | st.lists(st.binary(max_size=4), min_size=1)
)
def test_numbers_are_those_of_int_or_left_to_it(texts: list[bytes]) -> None:
    found = decimals(some_rows(texts, 1))
    if found is not None:
        assert found.tolist() == [int(text) for text in texts]
    elif ranges_library() is not None:
        assert not all(re.fullmatch(rb"-?[0-9]{1,18}\n?", text) for text in texts)
