"""What the arguments of loaders and writers mean, without a pool."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from hpstore.errors import ConfigError
from hpstore.loaders import Cache, DataLoader
from hpstore.loaders.batching import page_budget
from hpstore.loaders.batching.page_budget import cache_budget
from hpstore.units import GIB


def test_auto_is_a_quarter_of_the_memory_shared_by_the_ranks_of_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the default of a loader. None and 0 keep nothing, as does a loader with a Cache."""
    monkeypatch.setattr(page_budget, "available_bytes", lambda: 64 * GIB)
    assert inspect.signature(DataLoader).parameters["cache"].default == "auto"
    assert cache_budget("auto") == 16 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cache_budget("auto") == 4 * GIB
    with Cache("1MiB") as cache:
        assert [cache_budget(off) for off in (None, 0, "0", cache)] == [0, 0, 0, 0]
    assert cache_budget("3GiB") == cache_budget(3 * GIB) == 3 * GIB


@pytest.mark.parametrize("cache", [True, 1.5, "automatic", b"auto"])
def test_a_cache_that_is_none_is_refused(cache: Any) -> None:
    with pytest.raises(ConfigError, match=r"auto|number of bytes"):
        cache_budget(cache)
