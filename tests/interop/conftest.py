"""A pool in the registry of an empty home, and file systems over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import hpstore
from hpstore.config import Settings
from hpstore.interop import HpstoreFileSystem
from hpstore.units import KIB, MIB


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home directory; pools that URLs opened are closed at the end."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HPSTORE_POOLS", raising=False)
    fsspec.register_implementation("hpstore", HpstoreFileSystem, clobber=True)
    HpstoreFileSystem.clear_instance_cache()
    yield tmp_path / "home"
    HpstoreFileSystem.mounts.close()
    HpstoreFileSystem.clear_instance_cache()


@pytest.fixture
def pool(tmp_path: Path, home: Path) -> Iterator[hpstore.Pool]:
    """A pool called `main` over six directories."""
    with hpstore.create(
        [tmp_path / f"d{i}" for i in range(6)],
        data=4,
        parity=2,
        config=tmp_path / "pool.toml",
        name="main",
        unit_bytes=64 * KIB,
        settings=Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run")),
    ) as made:
        yield made


@pytest.fixture
def fs(pool: hpstore.Pool) -> HpstoreFileSystem:
    """The file system of all named pools."""
    found = fsspec.filesystem("hpstore")
    assert isinstance(found, HpstoreFileSystem)
    return found
