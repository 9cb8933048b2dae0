"""Pages in the memory of a node: a new loader finds what another one has filled, bit by bit."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.config import private_directory
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory, Mixture
from hpstore.loaders.batching import page_budget
from hpstore.loaders.batching.node_pages import NodePageMemory, NodePages
from hpstore.loaders.batching.page_budget import PageBudget
from hpstore.node_memory import keeper_session
from hpstore.node_memory.keeper import Keeper
from hpstore.node_memory.keeper_process import serve
from hpstore.node_memory.meeting_place import connect, keeper_directory, socket_path
from hpstore.pool.pool import Pool
from hpstore.runtime.address_range import HUGE_BYTES, AddressRange, make_huge
from hpstore.runtime.local_messages import Lost, receive, send
from hpstore.units import KIB, MIB
from tests.fault.common import poll
from tests.integration.loader_cases import KINDS, check, flat, write

COUNT = 97
WITHOUT_PAGES = ("scalars only", "larger than a unit")  # records larger than a page are read alone


@contextmanager
def keeping(place: Path) -> Iterator[Keeper]:
    """A keeper of this directory on a thread of the test."""
    private_directory(place)
    keeper, ended = Keeper(time.monotonic), threading.Event()
    arguments = (place, keeper, lambda: not ended.is_set())
    thread = threading.Thread(target=serve, args=arguments, daemon=True)
    thread.start()
    poll(20.0, lambda: (place / "keeper.sock").exists())
    try:
        yield keeper
    finally:
        ended.set()
        thread.join(60)
        keeper.free(None)


@pytest.fixture
def place(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the pool's keeper is met; none runs, and none may be started."""
    monkeypatch.setenv("HPSTORE_NODE_MEMORY", "on")

    def refuse(_: object) -> None:
        raise OSError("this test starts no process")

    monkeypatch.setattr(keeper_session.KeeperSession, "_launch", refuse)
    return keeper_directory(pool.config.settings)


@pytest.fixture
def keeper(place: Path) -> Iterator[Keeper]:
    with keeping(place) as made:
        yield made


def whole(loader: DataLoader) -> dict[str, Any]:
    """Read epochs until all pages are there; the figures."""
    for _ in range(50):
        list(loader)
        stats = loader.stats()
        if stats["pages_in_memory"] == stats["pages_to_keep"]:
            return stats
    raise AssertionError(f"pages do not come: {stats}")


def pages_there(keeper: Keeper) -> list[tuple[int, int]]:
    return [(found["pages"], found["pages_of"]) for found in keeper.listing()]


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


def plain(pool: Pool, name: str = "d", first: int = 0) -> Dataset:
    """12 pages and more of records whose bytes are their numbers modulo 251."""
    with DatasetWriter(
        pool, name, {"x": Field("uint8", (16 * KIB,)), "label": Field("int64")}, unit_bytes=64 * KIB
    ) as out:
        for i in range(COUNT):
            value = (i + first) % 251
            out.write({"x": np.full(16 * KIB, value, np.uint8), "label": np.int64(i)})
    return Dataset(pool, name)


def wrong(loader: DataLoader, first: int = 0) -> list[int]:
    return [
        label
        for batch in loader
        for row, label in enumerate(batch["label"].tolist())
        if (batch["x"][row] != (label + first) % 251).any()
    ]


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


HOSTILE: dict[str, Callable[[socket.socket], None]] = {
    "noise": lambda s: s.sendall(os.urandom(400)),
    "a huge message": lambda s: s.sendall(struct.pack("<III", 100, 1 << 30, 0)),
    "no object": lambda s: s.sendall(struct.pack("<III", 2, 0, 0) + b"[]"),
    "no such message": lambda s: send(s, {"op": "__class__"}),
    "no page": lambda s: send(s, {"op": "claim", "segment": 1}, [np.full(8, 255, np.uint8)]),
    "odd bytes": lambda s: send(s, {"op": "claim", "segment": 1}, [np.zeros(7, np.uint8)]),
    "no segment": lambda s: send(s, {"op": "publish", "segment": 99}, [np.zeros(8, np.uint8)]),
    "another's segment": lambda s: send(
        s, {"op": "publish", "segment": 1}, [np.zeros(8, np.uint8)]
    ),
    "no shape": lambda s: send(s, {"op": "attach", "key": "k", "name": "n", "pool": "p"}),
    "nested": lambda s: s.sendall(struct.pack("<III", 100_000, 0, 0) + b"[" * 100_000),
    "half a message": lambda s: s.sendall(struct.pack("<III", 100, 0, 0)),
    "an unending name": lambda s: send(
        s,
        {
            "op": "attach",
            "key": "k" * 9000,
            "name": "n",
            "pool": "p",
            "pages": 1,
            "page_bytes": 1,
            "bound": 1 << 40,
            "keep_milliseconds": 1,
        },
    ),
    "too large": lambda s: send(
        s,
        {
            "op": "attach",
            "key": "k",
            "name": "n",
            "pool": "p",
            "pages": 1 << 31,
            "page_bytes": 1 << 31,
            "bound": 1 << 62,
            "keep_milliseconds": 1,
        },
    ),
}


@pytest.mark.parametrize("hostile", list(HOSTILE))
def test_hostile_bytes_end_one_connection_alone(
    pool: Pool, keeper: Keeper, place: Path, hostile: str
) -> None:
    data = plain(pool)
    with closing(DataLoader(data, 8)) as loader, closing(connect(place)) as enemy:
        list(loader)
        HOSTILE[hostile](enemy)
        stats = whole(loader)
        assert not wrong(loader)
    assert stats["node_memory"] == "shared"
    assert [found["dataset"] for found in keeper.listing()] == ["d"]


def test_a_keeper_that_answers_nonsense_is_left(
    pool: Pool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_directory(place)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with socket_path(place) as path:
            listener.bind(path)
        listener.listen(4)
        heard: list[Any] = []

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(receive(connection).facts)
                send(connection, {"version": 1, "taken": 0})
                heard.append(receive(connection).facts)
                reading, writing = os.pipe()
                send(connection, {"segment": 1}, fds=[reading])
                os.close(reading)
                os.close(writing)

        thread = threading.Thread(target=answer)
        thread.start()
        with closing(DataLoader(plain(pool), 8)) as loader:
            stats = whole(loader)
            assert not wrong(loader)
        thread.join(60)
    assert [facts["op"] for facts in heard] == ["room", "attach"]
    assert "cannot be mapped" in stats["node_memory"]
    json.dumps(stats["node_memory"])


def test_a_stranger_is_not_believed(
    pool: Pool, keeper: Keeper, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(Lost, match="is on the other side"):
        connect(place)


def test_a_forked_child_leaves_the_connection_to_its_parent(pool: Pool, keeper: Keeper) -> None:
    """The keeper sees that the parent's loader has ended while the child still runs."""
    data = plain(pool)
    ended, end = os.pipe()
    with closing(DataLoader(data, 8)) as loader:
        whole(loader)
        child = os.fork()
        if not child:
            bad = 1
            try:
                with closing(DataLoader(data, 8, cache=0)) as own:
                    bad = len(wrong(own))
                os.read(ended, 1)
            finally:
                os._exit(bad)
        assert loader.stats()["node_memory"] == "shared"
        assert not wrong(loader)
    try:
        poll(20.0, lambda: keeper.listing()[0]["processes"] == [])
    finally:
        os.write(end, b"x")
        status = os.waitpid(child, 0)[1]
        os.close(ended)
        os.close(end)
    assert os.waitstatus_to_exitcode(status) == 0


def test_node_pages_ask_for_a_segment_once(pool: Pool, keeper: Keeper) -> None:
    data = plain(pool)
    node = NodePages(data, lambda _: 1, 60.0)  # no room
    assert node.use(data.streams[0], start=False) is None
    assert "above the bound" in node.described()
    with closing(DataLoader(data, 8)) as loader:
        whole(loader)
    assert node.use(data.streams[0], start=False) is None
    node.close()


def test_the_pool_may_close_before_the_loader(tmp_path: Path, pool: Pool, keeper: Keeper) -> None:
    loader = DataLoader(plain(pool), 8)
    whole(loader)
    with hpstore.open(tmp_path / "pool.toml") as other:
        assert Dataset(other, "d").fingerprint
    loader.close()
    loader.close()
    poll(20.0, lambda: keeper.listing()[0]["processes"] == [])


def test_huge_pages_beside_what_others_write_change_nothing_of_it() -> None:
    """Two processes read neighbouring pages of one segment into the same 2 MiB."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 2 * HUGE_BYTES)
    views = []
    for _ in range(2):
        made = AddressRange(2 * HUGE_BYTES)
        made.map_file(0, 2 * HUGE_BYTES, descriptor, 0, writable=True)
        views.append(made.array)
    os.close(descriptor)
    one, two = views
    one[: 300 * KIB] = 1
    make_huge(two[300 * KIB : 2 * MIB + 5])
    two[300 * KIB : 2 * MIB + 5] = 2
    make_huge(one[2 * MIB + 5 :])
    assert (one[: 300 * KIB] == 1).all()
    assert (one[300 * KIB : 2 * MIB + 5] == 2).all()
    assert not one[2 * MIB + 5 :].any()


def test_addresses_outside_of_a_range_are_refused() -> None:
    made = AddressRange(HUGE_BYTES)
    for at, nbytes in ((1, 4096), (0, HUGE_BYTES + 4096), (-4096, 4096), (4096, -1)):
        with pytest.raises(ValueError, match="are not within"):
            made.map_memory(at, nbytes)
