"""Objects with a stripe unit of their own: written, re-laid and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.objects.read.resolve import open_object
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB, MIB


def unit_of(pool: Pool, key: str) -> int:
    """What the object's own header says."""
    reader = open_object(pool._store, key)
    try:
        return reader.header.geometry.unit_bytes
    finally:
        reader.close()


def test_an_object_keeps_its_unit_when_it_is_laid_out_anew(tmp_path: Path) -> None:
    """Put with another unit than the pool's; a device is evicted, the rest re-lays it."""
    data = np.random.default_rng(0).bytes(1_500_000)
    harness = Harness(tmp_path, data=3, parity=1, devices=4, unit_bytes=64 * KIB)
    with harness.open() as pool:
        pool.put("own", data, unit_bytes=256 * KIB)
        pool.put("usual", data)
        assert (unit_of(pool, "own"), unit_of(pool, "usual")) == (256 * KIB, 64 * KIB)
        pool.evict(harness.urls[0])
        pool.rebuild()
        assert pool.stat("own").data == 2
        assert (unit_of(pool, "own"), unit_of(pool, "usual")) == (256 * KIB, 64 * KIB)
        assert pool.get("own") == pool.get("usual") == data


@pytest.mark.parametrize("unit", [0, 1000, 100 * KIB, 128 * MIB, 16 * MIB])
def test_a_unit_that_cannot_be_is_refused(tmp_path: Path, unit: int) -> None:
    """Not a multiple, too large, or more than the pool's memory can hold stripes of."""
    with Harness(tmp_path, data=3, parity=1, devices=4).open() as pool:
        with pytest.raises(ConfigError):
            pool.put("a", b"x", unit_bytes=unit)
        assert pool.list() == []
