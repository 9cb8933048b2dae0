"""Rows by columns are the records one by one: values, names, sizes, windows and parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpstore
from hpstore.loaders import Dataset, ingest
from hpstore.loaders.dataset.dataset_manifest import DatasetPart
from hpstore.loaders.ingestion.arrow_source import ArrowTables
from hpstore.loaders.ingestion.part_committer import PartsWriter
from hpstore.loaders.ingestion.sample_source import BLOCK_SHIFT, BlockwiseSource
from hpstore.loaders.ingestion.source_rows import (
    ColumnRows,
    ItemRows,
    SourceItem,
    SourceRows,
    gathered,
    grouped,
    pieces,
)
from hpstore.loaders.ingestion.value_sizes import sample_bytes
from hpstore.loaders.ingestion.write_order import ITEM_BYTES, BlockRecords, IngestPosition

COLUMNS: dict[str, list[Any]] = {
    "n": [1, 2, 3, None, 5],
    "x": [0.5, -1.0, 2.0, 3.0, 1e300],
    "s": ["a", "", "größer 😀", None, "x" * 300],
    "b": [b"", b"\xff\0", None, b"abc", b"d" * 5000],
    "list": [[1, 2], [], [3], [4, 5, 6], [7]],
    "fixed": [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]],
    "words": [["ä"], [], ["b", "c"], ["d"], []],
    "meta": [{"k": "v"}, {"k": "w"}, {"k": "x"}, {"k": "y"}, {"k": None}],
}


def table_file(root: Path, chosen: Sequence[str], rows: Sequence[int]) -> Path:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
    parquet = pytest.importorskip("pyarrow.parquet")
    types = {
        "n": pa.int64(),
        "x": pa.float64(),
        "s": pa.string(),
        "b": pa.binary(),
        "list": pa.list_(pa.int32()),
        "fixed": pa.list_(pa.float32(), 2),
        "words": pa.list_(pa.string()),
        "meta": pa.struct({"k": pa.string()}),
    }
    made = {n: pa.array([COLUMNS[n][i] for i in rows], types[n]) for n in chosen}
    path = root / "t.parquet"
    parquet.write_table(pa.table(made), path, row_group_size=7)
    return path


@given(
    chosen=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, unique=True),
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    start=st.integers(0, 8),
)
def test_columns_of_a_table_are_its_records(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[str], rows: list[int], start: int
) -> None:
    """Every kind of column, with nulls, from any record on: values, origins, names, sizes."""
    source = ArrowTables(table_file(tmp_path_factory.mktemp("t"), chosen, rows))
    at = 0
    for block in range(source.blocks):
        for read in source.read_rows(block, start):
            assert isinstance(read, ColumnRows)
            for row, item in enumerate(read.items()):
                number = item.origin & 0xFFFFFFFF
                wanted = {name: COLUMNS[name][rows[7 * block + number]] for name in chosen}
                assert item.sample is not None
                assert {n: plain(v) for n, v in item.sample.items()} == wanted
                assert item.name == f"t.parquet: block {block} row {number}"
                assert read.nbytes[row] == sample_bytes(item.sample)
                at += 1
    assert at == sum(max(0, min(7, len(rows) - 7 * b) - start) for b in range(source.blocks))


def plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


SIZES = st.lists(st.integers(0, 400), max_size=60)


def some_rows(sizes: Sequence[int], first: int, *, by_columns: bool) -> SourceRows:
    """Records of these sizes, whose origins count from `first`."""
    values: list[object] = [bytes(size) for size in sizes]
    origins = np.arange(first, first + len(sizes))
    if by_columns:
        return ColumnRows({"b": values}, origins, lambda row: f"r{first + row}")
    return ItemRows(
        [
            SourceItem(name=f"r{first + i}", origin=first + i, sample={"b": value})
            for i, value in enumerate(values)
        ]
    )


@given(sizes=SIZES, most=st.integers(1, 2000), by_columns=st.booleans())
def test_pieces_are_all_rows_and_bounded(sizes: list[int], most: int, by_columns: bool) -> None:
    found = list(pieces(some_rows(sizes, 0, by_columns=by_columns), most))
    rows = [item.name for _, piece in found for item in piece.items()]
    assert rows == [f"r{i}" for i in range(len(sizes))]
    at = 0
    for place, piece in found:
        assert place == at
        assert len(piece) == 1 or piece.nbytes.sum() <= most or not sizes
        at += len(piece)


@given(
    groups=st.lists(st.tuples(SIZES, st.booleans()), max_size=6),
    most=st.integers(1, 3000),
    count=st.integers(1, 50),
)
def test_small_reads_are_put_together_in_their_order(
    groups: list[tuple[list[int], bool]], most: int, count: int
) -> None:
    reads, first = list[SourceRows](), 0
    for sizes, by_columns in groups:
        if sizes:
            reads.append(some_rows(sizes, first, by_columns=by_columns))
            first += len(sizes)
    made = list(gathered(reads, rows=count, nbytes=most))
    items = [item for one in made for item in one.items()]
    assert [item.name for item in items] == [f"r{i}" for i in range(first)]
    assert [item.origin for item in items] == list(range(first))
    assert len(made) <= len(reads)


def test_a_bad_record_stands_by_itself() -> None:
    """Only the records round it are there by columns."""
    items = [
        SourceItem(name=str(i), origin=i, sample=None if i == 3 else {"i": i}, problem="")
        for i in range(6)
    ]
    made = list(grouped(items))
    assert [len(one) for one in made] == [3, 1, 2]
    assert [one.columns is None for one in made] == [False, True, False]


class Mixed(BlockwiseSource):
    """Blocks of reads with other sizes, some by columns, some one by one, some bad."""

    kind = where = "mixed"

    def __init__(self, blocks: Sequence[Sequence[int]], seed: int) -> None:
        self._blocks, self._seed = blocks, seed
        self.blocks = len(blocks)

    def fingerprint(self) -> str:
        return ""

    def item(self, block: int, number: int) -> SourceItem:
        size = self._blocks[block][number]
        bad = size % 13 == 12
        return SourceItem(
            name=f"{block}/{number}",
            origin=block << BLOCK_SHIFT | number,
            sample=None if bad else {"b": bytes(size)},
            problem="bad" if bad else "",
        )

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        for number in range(start, len(self._blocks[block])):
            yield self.item(block, number)

    def read_rows(self, block: int, start: int) -> Iterator[SourceRows]:
        rng = random.Random(self._seed)
        for rows in grouped(self.read_block(block, start), rows=rng.randint(1, 9)):
            columns = rows.columns
            if columns is None or rng.random() < 0.3:
                yield rows
            else:
                names = [item.name for item in rows.items()]
                yield ColumnRows(columns, rows.origins, names.__getitem__)


@given(
    blocks=st.lists(SIZES, max_size=4),
    seed=st.none() | st.integers(0, 3),
    window=st.sampled_from([1, 3000, 1 << 20]),
    most=st.sampled_from([1, 700, 1 << 20]),
    cut=st.integers(0, 100),
)
def test_windows_are_those_of_records_one_by_one(
    blocks: list[list[int]], seed: int | None, window: int, most: int, cut: int
) -> None:
    """Against the plain way to fill windows, record by record; pieces change no order."""
    source = Mixed(blocks, seed or 0)
    records = BlockRecords(source, seed, window)
    order = [int(records._blocks.indices(0, at, at + 1)[0]) for at in range(len(blocks))]
    window_bytes = records._window_bytes
    wanted: list[int] = []
    held, sizes, number = 0, list[int](), 0
    flat = [(block, n) for block in order for n in range(len(blocks[block]))]
    for place, (block, n) in enumerate(flat):
        item = source.item(block, n)
        sizes.append(item.origin)
        held += ITEM_BYTES + (sample_bytes(item.sample) if item.sample else 0)
        if held >= window_bytes or place == len(flat) - 1:
            wanted += [sizes[i] for i in records._mixed(number, len(sizes))]
            held, sizes, number = 0, [], number + 1
    found, places = list[SourceItem](), [IngestPosition()]
    for placed in records.read_rows(IngestPosition(), most):
        assert placed.first == len(found)
        found += placed.rows.items()
        places += [placed.after(count) for count in range(1, len(placed.rows) + 1)]
    assert [item.origin for item in found] == wanted
    assert all(
        item == source.item(item.origin >> BLOCK_SHIFT, item.origin & 0xFFFF) for item in found
    )
    at = min(cut, len(wanted))
    rest = [i.origin for p in records.read_rows(places[at], most) for i in p.rows.items()]
    assert rest == wanted[at:]


@pytest.mark.parametrize("shuffle", [True, False])
def test_parts_end_behind_the_same_records_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    """The same table twice, once with every batch refused: equal parts, sizes and fingerprints."""
    path = table_file(tmp_path, ["n", "s", "b", "list", "words"], [0, 1, 2, 3, 4] * 40)
    disks = [tmp_path / f"disk{i}" for i in range(3)]
    sizes: dict[str, Any] = {"shard_bytes": 1 << 14, "unit_bytes": 1 << 12, "shuffle": shuffle}
    with hpstore.create(disks, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        first = ingest(pool, "rows", path, **sizes)
        monkeypatch.setattr(PartsWriter, "write_rows", lambda *_: False)
        second = ingest(pool, "singly", path, **sizes)
        parts: list[tuple[DatasetPart, ...]] = []
        for name in ("rows", "singly"):
            with Dataset(pool, name) as data:
                parts.append(data.manifest.parts)
    assert len(parts[0]) > 5
    assert [part.rows for part in parts[0]] == [part.rows for part in parts[1]]
    assert first.fingerprint == second.fingerprint
    assert first.bytes == second.bytes
