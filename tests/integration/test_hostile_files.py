"""Archives, arrays and tables made to do harm (t5, t15): refused, in bounded memory."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hpstore.config import load_config
from hpstore.errors import ConfigError, IngestError, IntegrityError, MalformedFile
from hpstore.format.numpy_files import mapped_npy, npz_arrays
from hpstore.loaders.cache.messages import TURNS, address, listen
from hpstore.loaders.ingestion import open_source
from hpstore.loaders.ingestion.arrow_source import ArrowTables
from hpstore.loaders.ingestion.numpy_source import numpy_files
from hpstore.loaders.ingestion.sample_source import IndexedSource, Source
from hpstore.loaders.ingestion.source_rows import SourceItem
from hpstore.loaders.ingestion.webdataset_source import webdataset
from hpstore.runtime.clock import SystemClock
from hpstore.runtime.rights import group_number
from tests.fuzz.engine import bounded


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header with any bytes for its size, and the checksum that fits."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def items_of(source: Source) -> list[SourceItem]:
    if isinstance(source, IndexedSource):
        return [source.load(index) for index in range(source.length)]
    return [item for block in range(source.blocks) for item in source.read_block(block, 0)]  # type: ignore[attr-defined]


ZERO = b"00000000000\0"
BACK = b"\xff" + (2**88 - 1024).to_bytes(11, "big")
SIZES = {
    "2^70": b"\x80" + (1 << 70).to_bytes(11, "big"),
    "2^63-1": b"\x80" + ((1 << 63) - 1).to_bytes(11, "big"),
    "-1024": BACK,
    "-1": b"\xff" * 12,
}


@pytest.mark.parametrize("pack", [lambda raw: raw, gzip.compress], ids=["tar", "tar.gz"])
@pytest.mark.parametrize("size", SIZES)
def test_an_impossible_size_ends_a_tar(
    tmp_path: Path, size: str, pack: Callable[[bytes], bytes]
) -> None:
    """t5: the member is named as broken; OverflowError, or reading from the beginning, before."""
    path = tmp_path / ("s.tar" if pack is not gzip.compress else "s.tar.gz")
    path.write_bytes(pack(header("a.bin", SIZES[size]) + header("b.bin", ZERO) + bytes(1024)))
    found = items_of(webdataset(path))
    assert len(found) == 1
    assert "a size of" in found[0].problem


@pytest.mark.parametrize("kind", [b"0", b"x", b"L"])
def test_a_tar_never_goes_back(tmp_path: Path, kind: bytes) -> None:
    """t5_loop, CVE-2025-8194: the second header's size leads back to the first."""
    path = tmp_path / "s.tar"
    path.write_bytes(header("a.bin", ZERO) + header("b.bin", BACK, kind) + bytes(1024))
    found = items_of(webdataset(path))
    assert [bool(item.problem) for item in found] == [False, True]


def test_names_that_lead_to_names_are_bounded(tmp_path: Path) -> None:
    """65,540 headers in front of one file (t5): RecursionError before, and as much memory as they
    say."""
    path = tmp_path / "s.tar.gz"
    one = header("x", b"00000000100\0", b"L") + b"n" * 64 + bytes(448)
    path.write_bytes(gzip.compress(one * 65_540 + header("a.bin", ZERO) + bytes(1024)))
    with bounded():
        found = items_of(webdataset(path))
    assert "headers of more than" in found[-1].problem


def test_a_member_that_is_inflated_is_bounded(tmp_path: Path) -> None:
    """t5: 1 GiB of zeros in 1 MB of gz is not read into memory; what comes behind is."""
    path = tmp_path / "s.tar.gz"
    info = tarfile.TarInfo("a.bin")
    info.size = 1 << 30
    small = tarfile.TarInfo("b.txt")
    small.size = 1
    with gzip.open(path, "wb", 1) as out:
        out.write(info.tobuf(tarfile.GNU_FORMAT))
        for _ in range(64):
            out.write(bytes(1 << 24))
        out.write(small.tobuf(tarfile.GNU_FORMAT) + b"x" + bytes(511 + 1024))
    with bounded():
        first, second = items_of(webdataset(path))
    assert "write the tar without compression" in first.problem
    assert second.sample == {"txt": "x"}


def test_a_dictionary_is_bounded(tmp_path: Path) -> None:
    """A .tar.xz whose header wants a dictionary of 3 GiB, and an old .lzma that wants 4 GiB."""
    path = tmp_path / "s.tar.xz"
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 16}]
    small = bytearray(lzma.compress(bytes(2048), filters=filters))
    at = small.index(b"\x21\x01", 12) + 2  # LZMA2, one byte of properties: the dictionary
    small[at] = 39
    size = (small[12] + 1) * 4
    small[12 + size - 4 : 12 + size] = zlib.crc32(small[12 : 12 + size - 4]).to_bytes(4, "little")
    old = b"\x5d" + b"\xff" * 12 + bytes(64)
    for data, problem in ((bytes(small), "limit"), (old, "not supported")):
        path.write_bytes(data)
        with bounded():
            (found,) = items_of(webdataset(path))
        assert problem in found.problem


def test_streams_of_xz_follow_one_another(tmp_path: Path) -> None:
    """As `cat` and `xz -T` make them, with padding between."""
    raw = header("a.bin", ZERO) + header("b.bin", ZERO) + bytes(1024)
    packed = lzma.compress(raw[:700]) + bytes(4) + lzma.compress(raw[700:])
    (tmp_path / "s.tar.xz").write_bytes(packed)
    assert [item.problem for item in items_of(webdataset(tmp_path / "s.tar.xz"))] == ["", ""]
    (tmp_path / "s.tar.xz").write_bytes(packed[: len(packed) // 2])
    assert items_of(webdataset(tmp_path / "s.tar.xz"))[-1].problem


def npy(shape: str, descr: str = "'<f8'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "shape", ["(1152921504606846976,)", "(-1,)", "(" * 200 + ")" * 200, "5", "(1e3,)", "(2, 2"]
)
def test_an_array_is_as_large_as_its_file(tmp_path: Path, shape: str) -> None:
    """t5: shapes of 2^60 and worse in .npy and .npz; OverflowError, MemoryError, TypeError
    before."""
    (tmp_path / "a.npy").write_bytes(npy(shape))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", npy(shape))
    for name in ("a.npy", "a.npz"):
        with bounded(), pytest.raises(MalformedFile, match=name) as caught:
            numpy_files(tmp_path / name)
        assert isinstance(caught.value, IntegrityError)
        assert isinstance(caught.value, ConfigError)


def test_an_npz_that_is_inflated_is_bounded(tmp_path: Path) -> None:
    """1 GiB of zeros in 1 MB."""
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("a.npy", "w", force_zip64=True) as out,
    ):
        out.write(npy("(134217728,)"))
        for _ in range(64):
            out.write(bytes(1 << 24))
    with bounded(), pytest.raises(MalformedFile, match=r"Save them as \.npy"):
        numpy_files(tmp_path / "a.npz")


@pytest.mark.parametrize("descr", ["'<U1'", "'>U1'", "[('a', '<i4'), ('b', '<U1', (1,))]"])
def test_text_of_an_npz_is_made_of_characters(tmp_path: Path, descr: str) -> None:
    """0x7f000001 is no character: numpy took it, and raised SystemError when it was looked at
    (found by the fuzzing of what a cache has learned)."""
    codes = {">": b"\x7f\0\0\1"}.get(descr[1], b"\1\0\0\x7f")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", npy("(1,)", descr) + codes * (2 if "i4" in descr else 1))
    with pytest.raises(MalformedFile, match="which is not a character"):
        npz_arrays(tmp_path / "a.npz")


def arrow(column: list[object], kind: pa.DataType, old: list[int], new: list[int]) -> bytes:
    """An Arrow file in which one table of offsets is another."""
    table = pa.table({"v": pa.array(column, kind)})
    raw = io.BytesIO()
    with pa.ipc.new_file(raw, table.schema) as writer:
        writer.write_table(table)
    found = np.array(old, "<i4").tobytes()
    assert raw.getvalue().count(found) == 1
    return raw.getvalue().replace(found, np.array(new, "<i4").tobytes())


@pytest.mark.parametrize(
    "data",
    [
        arrow([b"aaaa", b"bbbb", b"cccc"], pa.binary(), [0, 4, 8, 12], [0, 4, 8, 3000]),
        arrow([b"aaaa", b"bbbb", b"cccc"], pa.binary(), [0, 4, 8, 12], [0, 4, 8, 1 << 30]),
        arrow([[1], [2, 3], [4]], pa.list_(pa.int64()), [0, 1, 3, 4], [0, 1, 3, 4000]),
        arrow([b"aaaa", b"bbbb", b"cccc"], pa.binary(), [0, 4, 8, 12], [0, 8, 4, 12]),
    ],
    ids=["other bytes of the file", "1 GiB behind it", "of a list", "not ascending"],
)
def test_offsets_of_arrow_lead_nowhere_else(tmp_path: Path, data: bytes) -> None:
    """t15: bytes from outside the values were stored, or the process ended by SIGBUS."""
    (tmp_path / "a.arrow").write_bytes(data)
    source = ArrowTables(tmp_path / "a.arrow")
    (found,) = items_of(source)
    assert found.sample is None
    assert "it cannot be read past row 0" in found.problem
    # who has left it out goes on behind it: it was counted and written down twice
    assert list(source.read_block(0, 1)) == []


@pytest.mark.parametrize(
    "text", ["devices = " + "[" * 20_000, "a = " + "9" * 5000, "x = 0x" + "f" * 9]
)
def test_toml_of_any_kind_is_a_config_error(tmp_path: Path, text: str) -> None:
    """Nested too deep, a number too long: RecursionError, ValueError before."""
    (tmp_path / "pool.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"pool\.toml"):
        load_config(tmp_path / "pool.toml")


def test_a_source_of_garbage_is_an_error_of_hpstore(tmp_path: Path) -> None:
    """By every ending that an ingest takes."""
    for name in ("a.npy", "a.npz", "a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"\x93NUMPY\x09" * 20)
        with pytest.raises((IngestError, ConfigError)):
            open_source(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
@pytest.mark.root
def test_a_squatted_address_of_a_cache_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """Another user binds the address that a shared cache would have: no process of this user could
    share one. Now the next address is taken, by all alike; when all are squatted, that is said."""
    name = f"squat-{os.getpid()}"

    def squat(turns: int) -> subprocess.Popen[bytes]:
        code = (
            "import os, socket, sys\nos.setuid(65534)\n"
            f"held = [socket.socket(socket.AF_UNIX) for _ in range({turns})]\n"
            f"for one, at in zip(held, {[address(name, n) for n in range(turns)]!r}):\n"
            "    one.bind(at); one.listen()\n"
            "print('bound', flush=True); sys.stdin.read()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"bound\n"
        return child

    child = squat(1)
    try:
        owner = listen(name, 4, SystemClock())
        assert owner is not None
        assert owner.getsockname() == address(name, 1)
        assert listen(name, 4, SystemClock()) is None  # a second process of this user joins
        owner.close()
    finally:
        child.communicate()
    child = squat(TURNS)
    try:
        with pytest.raises(ConfigError, match="another user has taken all"):
            listen(name, 4, SystemClock())
    finally:
        child.communicate()


def test_a_header_of_npy_that_is_nested_too_deeply_is_malformed(tmp_path: Path) -> None:
    """9,000 signs are a MemoryError of Python's parser, which looked like a lack of memory."""
    header = b"-" * 9000 + b"1\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(MalformedFile, match="nested too deeply"):
        mapped_npy(tmp_path / "a.npy")


@pytest.mark.parametrize("group", ["\u00b2", "99999999999", "no such group", "a\0b", "-1"])
def test_a_group_that_is_none_is_said(group: str) -> None:
    with pytest.raises(ConfigError, match="there is no group"):
        group_number(group)
