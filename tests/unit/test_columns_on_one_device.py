"""Two columns of one object on one device are one loss away from both."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.units import KIB


@pytest.mark.parametrize("size", [100, 300 * KIB])
def test_two_columns_on_one_device_are_taken_apart_by_a_rebuild(tmp_path: Path, size: int) -> None:
    """A repair that died has left a column where another one is: the device counts once, a rebuild
    moves one of them, and any m devices may go (rules 3 and 8; found by the simulator)."""
    h = Harness(tmp_path, data=2, parity=2, devices=5, clock=FakeClock())
    value = bytes(range(250)) * (size // 250 + 1)
    with h.open() as pool:
        pool.put("k", value)
        (to, _), (source, path) = h.columns("k")[:2]
        devices = h.devices
        devices[to].files[path] = devices[source].files.pop(path)
        devices[to]._durable_names[path] = devices[source]._durable_names.pop(path)
        assert pool.admin.condition().losses_tolerated == 1
        assert pool.rebuild().whole
        places = [url for url, _ in h.columns("k")]
        assert len(set(places)) == len(places)
        assert pool.stat("k").losses_tolerated == 2
    h.lose(places[:2])
    with h.open() as pool:
        assert pool.get("k") == value
