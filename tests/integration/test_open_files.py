"""Shards and the files that a process may have open."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpstore.descriptors import may_open
from hpstore.loaders import DataLoader, open_shards
from hpstore.loaders.open_shards import FILES_SHARE
from hpstore.pool import Pool
from tests.integration.data_sets import make_pool, write_samples

COUNT = 60
Limit = tuple[int, int]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


@pytest.fixture
def limit() -> Iterator[Limit]:
    """Soft and hard; both are there again afterwards."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, found)


def soft() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_limit_rises_as_far_as_it_may_and_never_falls(limit: Limit) -> None:
    hard = limit[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    assert may_open(400) == soft() == 500
    assert may_open(600) == soft() == 600
    assert may_open(550) == soft() == 600
    assert may_open(hard + 1) == soft() == hard


def test_where_the_limit_cannot_be_raised_it_stays(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seccomp or a container's policy may have it."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limit[1]))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert may_open(600) == 500
    monkeypatch.undo()
    assert soft() == 500


def epochs(pool: Pool, count: int) -> dict[str, Any]:
    """Statistics of a loader after so many, in a global shuffle over many shards."""
    with write_samples(pool, "a", range(COUNT)) as data:
        loader = DataLoader(data, 12, shuffle=True, seed=1, cache=0)
        for _ in range(count):
            assert sum(len(batch["label"]) for batch in loader) == COUNT
        found = loader.stats()
        loader.close()
    return found


def test_all_shards_stay_open_under_the_limit_that_a_shell_gives(pool: Pool, limit: Limit) -> None:
    """Without a word from the user. With the limit as it is four of them would."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * FILES_SHARE * pool.data, limit[1]))
    assert epochs(pool, 2)["shards_reopened"] == 0


def test_shards_that_are_opened_again_are_counted_and_told_once(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the hard limit is too low for all of them."""
    monkeypatch.setattr(open_shards, "may_open", lambda _: 0)
    with caplog.at_level(logging.WARNING, "hpstore"):
        assert epochs(pool, 3)["shards_reopened"] > COUNT
    said = [record.message for record in caplog.records if "opened again" in record.message]
    assert len(said) == 1
    assert "ulimit -n" in said[0]
