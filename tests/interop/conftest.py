"""Pools in the registry of an empty home, and file systems over them; tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import hpstore
from hpstore.config import Settings, register
from hpstore.interop import PoolFileSystem
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB, MIB


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own: zarr's store tests are such."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home directory; pools that URLs opened are closed at the end."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HPSTORE_POOLS", raising=False)
    fsspec.register_implementation("hpstore", PoolFileSystem, clobber=True)
    PoolFileSystem.clear_instance_cache()
    yield tmp_path / "home"
    PoolFileSystem.mounts.close()
    PoolFileSystem.clear_instance_cache()


@pytest.fixture
def harness(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """A pool over memory devices whose registered name URLs can use."""
    made = Harness(tmp_path, data=2, parity=1, devices=4)
    register(made.config)

    def open_pool(_: object, *, read_only: bool = False) -> hpstore.Pool:
        return made.open(threads=True, read_only=read_only)

    monkeypatch.setattr("hpstore.interop.filesystem.open_pools.open_pool", open_pool)
    return made


@pytest.fixture
def name(harness: Harness) -> str:
    """What URLs call the pool of `harness`."""
    return harness.config.name


@pytest.fixture
def pool(harness: Harness) -> Iterator[hpstore.Pool]:
    """The pool of `harness`, opened beside the file systems."""
    with harness.open(threads=True) as opened:
        yield opened


@pytest.fixture
def fs(harness: Harness) -> PoolFileSystem:
    """The file system of all named pools."""
    return PoolFileSystem()


@pytest.fixture
def disk_pool(tmp_path: Path, home: Path) -> Iterator[hpstore.Pool]:
    """A pool called `disk` over three directories, which other processes see too."""
    with hpstore.create(
        [tmp_path / f"d{i}" for i in range(3)],
        data=2,
        parity=1,
        config=tmp_path / "disk.toml",
        name="disk",
        unit_bytes=64 * KIB,
        settings=Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run")),
    ) as made:
        yield made
