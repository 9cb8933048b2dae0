"""What tab completion on a pool shows (docs/decisions/0106): what users type, and `admin`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import hpstore
from hpstore.errors import AlreadyClosed
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness

OBJECTS = {
    "put",
    "put_many",
    "get",
    "read_into",
    "open",
    "open_many",
    "stat",
    "versions",
    "exists",
    "list",
    "delete",
    "delete_many",
}
CARE = {"status", "scrub", "rebuild", "add_device", "drain", "evict", "readmit", "sit_out"}
FACTS = {"data", "parity", "scheme", "config", "metrics", "read_only"}


def test_a_pool_shows_what_users_type_and_one_name_for_the_rest() -> None:
    shown = {name for name in dir(Pool) if not name.startswith("_")}
    assert shown == OBJECTS | CARE | FACTS | {"close"}
    assert Pool.__bases__ == (object,)


def test_an_open_pool_shows_admin_besides(tmp_path: Path) -> None:
    with hpstore.create(
        [tmp_path / d for d in "abc"],
        data=2,
        parity=1,
        config=tmp_path / "p.toml",
        allow_root_disk=True,
    ) as pool:
        shown = {name for name in dir(pool) if not name.startswith("_")}
        assert shown == OBJECTS | CARE | FACTS | {"close", "admin"}
        assert pool.scheme == "2+1"
        pool.put("k", b"value")
        pool.admin.settle("k")
        assert pool.admin.condition().losses_tolerated == 1
        assert sorted(pool.admin.devices.places.values()) == [str(tmp_path / d) for d in "abc"]
        with pickle.loads(pickle.dumps(pool)) as again:
            assert again.get("k") == b"value"


def test_a_closed_pool_says_so_behind_admin_too(tmp_path: Path) -> None:
    pool = Harness(tmp_path, data=2, parity=1, devices=3).open()
    pool.close()
    pool.close()
    for refused in (pool.admin.condition, lambda: pool.admin.devices.evict("memory://d0")):
        with pytest.raises(AlreadyClosed):
            refused()
