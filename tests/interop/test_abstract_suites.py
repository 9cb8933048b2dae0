"""fsspec's own test suites, over named pools and over one pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

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
from hpstore.interop import PoolFileSystem
from tests.thorough import LONG


class _Named(AbstractFixtures):  # type: ignore[misc]  # fsspec is untyped
    @pytest.fixture
    def fs_path(self, name: str) -> str:
        return f"{name}/top"

    @pytest.fixture
    def local_fs(self) -> LocalFileSystem:
        return LocalFileSystem(auto_mkdir=True)

    @pytest.fixture
    def local_join(self) -> Callable[..., str]:
        return os.path.join

    @pytest.fixture
    def local_path(self, tmp_path: Path) -> str:
        (tmp_path / "local").mkdir()
        return str(make_path_posix(str(tmp_path / "local")))

    @pytest.fixture
    def fs(self, harness: object) -> PoolFileSystem:
        return PoolFileSystem()


class _Bare(_Named):
    @pytest.fixture
    def fs(self, pool: hpstore.Pool) -> PoolFileSystem:
        return PoolFileSystem(pool=pool)

    @pytest.fixture
    def fs_path(self) -> str:
        return "top"


class TestCopy(_Named, AbstractCopyTests):  # type: ignore[misc]
    """Copies within a named pool."""


class TestGet(_Named, AbstractGetTests):  # type: ignore[misc]
    """Copies out of a named pool."""


class TestPut(_Named, AbstractPutTests):  # type: ignore[misc]
    """Copies into a named pool."""


class TestOpen(_Named, AbstractOpenTests):  # type: ignore[misc]
    """Exclusive streams."""


class TestPipe(_Named, AbstractPipeTests):  # type: ignore[misc]
    """Exclusive puts."""


class TestBareCopy(_Bare, AbstractCopyTests):  # type: ignore[misc]
    """Copies within one pool; globs at their edges as in a named one."""

    if not LONG:
        test_copy_glob_edge_cases = None


class TestBareGet(_Bare, AbstractGetTests):  # type: ignore[misc]
    """Copies out of one pool; globs at their edges as in a named one."""

    if not LONG:
        test_get_glob_edge_cases = None


class TestBarePut(_Bare, AbstractPutTests):  # type: ignore[misc]
    """Copies into one pool; globs at their edges as in a named one."""

    if not LONG:
        test_put_glob_edge_cases = None
