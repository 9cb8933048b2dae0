"""Nulls and names that no record can hold are said, skipped when asked, and lose nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.errors import IngestError
from hpstore.loaders import Dataset, Field, ingest

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
