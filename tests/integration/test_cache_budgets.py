"""How small the budget of a cache may be, and what it says when it is too small."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.loaders.cache import Cache
from tests.integration.cache_sources import NumberedSource, read_epoch

COUNT, SIZE = 200, 3000


def test_a_budget_below_a_batch_is_refused_with_the_least_that_would_do() -> None:
    """The number in the message works, at blocks of one size and of many; half of it does not."""
    sizes = np.random.default_rng(0).integers(100, 20_000, COUNT).astype(np.int64)
    for source in (NumberedSource(COUNT, SIZE), NumberedSource(COUNT, sizes)):
        with Cache(20_000) as cache, pytest.raises(ConfigError, match="need at least") as told:
            cache.attach(source, batch_blocks=32)
        found = re.search(r"need at least (\d+)", str(told.value))
        assert found is not None
        least = int(found.group(1))
        with Cache(least) as cache, cache.attach(source, batch_blocks=32) as reader:
            read_epoch(reader, source, np.arange(COUNT), 32)
            read_epoch(reader, source, np.arange(COUNT), 32)
        with Cache(least // 2) as cache, pytest.raises(ConfigError, match=r"Nothing was changed"):
            cache.attach(source, batch_blocks=32)


def test_a_budget_that_cannot_be_is_refused_when_the_cache_is_made() -> None:
    """No bytes, more than there are, half of a disk tier: an error, and nothing reserved."""
    for wrong in (0, -5, 1 << 50):
        with pytest.raises(ConfigError, match="memory_bytes"):
            Cache(wrong)
        with pytest.raises(ConfigError, match="memory_bytes"):
            Cache(wrong, share=f"test {wrong}")
    with pytest.raises(ConfigError, match="disk_path and disk_bytes"):
        Cache(1 << 20, disk_bytes=5)
