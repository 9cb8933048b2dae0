"""Scrubs: a delete is believed by every device that comes back; what a scrub keeps of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import LockTimeout, ObjectNotFound
from hpstore.maintenance import repair_runner
from hpstore.maintenance.rebuild import Progress
from hpstore.maintenance.repair_object import Repair, repair_object
from hpstore.objects.context import PoolContext
from hpstore.testing.memory_pool import FakeClock, Harness

HORIZON = 3600.0  # Settings.tombstone_seconds


def test_a_delete_is_not_forgotten_while_an_evicted_device_may_return_rule_12(
    tmp_path: Path,
) -> None:
    """PROTOCOL 12: deleted while a device was away; evicted almost a horizon later; swept when the
    tombstone is past its own; back within a horizon of the eviction. A small object is served
    from one copy, so nothing but the tombstone speaks against what the device brings."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=clock)
    with harness.open() as pool:
        pool.put("small", b"x" * 100)
    away = harness.columns("small")[0][0]
    harness.lose([away])
    with harness.open() as pool:
        pool.delete("small")
        clock.advance(HORIZON - 100)
        pool.evict(away)
        assert pool.rebuild().whole
        clock.advance(200)
        pool.scrub()
        harness.bring_back()
        pool.readmit(away)
        with pytest.raises(ObjectNotFound):
            pool.get("small")
        report = pool.rebuild()  # it sweeps as a scrub does: the device is back
        assert report.whole
        clock.advance(HORIZON + 1)
        assert report.swept + pool.scrub().swept > 0
        assert harness.columns("small") == []
        with pytest.raises(ObjectNotFound):
            pool.get("small")


def test_a_delete_is_forgotten_a_horizon_after_the_last_eviction(tmp_path: Path) -> None:
    """What comes back later is put in quarantine; the tombstone is not kept for ever."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=clock)
    with harness.open() as pool:
        pool.put("small", b"x" * 100)
        away = harness.columns("small")[0][0]
    harness.lose([away])
    with harness.open() as pool:
        pool.delete("small")
        pool.evict(away)
        clock.advance(HORIZON + 1)
        assert pool.scrub().swept > 0
        harness.bring_back()
        found = pool.readmit(away)
        assert found is not None
        assert found.quarantined == 1
        with pytest.raises(ObjectNotFound):
            pool.get("small")


class Stopping:
    """A pace at which an object takes so many seconds, and which stops after so many objects."""

    def __init__(self, clock: FakeClock, seconds: float, objects: int) -> None:
        self._clock, self._seconds, self._left = clock, seconds, objects

    def __call__(self, nbytes: int) -> None:
        pass

    def go_on(self) -> bool:
        self._clock.advance(self._seconds)
        self._left -= 1
        return self._left >= 0


def test_a_slow_scrub_that_is_killed_loses_a_minute_of_work(tmp_path: Path) -> None:
    """Its position is noted by time: at a megabyte a second 64 objects may be a day."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=clock)
    keys = [f"k/{i}" for i in range(6)]
    with harness.open() as pool:
        for key in keys:
            pool.put(key, b"x" * 1000)

    def killed(step: Progress) -> None:
        if step.key == keys[4]:
            raise SimulatedCrash("here")

    with harness.open() as pool, pytest.raises(SimulatedCrash):
        pool.admin.scrub(pace=Stopping(clock, 61.0, 100), progress=killed)
    harness.restart()
    seen: list[str] = []
    with harness.open() as pool:
        pool.scrub(progress=lambda step: seen.append(step.key))
    assert seen == keys[4:]


def test_a_scrub_goes_on_past_an_object_that_cannot_be_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair holds its lock: that object is told, all others are looked at."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=FakeClock())
    with harness.open() as pool:
        for number in range(3):
            pool.put(f"k/{number}", b"x" * 1000)
        real = repair_object

        def busy(store: PoolContext, key: str, **named: Any) -> Repair:
            if key == "k/1":
                raise LockTimeout("repair of 'k/1'")
            return real(store, key, **named)

        monkeypatch.setattr(repair_runner, "repair_object", busy)
        seen: list[str] = []
        report = pool.scrub(progress=lambda step: seen.append(step.key))
    assert seen == ["k/0", "k/1", "k/2"]
    assert list(report.failed) == ["k/1"]
    assert report.objects == 3
