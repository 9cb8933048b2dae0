"""JSON Lines as a source: exact values, blocks that cut lines, bad lines by their place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.errors import ConfigError, IngestError
from hpstore.loaders import Field, open_source
from hpstore.loaders.ingestion import json_lines_source
from hpstore.loaders.ingestion.json_schema import json_value
from tests.unit.test_ingest_sources import check_restart, items_of, plain

OBJECTS: list[dict[str, Any]] = [
    {
        "i": 2**63 - 1 - n,
        "f": 0.1 * n,
        "s": f"né {n}\u2028",
        "flag": n % 2 == 0,
        "l": [n] * (n % 3),
        "v": [n, 0.5],
        "when": "2024-01-01T00:00:00Z",
    }
    for n in range(50)
]


def lines(objects: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in objects)


def write(path: Path, data: bytes) -> Path:
    """Compressed by the ending."""
    if path.suffix == ".zst":
        pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(data)
        return path
    made: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
    }
    path.write_bytes(made.get(path.suffix, bytes)(data))
    return path


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_values_are_exact(tmp_path: Path, ending: str) -> None:
    """Ints beyond a double's, text that looks like a time, ragged and fixed lists."""
    path = write(tmp_path / f"a.jsonl{ending}", lines(OBJECTS))
    source = open_source(path)
    assert source.kind == "jsonl"
    assert source.fields == {
        "i": Field("int64"),
        "f": Field("float64"),
        "s": Field("str"),
        "flag": Field("bool"),
        "l": Field("int64", (None,)),
        "v": Field("float64", (2,)),
        "when": Field("str"),
    }
    assert [plain(item.sample) for item in items_of(source)] == OBJECTS
    check_restart(source)


def test_blocks_cut_lines_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is in the block in which it begins: none twice, none lost, at every block size."""
    data = b"\n" + lines([{"n": n, "s": "x" * (n % 7)} for n in range(9)]) + b"\r\n"
    path = write(tmp_path / "a.jsonl", data + b'{"n": 9, "s": ""}')
    for size in range(1, len(data) + 2):
        monkeypatch.setattr(json_lines_source, "BLOCK_BYTES", size)
        found = [plain(item.sample)["n"] for item in items_of(open_source(path))]
        assert found == list(range(10)), size
    monkeypatch.setattr(json_lines_source, "BLOCK_BYTES", 31)
    check_restart(open_source(path))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a": 1', "it is no JSON"),
        (b'{"a": "\xff"}', "it is no JSON: UnicodeDecodeError"),
        (b"[1]", "no JSON object"),
        (b'{"a": 1, "a": 2}', "the key 'a' comes twice"),
        (b'{"b": 1}', "it lacks 'a'"),
        (b'{"a": null}', "it holds a null: 'a'"),
        (b'{"a": 1, "z": 2}', "it has 'z'"),
        (b'{"a": "text"}', "'a' is 'text', the field has float64"),
        (b'{"a": 9007199254740993}', "which float64 would round"),
        (b'{"a": ' + b"[" * 100_000, "it is no JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "it is no JSON"),
        (b'{"a": ' + b"9" * 400 + b"}", "would round"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    """By its byte, or its line where the file is compressed; the lines round it are read."""
    good = lines([{"a": 0.5}] * json_lines_source.LOOKED_AT)
    for ending, place in [("", f"byte {len(good)}"), (".gz", "line 1001")]:
        path = write(tmp_path / f"a.jsonl{ending}", good + line + b"\n" + lines([{"a": 1}]))
        items = items_of(open_source(path))
        assert said in items[-2].problem
        assert items[-2].name == f"a.jsonl{ending}: {place}"
        assert plain(items[-1].sample) == {"a": 1}


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ([{"a": None}], "'a' is None in the first 1 samples"),
        ([{"a": 1}, {"b": 1}], "'b' is missing in a record"),
        ([{"a": 1}, {"a": "x"}], "int64 and str"),
        ([{"a": 2**100}, {"a": 1}], r"'a' is 1267650600228229401496703205376, .* Field\('json'\)"),
    ],
)
def test_what_no_field_holds_is_refused(
    tmp_path: Path, objects: list[dict[str, Any]], said: str
) -> None:
    """Named, with the way out; another key of the same file can be taken."""
    path = write(tmp_path / "a.jsonl", lines([{**each, "ok": 1} for each in objects]))
    with pytest.raises(ConfigError, match=said):
        _ = open_source(path).fields
    source = open_source(path)
    source.restrict(["ok"], {})
    assert [plain(item.sample) for item in items_of(source)] == [{"ok": 1}] * len(objects)


def test_lists_of_empty_lists_stay_what_they_are(tmp_path: Path) -> None:
    """They had become an empty list. Where a field is an array, such a line is a bad record."""
    odd: list[dict[str, Any]] = [{"a": [[], []]}, {"a": [[1, 2]]}, {"a": []}]
    source = open_source(write(tmp_path / "a.jsonl", lines(odd)))
    assert source.fields == {"a": Field("json")}
    assert [item.sample for item in items_of(source)] == odd
    source.restrict(["a"], {"a": Field("int64", (None, 2))})
    shapes = [np.asarray(item.sample["a"]).shape for item in items_of(source) if item.sample]
    assert shapes == [(2, 0), (1, 2), (0, 2)]  # the writer takes none of two dimensions but (n, 2)


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        ("float32", 2**53 + 1, "'a' is 9007199254740993, which float32 would round"),
        ("bfloat16", [2**53 + 1], "'a' is 9007199254740993, which bfloat16 would round"),
        ("float32", [2**24 + 1, 16777217.0], ""),
        ("float16", [1e9], "a list of which a number is infinite as float16"),
        ("bfloat16", [1e39], "a list of which a number is infinite as bfloat16"),
        ("float32", [1e-3, float("inf"), 2**24], ""),
    ],
)
def test_numbers_are_those_that_a_float_holds(dtype: str, value: Any, said: str) -> None:
    """Larger ints are refused, and what would be infinite; who asks for a smaller float than 64
    bits gets the nearest one, of a whole number, too."""
    made = Field(dtype, (None,) if isinstance(value, list) else ())
    if said:
        with pytest.raises(ConfigError, match=said):
            json_value("a", value, made)
    else:
        assert np.array_equal(np.asarray(json_value("a", value, made)), np.array(value, dtype))


def test_ints_are_floats_where_one_is_a_float(tmp_path: Path) -> None:
    """Scalars and lists; and the user's types come first."""
    path = write(tmp_path / "a.jsonl", lines([{"a": 1, "l": [1]}, {"a": 0.5, "l": [2.5]}]))
    source = open_source(path)
    assert source.fields == {"a": Field("float64"), "l": Field("float64", (1,))}
    assert [plain(item.sample) for item in items_of(source)] == [
        {"a": 1, "l": [1.0]},
        {"a": 0.5, "l": [2.5]},
    ]
    types = {"l": Field("float32", (None,))}
    source.restrict(["l"], types)
    assert source.fields == types
    first = items_of(source)[0].sample
    assert first is not None
    assert np.asarray(first["l"]).dtype == np.float32


def test_empty_files_and_one_object(tmp_path: Path) -> None:
    """No object: said, with what is wrong with the first line."""
    for data, said in [
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b"x\n", "byte 0: it is no"),
    ]:
        with pytest.raises(IngestError, match=said):
            _ = open_source(write(tmp_path / "a.jsonl", data)).fields
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}')
    assert [plain(item.sample) for item in items_of(open_source(path))] == [{"a": 1}]


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_cut_file_is_never_a_shorter_one(tmp_path: Path, ending: str) -> None:
    """What is whole before the cut is read; then a bad record says so."""
    path = write(tmp_path / f"a.jsonl{ending}", lines(OBJECTS))
    whole = path.read_bytes()
    wanted = [plain(item.sample) for item in items_of(open_source(path))]
    for size in range(len(whole) // 2, len(whole), max(1, len(whole) // 20)):
        path.write_bytes(whole)
        source = open_source(path)
        assert source.fields
        path.write_bytes(whole[:size])
        items = items_of(source)
        assert "it cannot be read past line" in items[-1].problem, size
        good = [plain(item.sample) for item in items if not item.problem]
        assert good == wanted[: len(good)]


def test_a_line_above_the_most_is_a_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passed without being held; the lines behind it are read."""
    monkeypatch.setattr(json_lines_source, "LINE_BYTES", 30)
    monkeypatch.setattr(json_lines_source, "_PIECE_BYTES", 7)
    data = lines([{"a": "x"}, {"a": "y" * 100}, {"a": "z"}])
    for ending in ("", ".gz"):
        items = items_of(open_source(write(tmp_path / f"a.jsonl{ending}", data)))
        assert [bool(item.problem) for item in items] == [False, True, False]
        assert "the most of a line" in items[1].problem
