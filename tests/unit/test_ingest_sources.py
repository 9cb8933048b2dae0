"""Sources for ingest, on small real files: what records they have, which are bad and how named."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from hpstore.errors import ConfigError
from hpstore.loaders import Field, open_source
from hpstore.loaders.ingestion.infer_fields import infer_fields
from hpstore.loaders.ingestion.sample_source import BlockwiseSource, IndexedSource, Source
from hpstore.loaders.ingestion.source_rows import SourceItem


def items_of(source: Source) -> list[SourceItem]:
    """All records in the order of the source."""
    if isinstance(source, IndexedSource):
        return list(source.read(range(source.length), 1))
    assert isinstance(source, BlockwiseSource)
    return [item for block in range(source.blocks) for item in source.read_block(block, 0)]


def plain(sample: Mapping[str, object] | None) -> dict[str, object]:
    """Arrays as lists, so that samples compare."""
    assert sample is not None
    return {
        k: v.tolist() if isinstance(v, np.ndarray | np.generic) else v for k, v in sample.items()
    }


def check_restart(source: Source) -> None:
    """Reading a block from any record on gives the rest of it."""
    assert isinstance(source, BlockwiseSource)
    for block in range(source.blocks):
        whole = list(source.read_block(block, 0))
        for start in range(len(whole) + 1):
            rest = list(source.read_block(block, start))
            assert [i.name for i in rest] == [i.name for i in whole[start:]]
            assert [i.origin for i in rest] == [i.origin for i in whole[start:]]


def write_tar(path: Path, files: Mapping[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]  # a str of many modes
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def shard(first: int, count: int) -> dict[str, bytes]:
    """Members of `count` samples as WebDataset writes them."""
    return {
        f"d/{n:04d}.{ext}": data
        for n in range(first, first + count)
        for ext, data in (
            ("cls", b"%d" % n),
            ("txt", f"né {n}".encode()),
            ("seg.bin", bytes([n % 256]) * (n + 1)),
        )
    }


@pytest.mark.parametrize(("ending", "mode"), [(".tar", "w"), (".tar.gz", "w:gz")])
def test_tars_are_samples_by_basename(tmp_path: Path, ending: str, mode: str) -> None:
    """Two shards: keys grouped, .cls an int, .txt a str, the rest bytes; no-records counted."""
    for number in range(2):
        extra = {"README": b"x", "__meta__.json": b"{}"}
        write_tar(tmp_path / f"s-{number:03d}{ending}", {**extra, **shard(number * 5, 5)}, mode)
    source = open_source(str(tmp_path / f"s-{{000..001}}{ending}"))
    items = items_of(source)
    assert [plain(item.sample) for item in items] == [
        {"cls": n, "txt": f"né {n}", "seg.bin": bytes([n]) * (n + 1)} for n in range(10)
    ]
    assert items[7].name == f"s-001{ending}: d/0007"
    if isinstance(source, BlockwiseSource):
        check_restart(source)
    else:
        assert (source.length, source.ignored) == (10, 4)


@pytest.mark.parametrize(("ending", "mode"), [(".tar", "w"), (".tar.gz", "w:gz")])
def test_a_cut_tar_is_named_and_what_is_whole_is_read(
    tmp_path: Path, ending: str, mode: str
) -> None:
    """Cut anywhere, a tar never passes for a shorter one; samples before the cut are whole."""
    path = tmp_path / f"s{ending}"
    write_tar(path, shard(0, 3), mode)
    whole = path.read_bytes()
    wanted = [plain(item.sample) for item in items_of(open_source(path))]
    for size in range(1, len(whole) if mode == "w:gz" else 9 * 1024 + 1, 97):
        path.write_bytes(whole[:size])
        items = items_of(open_source(path))
        assert any("s" + ending in item.name and item.problem for item in items), size
        good = [plain(item.sample) for item in items if not item.problem]
        assert all(sample in wanted or len(sample) < 3 for sample in good), size


@pytest.mark.parametrize(("ending", "mode"), [(".tar", "w"), (".tar.gz", "w:gz")])
def test_a_tar_behind_another_one_is_named(tmp_path: Path, ending: str, mode: str) -> None:
    """Joined by cat; the second one was left out silently. Zeros are no fault."""
    path, whole = tmp_path / f"s{ending}", tmp_path / "whole"
    write_tar(whole, shard(0, 3), mode)
    for behind, wanted in [(b"\0" * 99_999, 3), (whole.read_bytes(), 4)]:
        packed = behind if ending == ".tar" or wanted == 4 else gzip.compress(behind)
        path.write_bytes(whole.read_bytes() + packed)
        items = items_of(open_source(path))
        assert len(items) == wanted
        assert not any(item.problem for item in items[:2] if wanted == 4)
        assert not any(item.problem for item in items if wanted == 3)
    assert "more lies behind its end mark" in items[-1].problem


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_a_damaged_tar_header_is_named(tmp_path: Path, ending: str) -> None:
    """tarfile takes a damaged header in the middle for the end; we do not."""
    write_tar(tmp_path / "whole", shard(0, 3))
    raw = bytearray((tmp_path / "whole").read_bytes())
    raw[4 * 1024 + 150] ^= 0xFF
    path = tmp_path / f"s{ending}"
    path.write_bytes(raw if ending == ".tar" else gzip.compress(raw))
    last = items_of(open_source(path))[-1]
    assert last.name == path.name
    assert "no tar header at byte 4096" in last.problem


def test_a_cut_member_is_known_before_anything_is_read(tmp_path: Path) -> None:
    """The scan of the headers finds it: an ingest does not begin."""
    path = tmp_path / "s.tar"
    write_tar(path, shard(0, 3))
    path.write_bytes(path.read_bytes()[: 9 * 1024 - 511])
    source = open_source(path)
    assert isinstance(source, IndexedSource)
    assert source.broken[2] == ".seg.bin is cut short by the end of the tar"


def test_bad_members_of_a_tar_are_named_by_key(tmp_path: Path) -> None:
    """A .cls and a .txt that are no UTF-8, a cut image, a member twice."""
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in [
            ("a.cls", b"\xff"),
            ("b.txt", b"\xff"),
            ("c.jpg", b"\xff\xd8cut"),
            ("d.bin", b"1"),
            ("d.bin", b"2"),
            ("e.cls", b"1"),
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    problems = {item.name: item.problem for item in items_of(open_source(path))}
    assert ".cls" in problems["s.tar: a"]
    assert ".txt" in problems["s.tar: b"]
    assert "cut short" in problems["s.tar: c"]
    assert "two members" in problems["s.tar: d"]
    assert problems["s.tar: e"] == ""


def test_numpy_files_and_folders(tmp_path: Path) -> None:
    """.npy and memmap are `data`; .npz, folders and structured arrays have a field an array."""
    a = np.arange(12, dtype=np.float32).reshape(4, 3)
    b = np.arange(4)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    np.savez(tmp_path / "both.npz", x=a, y=b)
    made = np.zeros(4, [("p", "f4", (3,)), ("q", "i8")])
    made["p"], made["q"] = a, b
    a.tofile(tmp_path / "raw")
    mapped = np.memmap(tmp_path / "raw", a.dtype, "r", shape=a.shape)
    for source, names in [
        (tmp_path / "a.npy", ("data",)),
        (tmp_path, ("a", "b")),
        (tmp_path / "both.npz", ("x", "y")),
        (made, ("p", "q")),
        ({"u": a, "v": b}, ("u", "v")),
        (mapped, ("data",)),
        (np.load(tmp_path / "a.npy", mmap_mode="r"), ("data",)),
    ]:
        opened = open_source(source, format="numpy" if source is tmp_path else "auto")
        found = [plain(item.sample) for item in items_of(opened)]
        assert found == [dict(zip(names, (a[i].tolist(), i), strict=False)) for i in range(4)]


def test_arrays_that_are_no_samples_are_refused(tmp_path: Path) -> None:
    """Objects (pickles), unequal lengths, no axis, damaged files: named."""
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "bad.npz").write_bytes(b"PK")
    for source, said in [
        (tmp_path / "o.npy", "o.npy"),
        (tmp_path / "bad.npz", "bad.npz"),
        ({"a": np.zeros(3), "b": np.zeros(4)}, "a 3, b 4"),
        (np.array(1.0), "no first axis"),
        (np.array(["x"]), "dtype"),
    ]:
        with pytest.raises(ConfigError, match=said):
            open_source(source)


def test_zarr_arrays_and_groups(tmp_path: Path) -> None:
    """Chunks are blocks; a group has a field for each array; a damaged chunk is named."""
    group = zarr.create_group(str(tmp_path / "g.zarr"))
    values = np.arange(60, dtype=np.int16).reshape(10, 6)
    group.create_array("x", data=values, chunks=(4, 6))
    group.create_array("y", data=np.arange(10), chunks=(10,))
    group.create_array("z", data=values, chunks=(4, 6))
    source = open_source(tmp_path / "g.zarr")
    source.restrict(["x", "z"], {})
    assert isinstance(source, BlockwiseSource)
    assert source.blocks == 3
    assert [plain(i.sample) for i in items_of(source)] == [
        {"x": row.tolist(), "z": row.tolist()} for row in values
    ]
    check_restart(source)
    alone = open_source(group["x"])
    assert alone.length == 10
    (tmp_path / "g.zarr/x/c/1/0").write_bytes(b"damage")
    bad = [item for item in items_of(source) if item.problem]
    assert len(bad) == 1
    assert "[4:8]" in bad[0].name
    whole = source.fingerprint()
    (tmp_path / "g.zarr/x/c/0/0").write_bytes(b"damage")  # of the rows that a fingerprint looks at
    assert source.fingerprint() != whole
    assert [item.name[-5:] for item in items_of(source) if item.problem] == ["[0:4]", "[4:8]"]


@pytest.mark.parametrize(("value", "names"), [((1, 2), ["a", "a"]), ({1: 1, "1": 2}, None)])
def test_parts_of_one_name_are_a_bad_record(value: Any, names: list[str] | None) -> None:
    """The last one had taken the place of the others."""
    for source in ([value], lambda: iter([value])):
        (item,) = items_of(open_source(source, names=names))
        assert "two of its parts have one name" in item.problem


def test_any_dataset_and_iterable() -> None:
    """torch's Dataset with tuples, a list of dicts, a generator, a function, an IterableDataset."""

    class Stream(torch.utils.data.IterableDataset[dict[str, int]]):
        def __iter__(self) -> Iterator[dict[str, int]]:
            return iter([{"i": 0}, {"i": 1}])

    pairs = torch.utils.data.TensorDataset(torch.arange(3), torch.ones(3, 2))
    named = items_of(open_source(pairs, names=("a", "b")))
    assert [int(item.sample["a"]) for item in named if item.sample] == [0, 1, 2]  # type: ignore[call-overload]
    numbers = [{"i": 0}, {"i": 1}]
    for source in (numbers, iter(numbers), lambda: iter(numbers), Stream()):
        assert [item.sample for item in items_of(open_source(source))] == numbers
    check_restart(open_source(lambda: iter(numbers)))


def test_what_a_dataset_raises_is_its_records_problem() -> None:
    """Named by its index; the others are read."""

    class Broken:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, int]:
            if index == 1:
                raise RuntimeError("no such file")
            return {"i": index}

    items = items_of(open_source(Broken()))
    assert [bool(item.problem) for item in items] == [False, True, False]
    assert (items[1].name, items[1].problem) == ("Broken[1]", "RuntimeError: no such file")


def test_fields_are_inferred_from_samples() -> None:
    """Types from values; a first dimension that differs is ragged; ints and floats are floats."""
    samples = [
        {
            "i": 1,
            "f": 1,
            "s": "x",
            "b": b"x",
            "t": torch.zeros(2, 3),
            "r": np.zeros((4, 2), "u1"),
            "n": np.float16(1),
            "h": torch.zeros(5, dtype=torch.bfloat16),
            "e": np.zeros(0),
        },
        {
            "i": 2,
            "f": 0.5,
            "s": "",
            "b": b"",
            "t": torch.ones(2, 3),
            "r": np.zeros((0, 2), "u1"),
            "n": np.float16(2),
            "h": torch.ones(5, dtype=torch.bfloat16),
            "e": np.zeros(3),
        },
    ]
    assert infer_fields(samples) == {
        "i": Field("int64"),
        "f": Field("float64"),
        "s": Field("str"),
        "b": Field("bytes"),
        "t": Field("float32", (2, 3)),
        "r": Field("uint8", (None, 2)),
        "n": Field("float16"),
        "h": Field("bfloat16", (5,)),
        "e": Field("float64", (None,)),
    }


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([{"a": 1}, {"b": 1}], "not every sample"),
        ([{"a": object()}], "object"),
        ([{"a": np.zeros((2, 3))}, {"a": np.zeros((2, 4))}], "first dimension"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(2, "f4")}], "float64 and float32"),
    ],
)
def test_what_no_field_can_hold_is_said(samples: list[dict[str, object]], said: str) -> None:
    """With the name of the field."""
    with pytest.raises(ConfigError, match=said):
        infer_fields(samples)


def test_formats_are_told_by_names_and_contents(tmp_path: Path) -> None:
    """A folder by what is in it; what is not clear, or not there, is said."""
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars/a.tar", shard(0, 1))
    zarr.create_array(str(tmp_path / "array"), data=np.zeros(3))
    assert open_source(tmp_path / "tars").kind == "webdataset"
    assert open_source(tmp_path / "array").kind == "zarr"
    (tmp_path / "odd").mkdir()
    for where, said in [("odd", "nothing of a known ending"), ("none", "does not exist")]:
        with pytest.raises(ConfigError, match=said):
            open_source(tmp_path / where)
    with pytest.raises(ConfigError, match="is not one of"):
        open_source(tmp_path, format="tar")
    with pytest.raises(ConfigError, match="is no source"):
        open_source(3)
