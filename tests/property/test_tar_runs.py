"""Tars by runs of headers and by ranges are what they are one header and one file at a time."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import IngestError
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.many_ranges import ranges_library
from hpstore.loaders.ingestion import tar_index, tar_runs
from hpstore.loaders.ingestion.tar_headers import TarHeaders, TarMember
from hpstore.loaders.ingestion.tar_index import TarIndex
from hpstore.loaders.ingestion.tar_runs import TarRun
from hpstore.loaders.ingestion.tar_scan import all_differ
from hpstore.loaders.ingestion.webdataset_source import TarShards

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
ENDINGS = ("cls", "txt", "bin", "jpg")


def no_run(_: object, at: int) -> TarRun:
    none = np.empty(0, np.int64)
    return TarRun(names=b"", offsets=none, sizes=none, end=at)


ODD = ("none", ".hidden.txt", "a/.hidden.txt", "__own.txt", "two\nlines.txt", "end.", "u.Ä")


def write_tar(path: Path, seed: int, count: int) -> None:
    """Samples of a few files each; now and then a folder, a link, a long name, a time in pax, a
    name that is none of a sample, a file that is there twice, a sample that is not in one piece."""
    rng = random.Random(seed)
    times, unusual = rng.choice([0.1, 1]), rng.choice([0, 0, 0.1])
    with tarfile.open(path, "w", format=rng.choice(FORMATS)) as tar:
        for counted in range(count):
            number = counted if rng.random() >= unusual else rng.randrange(count)
            folder = rng.choice(["", "a/", "d" * 90 + "/" + "e" * 20 + "/"])
            if rng.random() < 0.2:
                odd = tarfile.TarInfo(f"odd{number}")
                odd.type = rng.choice([tarfile.DIRTYPE, tarfile.SYMTYPE])
                odd.linkname = "x"
                tar.addfile(odd)
            for ending in ENDINGS[: rng.choice([2, 2, 2, 4])]:
                size = rng.choice([0, 1, 511, 512, 513, 9000])
                data = {"cls": str(number).encode(), "txt": "ä".encode() * (size // 2)}
                body = data.get(ending, rng.randbytes(size))
                name = f"{folder}{number:04d}.{ending}"
                if rng.random() < unusual:
                    name = rng.choice([*ODD, name.upper(), f"{folder}{number:04d}.bin"])
                member = tarfile.TarInfo(name)
                member.size = len(body)
                if rng.random() < times:
                    member.mtime = 1.5  # as WebDataset's own writer
                tar.addfile(member, io.BytesIO(body))


def facts(path: Path) -> object:
    """All that a scan finds, and the records by number; or its error."""
    try:
        source = TarShards("t", [path], check=False)
    except IngestError as error:
        return str(error)
    order = list(range(source.length))
    random.Random(0).shuffle(order)
    rows = list(source.read(order, 1))
    assert rows == [source.load(index) for index in order]
    return source.length, source.ignored, dict(source.broken), source.total_bytes, rows


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(0, 30),
    damage=st.none() | st.tuples(st.floats(0, 1), st.integers(1, 255)),
    cut=st.none() | st.floats(0, 1),
)
def test_a_tar_by_runs_is_the_one_by_headers(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    damage: tuple[float, int] | None,
    cut: float | None,
) -> None:
    """Whole, with a flipped byte anywhere, and cut anywhere: same samples, names and problems."""
    path = tmp_path_factory.mktemp("tar") / "t.tar"
    write_tar(path, seed, count)
    data = bytearray(path.read_bytes())
    if damage is not None:
        data[int(damage[0] * (len(data) - 1))] ^= damage[1]
    path.write_bytes(data[: int((1 if cut is None else cut) * len(data))])
    found = facts(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_index, "tar_run", no_run)
        assert facts(path) == found


@pytest.mark.parametrize(
    ("types", "bad"),
    [
        ({}, 0),
        ({"cls": Field("int64"), "txt": Field("str"), "bin": Field("bytes")}, 0),
        ({"cls": Field("float64"), "txt": Field("bytes")}, 0),
        ({"bin": Field("str")}, 20),
    ],
)
def test_fields_by_columns_are_those_of_each_record(
    tmp_path: Path, types: dict[str, Field], bad: int
) -> None:
    """Numbers, texts, bytes; bytes that are no text are bad records, each by its name."""
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(40):
            for ending, body in (
                ("cls", b"%d" % number),
                ("txt", b"text"),
                ("bin", b"\xff" if number % 2 else b"fine"),
            ):
                member = tarfile.TarInfo(f"{number:03d}.{ending}")
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))
    source = TarShards("t", [path], check=True)
    if types:
        source.restrict([*types, "__key__"], types)
    items = list(source.read(range(40), 3))
    assert items == [source.load(index) for index in range(40)]
    assert sum(bool(item.problem) for item in items) == bad
    assert all("t.tar: " in item.name for item in items)


def test_a_tar_that_shrinks_between_scan_and_read_has_bad_records(tmp_path: Path) -> None:
    """Its first samples are read, those behind its end are named."""
    path = tmp_path / "t.tar"
    write_tar(path, 4, 30)
    source = TarShards("t", [path], check=False)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    items = list(source.read(range(source.length), 2))
    assert items == [source.load(index) for index in range(source.length)]
    bad = [item for item in items if item.problem]
    assert 0 < len(bad) < len(items)
    assert all("the tar has changed" in item.problem for item in bad)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("name", [b"a/", b"a/\0junk", b"a.txt\0b/"])
def test_folders_of_the_oldest_tars_are_told_by_the_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes, library: bool
) -> None:
    """What lies behind the name's zero says nothing: the header counts no bytes that follow."""
    if not library:
        monkeypatch.setattr(tar_runs, "tar_headers", lambda *_: None)
    path = tmp_path / "t.tar"
    body = tarfile.TarInfo("b.txt")
    body.size = 1
    header = bytearray(512)
    header[: len(name)], header[124:136] = name, b"%011o\0" % 512
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(bytes(header) + body.tobuf() + b"x".ljust(512, b"\0") + bytes(1024))
    found = facts(path)
    monkeypatch.setattr(tar_index, "tar_run", no_run)
    assert facts(path) == found


@pytest.mark.parametrize("format_", FORMATS)
def test_ordinary_files_are_taken_by_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: int
) -> None:
    """With times that have a fraction as without: no header of them is looked at by itself."""
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w", format=format_) as tar:
        for number in range(300):
            for ending in ENDINGS:
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.mtime = 1700000000 + number / 7
                tar.addfile(member)
    if ranges_library() is None:
        pytest.skip("installed without a compiler")
    looked: list[int] = []
    singly: list[str] = []
    plain, add = TarHeaders.entries, TarIndex._file

    def entries(self: TarHeaders, at: int) -> Iterator[TarMember]:
        looked.append(at)
        return plain(self, at)

    def file(self: TarIndex, shard: int, name: str, *given: int) -> None:
        singly.append(name)
        add(self, shard, name, *given)

    monkeypatch.setattr(TarHeaders, "entries", entries)
    monkeypatch.setattr(TarIndex, "_file", file)
    index = TarIndex()
    index.scan(0, path)
    assert len(index) == 300
    assert len(looked) == 1  # the end
    assert len(singly) == len(ENDINGS)  # endings that were not known


@given(st.lists(st.binary(max_size=3), max_size=8), st.booleans())
def test_keys_differ_or_one_is_there_twice(keys: list[bytes], ordered: bool) -> None:
    keys = sorted(keys, key=lambda key: (len(key), key)) if ordered else keys
    ends = np.cumsum([0, *map(len, keys)])
    assert all_differ(b"".join(keys), ends) == (len(set(keys)) == len(keys))
