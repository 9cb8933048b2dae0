"""What the tests of trainers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.ranks import make_pool, open_pool
from tests.trainers.pipelines import write_samples


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a pool with the data set of the pipelines in it."""
    make_pool(tmp_path)
    with open_pool(tmp_path) as pool:
        write_samples(pool)
    return tmp_path
