"""Places in the settings: an evicted device takes none with it at which another one answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import hpstore
from hpstore.pool.pool import Pool

DATA = bytes(range(256)) * 2000


def made(tmp_path: Path, count: int) -> Path:
    config = tmp_path / "pool.toml"
    places = [tmp_path / f"d{i}" for i in range(count)]
    with hpstore.create(places, data=2, parity=1, config=config) as pool:
        pool.put("key", DATA)
    return config


def absent(pool: Pool) -> str:
    """The member that answers nowhere."""
    return next(
        m.device_id
        for m in pool.admin.record.members
        if m.device_id not in pool.admin.devices.places
    )


def places(config: Path) -> list[str]:
    with hpstore.open(config) as pool:
        assert pool.get("key") == DATA
        return sorted(Path(url).name for url in pool.admin.devices.places.values())


EVICTIONS: dict[str, Callable[[Pool, str], object]] = {"evict": Pool.evict, "drain": Pool.drain}


@pytest.mark.parametrize("open_meanwhile", [True, False])
def test_a_disk_that_replaces_another_at_its_place_stays(
    tmp_path: Path, open_meanwhile: bool
) -> None:
    """PROTOCOL 14, settings only say where to look. The new disk is added, the old one evicted."""
    config = made(tmp_path, 4)
    pool = hpstore.open(config)
    old = next(d for d, url in pool.admin.devices.places.items() if Path(url).name == "d0")
    shutil.rmtree(tmp_path / "d0")
    (tmp_path / "d0").mkdir()
    if not open_meanwhile:
        pool.close()
        pool = hpstore.open(config)
        assert absent(pool) == old
    with pool:
        pool.add_device(str(tmp_path / "d0"))
        pool.evict(old)
        assert pool.rebuild().whole
    assert places(config) == ["d0", "d1", "d2", "d3"]


@pytest.mark.parametrize("leave", EVICTIONS)
def test_of_disks_that_have_swapped_places_the_evicted_ones_is_forgotten(
    tmp_path: Path, leave: str
) -> None:
    config = made(tmp_path, 5)
    for old, new in (("d0", "x"), ("d1", "d0"), ("x", "d1")):
        (tmp_path / old).rename(tmp_path / new)
    with hpstore.open(config) as pool:
        moved = next(d for d, url in pool.admin.devices.places.items() if Path(url).name == "d1")
        EVICTIONS[leave](pool, moved)
        pool.rebuild()
    assert places(config) == ["d0", "d2", "d3", "d4"]


def test_the_place_of_a_disk_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    config = made(tmp_path, 4)
    shutil.rmtree(tmp_path / "d0")
    with hpstore.open(config) as pool:
        pool.evict(absent(pool))
        pool.rebuild()
        assert [Path(url).name for url in pool.config.devices] == ["d1", "d2", "d3"]
    assert places(config) == ["d1", "d2", "d3"]
