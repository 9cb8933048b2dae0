"""Threads, forks, pickles: one pool in each process, whoever asks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

import hpstore
from hpstore.errors import ConfigError
from hpstore.interop import PoolFileSystem
from hpstore.interop.filesystem import open_pools as mounts_module

ROOT = Path(__file__).resolve().parents[2]


def test_threads_share_one_pool(disk_pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec has an instance for each thread; the pool is opened once, also when all start at
    once."""
    opened = []

    def count(path: str, *, read_only: bool) -> hpstore.Pool:
        opened.append(path)
        return hpstore.open(path, read_only=read_only)

    monkeypatch.setattr(mounts_module, "open_pool", count)
    barrier = threading.Barrier(6)

    def work(index: int) -> bytes:
        fs = fsspec.filesystem("hpstore")
        barrier.wait(30)
        fs.pipe_file(f"disk/{index}", bytes([index]) * 70_000)
        return bytes(fs.cat_file(f"disk/{index}", 0, 1))

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(work, range(6))) == [bytes([i]) for i in range(6)]
    assert len(opened) == 1
    assert len(disk_pool.list()) == 6


def test_a_pool_that_did_not_open_is_tried_again(
    disk_pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that comes late is found by the next call."""
    fs = PoolFileSystem()
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> hpstore.Pool:
            raise ConfigError("not mounted yet")

        patch.setattr(mounts_module, "open_pool", fail)
        with pytest.raises(ConfigError, match="not mounted yet"):
            fs.exists("disk/a")
    assert not fs.exists("disk/a")


def _use(fs: PoolFileSystem, key: str) -> None:
    if fs.cat_file("disk/before") != b"1" or not fs.isdir("disk"):
        os._exit(3)
    with fs.open(f"disk/{key}", "wb") as stream:
        stream.write(key.encode())
    fresh = fsspec.filesystem("hpstore")
    os._exit(0 if fresh.cat_file(f"disk/{key}") == key.encode() else 4)


def test_a_used_file_system_works_in_a_fork(disk_pool: hpstore.Pool) -> None:
    """Its pool is open and its threads run when the child begins; the parent goes on after."""
    fs = PoolFileSystem()
    fs.pipe_file("disk/before", b"1")
    child = multiprocessing.get_context("fork").Process(target=_use, args=(fs, "child"))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert fs.cat_file("disk/child") == b"child"


def test_a_used_file_system_works_in_a_new_process(disk_pool: hpstore.Pool) -> None:
    """It is pickled as its arguments; the other process opens its own pool."""
    fs = PoolFileSystem()
    fs.pipe_file("disk/before", b"1")
    code = (
        "import pickle, sys; fs = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "assert fs.cat_file('disk/before') == b'1'; fs.pipe_file('disk/child', b'child')"
    )
    subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(fs).hex()],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert fs.cat_file("disk/child") == b"child"


def test_a_pickle_finds_its_pool_again(disk_pool: hpstore.Pool) -> None:
    """By name, by path and by Pool: the copy reads what the first wrote."""
    for pool in (None, "disk", disk_pool.config.path, disk_pool):
        fs = fsspec.filesystem("hpstore", **({} if pool is None else {"pool": pool}))
        path = "disk/a" if pool is None else "a"
        fs.pipe_file(path, b"1")
        copy = pickle.loads(pickle.dumps(fs))
        assert copy.cat_file(path) == b"1"


def test_a_pool_that_was_passed_is_not_closed(disk_pool: hpstore.Pool) -> None:
    """Closing what URLs opened leaves the caller's pool alone; URLs open theirs again."""
    own, named = PoolFileSystem(pool=disk_pool), PoolFileSystem()
    own.pipe_file("a", b"1")
    assert named.cat_file("disk/a") == b"1"
    PoolFileSystem.mounts.close()
    assert own.cat_file("a") == named.cat_file("disk/a") == b"1"
