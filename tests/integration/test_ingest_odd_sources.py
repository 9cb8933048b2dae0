"""Sources beside the straight path: structs, large rows and values, odd names, options, damage."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from hpstore.errors import ConfigError, IngestError, IntegrityError
from hpstore.loaders import Dataset, Field, ZarrDataset, ingest, open_source
from hpstore.loaders.dataset.dataset_manifest import DatasetManifest
from hpstore.loaders.dataset.fields import MAX_VALUE_BYTES, as_array, ragged_value
from hpstore.loaders.ingestion import source_paths
from hpstore.loaders.ingestion.arrow_source import BATCH_BYTES
from hpstore.loaders.ingestion.image_source import ImageFolder
from hpstore.loaders.ingestion.python_source import MapDataset
from hpstore.loaders.ingestion.sample_source import BlockwiseSource
from hpstore.loaders.ingestion.source_paths import local_files
from hpstore.loaders.ingestion.source_rows import SourceItem
from tests.property.test_field_kinds import pools
from tests.unit.test_ingest_sources import items_of


def test_a_struct_whose_bytes_are_a_number_stays_a_struct(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
    pq = pytest.importorskip("pyarrow.parquet")
    kind = pa.struct([("bytes", pa.int64()), ("packets", pa.int64())])
    rows = [{"bytes": 1, "packets": 2}, {"bytes": 3, "packets": 4}]
    table = pa.table({"flow": pa.array(rows, kind), "flows": pa.array([rows, []], pa.list_(kind))})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert source.fields == {"flow": Field("json"), "flows": Field("json")}
    found = [item.sample for item in items_of(source)]
    assert found == [{"flow": rows[0], "flows": rows}, {"flow": rows[1], "flows": []}]


def test_large_rows_of_parquet_are_read_some_at_a_time(tmp_path: Path) -> None:
    """Not 4,096 of them, whatever their size: memory is bounded by bytes."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
    pq = pytest.importorskip("pyarrow.parquet")
    size, count = 1 << 19, 64
    rng = np.random.default_rng(0)
    table = pa.table({"x": [rng.bytes(size) for _ in range(count)], "n": list(range(count))})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert isinstance(source, BlockwiseSource)
    read = [int(np.sum(rows.nbytes)) for rows in source.read_rows(0, 0)]
    assert sum(read) >= size * count
    assert max(read) <= 2 * BATCH_BYTES


def test_rows_of_hdf5_of_any_length_are_read_some_at_a_time(tmp_path: Path) -> None:
    """An array of places of 100 KB rows is not 8 bytes a row."""
    h5py = pytest.importorskip("h5py", reason="needs h5py (the extra `hdf5`)")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        ragged = file.create_dataset("r", (1000,), dtype=h5py.vlen_dtype("u1"))
        for row in range(1000):
            ragged[row] = np.full(100_000, row % 251, np.uint8)
    source = open_source(tmp_path / "a.h5")
    assert isinstance(source, BlockwiseSource)
    assert source.blocks > 1
    assert [_first(item) for item in items_of(source)] == [row % 251 for row in range(1000)]


def _first(item: SourceItem) -> int:
    assert item.sample is not None
    return int(np.asarray(item.sample["r"])[0])


@pytest.mark.parametrize("kind", ["images", "tar"])
def test_a_value_too_large_is_a_bad_record_before_it_is_read(tmp_path: Path, kind: str) -> None:
    """A sparse file takes no space, its bytes would take all memory."""
    size = 1 << 42
    folder = tmp_path / "data"
    folder.mkdir()
    image = folder / "huge.jpg"
    with image.open("wb") as file:
        file.truncate(size)
    (folder / "tiny.jpg").write_bytes(b"\xff\xd8\xff\xd9")
    where = folder
    if kind == "tar":
        where = tmp_path / "a.tar"
        command = ["tar", "--format=gnu", "-cf", str(where), "-C", str(folder), "tiny.jpg"]
        subprocess.run(command, check=True)
        with where.open("r+b") as file:
            _append_header(file, b"huge.jpg", size)
    source = open_source(where, check_images=False)
    problems = {item.name: item.problem for item in items_of(source) if item.sample is None}
    assert len(problems) == 1
    assert f"has {size} bytes; at most {MAX_VALUE_BYTES}" in next(iter(problems.values()))


def _append_header(file: Any, name: bytes, size: int) -> None:
    """Another member behind the first, sparse, and the end of the tar."""
    info = tarfile.TarInfo(name.decode())
    info.size = size
    file.seek(1024)
    file.write(info.tobuf(tarfile.GNU_FORMAT))
    file.truncate(1536 + size + 1024)


def test_a_path_that_is_no_text_is_recorded_with_backslashes(tmp_path: Path) -> None:
    """All was written, and then the manifest could not be."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    for name in ("a.tar", "b.tar.gz"):
        with tarfile.open(folder / name, "w:gz" if name.endswith("gz") else "w") as tar:
            for number in (b"1", b"x", b"2"):
                info = tarfile.TarInfo(os.fsdecode(b"\xe9" + number + b".cls"))
                info.size = 1
                tar.addfile(info, io.BytesIO(number))
    np.save(folder / os.fsdecode(b"\xe9.npy"), np.arange(3))
    with pools() as pool:
        made = {"cls": Field("int64")}
        for name in ("a.tar", "b.tar.gz"):
            report = ingest(pool, name, folder / name, fields=made, on_error="skip")
            assert [skipped.name for skipped in report.skipped] == [f"{name}: \\udce9x"]
        ingest(pool, "array", folder / os.fsdecode(b"\xe9.npy"))
        wanted = {
            "a.tar": (2, "caf\\udce9"),
            "b.tar.gz": (2, "caf\\udce9"),
            "array": (3, "\\udce9.npy"),
        }
        for name, (count, said) in wanted.items():
            data = Dataset(pool, name)
            assert len(data) == count
            assert said in json.dumps(data.metadata).replace("\\\\", "\\")


def test_a_table_whose_path_is_no_text_is_read(tmp_path: Path) -> None:
    """pyarrow takes paths as UTF-8 alone."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"x": [1, 2]})
    with pa.ipc.new_file(str(tmp_path / "plain.arrow"), table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, tmp_path / "plain.parquet")
    for ending in ("arrow", "parquet"):
        odd = tmp_path / os.fsdecode(b"\xe9." + ending.encode())
        (tmp_path / f"plain.{ending}").rename(odd)
        assert [item.sample for item in items_of(open_source(odd))] == [{"x": 1}, {"x": 2}]


def test_lists_of_numbers_beyond_int64_fit_uint64() -> None:
    """numpy makes floats of them where others are smaller, and objects of larger ones."""
    field = Field("uint64", (None,))
    for value in ([1 << 63, 1], [1, (1 << 64) - 1], [[1 << 63, 1]], [0]):
        made = as_array(
            field if not isinstance(value[0], list) else Field("uint64", (None, 2)), value
        )
        assert made.tolist() == value
        assert made.dtype == np.uint64
    for bad in ([1 << 64, 1], [-1, 1 << 63], [1 << 63, 1.0], [1 << 63, True]):
        with pytest.raises(ConfigError, match=r"is a list|has numbers"):
            as_array(field, bad)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2).to(torch.float8_e4m3fn),
        torch.eye(2).to_sparse(),
    ],
    ids=["float8", "sparse"],
)
def test_tensors_that_numpy_has_not_are_refused_by_name(value: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=f"is a tensor that numpy has not: {value.dtype}"):
        as_array(Field("float32", (2,)), value)


def test_bytes_are_taken_in_the_order_of_a_row(tmp_path: Path) -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    raw = ragged_value("x", Field("bytes"), array, "sample 0")
    assert raw.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("codec", ["gzip", "zstd", "blosc"])
def test_a_chunk_of_zarr_that_is_cut_is_a_bad_record(tmp_path: Path, codec: str) -> None:
    """A codec raises what it likes: EOFError, zlib.error, RuntimeError."""
    made = {
        "gzip": GzipCodec(),
        "zstd": ZstdCodec(),
        "blosc": BloscCodec(),
    }[codec]
    numbers = np.random.default_rng(0).integers(0, 1 << 40, 400)
    zarr.create_array(tmp_path / "a.zarr", data=numbers, chunks=(100,), compressors=[made])
    chunk = tmp_path / "a.zarr" / "c" / "1"
    data = chunk.read_bytes()
    for damaged in (data[: len(data) // 2], b"", data[:40] + bytes(20) + data[60:]):
        chunk.write_bytes(damaged)
        source = open_source(tmp_path / "a.zarr")
        source.fingerprint()
        items = items_of(source)
        assert sum(item.sample is not None for item in items) >= 300
        assert all(item.problem for item in items if item.sample is None)
    with pools() as pool:
        chunk.write_bytes(data[: len(data) // 2])
        report = ingest(pool, "z", tmp_path / "a.zarr", on_error="skip")
        assert (report.samples, len(report.skipped)) == (300, 1)


def test_the_fingerprint_of_a_dataset_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Whatever values it has, of which some are left out."""
    script = (
        "import datetime, numpy as np, torch\n"
        "from hpstore.loaders.ingestion.python_source import MapDataset\n"
        "class Odd: pass\n"
        "one = {'x': 1, 'a': (np.zeros(2), np.zeros(3)), 'd': datetime.date(2026, 1, 1),\n"
        "       's': {3}, 'o': Odd(), 'l': [Odd(), {'a', 'b', 'c'}],\n"
        "       't': torch.eye(2).to_sparse()}\n"
        "print(MapDataset([one]).fingerprint())\n"
    )
    prints = [subprocess.check_output([sys.executable, "-c", script]) for _ in range(2)]
    assert prints[0] == prints[1]
    assert MapDataset([{"x": 1}]).fingerprint() != MapDataset([{"x": 2}]).fingerprint()


def test_samples_of_zarr_have_whole_numbers(tmp_path: Path) -> None:
    data = ZarrDataset({"x": zarr.array(np.arange(3))})
    assert [int(data[i]["x"]) for i in (0, -1, 1)] == [0, 2, 1]
    for bad in (1.7, True, "1"):
        with pytest.raises(ConfigError, match="whole numbers"):
            data[bad]  # type: ignore[index]


def test_options_of_sources_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a;b\n1;2\n")
    for name, value in [("delimiter", 1), ("delimiter", 0), ("group", 0), ("database", 5)]:
        with pytest.raises(ConfigError, match=f"option {name} is {value}, not a text"):
            open_source(tmp_path / "a.csv", source_options={name: value})
    with pytest.raises(ConfigError, match="option storage is 'x': give a dict"):
        open_source(tmp_path / "a.csv", source_options={"storage": "x"})


def test_a_database_of_keys_with_several_values_is_refused(tmp_path: Path) -> None:
    """A block begins at a key, which says nothing of which of its values."""
    lmdb = pytest.importorskip("lmdb", reason="needs lmdb (the extra `lmdb`)")
    with lmdb.open(str(tmp_path / "a.lmdb"), max_dbs=1) as env:
        named = env.open_db(b"named", dupsort=True)
        with env.begin(write=True) as writer:
            writer.put(b"k", b"1", db=named)
    with pytest.raises(ConfigError, match="has keys with several values"):
        open_source(tmp_path / "a.lmdb", source_options={"database": "named"})


@pytest.mark.parametrize("how", ["images", "pattern"])
def test_folders_of_links_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Two links in each of 20 folders to the next lead to a million of them, in 64 to 2^64."""
    monkeypatch.setattr(source_paths, "MAX_LINKED", 1000)
    for level in range(20):
        folder = tmp_path / "top" / f"{level:02}"
        folder.mkdir(parents=True)
        for name in ("a", "b"):
            (folder / name).symlink_to(f"../{level + 1:02}")
    (tmp_path / "top" / "20").mkdir()
    (tmp_path / "top" / "20" / "x.jpg").write_bytes(b"")
    top = tmp_path / "top" / "00"

    def look() -> object:
        return ImageFolder(top) if how == "images" else local_files(f"{top}/**/*.npy", (".npy",))

    with pytest.raises(IngestError, match="more than 1,000 folders lie behind links"):
        look()


@pytest.mark.parametrize("odd", ["99", "x", "-1"])
def test_a_column_of_no_field_is_no_manifest(odd: str) -> None:
    """Of an enemy's manifest: verify_dataset took its name for a number."""
    with pools() as pool:
        ingest(pool, "t", [{"x": n} for n in range(4)])
        made = Dataset(pool, "t").manifest
    columns = {**made.parts[0].columns, odd: next(iter(made.parts[0].columns.values()))}
    enemy = replace(made, parts=(replace(made.parts[0], columns=columns),))
    with pytest.raises(IntegrityError, match=f"column '{odd}' belongs to no field"):
        DatasetManifest.decode(enemy.encode(), where="t")
