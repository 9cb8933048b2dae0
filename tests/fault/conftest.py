"""Fixtures of the fault tests: real filesystems to break, directories that stand for devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpstore.testing.loopfs import LoopFilesystem, loop_mounts_problem
from hpstore.testing.scratch import sweep
from hpstore.units import MIB
from tests.fault.common import Bench, MakeDisks


@pytest.fixture(autouse=True)
def spare_files() -> None:
    """As many on a device as its filesystem would have: disks get full here."""


@pytest.fixture(scope="session")
def loop_mounts() -> None:
    """Skip, with the reason, where loop filesystems cannot be made. Tries it once, sweeps first."""
    if os.geteuid() == 0:
        for what in sweep():
            print(f"left by a killed run, removed: {what}")
    problem = loop_mounts_problem()
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture
def make_disks(loop_mounts: None, tmp_path: Path) -> Iterator[MakeDisks]:
    """Make loop filesystems; they are gone after the test, however it ends."""
    with ExitStack() as stack:

        def make(count: int, size_bytes: int = 64 * MIB, inodes: int = 0) -> list[LoopFilesystem]:
            return [
                stack.enter_context(LoopFilesystem(tmp_path, size_bytes=size_bytes, inodes=inodes))
                for _ in range(count)
            ]

        yield make


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Where a pool of plain directories is made."""
    return Bench(tmp_path)
