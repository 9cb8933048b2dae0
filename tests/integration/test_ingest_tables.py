"""ingest of Parquet and Arrow files: every kind of column, nulls, damage, order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.errors import ConfigError, IngestError
from hpstore.loaders import Dataset, Field, ingest, open_source
from hpstore.loaders.ingestion.sample_source import BlockwiseSource
from hpstore.pool.pool import Pool

pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (the extra `parquet`)")

ROWS = 100


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    devices = [tmp_path / f"disk{i}" for i in range(3)]
    with hpstore.create(devices, data=2, parity=1, config=tmp_path / "pool.toml") as made:
        yield made


def columns(rows: int = ROWS) -> Any:  # Any: pyarrow ships no types
    n = range(rows)
    return pa.table(
        {
            "i": pa.array(n, pa.int32()),
            "f": pa.array([i / 2 for i in n]),
            "flag": pa.array([i % 2 == 0 for i in n]),
            "s": pa.array([f"né {i}" for i in n]),
            "b": pa.array([b"x" * i for i in n], pa.binary()),
            "when": pa.array([i * 1000 for i in n], pa.timestamp("us")),
            "l": pa.array([[float(i)] * (i % 4) for i in n], pa.list_(pa.float32())),
            "v": pa.array([[i, i + 1, i + 2] for i in n], pa.list_(pa.int16(), 3)),
            "kind": pa.array([str(i % 3) for i in n]).dictionary_encode(),
            "image": pa.array(
                [{"bytes": bytes([i]), "path": None} for i in n],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
        }
    )


def write(path: Path, table: Any) -> Path:
    """As .parquet in several row groups, .arrow in several batches, or a stream."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=30)
        return path
    maker = pa.ipc.new_stream if path.stem == "stream" else pa.ipc.new_file
    with maker(str(path), table.schema) as writer:
        for batch in table.to_batches(30):
            writer.write_batch(batch)
    return path


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "stream.arrow"])
def test_every_kind_of_column_is_kept(pool: Pool, tmp_path: Path, name: str) -> None:
    """All values of all rows, in the file's order; the schema gives the fields."""
    path = write(tmp_path / name, columns())
    report = ingest(pool, "t", path, shuffle=False)
    assert report.fields["l"] == ("float32", (None,))
    assert report.fields["v"] == ("int16", (3,))
    with Dataset(pool, "t") as found:
        assert len(found) == ROWS
        for i, sample in enumerate(found.__getitems__(list(range(ROWS)))):
            said = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in sample.items()}
            assert said == {
                "i": i,
                "f": i / 2,
                "flag": i % 2 == 0,
                "s": f"né {i}",
                "b": b"x" * i,
                "when": i * 1000,
                "l": [float(i)] * (i % 4),
                "v": [i, i + 1, i + 2],
                "kind": str(i % 3),
                "image": bytes([i]),
            }


def test_blocks_are_read_from_any_row(tmp_path: Path) -> None:
    """A row group from record n on is the rest of it: what a resumed ingest asks for."""
    source = open_source(write(tmp_path / "t.parquet", columns()))
    assert isinstance(source, BlockwiseSource)
    assert (source.blocks, source.length) == (4, ROWS)
    whole = [item.name for item in source.read_block(1, 0)]
    for start in (0, 1, 29, 30):
        assert [item.name for item in source.read_block(1, start)] == whole[start:]


def test_a_shuffled_table_has_every_row_once(pool: Pool, tmp_path: Path) -> None:
    """Row groups permuted, rows mixed: said as what it is."""
    report = ingest(pool, "t", write(tmp_path / "t.parquet", columns()), fields=["i"])
    with Dataset(pool, "t") as found:
        order = found.scalars("i", np.arange(ROWS)).tolist()
    assert sorted(order) == list(range(ROWS))
    assert order != sorted(order)
    assert report.order["kind"] == "windows"


def test_nulls_are_bad_records_by_file_and_row(pool: Pool, tmp_path: Path) -> None:
    """A null in a column that is said not to be optional, and one inside a list; columns that are
    not taken may have some."""
    table = pa.table(
        {
            "a": [1, None, 3, 4],
            "l": [[1], [2], [None], [4]],
            "s": ["x", "y", "z", None],
            "x": [None, 1, 1, 1],
        }
    )
    write(tmp_path / "t.parquet", table)
    fields = {"a": Field("int64"), "l": Field("int64", (None,)), "s": Field("str")}
    with pytest.raises(IngestError, match=r"t.parquet: block 0 row 1: it holds a null: 'a'"):
        ingest(pool, "t", tmp_path / "t.parquet", fields=fields, shuffle=False)
    report = ingest(pool, "t", tmp_path / "t.parquet", fields=fields, on_error="skip")
    assert sorted(s.problem for s in report.skipped) == [
        "it holds a null: 'a'",
        "it holds a null: 'l'",
        "it holds a null: 's'",
    ]
    with Dataset(pool, "t") as found:
        assert found.scalars("a", np.arange(1)).tolist() == [1]


def test_a_damaged_file_is_named_and_the_others_are_read(pool: Pool, tmp_path: Path) -> None:
    """A cut footer: a bad record by the file's name."""
    root = tmp_path / "in"
    root.mkdir()
    for number in range(3):
        write(root / f"{number}.parquet", columns(10))
    cut = root / "1.parquet"
    cut.write_bytes(cut.read_bytes()[:-7])
    with pytest.raises(IngestError, match=r"bad record 1.parquet: it cannot be read"):
        ingest(pool, "t", root, shuffle=False)
    report = ingest(pool, "t", root, on_error="skip")
    assert report.samples == 20
    assert sorted(s.name for s in report.skipped) == ["1.parquet"]


def test_columns_that_no_field_holds_are_named(pool: Pool, tmp_path: Path) -> None:
    """A map, a list of bytes; without them the rest is taken."""
    table = pa.table({"a": [1, 2], "deep": [[b"x"], [b"y"]]})
    write(tmp_path / "t.parquet", table)
    with pytest.raises(ConfigError, match="column 'deep' is list"):
        ingest(pool, "t", tmp_path / "t.parquet")
    assert ingest(pool, "t", tmp_path / "t.parquet", fields=["a"]).samples == 2
    with pytest.raises(ConfigError, match="has no 'b'"):
        ingest(pool, "u", tmp_path / "t.parquet", fields=["b"])
