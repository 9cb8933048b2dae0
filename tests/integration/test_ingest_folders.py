"""What is in a source, all of it and nothing else: fields that show late, files beside a table,
the members of tars. (Cases r4_webdataset_cls, r5_late_field_dropped, r6_hf_cache_files, r8_small.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpstore
from hpstore.errors import ConfigError, IngestError
from hpstore.loaders import Dataset, DatasetWriter, Field, ingest
from hpstore.loaders.ingestion.infer_fields import LOOKED_AT
from hpstore.loaders.ingestion.tar_index import MOST_ENDINGS
from hpstore.pool.pool import Pool
from tests.unit.test_ingest_sources import write_tar

pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (the extra `parquet`)")
TARS = pytest.mark.parametrize(("ending", "mode"), [("tar", "w"), ("tar.gz", "w:gz")])


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    devices = [tmp_path / f"disk{i}" for i in range(3)]
    with hpstore.create(devices, data=2, parity=1, config=tmp_path / "pool.toml") as made:
        yield made


def numbers(pool: Pool, name: str, field: str = "i") -> list[Any]:
    data = Dataset(pool, name)
    return [data[i][field] for i in range(len(data))]


# --- fields ----------------------------------------------------------------------------------


def late(first: int, count: int = 2 * LOOKED_AT) -> list[dict[str, Any]]:
    """Samples of which those from number `first` on have a caption."""
    return [{"i": i, **({"caption": f"c{i}"} if i >= first else {})} for i in range(count)]


@pytest.mark.parametrize("source", [late, lambda first: iter(late(first))], ids=["list", "stream"])
@pytest.mark.parametrize("first", [1, LOOKED_AT - 1, LOOKED_AT, LOOKED_AT + 7])
def test_a_field_that_shows_late_is_not_dropped(pool: Pool, first: int, source: Any) -> None:
    """Wherever it begins it is an error, or is left out because the user says what to take."""
    with pytest.raises((ConfigError, IngestError), match="caption"):
        ingest(pool, "a", source(first), shuffle=False)
    assert ingest(pool, "b", source(first), shuffle=False, fields=["i"]).samples == 2 * LOOKED_AT


def test_a_late_field_is_an_error_after_a_resume_too(pool: Pool) -> None:
    """The fields are those of the run that was cut; what is whole is said by the new call."""
    samples = late(LOOKED_AT + 20)
    for _ in range(2):  # the second call goes on where the first one stopped
        with pytest.raises(IngestError, match=rf"\[{LOOKED_AT + 20}\].*it has 'caption'"):
            ingest(pool, "a", samples, shuffle=False, shard_bytes=4096)
    report = ingest(pool, "a", samples, shuffle=False, shard_bytes=4096, on_error="skip")
    assert report.samples == LOOKED_AT + 20
    assert len(report.skipped) == LOOKED_AT - 20


@pytest.mark.parametrize("value", [0.5, "x", [1, 2]], ids=["float", "text", "array"])
def test_a_value_of_another_type_that_comes_late_is_not_converted(pool: Pool, value: Any) -> None:
    samples = [{"i": i} for i in range(LOOKED_AT)] + [{"i": value}]
    with pytest.raises(IngestError, match=rf"\[{LOOKED_AT}\].*'i'"):
        ingest(pool, "a", samples, shuffle=False)


def test_a_writer_takes_no_field_that_it_was_not_told_of(pool: Pool) -> None:
    with DatasetWriter(pool, "a", {"i": Field("int64")}) as writer:
        writer.write({"i": 1})
        with pytest.raises(ConfigError, match="caption"):
            writer.write({"i": 1, "caption": "c"})


@pytest.mark.parametrize("given", ["pool.toml", Path("pool.toml"), None])
def test_a_path_in_the_place_of_a_pool_is_said(given: Any) -> None:
    """Whoever takes a pool says how to open one."""
    for call in (
        lambda: Dataset(given, "a"),
        lambda: DatasetWriter(given, "a", {"i": Field("int64")}),
        lambda: ingest(given, "a", [{"i": 1}]),
    ):
        with pytest.raises(ConfigError, match=r"takes an open pool, not a .*hpstore\.open"):
            call()


# --- tables ----------------------------------------------------------------------------------


def arrow(path: Path, values: list[int], column: str = "i") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({column: values})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


def parquet(path: Path, values: list[int], column: str = "i") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: values}), path)
    return path


def test_a_saved_data_set_of_hugging_face_is_what_it_says_it_is(pool: Pool, tmp_path: Path) -> None:
    """map() leaves a cache beside the data files, which state.json lists."""
    folder = tmp_path / "saved"
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for number, name in enumerate(names):
        arrow(folder / name, [2 * number, 2 * number + 1])
    arrow(folder / "cache-0123456789abcdef.arrow", [0, 10, 20, 30])
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    report = ingest(pool, "a", folder, shuffle=False)
    assert numbers(pool, "a") == [0, 1, 2, 3]
    assert report.ignored == 1
    for bad, said in (
        ("../data.arrow", "no file in the folder"),
        ("gone.arrow", "not there"),
        (7, "no file in the folder"),
    ):
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": bad}]}))
        with pytest.raises(IngestError, match=said):
            ingest(pool, "b", folder)
    (folder / "state.json").write_text(json.dumps({"_data_files": []}))
    with pytest.raises(IngestError, match="names no file"):
        ingest(pool, "b", folder)


def test_a_cache_is_no_part_of_a_table_that_names_no_files(pool: Pool, tmp_path: Path) -> None:
    """Copied without its state.json, or with an info that does not fit. By itself it is one."""
    folder = tmp_path / "copied"
    arrow(folder / "data.arrow", [0, 1])
    arrow(folder / "cache-0123456789abcdef_00000_of_00002.arrow", [7])
    (folder / "dataset_info.json").write_text(json.dumps({"splits": {"train": {}}}))
    assert ingest(pool, "a", folder, shuffle=False).ignored == 1
    assert numbers(pool, "a") == [0, 1]
    (folder / "data.arrow").unlink()
    ingest(pool, "b", folder, shuffle=False)
    assert numbers(pool, "b") == [7]


def test_splits_are_not_mixed(pool: Pool, tmp_path: Path) -> None:
    """A DatasetDict on disk, and a folder of datasets' cache with several splits."""
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict/dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(ConfigError, match="splits train, test"):
        ingest(pool, "a", tmp_path / "dict", format="parquet")
    folder = tmp_path / "cache"
    arrow(folder / "imdb-train-00000-of-00002.arrow", [0, 1])
    arrow(folder / "imdb-train-00001-of-00002.arrow", [2])
    arrow(folder / "cache-0123456789abcdef.arrow", [9])
    info = {"splits": {"train": {"name": "train"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    assert ingest(pool, "b", folder, shuffle=False).ignored == 1
    assert numbers(pool, "b") == [0, 1, 2]
    arrow(folder / "imdb-test.arrow", [5])
    info["splits"]["test"] = {"name": "test"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match=r"splits train, test: .*imdb-train\*"):
        ingest(pool, "c", folder)
    ingest(pool, "c", f"{folder}/imdb-train*", format="parquet", shuffle=False)
    assert numbers(pool, "c") == [0, 1, 2]


def test_parquet_metadata_says_which_files_there_are(pool: Pool, tmp_path: Path) -> None:
    """Of a folder that dask or Spark has written; others beside them are no part of it."""
    folder = tmp_path / "table"
    collected: list[Any] = []
    for number in range(2):
        table = pa.table({"i": [2 * number, 2 * number + 1]})
        file = folder / f"part.{number}.parquet"
        folder.mkdir(exist_ok=True)
        pq.write_table(table, file, metadata_collector=collected)
        collected[-1].set_file_path(file.name)
    pq.write_metadata(table.schema, folder / "_metadata", metadata_collector=collected)
    parquet(folder / "part.9.parquet", [9])
    assert ingest(pool, "a", folder, shuffle=False).ignored == 1
    assert numbers(pool, "a") == [0, 1, 2, 3]
    (folder / "_metadata").write_bytes(b"PAR1 and no more")
    with pytest.raises(IngestError, match="_metadata cannot be read"):
        ingest(pool, "b", folder)


def test_hidden_files_are_no_part_of_a_table(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    parquet(folder / "a.parquet", [0, 1])
    parquet(folder / "_temporary.parquet", [7])
    parquet(folder / "._a.parquet", [8])
    assert ingest(pool, "a", folder, shuffle=False).ignored == 2
    assert numbers(pool, "a") == [0, 1]
    (folder / "a.parquet").unlink()
    with pytest.raises(ConfigError, match="begin with a dot or an underscore"):
        ingest(pool, "b", folder)


def test_a_file_of_another_table_is_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    """Not one bad record of many rows; and the order of the columns is no difference."""
    folder = tmp_path / "table"
    pq.write_table(pa.table({"i": [0], "s": ["a"]}), parquet(folder / "a.parquet", [0]))
    pq.write_table(pa.table({"s": ["b"], "i": [1]}), parquet(folder / "b.parquet", [0]))
    ingest(pool, "a", folder, shuffle=False)
    assert numbers(pool, "a", "s") == ["a", "b"]
    pq.write_table(pa.table({"i": [1.5], "t": [1]}), folder / "c.parquet")
    for on_error in ("raise", "skip"):
        with pytest.raises(IngestError, match=r"c\.parquet has other columns .*'i' is double.*'s'"):
            ingest(pool, "b", folder, on_error=on_error)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ConfigError, match="several columns named 'x'"):
        ingest(pool, "b", tmp_path / "twice.parquet")


def test_what_cannot_be_read_says_what_can(pool: Pool, tmp_path: Path) -> None:
    """Every hint names something that exists."""
    parquet(tmp_path / "deep/below/a.parquet", [3])
    for kind in ("auto", "parquet"):
        with pytest.raises(ConfigError, match=r"below/a\.parquet: .*deep/\*\*/\*\.parquet"):
            ingest(pool, "a", tmp_path / "deep", format=kind)
    ingest(pool, "a", f"{tmp_path}/deep/**/*.parquet", shuffle=False)
    assert numbers(pool, "a") == [3]
    (tmp_path / "x.other").write_text("{}")
    with pytest.raises(ConfigError, match="an iterable of its samples"):
        ingest(pool, "b", tmp_path / "x.other")


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("s3://bucket/x.parquet", "numpy"),
        ("s3://b/{0..3}.tar", "images"),
        ("s3://b/x.bin", "auto"),
        ("gs://b/x.npy", "auto"),
        ("https://a/b", "auto"),
        ("pipe:aws s3 cp s3://b/x.tar -", "auto"),
        ("pipe:aws s3 cp s3://b/x.tar -", "webdataset"),
    ],
)
def test_files_elsewhere_are_no_files_that_do_not_exist(pool: Pool, where: str, kind: str) -> None:
    """r8_small, s3: what is read of local files alone says so."""
    with pytest.raises(ConfigError, match=r"is not on this machine.*copy.*iterable"):
        ingest(pool, "b", where, format=kind)


def test_a_file_url_is_the_file(pool: Pool, tmp_path: Path) -> None:
    parquet(tmp_path / "a b.parquet", [5])
    ingest(pool, "a", f"file://{tmp_path}/a%20b.parquet")
    assert numbers(pool, "a") == [5]


# --- tars ------------------------------------------------------------------------------------


@TARS
def test_a_label_that_is_text_is_text(pool: Pool, tmp_path: Path, ending: str, mode: str) -> None:
    """By default, left out, and as whatever the user says that it is."""
    tar = tmp_path / f"a.{ending}"
    write_tar(
        tar, {f"{i}.{e}": d for i in range(3) for e, d in (("bin", b"x"), ("cls", b"cat"))}, mode
    )
    ingest(pool, "a", tar, shuffle=False)
    assert numbers(pool, "a", "cls") == ["cat"] * 3
    assert list(ingest(pool, "b", tar, fields=["bin"]).fields) == ["bin"]
    ingest(pool, "c", tar, fields={"bin": Field("bytes"), "cls": Field("bytes")})
    assert numbers(pool, "c", "cls") == [b"cat"] * 3


@TARS
def test_members_are_what_webdataset_takes_them_for(
    pool: Pool, tmp_path: Path, ending: str, mode: str
) -> None:
    """Numbers, text, JSON as its text; the key for who asks for it."""
    tar = tmp_path / f"a.{ending}"
    files = {"cls": b"3", "left.index": b"4", "json": b'{"a": 1}', "text": b"t", "jpgx": b"\xff"}
    write_tar(tar, {f"d.1/k{i}.{e}": d for i in range(2) for e, d in files.items()}, mode)
    ingest(pool, "a", tar, shuffle=False)
    assert Dataset(pool, "a")[1] == {
        "cls": 3,
        "left.index": 4,
        "json": '{"a": 1}',
        "text": "t",
        "jpgx": b"\xff",
    }
    ingest(pool, "b", tar, shuffle=False, fields=["__key__", "cls"])
    assert numbers(pool, "b", "__key__") == ["d.1/k0", "d.1/k1"]
    ingest(pool, "c", tar, shuffle=False, fields={"cls": Field("float32"), "json": Field("bytes")})
    assert Dataset(pool, "c")[0] == {"cls": 3.0, "json": b'{"a": 1}'}


@TARS
def test_text_that_is_no_utf8_says_how_it_can_be_kept(
    pool: Pool, tmp_path: Path, ending: str, mode: str
) -> None:
    tar = tmp_path / f"a.{ending}"
    write_tar(tar, {"1.txt": b"caf\xe9", "1.cls": b"1"}, mode)
    with pytest.raises(IngestError, match=r"1: \.txt: .*utf-8.*fields=\{'txt': Field\('bytes'\)"):
        ingest(pool, "a", tar)
    ingest(pool, "a", tar, fields={"txt": Field("bytes"), "cls": Field("int64")})
    assert numbers(pool, "a", "txt") == [b"caf\xe9"]


@TARS
def test_files_of_a_sample_that_lie_apart_are_named(
    pool: Pool, tmp_path: Path, ending: str, mode: str
) -> None:
    """As tar writes a folder that was filled file by file."""
    tar = tmp_path / f"a.{ending}"
    write_tar(tar, {"1.bin": b"x", "2.bin": b"y", "1.cls": b"1", "2.cls": b"2"}, mode)
    with pytest.raises((IngestError, ConfigError), match="tar --sort=name"):
        ingest(pool, "a", tar)


@TARS
def test_numbers_before_the_ending_are_said_to_be_part_of_it(
    pool: Pool, tmp_path: Path, ending: str, mode: str
) -> None:
    tar = tmp_path / f"a.{ending}"
    write_tar(tar, {f"img.{i:06}.jpg": b"x" for i in range(MOST_ENDINGS + 1)}, mode)
    with pytest.raises(IngestError, match=r"one sample\. Rename them"):
        ingest(pool, "a", tar)
