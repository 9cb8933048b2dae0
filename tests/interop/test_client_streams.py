"""What clients of other file systems do with streams: forget them, pickle them, append to them.

Cases forgotten_stream, pickle_stream, append, mtime, dangling_name.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

import hpstore
from hpstore.errors import ConfigError, VersionConflict
from hpstore.interop import PoolFileSystem
from hpstore.interop.filesystem import unclosed_streams as forgotten_module
from hpstore.testing.memory_pool import Harness
from tests.fault.common import exit_status, forked, poll

FORGOTTEN = "was stored when it was collected"


def drop(streams: list[Any]) -> None:
    """The last reference goes."""
    streams.clear()
    gc.collect()


def drop_in_a_handler(streams: list[Any]) -> None:
    try:
        raise KeyError
    except KeyError:
        drop(streams)


# --- forgotten -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wb", "w", "xb", "ab", "r+b"])
def test_a_forgotten_stream_is_stored(fs: PoolFileSystem, name: str, mode: str) -> None:
    """As other file systems do: duckdb, polars and zipfile drop their streams. It is said."""
    if mode == "r+b":
        fs.pipe_file(f"{name}/a", b"b")

    def forget() -> None:
        fs.open(f"{name}/a", mode).write(b"whole" if "b" in mode else "whole")
        gc.collect()

    with pytest.warns(ResourceWarning, match=FORGOTTEN):
        forget()
    assert fs.cat_file(f"{name}/a") == b"whole"


def test_a_stream_that_an_exception_drops_stores_nothing(fs: PoolFileSystem, name: str) -> None:
    """In the handler of the exception."""
    stream = fs.open(f"{name}/a", "wb")
    stream.write(b"half")
    streams = [stream]
    del stream
    with pytest.warns(ResourceWarning, match="nothing was stored"):
        drop_in_a_handler(streams)
    assert not fs.exists(f"{name}/a")


def test_a_stream_whose_write_failed_is_not_stored_when_it_is_forgotten(
    fs: PoolFileSystem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it may be missing. What was refused before anything was written is no failure."""
    for error, said in ((TypeError, FORGOTTEN), (OSError, "nothing was stored")):
        stream = fs.open(f"{name}/{said[:3]}", "wb")
        stream.write(b"half")

        def fail(data: object, error: type[Exception] = error) -> int:
            raise error

        monkeypatch.setattr(stream._spool, "write", fail)
        with pytest.raises(error):
            stream.write(b"rest")
        streams = [stream]
        del stream
        with pytest.warns(ResourceWarning, match=said):
            drop(streams)
    assert fs.ls(name, detail=False) == [f"{name}/{FORGOTTEN[:3]}"]


def test_a_forgotten_stream_that_cannot_be_stored_is_logged(
    fs: PoolFileSystem, name: str, harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """And the warning does not say that it was stored."""
    stream = fs.open(f"{name}/a", "wb")
    stream.write(b"x")
    harness.lose(harness.urls[:3])
    streams = [stream]
    del stream
    with pytest.warns(ResourceWarning, match="could not be stored when it was collected: "):
        drop(streams)
    assert "could not be stored: 'fs" in caplog.text or "cannot be written" in caplog.text
    assert "was stored" not in caplog.text
    harness.bring_back()
    assert not fs.exists(f"{name}/a")


def test_a_stream_that_is_collected_under_a_lock_does_not_wait_for_ever(
    fs: PoolFileSystem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector runs on any thread, in the midst of anything: the put is another thread's."""
    monkeypatch.setattr(forgotten_module, "WAIT_SECONDS", 0.2)
    lock = threading.Lock()
    stream = fs.open(f"{name}/a", "wb")
    stream.write(b"x")
    put = stream._put

    def locked(file: object) -> None:
        with lock:
            put(file)

    stream._put = locked
    streams = [stream]
    del stream
    with lock, pytest.warns(ResourceWarning, match="it is still being stored"):
        drop(streams)
    poll(20, lambda: bool(fs.exists(f"{name}/a")))


def test_a_fork_does_not_store_what_its_parent_writes(fs: PoolFileSystem, name: str) -> None:
    stream = fs.open(f"{name}/a", "wb")
    stream.write(b"half")

    def child() -> None:
        nonlocal stream
        stream = None
        gc.collect()

    with forked(child) as pid:
        exit_status(pid, 20)
    assert not fs.exists(f"{name}/a")
    stream.write(b" and half")
    stream.close()
    assert fs.cat_file(f"{name}/a") == b"half and half"


PROGRAM = """
import sys, fsspec
fs = fsspec.filesystem("hpstore", pool=sys.argv[1])
stream = fs.open("at-exit", "wb")
stream.write(b"whole")
text = fs.open("text", "w")
text.write("text")
if sys.argv[2] == "fails":
    raise SystemError("the program fails")
if sys.argv[2] == "notebook":
    sys.ps1, sys.last_value = "In : ", SystemError("of a cell, hours ago")
"""


@pytest.mark.parametrize("end", ["ends", "fails", "notebook"])
def test_what_is_open_at_the_end_of_a_program(tmp_path: Path, end: str) -> None:
    """Stored, unless an exception ends it: then the half is no whole. One of a notebook's cells
    does not end the notebook."""
    devices = [tmp_path / f"d{i}" for i in range(3)]
    hpstore.create(devices, data=2, parity=1, config=tmp_path / "pool.toml").close()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "pool.toml"), end],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode == 0) == (end != "fails"), done.stderr
    with hpstore.open(tmp_path / "pool.toml") as pool:
        found = {key: bytes(pool.get(key)) for key in pool.list("")}
    assert found == ({"at-exit": b"whole", "text": b"text"} if end != "fails" else {})


# --- pickled ---------------------------------------------------------------------------------


def test_a_read_stream_pickles(fs: PoolFileSystem, name: str) -> None:
    """dask, distributed and joblib send open files: the version, and the position."""
    fs.pipe_file(f"{name}/a", b"0123456789")
    with fs.open(f"{name}/a") as stream:
        stream.read(4)
        sent = pickle.dumps(stream)
        twin = pickle.loads(sent)
        assert (twin.tell(), twin.read(), twin.version) == (4, b"456789", stream.version)
        assert stream.read(2) == b"45"
        twin.close()
    with pytest.raises(TypeError, match="is closed"):
        pickle.dumps(stream)
    fs.pipe_file(f"{name}/a", b"another one")
    with pytest.raises(VersionConflict, match="replaced or deleted"):
        pickle.loads(sent)
    fs.rm_file(f"{name}/a")
    with pytest.raises(VersionConflict, match="replaced or deleted"):
        pickle.loads(sent)


def test_streams_know_their_file_system(fs: PoolFileSystem, name: str) -> None:
    """As fsspec's own do."""
    with fs.open(f"{name}/a", "wb") as stream:
        assert (stream.fs, stream.details["type"]) == (fs, "file")
        stream.write(b"abc")
    with fs.open(f"{name}/a") as stream:
        assert stream.fs is fs
        assert stream.blocksize > 0
        assert stream.details["size"] == 3


# --- appended to -----------------------------------------------------------------------------


def test_appending_keeps_what_is_there(fs: PoolFileSystem, name: str) -> None:
    """Binary and text; wherever the position is set, writes go to the end; a new one is made."""
    path = f"{name}/log"
    for number in range(3):
        with fs.open(path, "a", newline="") as text:
            text.write(f"{number}\r\n")
    assert fs.cat_file(path) == b"0\r\n1\r\n2\r\n"
    with fs.open(path, "ab") as stream:
        assert stream.tell() == 9
        stream.seek(0)
        stream.write(b"end")
        with pytest.raises(io.UnsupportedOperation):
            stream.read()
        assert not stream.readable()
    assert fs.cat_file(path).endswith(b"2\r\nend")
    with fs.open(path, "a+b") as stream:
        stream.seek(0)
        assert stream.read(1) == b"0"


@pytest.mark.parametrize("mode", ["ab", "r+b"])
def test_what_is_appended_to_keeps_its_metadata(
    fs: PoolFileSystem, name: str, pool: hpstore.Pool, mode: str
) -> None:
    pool.put("a", b"0", {"run": 1})
    with fs.open(f"{name}/a", mode) as stream:
        stream.write(b"1")
    assert fs.info(f"{name}/a")["metadata"] == {"run": 1}


@pytest.mark.parametrize("mode", ["r+b", "rb+"])
def test_updating_changes_bytes_in_the_midst(fs: PoolFileSystem, name: str, mode: str) -> None:
    """h5py: seek, read, write, truncate; the object is replaced as a whole at the end."""
    path = f"{name}/a"
    with pytest.raises(FileNotFoundError):
        fs.open(path, mode)
    fs.pipe_file(path, b"0123456789" * 50_000)
    with fs.open(path, mode) as stream:
        assert stream.read(3) == b"012"
        stream.write(b"xy")
        buffer = bytearray(2)
        assert stream.readinto(buffer) == 2
        assert bytes(buffer) == b"56"
        stream.truncate(100)
        assert fs.info(path)["size"] == 500_000
    assert fs.cat_file(path) == (b"012xy56789" + b"0123456789" * 9)
    with fs.open(path, "w+b") as stream:
        stream.write(b"new")
        stream.seek(1)
        assert stream.read() == b"ew"
    assert fs.cat_file(path) == b"new"


@pytest.mark.parametrize("mode", ["ab", "r+b"])
def test_two_that_append_at_once_lose_nothing(fs: PoolFileSystem, name: str, mode: str) -> None:
    """The second to close is told; what the first has stored stays."""
    path = f"{name}/log"
    fs.pipe_file(path, b"0")
    first, second = fs.open(path, mode), fs.open(path, mode)
    first.write(b"1")
    second.write(b"2")
    first.close()
    with pytest.raises(VersionConflict):
        second.close()
    assert fs.cat_file(path) in (b"01", b"1")
    one, other = fs.open(f"{name}/new", "ab"), fs.open(f"{name}/new", "ab")
    one.write(b"1")
    other.write(b"2")
    one.close()
    with pytest.raises(VersionConflict):
        other.close()
    assert fs.cat_file(f"{name}/new") == b"1"


def test_an_exception_leaves_what_was_appended_to_as_it_was(fs: PoolFileSystem, name: str) -> None:
    fs.pipe_file(f"{name}/a", b"old")

    def stop() -> None:
        with fs.open(f"{name}/a", "a") as stream:
            stream.write("new")
            raise KeyError

    with pytest.raises(KeyError):
        stop()
    assert fs.cat_file(f"{name}/a") == b"old"


# --- looked at -------------------------------------------------------------------------------


def test_files_say_when_they_were_put(fs: PoolFileSystem, name: str) -> None:
    """pyarrow and UPath look for "mtime"."""
    fs.pipe_file(f"{name}/a", b"x")
    for facts in (fs.info(f"{name}/a"), fs.ls(name)[0], fs.find(name, detail=True)[f"{name}/a"]):
        assert facts["mtime"] == facts["created"] > 1.6e9


def test_a_directory_is_no_file(fs: PoolFileSystem, name: str) -> None:
    fs.pipe_file(f"{name}/d/a", b"x")
    with pytest.raises(IsADirectoryError):
        fs.open(f"{name}/d")
    with pytest.raises(FileNotFoundError):
        fs.open(f"{name}/e")


def test_slashes_count_once(fs: PoolFileSystem, name: str) -> None:
    """As on a disk: clients join paths that end in one."""
    fs.pipe_file(f"{name}//d///a", b"x")
    assert fs.cat_file(f"{name}/d/a") == b"x"
    assert fs.cat_file(f"hpstore://{name}//d//a") == b"x"
    assert fs.exists(f"/{name}/d//a")


def test_a_name_whose_pool_is_gone_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over all pools: it is passed over, and said once; asked for by itself it is an error."""
    devices = [tmp_path / f"d{i}" for i in range(3)]
    hpstore.create(devices, data=2, parity=1, config=tmp_path / "pool.toml").close()
    names = tmp_path / "pools.toml"
    names.write_text(f'gone = "{tmp_path}/gone.toml"\nmain = "{tmp_path}/pool.toml"\n')
    monkeypatch.setenv("HPSTORE_POOLS", str(names))
    fs = fsspec.filesystem("hpstore", skip_instance_cache=True)
    fs.pipe_file("main/x", b"1")
    assert fs.find("") == ["main/x"]
    assert fs.glob("hpstore://*/x") == ["main/x"]
    assert caplog.text.count("'gone' is passed over") == 1
    with pytest.raises(ConfigError):
        fs.find("gone")
    (tmp_path / "gone.toml").write_text((tmp_path / "pool.toml").read_text())
    assert fs.find("") == ["gone/x", "main/x"]
    (tmp_path / "gone.toml").unlink()
    fs = fsspec.filesystem("hpstore", skip_instance_cache=True)
    assert [fs.find(""), fs.find("")] == [["main/x"]] * 2
    assert caplog.text.count("'gone' is passed over") == 2  # found in between
