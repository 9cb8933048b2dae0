"""Nulls and names that no record can hold are said, skipped when asked, and lose nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.errors import IngestError
from hpstore.loaders import Dataset, Field, ingest, unfinished_ingests
from hpstore.loaders.ingestion import arrow_source
from hpstore.loaders.ingestion.lance_source import LanceRows
from tests.integration.ingest_cases import Stop, stop_after

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = {
    "lists": lambda: pa.array([[1, 2], None, [3]]),
    "large lists": lambda: pa.array([[1, 2], None, [3]], pa.large_list(pa.int64())),
    "fixed lists": lambda: pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)),
    "lists of fixed lists": lambda: pa.array(
        [[[1, 2]], None, [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int64(), 2))
    ),
    "inside": lambda: pa.array([[1, 2], [None], [3]]),
}
SHAPES: dict[str, tuple[int | None, ...]] = {
    "fixed lists": (2,),
    "lists of fixed lists": (None, 2),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_null_list_is_a_bad_record(pool: hpstore.Pool, tmp_path: Path, name: str) -> None:
    """As a null anywhere else where the field is not optional: named, or left out."""
    column = COLUMNS[name]()
    fields = {"c": Field("int64", SHAPES.get(name, (None,)))}
    pq.write_table(pa.table({"c": column}), tmp_path / "n.parquet")
    with pytest.raises(IngestError, match="holds a null: 'c'"):
        ingest(pool, "s", tmp_path / "n.parquet", fields=fields)
    ingest(pool, "t", tmp_path / "n.parquet", fields=fields, on_error="skip", shuffle=False)
    with Dataset(pool, "t") as found:
        values = [np.asarray(found[i]["c"]).tolist() for i in range(len(found))]
    assert values == [row for row in column.to_pylist() if row and row != [None]]


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "inside"])
@pytest.mark.parametrize("file", ["n.parquet", "n.arrow", "stream.arrow"])
def test_a_column_with_nulls_is_optional(
    pool: hpstore.Pool, tmp_path: Path, name: str, file: str
) -> None:
    """None where the null was, and a column that merely could have one is as ever."""
    column = COLUMNS[name]()
    table = pa.table({"c": column, "x": [1, 2, 3], "e": [[1], [], [2]]})
    if file.endswith(".parquet"):
        pq.write_table(table, tmp_path / file)
    else:
        maker = pa.ipc.new_stream if file == "stream.arrow" else pa.ipc.new_file
        with maker(str(tmp_path / file), table.schema) as out:
            out.write_table(table)
    ingest(pool, "t", tmp_path / file, shuffle=False)
    with Dataset(pool, "t") as found:
        assert [found.fields[n].optional for n in ("c", "x", "e")] == [True, False, False]
        values = [sample["c"] for sample in found.__getitems__(range(3))]
    assert [None if v is None else v.tolist() for v in values] == column.to_pylist()


def test_empty_batches_of_a_stream_are_nothing(pool: hpstore.Pool, tmp_path: Path) -> None:
    schema = pa.schema([("c", pa.list_(pa.int64())), ("f", pa.list_(pa.int64(), 2))])
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as out:
        for rows in (3, 0, 2):
            data: dict[str, Any] = {"c": [[1]] * rows, "f": [[2, 3]] * rows}
            out.write_batch(pa.record_batch(data, schema=schema))
    ingest(pool, "t", tmp_path / "s.arrow")
    with Dataset(pool, "t") as found:
        assert len(found) == 5


def test_names_that_are_no_unicode_are_recorded_with_backslashes(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """Folders of classes, and damaged files that are skipped."""
    root = os.fsencode(tmp_path / "images")
    for folder, files in ((b"cl\xff", (b"a.png", b"\xfe.png")), (b"good", (b"b.png",))):
        os.makedirs(os.path.join(root, folder))
        for name in files:
            with open(os.path.join(root, folder, name), "wb") as file:
                file.write(b"" if name == b"\xfe.png" else b"x")
    report = ingest(pool, "s", tmp_path / "images", check_images=False)
    with Dataset(pool, "s") as found:
        assert len(found) == report.samples == 3
        assert found.metadata["classes"] == ["cl\\udcff", "good"]
    os.unlink(os.path.join(root, b"good", b"b.png"))
    os.symlink(b"/nowhere", os.path.join(root, b"good", b"\xfd.png"))
    skipped = ingest(pool, "t", tmp_path / "images", check_images=False, on_error="skip").skipped
    assert [one.name for one in skipped] == ["good/\\udcfd.png"]


def late_null(path: Path, at: int, count: int = 6000) -> Any:
    """A table of twelve row groups whose column `c` has one null."""
    values = [None if n == at else n for n in range(count)]
    table = pa.table({"c": pa.array(values, pa.int64()), "n": list(range(count))})
    pq.write_table(table, path, row_group_size=500)
    return values


def batches_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """Blocks and columns, as they are read."""
    seen: list[tuple[int, tuple[str, ...]]] = []
    plain = arrow_source._batches

    def counted(arrow: Any, block: Any, names: Any) -> Any:
        seen.append((block.part, tuple(names)))
        return plain(arrow, block, names)

    monkeypatch.setattr(arrow_source, "_batches", counted)
    return seen


def test_columns_without_nulls_are_read_once(
    pool: hpstore.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the beginnings of three blocks, by which it is decided."""
    late_null(tmp_path / "n.parquet", -1)
    seen = batches_read(monkeypatch)
    ingest(pool, "t", tmp_path / "n.parquet")
    assert seen[:3] == [(0, ("c", "n")), (5, ("c", "n")), (11, ("c", "n"))]
    assert sorted(block for block, _ in seen[3:]) == list(range(12))
    with Dataset(pool, "t") as found:
        assert not any(field.optional for field in found.fields.values())


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_null_that_comes_late_makes_the_column_optional(
    pool: hpstore.Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture, shuffle: bool
) -> None:
    """What was written before it goes, and a line says so."""
    values = late_null(tmp_path / "n.parquet", 3777)
    small: dict[str, Any] = {"shard_bytes": 1 << 14, "unit_bytes": 1 << 12}
    ingest(pool, "t", tmp_path / "n.parquet", shuffle=shuffle, window_bytes=1 << 18, **small)
    (line,) = [record.getMessage() for record in caplog.records if "begins again" in record.msg]
    assert "column 'c'" in line
    assert "n.parquet: block 7" in line
    with Dataset(pool, "t") as found:
        assert [found.fields[name].optional for name in ("c", "n")] == [True, False]
        rows = found.__getitems__(range(len(found)))
        parts = {part.nonce for part in found.manifest.parts}
    got = sorted((int(row["n"]), None if row["c"] is None else int(row["c"])) for row in rows)
    assert got == list(enumerate(values))
    stored = {key.split("/")[2] for key in pool.list("data/t/") if "/" in key[len("data/t/") :]}
    assert parts <= stored
    assert len(stored) <= len(parts) + 1  # nothing of the first attempt stays


def test_a_run_that_is_resumed_meets_a_late_null_too(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Cut short before the null: the fields in the journal are those that were assumed."""
    values = late_null(tmp_path / "n.parquet", 5300)
    small: dict[str, Any] = {"shard_bytes": 1 << 13, "unit_bytes": 1 << 12, "shuffle": False}
    with pytest.raises(Stop):
        ingest(pool, "t", tmp_path / "n.parquet", progress=stop_after(4000), **small)
    assert unfinished_ingests(pool)
    report = ingest(pool, "t", tmp_path / "n.parquet", **small)
    assert report.samples == len(values)
    with Dataset(pool, "t") as found:
        assert found[5300]["c"] is None
        assert int(found[5299]["c"]) == 5299


def test_a_null_where_the_user_says_there_is_none_is_a_bad_record(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """Late or not."""
    late_null(tmp_path / "n.parquet", 3777)
    fields = {"c": Field("int64"), "n": Field("int64")}
    with pytest.raises(IngestError, match="holds a null: 'c'"):
        ingest(pool, "t", tmp_path / "n.parquet", fields=fields)


def test_columns_of_lance_are_read_once_or_begun_again(
    pool: hpstore.Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of Parquet: the first batches of three fragments are looked at, a null that comes later
    makes the ingest begin again."""
    lance = pytest.importorskip("lance", reason="needs pylance (the extra `lance`)")
    rows = 3000
    for name, late in (("none", -1), ("late", 1777)):
        values = [None if n == late else n for n in range(rows)]
        table = pa.table({"c": pa.array(values, pa.int64()), "n": list(range(rows))})
        lance.write_dataset(table, str(tmp_path / f"{name}.lance"), max_rows_per_file=500)
        caplog.clear()
        ingest(pool, name, tmp_path / f"{name}.lance")
        lines = [record for record in caplog.records if "begins again" in record.msg]
        assert len(lines) == (late >= 0)
        with Dataset(pool, name) as found:
            assert found.fields["c"].optional == (late >= 0)
            got = {int(s["n"]): s["c"] for s in found.__getitems__(range(rows))}
        assert [None if got[n] is None else int(got[n]) for n in range(rows)] == values


def test_of_lance_a_few_batches_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lance = pytest.importorskip("lance", reason="needs pylance (the extra `lance`)")
    table = pa.table({"c": list(range(3000)), "n": list(range(3000))})
    lance.write_dataset(table, str(tmp_path / "t.lance"), max_rows_per_file=500)
    source = LanceRows(tmp_path / "t.lance")
    looked: list[tuple[int, tuple[str, ...]]] = []
    plain = LanceRows._readable

    def counted(self: LanceRows, block: int, names: Any) -> Any:
        looked.append((block, tuple(names)))
        return plain(self, block, names)

    monkeypatch.setattr(LanceRows, "_readable", counted)
    assert not any(field.optional for field in source.fields.values())
    assert looked == [(0, ("c", "n")), (2, ("c", "n")), (5, ("c", "n"))]
