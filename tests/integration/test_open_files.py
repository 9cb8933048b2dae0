"""Shards and the files that a process may have open."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.loaders import DataLoader, Dataset
from hpstore.loaders.dataset import open_objects, page_compression
from hpstore.loaders.dataset.open_objects import FILES_SHARE
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.pool.pool import Pool
from hpstore.runtime.open_file_limit import may_open
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


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


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
    """Without a word from the user. With the limit as it is a few of them would."""
    others = descriptors()  # of whatever else this process has at work
    resource.setrlimit(resource.RLIMIT_NOFILE, (others + 4 * FILES_SHARE * pool.data, limit[1]))
    assert epochs(pool, 2)["shards_reopened"] == 0


def test_shards_that_are_opened_again_are_counted_and_told_once(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the hard limit is too low for all of them."""
    monkeypatch.setattr(open_objects, "may_open", lambda _: 0)
    with caplog.at_level(logging.WARNING, "hpstore"):
        assert epochs(pool, 3)["shards_reopened"] > COUNT
    said = [record.message for record in caplog.records if "opened again" in record.message]
    assert len(said) == 1
    assert "ulimit -n" in said[0]


@pytest.mark.parametrize("cache", [0, "64MiB"])
def test_no_shard_is_closed_before_what_was_asked_of_it_is_read(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, cache: int | str
) -> None:
    """A batch of more shards than a thread keeps open: the first were closed while the last were
    opened, and reads of them went to whatever file had the descriptor by then. One of a ring of
    another thread never ends: the batch stood for 30 seconds, and the device was blamed."""
    left: list[int] = []  # records that cross a unit, and what else was not read at once
    again, pages = StoredData._read_again, page_compression.read_pages

    def read_again(data: StoredData, stream: Any, indices: Any, rest: Any, *others: Any) -> None:
        left.extend(indices[rest].tolist())
        again(data, stream, indices, rest, *others)

    def read_pages(shard: Any, stream: Any, table: Any, numbers: Any, *others: Any) -> None:
        left.extend(numbers.tolist())
        pages(shard, stream, table, numbers, *others)

    monkeypatch.setattr(StoredData, "_read_again", read_again)
    monkeypatch.setattr(page_compression, "read_pages", read_pages)

    def not_read_at_once() -> list[int]:
        left.clear()
        loader = DataLoader(data, 30, shuffle=True, seed=1, cache=cache)
        labels = [int(label) for batch in loader for label in batch["label"]]
        loader.close()
        assert sorted(labels) == list(range(COUNT))
        return sorted(set(left))

    with write_samples(pool, "a", range(COUNT)) as data:
        shards = max(len(stream.nonces) for stream in data.streams)
        assert shards > open_objects.LEAST_READERS
        wanted = not_read_at_once()
    monkeypatch.setattr(open_objects, "may_open", lambda _: 0)
    with Dataset(pool, "a") as data:
        assert not_read_at_once() == wanted


def test_ranges_are_read_of_so_many_shards_at_once() -> None:
    """Each once, in groups of shards that are open together."""
    shards = np.random.default_rng(3).integers(0, 50, 200).astype(np.int32)
    groups = open_objects.in_reach(shards, 7)
    assert sorted(np.concatenate(groups).tolist()) == list(range(200))
    assert all(len(np.unique(shards[group])) <= 7 for group in groups)
    assert len(groups) == -(-len(np.unique(shards)) // 7)
    assert open_objects.in_reach(shards[:0], 7) == []


def test_readers_that_are_forgotten_keep_no_files(pool: Pool) -> None:
    """t11_rd: each kept one of every column, deleted ones too, beyond the pool's own end."""
    pool.put("a", os.urandom(1 << 20))
    pool.open("a").close()
    before = descriptors()
    for _ in range(50):
        pool.open("a")
    gc.collect()
    assert descriptors() <= before + 2  # a thread of the pool may be at something
    target = bytearray(10)
    with pool.open("a") as kept:
        assert kept.read_into(target) == 10


def locked(path: Path) -> bool:
    """Whether somebody reads the file, so that it is not recycled."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_forked_child_that_forgets_a_reader_leaves_the_parents_lock(
    pool: Pool, tmp_path: Path
) -> None:
    """PROTOCOL 11: a file that is read is not recycled."""
    body = os.urandom(1 << 20)
    pool.put("a", body)
    reader = pool.open("a")
    paths = list(tmp_path.glob("*/objects/a/@*"))
    read = [path for path in paths if locked(path)]
    assert read
    child = os.fork()
    if not child:
        del reader
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert [path for path in paths if locked(path)] == read
    target = bytearray(len(body))
    assert reader.read_into(target) == len(body)
    assert target == body
    reader.close()
