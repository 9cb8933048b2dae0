"""Sources that a package of its own reads: HDF5, LMDB, TFRecord, Lance; what each refuses."""

from __future__ import annotations

import builtins
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.errors import ConfigError, MalformedFile
from hpstore.loaders import Field, open_source
from hpstore.loaders.ingestion.lmdb_source import LmdbRecords
from tests.integration.source_makers import lance as lance_rows
from tests.integration.source_makers import tfrecord as tfrecord_files
from tests.unit.test_ingest_sources import check_restart, items_of, plain


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("a.h5", "h5py", "hdf5"),
        ("a.lmdb", "lmdb", "lmdb"),
        ("a.tfrecord", "tfrecord.example_pb2", "tfrecord"),
        ("a.lance", "lance", "lance"),
        ("a.csv", "pyarrow", "parquet"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    (tmp_path / name).touch()
    known = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return known(name, *rest)

    if extra == "lance":
        pytest.importorskip("pyarrow", reason="needs pyarrow (the extra `parquet`)")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=rf"pip install 'hpstore\[{extra}\]'"):
        open_source(tmp_path / name)


def test_data_sets_of_hdf5(tmp_path: Path) -> None:
    """By group; arrays, texts, ragged rows, booleans; from any row on."""
    h5py = pytest.importorskip("h5py", reason="needs h5py (the extra `hdf5`)")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("g/h")
        group.create_dataset("x", data=np.arange(20, dtype=">i2").reshape(10, 2), chunks=(3, 2))
        group.create_dataset("flag", data=np.arange(10) % 2 == 0)
        group.create_dataset("s", data=["é" * i for i in range(10)], dtype=h5py.string_dtype())
        ragged = group.create_dataset("r", (10,), dtype=h5py.vlen_dtype("f4"))
        for i in range(10):
            ragged[i] = np.arange(i)
        group.create_group("inner")
    source = open_source(tmp_path / "a.h5", source_options={"group": "g/h"})
    assert source.fields == {
        "flag": Field("bool"),
        "r": Field("float32", (None,)),
        "s": Field("str"),
        "x": Field("int16", (2,)),
    }
    assert [plain(item.sample) for item in items_of(source)] == [
        {"flag": i % 2 == 0, "r": list(range(i)), "s": "é" * i, "x": [2 * i, 2 * i + 1]}
        for i in range(10)
    ]
    check_restart(source)
    with pytest.raises(ConfigError, match=r"there is none; groups in it: g"):
        open_source(tmp_path / "a.h5")
    with pytest.raises(ConfigError, match="has no group 'z'"):
        open_source(tmp_path / "a.h5", source_options={"group": "z"})


def test_an_hdf5_file_reads_no_other(tmp_path: Path) -> None:
    """Links, external storage, virtual data sets; a shape that its bytes cannot have; damage."""
    h5py = pytest.importorskip("h5py", reason="needs h5py (the extra `hdf5`)")
    (tmp_path / "secret").write_bytes(b"secret!!")

    def external(file: Any) -> None:
        file.create_dataset("x", (8,), "u1", external=[(str(tmp_path / "secret"), 0, 8)])

    def virtual(file: Any) -> None:
        layout = h5py.VirtualLayout((8,), "u1")
        layout[:] = h5py.VirtualSource("other.h5", "x", (8,))
        file.create_virtual_dataset("x", layout)

    def link(file: Any) -> None:
        file["x"] = h5py.ExternalLink("other.h5", "/x")

    def huge(file: Any) -> None:
        file.create_dataset("x", (1 << 40,), "u1", chunks=(1 << 20,))

    def objects(file: Any) -> None:
        file.create_dataset("x", data=np.zeros(3, [("a", "i4"), ("b", "f8")]))

    for make, said in [
        (external, "lies in other files"),
        (virtual, "lies in other files"),
        (link, "is a link"),
        (huge, "far more than its file"),
        (objects, "which no field can hold"),
    ]:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            make(file)
        with pytest.raises((ConfigError, MalformedFile), match=said):
            open_source(tmp_path / "a.h5")
    for data in (b"", b"no hdf5", (tmp_path / "a.h5").read_bytes()[:700]):
        (tmp_path / "a.h5").write_bytes(data)
        with pytest.raises(MalformedFile, match=r"a\.h5 cannot be read"):
            open_source(tmp_path / "a.h5")


def test_records_of_lmdb(tmp_path: Path) -> None:
    """In the order of keys, of a folder, a file and a named database; from any record on."""
    lmdb = pytest.importorskip("lmdb", reason="needs lmdb (the extra `lmdb`)")
    count = 2500
    with lmdb.open(str(tmp_path / "a.lmdb"), map_size=1 << 24, max_dbs=1) as env:
        named = env.open_db(b"named")
        with env.begin(write=True) as writer:
            for n in range(count):
                writer.put(b"%06d" % n, b"v" * (n % 5), db=named)
    single_file = lmdb.open(str(tmp_path / "b.mdb"), map_size=1 << 24, subdir=False)
    with single_file as env, env.begin(write=True) as writer:
        writer.put(b"k", b"v")
    source = open_source(tmp_path / "a.lmdb", source_options={"database": "named"})
    assert source.fields == {"key": Field("bytes"), "value": Field("bytes")}
    assert source.length == count
    assert [plain(item.sample) for item in items_of(source)] == [
        {"key": b"%06d" % n, "value": b"v" * (n % 5)} for n in range(count)
    ]
    single = open_source(tmp_path / "b.mdb")
    assert [plain(item.sample) for item in items_of(single)] == [{"key": b"k", "value": b"v"}]
    check_restart(single)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    items_of(source)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    with pytest.raises(MalformedFile, match="cannot be read"):
        open_source(tmp_path / "a.lmdb", source_options={"database": "other"})
    (tmp_path / "c.mdb").write_bytes(b"no lmdb" * 1000)
    with pytest.raises(MalformedFile, match="cannot be read"):
        open_source(tmp_path / "c.mdb")


def test_what_cannot_be_read_of_lmdb_is_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has left it out goes on behind it. A page that lmdb finds damaged ends it in C, or the
    process, so its error is made here."""
    lmdb = pytest.importorskip("lmdb", reason="needs lmdb (the extra `lmdb`)")
    with (
        lmdb.open(str(tmp_path / "a.lmdb"), map_size=1 << 24) as env,
        env.begin(write=True) as writer,
    ):
        for n in range(9):
            writer.put(b"%06d" % n, b"v")
    source = open_source(tmp_path / "a.lmdb")
    assert isinstance(source, LmdbRecords)
    plain_cursor = source._cursor

    class Damaged:
        def __init__(self, cursor: Any) -> None:
            self.set_key, self._rows = cursor.set_key, cursor.iternext

        def iternext(self) -> Iterator[tuple[bytes, bytes]]:
            yield from islice(self._rows(), 4)
            raise lmdb.CorruptedError("a page")

    @contextmanager
    def cursor() -> Iterator[Damaged]:
        with plain_cursor() as found:
            yield Damaged(found)

    monkeypatch.setattr(source, "_cursor", cursor)
    assert [bool(item.problem) for item in source.read_block(0, 0)] == [False] * 4 + [True]
    assert [item.problem != "" for item in source.read_block(0, 4)] == [True]
    assert list(source.read_block(0, 5)) == []


def test_a_tfrecord_that_is_damaged_anywhere_is_found(tmp_path: Path) -> None:
    """Every byte flipped, every length cut: no record is another one, and each damage is named."""
    tfrecord_files(tmp_path, 6)
    (tmp_path / "a.tfrecord").unlink()
    path = tmp_path / "b.tfrecord"
    whole = path.read_bytes()
    source = open_source(path)
    assert source.fields == {"n": Field("int64"), "s": Field("bytes")}
    wanted = [plain(item.sample) for item in items_of(source)]
    assert [sample["n"] for sample in wanted] == [3, 4, 5]
    check_restart(source)
    places = [*range(16), *range(16, len(whole), 211), *range(len(whole) - 4, len(whole))]
    for at in places:
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(data)
            items = items_of(source)
            assert all(plain(item.sample) in wanted for item in items if item.sample)
            assert any(item.problem for item in items) or at == 0, at


def write_examples(path: Path, *features: Mapping[str, Any]) -> Path:
    """A file of tf.train.Example."""
    example = pytest.importorskip("tfrecord.example_pb2", reason="needs tfrecord (its extra)")
    from hpstore.loaders.ingestion.tfrecord_source import masked_crc

    raw = b""
    for each in features:
        made = example.Example()
        for name, values in each.items():
            feature = made.features.feature[name]
            if not values:
                continue  # there, and of no type
            kinds = {bytes: feature.bytes_list, float: feature.float_list}
            kinds.get(type(values[0]), feature.int64_list).value.extend(values)
        data = made.SerializeToString()
        head = struct.pack("<Q", len(data))
        raw += (
            head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))
        )
    path.write_bytes(raw)
    return path


def test_features_of_examples(tmp_path: Path) -> None:
    """One value each is a scalar, more are ragged; several bytes are refused."""
    write = partial(write_examples, tmp_path / "a.tfrecord")
    path = write({"i": [1], "f": [0.5, 1.5], "t": [b"x"]}, {"i": [2], "f": [2.5], "t": [b"\xff"]})
    source = open_source(path)
    assert source.fields == {
        "f": Field("float32", (None,)),
        "i": Field("int64"),
        "t": Field("bytes"),
    }
    assert [plain(item.sample) for item in items_of(source)] == [
        {"f": [0.5, 1.5], "i": 1, "t": b"x"},
        {"f": [2.5], "i": 2, "t": b"\xff"},
    ]
    none: dict[str, Any] = {"f": []}
    for features in ([none, {"f": [0.5]}], [{"f": [0.5, 1.0]}, none]):
        unset = open_source(write(*features))
        assert unset.fields == {"f": Field("float32", (None,))}
        found = [plain(item.sample) for item in items_of(unset)]
        assert found == features
    source = open_source(write({"t": [b"x"]}, {"t": [b"\xff"]}))
    source.restrict(["t"], {"t": Field("str")})
    assert [item.problem for item in items_of(source)] == [
        "",
        "'t' is no UTF-8: invalid start byte",
    ]
    with pytest.raises(ConfigError, match="'t' has several byte strings"):
        _ = open_source(write({"t": [b"x", b"y"]})).fields
    later = open_source(
        write(*[{"i": [1]}] * 1000, {"i": [1, 2]}, {"j": [1]}, {"i": [1], "j": [1]})
    )
    problems = [item.problem for item in items_of(later)[1000:]]
    assert [problem.split(";")[0] for problem in problems] == [
        "'i' has 2 values, the field is one int64",
        "it lacks 'i'",
        "it has 'j', which the first examples have not",
    ]


def test_versions_of_lance(tmp_path: Path) -> None:
    """Deleted rows are not there; another version is another source; from any row on."""
    lance = pytest.importorskip("lance", reason="needs pylance (the extra `lance`)")
    path = lance_rows(tmp_path, 45)
    before = open_source(path)
    check_restart(before)
    lance.dataset(str(path)).delete("n in (3, 41)")
    source = open_source(path)
    assert source.fingerprint() != before.fingerprint()
    found = [plain(item.sample)["n"] for item in items_of(source)]
    assert found == [n for n in range(45) if n not in (3, 41)]
    check_restart(source)
    (tmp_path / "b.lance").mkdir()
    with pytest.raises(MalformedFile, match=r"b\.lance cannot be read"):
        open_source(tmp_path / "b.lance")


def test_features_of_tfrecord_become_images_json_and_lists_of_texts(tmp_path: Path) -> None:
    one = {"img": [b"\xff\xd8\xff"], "said": [b'{"a": [1]}'], "tags": [b"x", "é".encode()]}
    path = write_examples(tmp_path / "a.tfrecord", one, {**one, "tags": [b"y"]})
    source = open_source(path)
    made = {
        "img": Field("image"),
        "said": Field("json"),
        "tags": Field("str", (None,)),
        "none": Field("bytes", optional=True),
    }
    source.restrict(list(made), made)
    first, second = (item.sample for item in items_of(source))
    assert first == {"img": b"\xff\xd8\xff", "said": {"a": [1]}, "tags": ["x", "é"], "none": None}
    assert plain(second)["tags"] == ["y"]
    source.restrict(["tags"], {"tags": Field("json")})
    assert ["'tags' has 2 values" in item.problem for item in items_of(source)] == [True, False]
