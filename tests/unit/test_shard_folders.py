"""MDS and LitData by path: what becomes of their columns, and what is refused, by name."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpstore.errors import ConfigError, MalformedFile
from hpstore.loaders import Field, open_source
from hpstore.loaders.ingestion.mds_source import MdsShards
from hpstore.loaders.ingestion.source_formats import format_of
from tests.integration.source_makers import litdata, mds, package
from tests.unit.test_ingest_sources import check_restart, items_of, plain

Index = dict[str, Any]  # Any: JSON
LITDATA = pytest.mark.filterwarnings(  # it leaves the files of chunks to the garbage collection
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def change(folder: Path, edit: Callable[[Index], object]) -> None:
    """Change the index of a folder."""
    file = folder / "index.json"
    index = json.loads(file.read_text())
    edit(index)
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("package", "extra", "index"),
    [
        ("streaming.base.format.mds.encodings", "mds", {"shards": [], "version": 2}),
        (
            "litdata.streaming",
            "litdata",
            {"chunks": [], "config": {"data_format": ["int"], "data_spec": None}},
        ),
    ],
)
@pytest.mark.parametrize("error", [ImportError("x"), RuntimeError("torchvision::nms")])
def test_a_package_that_is_missing_or_broken_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    extra: str,
    index: Index,
    error: Exception,
) -> None:
    """Where torchvision was built for another torch, both packages raise RuntimeError."""
    (tmp_path / "index.json").write_text(json.dumps(index))
    known = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == package:
            raise error
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    said = rf"hpstore\[{extra}\]" if isinstance(error, ImportError) else "cannot be imported"
    with pytest.raises(ConfigError, match=said):
        open_source(tmp_path)


def test_an_index_says_which_format_a_folder_has(tmp_path: Path) -> None:
    """An index.json of something else is none; a damaged one beside chunks is said."""
    index = tmp_path / "index.json"
    (tmp_path / "a.jpg").touch()
    for text, kind in [
        ('{"shards": []}', "mds"),
        ('{"chunks": [], "config": {}}', "litdata"),
        ('{"chunks": []}', "images"),
        ("[]", "images"),
        ("{", "images"),
    ]:
        index.write_text(text)
        assert format_of(str(tmp_path), "auto") == kind
    (tmp_path / "chunk-0-0.bin").touch()
    with pytest.raises(MalformedFile, match=r"index\.json cannot be read"):
        format_of(str(tmp_path), "auto")


def mixed_mds(folder: Path, **more: Any) -> Path:
    """A column of each kind; Any: values."""
    module = package("streaming.base.format.mds", "mds")
    columns = {
        "n": "int",
        "half": "float16",
        "s": "str",
        "raw": "bytes",
        "meta": "json",
        "grid": "ndarray:int16:2,3",
        **more,
    }
    with module.MDSWriter(out=str(folder), columns=columns, size_limit=600) as writer:
        for n in range(10):
            row: dict[str, Any] = {
                "n": n - 5,
                "half": np.float16(n / 2),
                "s": "é" * n,
                "raw": bytes([n]) * n,
                "meta": {"n": [n, None]},
                "grid": np.full((2, 3), n, np.int16),
            }
            row |= {name: {"n": n} for name in more}
            writer.write(row)
    return folder


def test_columns_of_mds_are_fields(tmp_path: Path) -> None:
    """By number, in the order of the index, over several shards; some of them alone."""
    source = open_source(mixed_mds(tmp_path / "a"))
    assert isinstance(source, MdsShards)
    assert source.fields == {
        "grid": Field("int16", (2, 3)),
        "half": Field("float16"),
        "meta": Field("json"),
        "n": Field("int64"),
        "raw": Field("bytes"),
        "s": Field("str"),
    }
    items = items_of(source)
    assert [plain(item.sample) for item in items] == [
        {
            "grid": [[n] * 3] * 2,
            "half": n / 2,
            "meta": {"n": [n, None]},
            "n": n - 5,
            "raw": bytes([n]) * n,
            "s": "é" * n,
        }
        for n in range(10)
    ]
    assert items[0].name == "shard.00000.mds sample 0"
    assert items[9].name != "shard.00000.mds sample 9"
    source.restrict(["n", "s"], {})
    assert plain(items_of(source)[3].sample) == {"n": -2, "s": "ééé"}
    assert open_source(tmp_path / "a" / "index.json", format="mds").fingerprint() == (
        source.fingerprint()
    )


def test_pickles_in_mds_are_left_out_or_refused(tmp_path: Path) -> None:
    """Nothing is unpickled: the column must be left out by name."""
    source = open_source(mixed_mds(tmp_path / "a", odd="pkl"))
    with pytest.raises(ConfigError, match=r"'odd' holds pickles.*fields=\['grid', 'half'"):
        assert source.fields
    source.restrict(["n"], {})
    assert source.fields == {"n": Field("int64")}
    assert [plain(item.sample)["n"] for item in items_of(source)] == [n - 5 for n in range(10)]


def test_an_array_of_a_shape_that_is_none_is_a_bad_record(tmp_path: Path) -> None:
    """In an index that lies; the error is not one of Python's own."""
    folder = mds(tmp_path, 3)
    change(folder, lambda i: i["shards"][0]["column_encodings"].__setitem__(1, "ndarray:int16:x"))
    source = open_source(folder)
    assert source.fields is None
    assert all("invalid literal" in item.problem for item in items_of(source))


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.where,)


def test_a_pickle_behind_a_column_without_a_field_is_not_loaded(tmp_path: Path) -> None:
    """Fields are then inferred from samples, which reads them: the pickle is refused before."""
    module = package("streaming.base.format.mds", "mds")
    folder, trace = tmp_path / "a", tmp_path / "ran"
    columns = {"a": "ndarray", "b": "pkl"}  # arrays of any shape: no field by the index
    with module.MDSWriter(out=str(folder), columns=columns) as writer:
        writer.write({"a": np.zeros(3, np.int16), "b": Trap(trace)})
    source = open_source(folder)
    with pytest.raises(ConfigError, match=r"'b' holds pickles.*fields=\['a'\]"):
        assert source.fields
    (item,) = items_of(source)
    assert "pickle" in item.problem
    assert not trace.exists()
    source.restrict(["a"], {})
    assert plain(items_of(source)[0].sample) == {"a": [0, 0, 0]}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda i: i.update(version=3), "version '3', not 2"),
        (lambda i: i.update(shards=[]), "list index out of range"),
        (lambda i: i["shards"][0].update(format="csv"), "not mds"),
        (lambda i: i["shards"][0]["raw_data"].update(basename="../x.mds"), "no name of a file"),
        (lambda i: i["shards"][0]["raw_data"].update(basename=".."), "no name of a file"),
        (lambda i: i["shards"][0]["raw_data"].update(basename="gone"), "gone is not there"),
        (lambda i: i["shards"][0]["raw_data"].update(bytes=1 << 40), "is cut short"),
        (lambda i: i["shards"][0].update(samples=2), "places of samples are damaged"),
        (lambda i: i["shards"][0].update(samples=1 << 40), "no room for"),
        (lambda i: i["shards"][0].update(samples=-1), "samples is '-1'"),
        (lambda i: i["shards"][-1]["column_names"].reverse(), "have not the same columns"),
        (lambda i: i["shards"][0].update(column_names=["a"]), "MDS: ValueError"),
        (lambda i: i["shards"][0]["column_sizes"].__setitem__(0, "9"), "column_sizes is '9'"),
        (lambda i: i["shards"][0].pop("raw_data"), "KeyError"),
        (lambda i: i["shards"].__setitem__(0, 7), "TypeError"),
    ],
)
def test_an_mds_index_that_lies_is_said(tmp_path: Path, edit: Any, said: str) -> None:
    folder = mds(tmp_path, 60)
    change(folder, edit)
    with pytest.raises(MalformedFile, match=said):
        open_source(folder, format="mds")


def test_damage_in_an_mds_shard_is_a_bad_record_or_an_error(tmp_path: Path) -> None:
    """Any byte, of places, sizes or values: an error as it is opened, or records with a reason, or
    another value; nothing else is raised."""
    folder = mds(tmp_path, 20)
    path = folder / "shard.00000.mds"
    whole = path.read_bytes()
    for at in [*range(140), *range(140, len(whole), 1009)]:
        raw = bytearray(whole)
        raw[at] ^= 0x81
        path.write_bytes(raw)
        try:
            items = items_of(open_source(folder))
        except MalformedFile:
            assert at < 100  # in the places of samples
            continue
        assert len(items) == 20
        assert all(item.problem or item.sample for item in items)
    path.write_bytes(whole[:-1])
    with pytest.raises(MalformedFile, match="cut short"):
        open_source(folder)


def test_mds_that_is_compressed_alone_is_refused(tmp_path: Path) -> None:
    """It says what unpacks it."""
    folder = mds(tmp_path, 20)
    packed = {"basename": "shard.00000.mds.zstd", "bytes": 1, "hashes": {}}
    change(folder, lambda i: i["shards"][0].update(zip_data=packed, compression="zstd"))
    assert len(items_of(open_source(folder))) == 20  # it is there unpacked, too
    (folder / "shard.00000.mds").unlink()
    with pytest.raises(ConfigError, match=r"compressed \(zstd\).*Nothing was written"):
        open_source(folder)


@LITDATA
def test_samples_of_litdata_are_kept_with_their_files(tmp_path: Path) -> None:
    """Numbers, texts, tensors, arrays; images stay encoded; the folder is left as it was."""
    streaming = package("litdata.streaming", "litdata")
    types = package("litdata.types", "litdata")
    jpeg = b"\xff\xd8\xff\xda\0\2..\xff\xd9"
    (tmp_path / "a").mkdir()
    cache = streaming.Cache(str(tmp_path / "a"), chunk_size=4)
    for n in range(10):
        cache[n] = {
            "n": n,
            "x": n / 4,
            "flag": n % 2 == 0,
            "s": "é" * n,
            "raw": bytes([n]) * n,
            "ids": torch.arange(n + 1),
            "grid": np.full((2, 2), n, np.float32),
            "photo": types.Jpeg(bytes=jpeg),
        }
    cache.done()
    cache.merge()
    before = sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "a").iterdir())
    source = open_source(tmp_path / "a")
    assert (source.kind, source.length) == ("litdata", 10)
    check_restart(source)
    for n, item in enumerate(items_of(source)):
        sample = plain(item.sample)
        ids = sample.pop("ids")
        assert isinstance(ids, torch.Tensor)
        assert ids.tolist() == list(range(n + 1))
        assert sample == {
            "n": n,
            "x": n / 4,
            "flag": n % 2 == 0,
            "s": "é" * n,
            "raw": bytes([n]) * n,
            "grid": [[n] * 2] * 2,
            "photo": jpeg,
        }
    assert sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "a").iterdir()) == before


@pytest.mark.parametrize(
    ("edit", "kind", "said"),
    [
        (lambda i: i["config"].update(data_format=["pickle"]), ConfigError, "unpickles"),
        (lambda i: i["config"].update(data_format=["graph:1"]), ConfigError, "kind 'graph'"),
        (lambda i: i["config"].update(compression="zstd"), ConfigError, "compressed by zstd"),
        (lambda i: i["config"].update(encryption={"a": 1}), ConfigError, "encrypted"),
        (lambda i: i["config"].update(item_loader="TokensLoader"), ConfigError, "TokensLoader"),
        (lambda i: i["config"].pop("data_format"), MalformedFile, "KeyError"),
        (lambda i: i["config"].update(data_spec="[1, {"), MalformedFile, "no LitData"),
        (lambda i: i["chunks"][0].update(filename="/etc/passwd"), MalformedFile, "no name of"),
        (lambda i: i["chunks"][0].update(filename="gone.bin"), MalformedFile, "not there"),
        (lambda i: i["chunks"][0].update(chunk_bytes=1 << 40), MalformedFile, "cut short"),
        (lambda i: i["chunks"][0].update(chunk_size="7"), MalformedFile, "chunk_size"),
        (lambda i: i.update(chunks=7), MalformedFile, "TypeError"),
    ],
)
def test_a_litdata_index_that_lies_or_is_not_read_is_said(
    tmp_path: Path, edit: Any, kind: type[Exception], said: str
) -> None:
    folder = litdata(tmp_path, 10)
    change(folder, edit)
    with pytest.raises(kind, match=said):
        open_source(folder, format="litdata")


def test_samples_of_other_types_than_json_s_are_refused(tmp_path: Path) -> None:
    """A defaultdict would have litdata import what the index names."""
    folder = litdata(tmp_path, 10)
    leaf: Index = {"type": None, "context": None, "children_spec": []}
    odd = {
        "type": "collections.defaultdict",
        "context": json.dumps(
            {"default_factory_module": "os", "default_factory_name": "system", "dict_context": []}
        ),
        "children_spec": [leaf],
    }
    tree = {"type": "builtins.list", "context": "null", "children_spec": [odd]}
    change(folder, lambda i: i["config"].update(data_spec=json.dumps([1, tree])))
    with pytest.raises(MalformedFile, match=r"samples hold a collections\.defaultdict"):
        open_source(folder)


@LITDATA
def test_a_damaged_litdata_chunk_has_bad_records(tmp_path: Path) -> None:
    """Places that lead anywhere: each sample is there or named with a reason."""
    folder = litdata(tmp_path, 10)
    path = next(folder.glob("chunk-*.bin"))
    whole = path.read_bytes()
    for at in [4, 8, 13, 20, 31, 40, len(whole) // 2]:
        raw = bytearray(whole)
        raw[at] ^= 0xFF
        path.write_bytes(raw)
        items = items_of(open_source(folder))
        assert len(items) == 10
        assert all(item.problem or item.sample is not None for item in items)
        assert all(path.name in item.name or item.sample for item in items)
