"""Pages in the memory of a node: a new loader finds what another one has filled, bit by bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory, Mixture
from hpstore.loaders.batching import page_budget
from hpstore.loaders.batching.node_pages import NodePageMemory
from hpstore.loaders.batching.page_budget import PageBudget
from hpstore.node_memory.keeper import Keeper
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.common import poll
from tests.integration.loader_cases import KINDS, check, flat, write
from tests.integration.node_keepers import (
    COUNT,
    keeping,
    meeting_place,
    pages_there,
    plain,
    whole,
    wrong,
)

WITHOUT_PAGES = ("scalars only", "larger than a unit")  # records larger than a page are read alone


@pytest.fixture
def place(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Path:
    return meeting_place(pool, monkeypatch)


@pytest.fixture
def keeper(place: Path) -> Iterator[Keeper]:
    with keeping(place) as made:
        yield made


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in WITHOUT_PAGES])
def test_a_new_loader_reads_no_page_that_is_in_memory(
    pool: Pool, keeper: Keeper, kind: str
) -> None:
    fields, options = KINDS[kind]
    data = write(pool, "d", fields, COUNT, **options)
    with closing(DataLoader(data, 10, shuffle=True)) as first:
        whole(first)
    poll(20.0, lambda: all(there == of for there, of in pages_there(keeper)))
    with Dataset(pool, "d") as again, closing(DataLoader(again, 10, shuffle=True)) as second:
        for batch in second:
            check(batch, fields)
        stats = second.stats()
    assert stats["pages_adopted"] == stats["pages_to_keep"] == stats["pages_in_memory"] > 0
    assert (stats["records_read"], stats["node_memory"]) == (0, "shared")


@pytest.mark.parametrize("kind", WITHOUT_PAGES)
def test_a_dataset_without_pages_needs_no_keeper(pool: Pool, keeper: Keeper, kind: str) -> None:
    fields, options = KINDS[kind]
    with closing(DataLoader(write(pool, "d", fields, COUNT, **options), 10)) as loader:
        for batch in loader:
            check(batch, fields)
        assert loader.stats()["node_memory"] == "off"
    assert keeper.empty


def test_two_loaders_at_once_read_each_page_once(pool: Pool, keeper: Keeper) -> None:
    data = plain(pool)
    with closing(DataLoader(data, 8)) as one, closing(DataLoader(data, 8)) as two:
        threads = [threading.Thread(target=whole, args=(loader,)) for loader in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        stats = [one.stats(), two.stats()]
        assert not wrong(one)
        assert not wrong(two)
    pages = stats[0]["pages_to_keep"]
    assert [s["pages_in_memory"] for s in stats] == [pages, pages]
    assert sum(s["pages_adopted"] for s in stats) == pages  # the rest each has read itself


def test_a_trainer_that_writes_into_a_batch_changes_no_page(pool: Pool, keeper: Keeper) -> None:
    data = plain(pool)
    with closing(DataLoader(data, 8)) as loader:
        whole(loader)
        for batch in loader:
            batch["x"].fill_(255)
        assert not wrong(loader)
    with closing(DataLoader(data, 8)) as another:
        assert not wrong(another)


def test_shared_pages_cannot_be_written(pool: Pool, keeper: Keeper) -> None:
    """The kernel refuses: a system call that would write there fails."""
    data = plain(pool)
    with closing(DataLoader(data, 8)) as loader:
        whole(loader)
        slab = next(iter(loader.engine()._slabs.values()))  # type: ignore[union-attr]
        start = int(slab._slot[0]) * slab._page_bytes
        reading, writing = os.pipe()
        os.write(writing, b"x")
        with pytest.raises(OSError, match="Bad address"):
            os.readv(reading, [slab._memory[start : start + 1].data])
        os.close(reading)
        os.close(writing)


def test_a_dataset_that_was_replaced_is_another_one(pool: Pool, keeper: Keeper) -> None:
    with plain(pool) as old, closing(DataLoader(old, 8)) as loader:
        whole(loader)
    with DatasetWriter(
        pool,
        "d",
        {"x": Field("uint8", (16 * KIB,)), "label": Field("int64")},
        unit_bytes=64 * KIB,
        overwrite=True,
    ) as out:
        for i in range(COUNT):
            out.write({"x": np.full(16 * KIB, (i + 7) % 251, np.uint8), "label": np.int64(i)})
    with Dataset(pool, "d") as new, closing(DataLoader(new, 8)) as loader:
        assert not wrong(loader, 7)
        assert whole(loader)["pages_adopted"] == 0
        assert not wrong(loader, 7)


def test_without_a_keeper_pages_are_this_process_s_own(
    pool: Pool, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = plain(pool)
    with closing(DataLoader(data, 8)) as loader:
        stats = whole(loader)
        assert not wrong(loader)
    assert "cannot be started" in stats["node_memory"]
    assert stats["pages_adopted"] == 0
    assert len([r for r in caplog.records if "cannot be started" in r.message]) == 1


def test_a_keeper_that_goes_in_the_midst_leaves_the_rest_to_the_loader(
    pool: Pool, place: Path
) -> None:
    data = plain(pool)
    budget = PageBudget(own_bytes=1 << 30, keep_seconds=60.0)
    node = budget.node(data)
    assert node is not None
    with keeping(place) as keeper:
        stream = data.streams[0]
        slab = NodePageMemory(data, stream, node)
        slab.read(slab.reserve(np.arange(5)) or {})
        poll(20.0, lambda: pages_there(keeper)[0][0] == 5)
        node.session._lose("the keeper was killed")
    places = slab.reserve(np.arange(12)) or {}
    assert sorted(places) == list(range(5, 12))
    assert min(places.values()) >= slab._own
    slab.read(places)
    assert (slab._slot[:12] >= 0).all()
    assert node.described() == "shared, left: the keeper was killed"


def test_what_another_process_reads_and_does_not_end_is_read_here(
    pool: Pool, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, budget = plain(pool), PageBudget(own_bytes=1 << 30, keep_seconds=60.0)
    monkeypatch.setattr("hpstore.loaders.batching.node_pages.STALL_SECONDS", 0.3)
    stopped, going = budget.node(data), budget.node(data)
    assert stopped is not None
    assert going is not None
    one = NodePageMemory(data, data.streams[0], stopped)
    assert len(one.reserve(np.arange(4)) or {}) == 4  # and is not read
    two = NodePageMemory(data, data.streams[0], going)
    assert sorted(two.reserve(np.arange(8)) or {}) == [4, 5, 6, 7]
    rest = two.reserve_rest() or {}
    assert sorted(rest) == [0, 1, 2, 3]
    assert min(rest.values()) >= two._own
    stopped.close()
    going.close()


def test_what_a_process_left_behind_is_claimed_by_others(pool: Pool, keeper: Keeper) -> None:
    data, budget = plain(pool), PageBudget(own_bytes=1 << 30, keep_seconds=60.0)
    dead, going = budget.node(data), budget.node(data)
    assert dead is not None
    assert going is not None
    one = NodePageMemory(data, data.streams[0], dead)
    two = NodePageMemory(data, data.streams[0], going)
    one.reserve(np.arange(4))
    two.reserve(np.arange(4))
    dead.close()
    rest = two.reserve_rest() or {}
    assert sorted(rest) == [0, 1, 2, 3]
    pages = len(data.pages(data.streams[0]).start)
    assert [rest[page] for page in range(4)] == list(range(pages, pages + 4))  # fresh slots
    two.read(rest)
    poll(20.0, lambda: pages_there(keeper)[0][0] == 4)
    going.close()


def test_ranks_share_one_copy_that_is_larger_than_a_rank_s_share(
    pool: Pool, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = plain(pool)
    monkeypatch.setattr(page_budget, "available_bytes", lambda: 16 * MIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    made = [DataLoader(data, 8, rank=rank, world_size=4) for rank in range(4)]
    try:
        stats = [whole(loader) for loader in made]
    finally:
        for loader in made:
            loader.close()
    assert [s["mode"] for s in stats] == ["resident"] * 4
    assert [s["node_memory"] for s in stats] == ["shared"] * 4
    assert len(keeper.listing()) == 1


def test_without_a_keeper_ranks_divide_the_quarter(
    pool: Pool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = plain(pool)
    monkeypatch.setattr(page_budget, "available_bytes", lambda: 16 * MIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with closing(DataLoader(data, 8, rank=0, world_size=4)) as loader:
        list(loader)
        assert loader.stats()["mode"] == "records"


def test_what_is_kept_counts_as_available(
    pool: Pool, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose memory the dataset itself has taken: the next process still finds it."""
    data = plain(pool)
    monkeypatch.setattr(page_budget, "available_bytes", lambda: 8 * MIB)
    with closing(DataLoader(data, 8)) as loader:
        assert whole(loader)["mode"] == "resident"
    for available in (int(6.4 * MIB), 64 * 1024):  # other programs have taken the rest
        monkeypatch.setattr(page_budget, "available_bytes", lambda a=available: a)
        with closing(DataLoader(data, 8)) as loader:
            stats = whole(loader)
        assert (stats["mode"], stats["node_memory"]) == ("resident", "shared")
        assert stats["records_read"] == 0


@pytest.mark.parametrize("cache", [None, 0])
def test_cache_none_keeps_nothing(pool: Pool, keeper: Keeper, cache: int | None) -> None:
    with closing(DataLoader(plain(pool), 8, cache=cache)) as loader:
        list(loader)
        assert loader.stats()["node_memory"] == "off"
    assert keeper.empty


def test_it_can_be_switched_off(
    pool: Pool, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = plain(pool)
    with closing(DataLoader(data, 8, memory=LoaderMemory(node_minutes=0))) as loader:
        assert whole(loader)["node_memory"] == "off"
    monkeypatch.setenv("HPSTORE_NODE_MEMORY", "off")
    with closing(DataLoader(data, 8)) as loader:
        assert whole(loader)["node_memory"] == "off"
    monkeypatch.setenv("HPSTORE_NODE_MEMORY", "of")
    with pytest.raises(ConfigError, match="set it to on or off"):
        list(DataLoader(data, 8))
    assert keeper.empty


@pytest.mark.parametrize("minutes", [-1, True, "10", float("nan"), 1e9])
def test_minutes_that_are_none_are_refused(minutes: Any) -> None:
    with pytest.raises(ConfigError, match="node_minutes"):
        LoaderMemory(node_minutes=minutes)


def test_datasets_of_a_mixture_are_kept_each(pool: Pool, keeper: Keeper) -> None:
    mixed = Mixture([plain(pool, "a"), plain(pool, "b")], [1, 1])
    with closing(DataLoader(mixed, 8, shuffle=True)) as loader:
        whole(loader)
    poll(20.0, lambda: all(there == of for there, of in pages_there(keeper)))
    assert [found["dataset"] for found in keeper.listing()] == ["a", "b"]
    with closing(DataLoader(mixed, 8, shuffle=True)) as loader:
        assert len(flat(loader)) == 2 * COUNT
        assert loader.stats()["records_read"] == 0
