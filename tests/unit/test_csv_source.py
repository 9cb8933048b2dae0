"""CSV as a source: what is in the text is in the samples, bad rows by their number."""

from __future__ import annotations

import csv
import gzip
import math
from pathlib import Path

import pytest

from hpstore.errors import ConfigError, IngestError
from hpstore.loaders import Field, open_source
from hpstore.loaders.ingestion import csv_source
from tests.unit.test_ingest_sources import check_restart, items_of, plain

pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")

ROWS = [
    {
        "n": str(2**62 + n),
        "f": f"{n}.5",
        "flag": str(n % 2 == 0),
        "zip": f"00{n}",
        "s": f'a,"é\n{n}',
    }
    for n in range(20)
]


def write(path: Path, rows: list[dict[str, str]], delimiter: str = ",") -> Path:
    """By the standard library's writer."""
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("b.csv", ";")])
def test_values_are_those_of_the_text(tmp_path: Path, name: str, delimiter: str) -> None:
    """Ints, floats, booleans; codes with zeros in front, quotes and new lines stay text."""
    path = write(tmp_path / name, ROWS, delimiter)
    source = open_source(path, source_options={"delimiter": ";"} if delimiter == ";" else None)
    assert source.kind == "csv"
    dtypes = {field: made.dtype for field, made in (source.fields or {}).items()}
    assert dtypes == {"n": "int64", "f": "float64", "flag": "bool", "zip": "str", "s": "str"}
    assert [plain(item.sample) for item in items_of(source)] == [
        {"n": 2**62 + n, "f": n + 0.5, "flag": n % 2 == 0, "zip": f"00{n}", "s": f'a,"é\n{n}'}
        for n in range(20)
    ]
    check_restart(source)


def test_bad_rows_are_named_in_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few or many values, no number, no UTF-8: by row, the header the first; in small blocks
    that must grow, too."""
    looked_at = 50  # all rows are read once for each, below
    monkeypatch.setattr(csv_source, "LOOKED_AT", looked_at)
    head = b"a,b\n" + b"1,x\n" * looked_at
    bad = b"2\nx,y\n3,y,z\n4,\xff\n07,u\n,u\n" + b"5," + b"v" * 5000 + b"\n6\n"
    path = tmp_path / "a.csv"
    path.write_bytes(head + bad)
    problems: list[str] = []
    for nbytes in (1 << 20, 64):
        monkeypatch.setattr(csv_source, "_BLOCK_BYTES", nbytes)
        items = items_of(open_source(path))[looked_at:]
        assert [item.name for item in items] == [f"a.csv row {n}" for n in range(52, 60)]
        assert plain(items[6].sample) == {"a": 5, "b": "v" * 5000}
        assert problems in ([], [item.problem for item in items])
        problems = [item.problem for item in items]
    for problem, said in zip(
        problems,
        ["1 values", "'x', the field has int64", "3 values", "UTF-8", "'07'", "empty", "", "1 val"],
        strict=True,
    ):
        assert said in problem
    check_restart(open_source(path))


def test_numbers_of_which_some_are_empty_are_optional(tmp_path: Path) -> None:
    """As text they are empty texts; as numbers that all have a value one is a bad record."""
    path = write(tmp_path / "a.csv", [{"a": "1", "b": "x"}, {"a": "", "b": ""}])
    source = open_source(path)
    assert source.fields == {"a": Field("int64", optional=True), "b": Field("str")}
    source.restrict(["a", "b"], dict(source.fields))
    wanted = [{"a": 1, "b": "x"}, {"a": None, "b": ""}]
    assert [plain(item.sample) for item in items_of(source)] == wanted
    source.restrict(["b"], {"b": Field("str", optional=True)})
    assert [plain(item.sample) for item in items_of(source)] == [{"b": "x"}, {"b": None}]
    source.restrict(["a"], {"a": Field("int64")})
    assert [item.problem != "" for item in items_of(source)] == [False, True]
    source = open_source(path)
    source.restrict(["a"], {"a": Field("str")})
    assert [plain(item.sample) for item in items_of(source)] == [{"a": "1"}, {"a": ""}]
    source.restrict(["a"], {"a": Field("float32", (2,))})
    with pytest.raises(ConfigError, match="'a': a value of CSV is a number or text"):
        _ = source.fields


def test_files_of_one_table_have_one_header(tmp_path: Path) -> None:
    """Another header, a column twice, no row, an empty and a cut file: named."""
    write(tmp_path / "a.csv", [{"a": "1"}])
    write(tmp_path / "b.csv", [{"b": "1"}])
    with pytest.raises(IngestError, match=r"b.csv has the columns \['b'\]"):
        _ = open_source(tmp_path / "*.csv").fields
    for data, said in [
        (b"a,a\n1,2\n", "several columns named 'a'"),
        (b"a,b\n", "no row"),
        (b"", "cannot be read"),
    ]:
        (tmp_path / "c.csv").write_bytes(data)
        with pytest.raises((ConfigError, IngestError), match=said):
            _ = open_source(tmp_path / "c.csv").fields
    whole = gzip.compress(write(tmp_path / "d", ROWS).read_bytes())
    (tmp_path / "d.csv.gz").write_bytes(whole)
    source = open_source(tmp_path / "d.csv.gz")
    assert source.fields
    (tmp_path / "d.csv.gz").write_bytes(whole[:-9])
    assert "it cannot be read past row" in items_of(source)[-1].problem


@pytest.mark.parametrize(
    "text", ['a,b\n1,x\n2,"y\n3,z\n', 'a,b\n1,x\n2,"', 'a\nx\n"y\n', 'a,b\n1,x\n"2,']
)
def test_a_quote_that_is_open_at_the_end_is_a_bad_record(tmp_path: Path, text: str) -> None:
    """It had taken what follows for its value; the same text with the quote closed is one row."""
    path = tmp_path / "a.csv"
    path.write_text(text)
    problems = [item.problem for item in items_of(open_source(path))]
    assert problems == ["", "a quote in it is not closed"]
    path.write_text(text + '"' + ",c" * (text.endswith('"2,')))
    items = items_of(open_source(path))
    assert [item.problem for item in items[:1]] == [""]
    assert "quote" not in items[-1].problem


def test_whole_numbers_are_never_rounded(tmp_path: Path) -> None:
    """A column of floats with an int that no float64 is stays text; later such an int is bad."""
    big = str(2**53 + 1)
    path = write(tmp_path / "a.csv", [{"a": big, "b": "1.5"}, {"a": "0.5", "b": "2"}])
    source = open_source(path)
    assert source.fields == {"a": Field("str"), "b": Field("float64")}
    source.restrict(["a"], {"a": Field("float64")})
    first, second = items_of(source)
    assert first.problem == f"column 'a' is {big}, which float64 would round"
    assert second.sample == {"a": 0.5}


def test_long_ids_and_minus_zero_are_kept(tmp_path: Path) -> None:
    """Whole numbers beyond 64 bits are text, among floats too; a uint64 is asked for by name."""
    high = str(2**64 - 1)
    rows = [{"a": high, "b": "-0", "c": high}, {"a": "7", "b": "2", "c": "0.5"}]
    source = open_source(write(tmp_path / "a.csv", rows))
    assert source.fields == {"a": Field("str"), "b": Field("float64"), "c": Field("str")}
    first = items_of(source)[0].sample
    assert first is not None
    assert math.copysign(1, float(str(first["b"]))) == -1
    source.restrict(["a"], {"a": Field("uint64")})
    assert [item.sample for item in items_of(source)] == [{"a": 2**64 - 1}, {"a": 7}]


def test_a_first_row_may_be_larger_than_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_source, "_BLOCK_BYTES", 64)
    path = write(tmp_path / "a.csv", [{"a": "1", "b": "v" * 5000}])
    assert [plain(item.sample) for item in items_of(open_source(path))] == [
        {"a": 1, "b": "v" * 5000}
    ]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", ROWS)
    with pytest.raises(ConfigError, match="did you mean 'delimiter'"):
        open_source(path, source_options={"delimeter": ";"})
    with pytest.raises(ConfigError, match="not one ASCII"):
        open_source(path, source_options={"delimiter": ";;"})
    with pytest.raises(ConfigError, match="another meaning"):
        open_source(path, source_options={"delimiter": '"'})
    with pytest.raises(ConfigError, match="options: none"):
        open_source([{"a": 1}], source_options={"delimiter": ";"})
