"""Streams: nothing shows before close, versions never mix, descriptors are real, memory bounded."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.errors import TooFewDevices, VersionConflict
from hpstore.interop import PoolFileSystem
from hpstore.interop.filesystem.file_streams import ReadStream, WriteStream
from hpstore.interop.filesystem.write_buffer import Spool
from hpstore.objects.read.resolve import open_object
from hpstore.runtime.budget import ByteBudget
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB, MIB


def payload(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def test_nothing_is_visible_before_close(fs: PoolFileSystem, name: str) -> None:
    """Written and flushed bytes are no object; after close they are, wholly."""
    stream = fs.open(f"{name}/a", "wb")
    stream.write(b"x" * 300_000)
    stream.flush()
    os.fsync(stream.fileno())
    assert not fs.exists(f"{name}/a")
    stream.close()
    stream.close()
    assert fs.cat_file(f"{name}/a") == b"x" * 300_000


@pytest.mark.parametrize("mode", ["wb", "w", "xb", "x"])
def test_an_exception_discards(fs: PoolFileSystem, name: str, mode: str) -> None:
    """In binary and in text mode; the object before stays."""
    if "w" in mode:
        fs.pipe_file(f"{name}/a", b"old")

    def stop_while_writing() -> None:
        with fs.open(f"{name}/a", mode) as stream:
            stream.write(b"new" if "b" in mode else "new")
            raise KeyError

    with pytest.raises(KeyError):
        stop_while_writing()
    assert fs.exists(f"{name}/a") == ("w" in mode)
    assert "w" not in mode or fs.cat_file(f"{name}/a") == b"old"


def test_text_round_trips(fs: PoolFileSystem, name: str) -> None:
    """Encoding and newlines are those asked for."""
    with fs.open(f"{name}/t", "w", encoding="utf-16", newline="\r\n") as stream:
        stream.write("ü\n")
    assert fs.cat_file(f"{name}/t") == "ü\r\n".encode("utf-16")
    fs.write_text(f"{name}/t", "plain")
    assert fs.read_text(f"{name}/t") == "plain"


def test_an_exclusive_stream_loses_to_one_that_closed_before(fs: PoolFileSystem, name: str) -> None:
    """Both were opened while nothing was there."""
    first, second = fs.open(f"{name}/a", "xb"), fs.open(f"{name}/a", "xb")
    first.write(b"1")
    second.write(b"2")
    first.close()
    with pytest.raises(FileExistsError):
        second.close()
    assert fs.cat_file(f"{name}/a") == b"1"


def test_a_failed_put_is_raised_once_by_close(
    fs: PoolFileSystem, name: str, harness: Harness
) -> None:
    """The error of the pool goes through, the bytes are given up, the old object stays."""
    fs.pipe_file(f"{name}/a", b"old" * 100_000)
    stream = fs.open(f"{name}/a", "wb")
    stream.write(b"new")
    harness.lose(harness.urls[:3])
    with pytest.raises(TooFewDevices):
        stream.close()
    stream.close()
    assert stream.closed
    harness.bring_back()
    assert fs.cat_file(f"{name}/a") == b"old" * 100_000


def test_a_compressor_is_refused(fs: PoolFileSystem, name: str) -> None:
    """It would not close what it writes to; the reason names what does."""
    with pytest.raises(io.UnsupportedOperation, match=r"fsspec\.open"):
        fs.open(f"{name}/a", "wb", compression="gzip")
    with pytest.raises(io.UnsupportedOperation, match="is none of rb"):
        fs.open(f"{name}/a", "x+b")


def test_reading_equals_a_file(fs: PoolFileSystem, name: str, tmp_path: Path) -> None:
    """seek, tell, read, readinto, readline against a local file, over buffer and unit borders."""
    data = payload(900 * KIB + 17)
    fs.pipe_file(f"{name}/a", data)
    (tmp_path / "f").write_bytes(data)
    rng = np.random.default_rng(1)
    with fs.open(f"{name}/a", "rb") as ours, (tmp_path / "f").open("rb") as file:
        assert isinstance(ours, ReadStream)
        assert (ours.size, ours.readable(), ours.seekable()) == (len(data), True, True)
        for _ in range(40):
            at, count = int(rng.integers(0, len(data) + 9)), int(rng.integers(0, 400_000))
            assert ours.seek(at) == file.seek(at)
            assert ours.read(count) == file.read(count)
            assert ours.readline(50) == file.readline(50)
            mine, theirs = bytearray(count), bytearray(count)
            assert ours.readinto(mine) == file.readinto(theirs)
            assert mine == theirs
            assert ours.tell() == file.tell()
        assert ours.seek(-5, 2) == file.seek(-5, 2)
        assert ours.read() == file.read()
        with pytest.raises((OSError, ValueError)):
            ours.seek(-1)
        with pytest.raises(io.UnsupportedOperation):
            ours.fileno()
    with pytest.raises(ValueError, match="closed"):
        ours.read()


def test_a_stream_never_mixes_versions(fs: PoolFileSystem, name: str, pool: hpstore.Pool) -> None:
    """The pool's reader moved on to a replacement: an error, not bytes of the new one."""
    fs.pipe_file(f"{name}/a", b"1" * MIB)
    with fs.open(f"{name}/a", "rb", block_size=64 * KIB) as stream:
        assert stream.read(10) == b"1" * 10
        pool.put("a", b"2" * MIB)
        stream._file._reader._reader.close()
        stream._file._reader._reader = open_object(pool._store, "a")  # as when columns vanish
        stream.seek(512 * KIB)
        with pytest.raises(VersionConflict, match="replaced while it was read"):
            stream.read(10)


def test_the_descriptor_is_that_of_the_bytes(fs: PoolFileSystem, name: str) -> None:
    """What goes past the stream, straight to the descriptor, is stored too; also after a move to
    disk."""
    fs = PoolFileSystem(spool_bytes=64 * KIB)
    for size in (1000, 100_000):
        array = np.arange(size, dtype=np.uint8)
        with fs.open(f"{name}/a", "wb") as stream:
            stream.write(b"head")
            number = stream.fileno()
            array.tofile(stream)
            stream.write(b"tail" * 20_000)
            assert stream.fileno() == number
        assert fs.cat_file(f"{name}/a") == b"head" + array.tobytes() + b"tail" * 20_000


def test_writers_may_seek(fs: PoolFileSystem, name: str) -> None:
    """Archives go back to fill in their headers."""
    with fs.open(f"{name}/a", "wb") as stream:
        assert stream.seekable()
        stream.write(b"????body")
        stream.seek(0)
        stream.write(b"HEAD")
        stream.seek(0, 2)
        assert stream.tell() == 8
    assert fs.cat_file(f"{name}/a") == b"HEADbody"


def test_a_spool_keeps_its_bound_and_gives_its_lease_back(tmp_path: Path) -> None:
    """Beyond the bound the bytes are in an unlinked file; memory is leased only before."""
    budget = ByteBudget(100)
    spool = Spool(budget, memory_bytes=100, directory=str(tmp_path))
    number = spool.fileno()
    spool.write(b"a" * 100)
    assert (spool.on_disk, budget.used_bytes) == (False, 100)
    spool.write(b"b")
    assert (spool.on_disk, budget.used_bytes, spool.fileno()) == (True, 0, number)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert os.pread(number, 200, 0) == b"a" * 100 + b"b"
    assert os.fstat(number).st_dev == tmp_path.stat().st_dev
    spool.close()
    spool.close()
    assert budget.used_bytes == 0


def test_a_spool_moves_to_disk_where_it_stands(tmp_path: Path) -> None:
    """A write that goes back and then beyond the bound lands at its place."""
    spool = Spool(ByteBudget(100), memory_bytes=100, directory=str(tmp_path))
    spool.write(b"a" * 100)
    spool.file.seek(90)
    spool.write(b"b" * 20)
    assert os.pread(spool.fileno(), 200, 0) == b"a" * 90 + b"b" * 20
    spool.close()


def test_a_stream_whose_last_bytes_do_not_fit_is_given_up(
    fs: PoolFileSystem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() cannot flush: the error is raised, no object is made, the memory is given back."""
    stream = fs.open(f"{name}/a", "wb")
    stream.write(b"x")

    def full(_: WriteStream) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(WriteStream, "flush", full)
        with pytest.raises(OSError, match="No space"):
            stream.close()
    assert fs.mounts.budget.used_bytes == 0
    assert not fs.exists(f"{name}/a")


def test_streams_beyond_the_budget_start_on_disk(tmp_path: Path) -> None:
    """The memory of all streams together is bounded; nobody waits for another's close."""
    budget = ByteBudget(100)
    first = Spool(budget, memory_bytes=100, directory=str(tmp_path))
    second = Spool(budget, memory_bytes=100, directory=str(tmp_path))
    assert (first.on_disk, second.on_disk) == (False, True)
    first.close()
    third = Spool(budget, memory_bytes=100, directory=str(tmp_path))
    assert not third.on_disk
    second.close()
    third.close()


def test_a_full_spool_is_an_error_and_no_object(
    fs: PoolFileSystem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC while the bytes move to disk reaches the writer; nothing is stored."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    fs = PoolFileSystem(spool_bytes=10)
    monkeypatch.setattr(os, "sendfile", full)

    def overflow() -> None:
        with fs.open(f"{name}/a", "wb") as stream:
            stream.write(b"0123456789")
            stream.write(b"x")

    with pytest.raises(OSError, match="No space"):
        overflow()
    assert not fs.exists(f"{name}/a")


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("transaction", [False, True])
def test_close_after_a_failed_write_stores_nothing(
    fs: PoolFileSystem, name: str, text: bool, transaction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a `finally`, as pyarrow and pandas do it: what was there stays, and close() says so."""
    path = f"{name}/a"
    fs.pipe_file(path, b"old")
    plain = Spool.write

    def full(spool: Spool, data: Any) -> int:
        if len(bytes(data)) > 50:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(spool, data)

    monkeypatch.setattr(Spool, "write", full)
    with fs.transaction if transaction else contextlib.nullcontext():
        stream = fs.open(path, "w" if text else "wb")
        some: Any = "a" if text else b"a"
        stream.write(some)
        stream.flush()
        with pytest.raises(OSError, match="No space"):
            stream.write(100_000 * some)
        with pytest.raises(OSError, match=r"nothing is stored|No space"):
            stream.close()
    assert fs.cat_file(path) == b"old"


@pytest.mark.parametrize("mode", ["r+b", "r+", "a+b", "ab"])
def test_an_update_within_a_transaction_is_part_of_it(
    fs: PoolFileSystem, name: str, mode: str
) -> None:
    """fsspec itself takes no stream whose mode has an r."""
    path = f"{name}/a"
    fs.pipe_file(path, b"old")
    with fs.transaction:
        with fs.open(path, mode) as stream:
            stream.write(b"new" if "b" in mode else "new")
        assert fs.cat_file(path) == b"old"
    assert fs.cat_file(path) == (b"oldnew" if "a" in mode else b"new")
    with contextlib.suppress(KeyError), fs.transaction:
        with fs.open(path, mode) as stream:
            stream.write(b"bad" if "b" in mode else "bad")
        raise KeyError
    assert b"bad" not in fs.cat_file(path)


def test_closing_a_read_stream_releases_the_files(
    fs: PoolFileSystem, disk_pool: hpstore.Pool
) -> None:
    """No descriptor of a column stays open."""
    before = set(os.listdir("/proc/self/fd"))
    one = PoolFileSystem(pool=disk_pool)
    one.pipe_file("a", payload(300_000))
    during = len(os.listdir("/proc/self/fd"))
    with one.open("a", "rb") as stream:
        stream.read(10)
        assert len(os.listdir("/proc/self/fd")) > during
    assert len(os.listdir("/proc/self/fd")) == during
    assert len(before) <= during
