"""Fields that come late, again after a resume, in an append, in parts; columns of several files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpstore.errors import HpstoreError, IngestError
from hpstore.loaders import Dataset, Field, IngestProgress, ingest, ingest_parts
from hpstore.loaders.ingestion.json_lines_source import LOOKED_AT
from hpstore.pool.pool import Pool
from tests.integration.ingest_cases import Stop, make_pool
from tests.unit.test_ingest_sources import shard, write_tar
from tests.unit.test_optional_sources import write_examples

ODD = LOOKED_AT + 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def jsonl(path: Path, odd: int, count: int = 2 * LOOKED_AT) -> Path:
    """Lines of which number `odd` has one key more."""
    lines = ({"i": i, **({"caption": "c"} if i == odd else {})} for i in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def source_with_late_field(kind: str, folder: Path) -> Path:
    if kind == "jsonl":
        return jsonl(folder / "a.jsonl", ODD)
    if kind == "tfrecord":
        rows: list[dict[str, Any]] = [{"i": [i]} for i in range(2 * LOOKED_AT)]
        rows[ODD] = {"i": [ODD], "caption": [b"c"]}
        return write_examples(folder / "a.tfrecord", *rows)
    members = shard(0, ODD + 50)
    place = list(members).index(f"d/{ODD:04d}.seg.bin")
    names = list(members)
    late = {name: members[name] for name in names[: place + 1]}
    late |= {f"d/{ODD:04d}.caption": b"c"} | {name: members[name] for name in names[place + 1 :]}
    write_tar(folder / f"a.{kind}", late, "w:gz" if kind == "tar.gz" else "w")
    return folder / f"a.{kind}"


@pytest.mark.parametrize("kind", ["jsonl", "tfrecord", "tar", "tar.gz"])
def test_a_late_field_is_an_error_after_a_resume_too(pool: Pool, tmp_path: Path, kind: str) -> None:
    """The second call took the record without the field, and was content."""
    source = source_with_late_field(kind, tmp_path)
    for _ in range(2):
        with pytest.raises(IngestError, match="caption"):
            ingest(pool, "a", source, shuffle=False, shard_bytes=4096)
    report = ingest(pool, "a", source, shuffle=False, shard_bytes=4096, on_error="skip")
    assert len(report.skipped) == 1
    assert "caption" in report.skipped[0].problem
    assert report.samples > ODD
    fields = [name for name in report.fields if name != "caption"]
    assert ingest(pool, "b", source, shuffle=False, fields=fields).samples == report.samples + 1


def test_a_part_with_a_late_field_is_an_error(pool: Pool, tmp_path: Path) -> None:
    files = [str(jsonl(tmp_path / f"{n}.jsonl", ODD if n else -1)) for n in range(2)]
    with pytest.raises(IngestError, match="caption"):
        ingest_parts(pool, "a", files, parts=2)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl", "tar", "tar.gz"])
def test_an_append_leaves_out_no_field_unsaid(pool: Pool, tmp_path: Path, kind: str) -> None:
    """A source that has more is refused; with fields= it is the user who leaves them out."""
    old, new = (tmp_path / f"{name}.{kind}" for name in ("old", "new"))
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"i": [0, 1]}), old)
        pq.write_table(pa.table({"i": [2], "caption": ["c"]}), new)
    elif kind == "csv":
        pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
        old.write_text("i\n0\n1\n")
        new.write_text("i,caption\n2,c\n")
    elif kind == "jsonl":
        jsonl(old, -1, 2)
        jsonl(new, 0, 1)
    else:
        mode = "w:gz" if kind == "tar.gz" else "w"
        write_tar(old, {"0.i": b"a", "1.i": b"b"}, mode)
        write_tar(new, {"2.i": b"c", "2.caption": b"c"}, mode)
    ingest(pool, "a", old, shuffle=False)
    with pytest.raises(HpstoreError, match="caption"):
        ingest(pool, "a", new, append=True)
    assert len(Dataset(pool, "a")) == 2
    assert ingest(pool, "a", new, append=True, fields=["i"], resume=False).samples == 1
    assert len(Dataset(pool, "a")) == 3


def test_files_whose_numbers_stand_for_other_classes_are_refused(
    pool: Pool, tmp_path: Path
) -> None:
    """The names of the first file were taken for both: labels of the second meant the opposite."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
    pq = pytest.importorskip("pyarrow.parquet")

    def write(name: str, classes: list[str] | None) -> None:
        label = {"names": classes, "_type": "ClassLabel"}
        said = {"huggingface": json.dumps({"info": {"features": {"label": label}}})}
        table = pa.table({"label": [0, 1]}).replace_schema_metadata(said if classes else None)
        pq.write_table(table, tmp_path / name)

    write("a.parquet", ["cat", "dog"])
    write("b.parquet", ["dog", "cat"])
    with pytest.raises(IngestError, match=r"b\.parquet: numbers of 'label' stand for other"):
        ingest(pool, "t", tmp_path / "*.parquet")
    write("b.parquet", ["cat", "dog"])
    write("c.parquet", None)
    assert ingest(pool, "t", tmp_path / "*.parquet").samples == 6
    assert Dataset(pool, "t").classes == {"label": ["cat", "dog"]}


def test_a_column_is_optional_when_any_file_may_have_nulls(pool: Pool, tmp_path: Path) -> None:
    """The first file's schema said that it has none, and a null of the second was a bad record."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
    pq = pytest.importorskip("pyarrow.parquet")
    for name, values, nullable in [("a", [1, 2], False), ("b", [3, None], True)]:
        schema = pa.schema([pa.field("x", pa.int64(), nullable=nullable)])
        pq.write_table(pa.table({"x": values}, schema), tmp_path / f"{name}.parquet")
    report = ingest(pool, "t", tmp_path / "*.parquet", shuffle=False)
    assert report.samples == 4
    assert Dataset(pool, "t").fields == {"x": Field("int64", optional=True)}


def test_fields_are_not_chosen_in_the_middle_of_an_ingest(pool: Pool, tmp_path: Path) -> None:
    """A record that was bad would be good, and a window of the shuffle hold other rows. Chosen from
    the start they need not be said again."""
    source = jsonl(tmp_path / "a.jsonl", ODD)
    for _ in range(2):
        with pytest.raises(IngestError, match="caption"):
            ingest(pool, "a", source, shard_bytes=4096, workers=1)
    for fields in (["i"], {"i": Field("int64")}):
        with pytest.raises(IngestError, match="no fields were chosen, now they are"):
            ingest(pool, "a", source, shard_bytes=4096, fields=fields)
    made = ingest(pool, "a", source, shard_bytes=4096, fields=["i"], resume=False)
    assert made.samples == 2 * LOOKED_AT

    def stop(progress: IngestProgress) -> None:
        if progress.records >= LOOKED_AT:
            raise Stop

    with pytest.raises(Stop):
        ingest(pool, "b", source, shard_bytes=4096, shuffle=False, fields=["i"], progress=stop)
    report = ingest(pool, "b", source, shard_bytes=4096, shuffle=False)
    assert report.resumed_samples > 0
    assert report.samples == 2 * LOOKED_AT
    data = Dataset(pool, "b")
    assert [int(data[n]["i"]) for n in range(len(data))] == list(range(2 * LOOKED_AT))


@pytest.mark.parametrize("more", [True, False])
def test_a_stream_whose_columns_change_is_an_error(pool: Pool, more: bool) -> None:
    """Of Hugging Face, without features: a column that came late was left out, one that went away
    a KeyError."""
    datasets = pytest.importorskip("datasets", reason="needs datasets (the extra `huggingface`)")
    long, short = {"i": 1, "caption": "c"}, {"i": 1}
    first, later = (short, long) if more else (long, short)

    def batches(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        keys = first if rows["n"][0] < LOOKED_AT else later
        return {name: [value] * len(rows["n"]) for name, value in keys.items()}

    numbers = datasets.Dataset.from_dict({"n": list(range(3 * LOOKED_AT))}).to_iterable_dataset()
    stream = numbers.map(batches, batched=True, batch_size=LOOKED_AT, remove_columns=["n"])
    stream.info.features = None
    with pytest.raises(IngestError, match="only some of its rows have 'caption'"):
        ingest(pool, "a", stream)
    if more:
        assert ingest(pool, "b", stream, fields=["i"]).samples == 3 * LOOKED_AT
