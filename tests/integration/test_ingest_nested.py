"""Dicts, lists, texts and None of Python, Arrow, Parquet and Hugging Face become fields of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hpstore
from hpstore.errors import ConfigError, IngestError
from hpstore.loaders import Dataset, Field, ingest
from hpstore.loaders.ingestion.infer_fields import infer_fields
from tests.property.test_field_kinds import TEXTS, pools

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CHAT = [{"role": "user", "content": "né?"}, {"role": "assistant", "content": "yes"}]
INFERRED: dict[str, tuple[list[Any], Field]] = {
    "numbers or None": ([1, None, 3], Field("int64", optional=True)),
    "texts or None": ([None, "a"], Field("str", optional=True)),
    "arrays or None": (
        [np.zeros(3, np.float32), None],
        Field("float32", (3,), optional=True),
    ),
    "lists of texts": ([["a"], []], Field("str", (None,))),
    "lists of numbers": ([[1, 2], [], [3]], Field("int64", (None,))),
    "lists of floats": ([[1, 2.5]], Field("float64", (None,))),
    "lists of bools": ([[True], [False]], Field("bool", (None,))),
    "lists of endless ints": ([[2**70]], Field("json")),
    "empty lists": ([[], []], Field("json")),
    "dicts": ([{"a": 1}, {"b": [None]}], Field("json")),
    "dicts or None": ([{"a": 1}, None], Field("json", optional=True)),
    "texts and lists": (["a", ["b"]], Field("json")),
    "lists in lists": ([[[1], [2, 3]]], Field("json")),
    "chats": ([CHAT, CHAT[:1]], Field("chat")),
    "what is no chat": ([CHAT, [{"role": 3}]], Field("json")),
}


@pytest.mark.parametrize("name", INFERRED)
def test_fields_are_inferred(name: str) -> None:
    values, wanted = INFERRED[name]
    assert infer_fields([{"x": value} for value in values]) == {"x": wanted}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([None, None], "is None in the first 2 samples"),
        ([{"a": np.zeros(2)}], r"\['a'\] is a ndarray, which is no JSON"),
        ([{"a": float("nan")}], "nan, which is no JSON"),
        ([[b"x"]], r"\[0\] is a bytes"),
    ],
)
def test_what_no_field_holds_is_said_by_its_path(values: list[Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        infer_fields([{"x": value} for value in values])


SAMPLES: list[dict[str, Any]] = [
    {"id": 1, "tags": ["a", "é"], "meta": {"n": 2**60, "deep": [{"x": None}]}, "age": None},
    {"id": 2, "tags": [], "meta": {"n": -1, "deep": []}, "age": 7},
    {"id": 3, "tags": ["c"], "meta": None, "age": 8},
]


def rows(pool: hpstore.Pool) -> list[dict[str, Any]]:
    with Dataset(pool, "t") as found:
        samples = found.__getitems__(range(len(found)))
    return [
        {name: v.tolist() if hasattr(v, "tolist") else v for name, v in sample.items()}
        for sample in samples
    ]


def test_python_dicts_are_ingested_without_a_word() -> None:
    with pools() as pool:
        ingest(pool, "t", SAMPLES, shuffle=False)
        assert rows(pool) == SAMPLES
        with Dataset(pool, "t") as found:
            assert found.fields["age"] == Field("int64", optional=True)


@pytest.mark.parametrize("file", ["t.parquet", "t.arrow"])
def test_nested_tables_are_ingested(tmp_path: Path, file: str) -> None:
    """Structs, lists of texts, chats and nulls; empty lists alone make no column optional."""
    more = [{**sample, "chat": CHAT[: n + 1]} for n, sample in enumerate(SAMPLES)]
    table = pa.Table.from_pylist(more)
    if file == "t.parquet":
        pq.write_table(table, tmp_path / file, row_group_size=2)
    else:
        with pa.ipc.new_file(str(tmp_path / file), table.schema) as out:
            out.write_table(table)
    with pools() as pool:
        ingest(pool, "t", tmp_path / file, shuffle=False)
        assert rows(pool) == more
        with Dataset(pool, "t") as found:
            assert dict(found.fields) == {
                "id": Field("int64"),
                "tags": Field("str", (None,)),
                "meta": Field("json", optional=True),
                "age": Field("int64", optional=True),
                "chat": Field("chat"),
            }


def test_a_null_among_texts_and_nan_in_a_struct_are_bad_records(tmp_path: Path) -> None:
    table = pa.table({"t": [["a"], [None], ["b"]], "s": [{"x": 1.0}, {"x": 2.0}, {"x": np.nan}]})
    pq.write_table(table, tmp_path / "t.parquet")
    with pools() as pool:
        with pytest.raises(IngestError, match=r"field 't' \[0\] is a NoneType"):
            ingest(pool, "t", tmp_path / "t.parquet", shuffle=False)
        report = ingest(pool, "t", tmp_path / "t.parquet", on_error="skip", resume=False)
        assert len(report.skipped) == 2
        assert rows(pool) == [{"t": ["a"], "s": {"x": 1.0}}]


ROW = st.fixed_dictionaries(
    {
        "n": st.none() | st.integers(-(2**63), 2**63 - 1),
        "t": st.none() | TEXTS,
        "b": st.none() | st.binary(max_size=9),
        "l": st.none() | st.lists(st.integers(-9, 9), max_size=3),
        "ts": st.none() | st.lists(TEXTS, max_size=3),
        "s": st.none() | st.fixed_dictionaries({"x": st.none() | TEXTS, "y": st.integers(0, 9)}),
    }
)
SCHEMA = [
    ("n", pa.int64()),
    ("t", pa.string()),
    ("b", pa.binary()),
    ("l", pa.list_(pa.int64())),
    ("ts", pa.list_(pa.string())),
    ("s", pa.struct([("x", pa.string()), ("y", pa.int64())])),
]


@given(st.lists(ROW, min_size=1, max_size=8), st.sampled_from(["t.parquet", "t.arrow"]))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_table_comes_back(tmp_path: Path, wanted: list[dict[str, Any]], file: str) -> None:
    table = pa.Table.from_pylist(wanted, pa.schema(SCHEMA))
    if file == "t.parquet":
        pq.write_table(table, tmp_path / file, row_group_size=3)
    else:
        with pa.ipc.new_file(str(tmp_path / file), table.schema) as out:
            out.write_table(table, 3)
    with pools() as pool:
        ingest(pool, "t", tmp_path / file, shuffle=False)
        assert rows(pool) == wanted
        with Dataset(pool, "t") as found:
            for name in wanted[0]:
                assert found.fields[name].optional is any(row[name] is None for row in wanted)
