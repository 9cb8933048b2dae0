"""fsspec's own test suites, over named pools and over one pool."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem, make_path_posix
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

import hpstore
from hpstore.interop import HpstoreFileSystem


class _Fixtures(AbstractFixtures):  # type: ignore[misc]  # fsspec is untyped
    @pytest.fixture
    def fs(self, pool: hpstore.Pool) -> HpstoreFileSystem:
        return HpstoreFileSystem()

    @pytest.fixture
    def fs_path(self) -> str:
        return "main/top"

    @pytest.fixture
    def local_fs(self) -> LocalFileSystem:
        return LocalFileSystem(auto_mkdir=True)

    @pytest.fixture
    def local_join(self) -> object:
        import os

        return os.path.join

    @pytest.fixture
    def local_path(self, tmp_path: Path) -> str:
        (tmp_path / "local").mkdir()
        return str(make_path_posix(str(tmp_path / "local")))


class _OnePool(_Fixtures):
    @pytest.fixture
    def fs(self, pool: hpstore.Pool) -> HpstoreFileSystem:
        found = fsspec.filesystem("hpstore", pool=str(pool.config.path))
        assert isinstance(found, HpstoreFileSystem)
        return found

    @pytest.fixture
    def fs_path(self) -> str:
        return "top"


class TestCopy(_Fixtures, AbstractCopyTests):  # type: ignore[misc]
    """Copies within the pool."""


class TestGet(_Fixtures, AbstractGetTests):  # type: ignore[misc]
    """Copies out of the pool."""


class TestPut(_Fixtures, AbstractPutTests):  # type: ignore[misc]
    """Copies into the pool."""


class TestOpen(_Fixtures, AbstractOpenTests):  # type: ignore[misc]
    """Exclusive streams."""


class TestPipe(_Fixtures, AbstractPipeTests):  # type: ignore[misc]
    """Exclusive puts."""


class TestCopyOverOnePool(_OnePool, AbstractCopyTests):  # type: ignore[misc]
    """Copies within the pool, with bare keys."""


class TestPutOverOnePool(_OnePool, AbstractPutTests):  # type: ignore[misc]
    """Copies into the pool, with bare keys."""
