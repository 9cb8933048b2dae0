"""A keeper on a thread of the test, and a dataset whose pages it keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.config import private_directory
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.node_memory import keeper_session
from hpstore.node_memory.keeper import Keeper
from hpstore.node_memory.keeper_process import serve
from hpstore.node_memory.meeting_place import connect, keeper_directory
from hpstore.pool.pool import Pool
from hpstore.runtime.local_messages import Lost
from hpstore.units import KIB
from tests.fault.common import poll

COUNT = 97


@contextmanager
def keeping(place: Path) -> Iterator[Keeper]:
    """A keeper of this directory on a thread of the test."""
    private_directory(place)
    keeper, ended = Keeper(time.monotonic), threading.Event()
    arguments = (place, keeper, lambda: not ended.is_set())
    thread = threading.Thread(target=serve, args=arguments, daemon=True)
    thread.start()
    poll(20.0, lambda: _listens(place))
    try:
        yield keeper
    finally:
        ended.set()
        thread.join(60)
        keeper.free(None)


def _listens(place: Path) -> bool:
    """Its name is there before it can be met."""
    try:
        connect(place).close()
    except Lost:
        return False
    return True


def meeting_place(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the pool's keeper is met; none runs, and none may be started."""
    monkeypatch.setenv("HPSTORE_NODE_MEMORY", "on")

    def refuse(_: object) -> None:
        raise OSError("this test starts no process")

    monkeypatch.setattr(keeper_session.KeeperSession, "_launch", refuse)
    return keeper_directory(pool.config.settings)


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
