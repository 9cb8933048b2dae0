"""ingest of tables divided into folders: what the folders' names say are columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstore.errors import ConfigError, IngestError
from hpstore.loaders import Dataset, Field, ingest, open_source
from hpstore.pool.pool import Pool
from tests.integration.ingest_cases import make_pool, samples

pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (the extra `parquet`)")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def divided(root: Path) -> Path:
    """By pyarrow's own writer; a value that must be escaped."""
    table = pa.table(
        {"a": range(6), "year": [2020] * 3 + [2021] * 3, "lang": ["é /", "en", "en"] * 2}
    )
    pq.write_to_dataset(table, root, partition_cols=["year", "lang"])
    return root


def test_columns_of_folders_are_fields(pool: Pool, tmp_path: Path) -> None:
    """Whole numbers and text; by the folder and by a pattern; alone, too."""
    root = divided(tmp_path / "t")
    wanted = [
        {"a": i, "year": 2020 + i // 3, "lang": "é /" if i % 3 == 0 else "en"} for i in range(6)
    ]
    for name, where in [("folder", root), ("pattern", f"{root}/**/*.parquet")]:
        report = ingest(pool, name, where)
        assert report.fields == {"a": ("int64", ()), "year": ("int32", ()), "lang": ("str", ())}
        found = [
            {k: v if isinstance(v, str) else int(v) for k, v in sample.items()}
            for sample in samples(pool, name)
        ]
        assert sorted(found, key=lambda row: int(row["a"])) == wanted
    assert ingest(pool, "one", root, fields=["lang"]).samples == 6
    assert sorted(sample["lang"] for sample in samples(pool, "one")) == ["en"] * 4 + ["é /"] * 2
    part = open_source(root / "year=2020")
    assert part.fields == {"a": Field("int64"), "lang": Field("str")}


def test_a_folder_of_nulls_makes_an_optional_field(pool: Pool, tmp_path: Path) -> None:
    """As a null in a column does; where the field is told to have values it is a bad record."""
    root = divided(tmp_path / "t")
    lost = root / "year=2020/lang=__HIVE_DEFAULT_PARTITION__/x.parquet"
    lost.parent.mkdir()
    pq.write_table(pa.table({"a": [9]}), lost)
    ingest(pool, "t", root, shuffle=False)
    found = Dataset(pool, "t").__getitems__(range(7))
    assert [sample["lang"] is None for sample in found] == [sample["a"] == 9 for sample in found]
    told = {"a": Field("int64"), "lang": Field("str")}
    with pytest.raises(IngestError, match=r"lang=__HIVE.*x.parquet: block 0 row 0: .*null: 'lang'"):
        ingest(pool, "told", root, fields=told, shuffle=False)
    assert ingest(pool, "told", root, fields=told, on_error="skip").samples == 6


def test_what_is_no_column_is_refused(pool: Pool, tmp_path: Path) -> None:
    """A file outside the folders' order, a column that the files have too."""
    root = divided(tmp_path / "t")
    pq.write_table(pa.table({"a": [9]}), root / "year=2020/x.parquet")
    with pytest.raises(ConfigError, match=r"is divided by year, other files by year, lang"):
        open_source(root)
    (root / "year=2020/x.parquet").unlink()
    both = tmp_path / "both/a=1"
    both.mkdir(parents=True)
    pq.write_table(pa.table({"a": [9]}), both / "x.parquet")
    with pytest.raises(ConfigError, match="several columns named 'a'"):
        open_source(tmp_path / "both")
