"""JSON Lines of chats, objects, lists and nulls, as data of language models are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpstore.errors import IngestError
from hpstore.loaders import Dataset, Field, ingest
from hpstore.pool.pool import Pool
from tests.integration.data_sets import make_pool

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "é"}]
ROWS: list[dict[str, Any]] = [
    {"messages": TALK, "meta": {"n": 2**70, "l": [1, None]}, "tags": ["x", "y"], "score": 1.5},
    {"messages": TALK[:1], "meta": {"other": {}}, "tags": [], "score": None},
    {"messages": TALK, "meta": {}, "tags": ["z"], "score": 2},
]
FIELDS = {
    "messages": Field("chat"),
    "meta": Field("json"),
    "tags": Field("str", (None,)),
    "score": Field("float64", optional=True),
}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("fields", [None, FIELDS])
def test_what_a_line_holds_comes_back(
    pool: Pool, tmp_path: Path, fields: dict[str, Field] | None
) -> None:
    """Inferred, and as the user says that it is."""
    ingest(pool, "t", lines(tmp_path / "t.jsonl", ROWS), fields=fields, shuffle=False)
    data = Dataset(pool, "t")
    assert dict(data.fields) == FIELDS
    for found, row in zip(data.__getitems__(range(3)), ROWS, strict=True):
        score = found.pop("score")
        assert (score if score is None else float(score)) == row["score"]
        assert found == {name: row[name] for name in found}


def test_what_is_no_chat_is_a_bad_record(pool: Pool, tmp_path: Path) -> None:
    """Named by its line, or left out."""
    rows = [ROWS[0], {**ROWS[1], "messages": [{"role": 1}]}, ROWS[2]]
    path = lines(tmp_path / "t.jsonl", rows)
    with pytest.raises(IngestError, match=r"t\.jsonl: byte \d+: .*messages"):
        ingest(pool, "t", path, fields=FIELDS, shuffle=False)
    report = ingest(pool, "t", path, fields=FIELDS, shuffle=False, on_error="skip")
    assert (report.samples, len(report.skipped)) == (2, 1)
