"""The keeper of a node's memory and those that it hears: strangers, forks, nonsense, ends."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.config import private_directory
from hpstore.loaders import DataLoader, Dataset
from hpstore.loaders.batching.node_pages import NodePages
from hpstore.node_memory.keeper import Keeper
from hpstore.node_memory.meeting_place import connect, socket_path
from hpstore.pool.pool import Pool
from hpstore.runtime.address_range import HUGE_BYTES, AddressRange, make_huge
from hpstore.runtime.local_messages import Lost, receive, send
from hpstore.units import KIB, MIB
from tests.fault.common import poll
from tests.integration.node_keepers import keeping, meeting_place, plain, whole, wrong


@pytest.fixture
def place(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Path:
    return meeting_place(pool, monkeypatch)


@pytest.fixture
def keeper(place: Path) -> Iterator[Keeper]:
    with keeping(place) as made:
        yield made


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
        thread.join(10)
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
