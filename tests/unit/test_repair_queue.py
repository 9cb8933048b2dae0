"""Repairs after damaged reads: one at a time, and what cannot be repaired is not tried for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import hpstore
from hpstore.errors import TooManyErasures
from hpstore.pool.process_resources import RepairQueue

MINUTE = 60.0


def test_a_key_is_queued_once_and_not_while_it_is_repaired() -> None:
    queue = RepairQueue()
    assert queue.add("a")
    assert not queue.add("a")
    assert queue.add("b")
    assert queue.take() == "a"
    assert not queue.add("a")  # the repair meets the damage itself
    queue.done("a", good=True)
    assert queue.add("a")
    assert [queue.take(), queue.take(), queue.take()] == ["b", "a", None]


def test_what_failed_rests_twice_as_long_each_time() -> None:
    now = 0.0
    queue = RepairQueue(lambda: now)
    rests = []
    assert queue.add("a")
    for _ in range(9):
        assert queue.take() == "a"
        queue.done("a", good=False)
        began = now
        while not queue.add("a"):
            now += MINUTE
        rests.append(now - began)
    assert rests[:3] == [MINUTE, 2 * MINUTE, 4 * MINUTE]
    assert rests[-1] == 60 * MINUTE


def test_what_failed_is_tried_again_when_devices_come_or_go() -> None:
    queue = RepairQueue(lambda: 0.0)
    queue.add("a")
    queue.done(str(queue.take()), good=False)
    assert not queue.add("a")
    queue.rest_no_more()
    assert queue.add("a")


def test_an_object_beyond_repair_is_tried_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not again and again: a repair's own reads meet the damage, too."""
    places = [tmp_path / f"d{i}" for i in range(4)]
    with hpstore.create(places, data=2, parity=2, config=tmp_path / "pool.toml") as pool:
        pool.put("key", bytes(400_000))
        for place in places[:3]:
            file = next(place.glob("objects/key/@*"))
            file.write_bytes(file.read_bytes()[:5000])
        with pytest.raises(TooManyErasures):
            pool.get("key")
        time.sleep(1.0)
        assert pool.metrics.value("read_repair_error_total") == 1
        with pytest.raises(TooManyErasures):
            pool.get("key")
        time.sleep(0.5)
        assert pool.metrics.value("read_repair_error_total") == 1
    assert caplog.text.count("repair of 'key' failed") == 1


def test_a_device_that_leaves_ends_the_rest(tmp_path: Path) -> None:
    places = [tmp_path / f"d{i}" for i in range(4)]
    with hpstore.create(places, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        pool._session._repairs.add("key")
        pool._session._repairs.done(str(pool._session._repairs.take()), good=False)
        pool.admin.refresh()
        assert not pool._session._repairs.add("key")
        pool.evict(str(places[0]))
        assert pool._session._repairs.add("key")
