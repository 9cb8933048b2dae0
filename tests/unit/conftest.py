"""Fixtures that several files of unit tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tended import Tended


@pytest.fixture
def tended(tmp_path: Path) -> Iterator[Tended]:
    """A pool and its agent, by rounds."""
    made = Tended(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """A directory on a drive, below /var/tmp where those of the tests are in memory."""
    for parent in (tmp_path, Path("/var/tmp")):
        if os.major(parent.stat().st_dev):
            with tempfile.TemporaryDirectory(dir=parent) as made:
                yield Path(made)
            return
    pytest.skip(f"neither {tmp_path} nor /var/tmp is on a drive: set TMPDIR to a directory that is")
