"""Fixtures that several files of unit tests share."""

from __future__ import annotations

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
