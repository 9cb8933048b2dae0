"""A delete is believed by every device that comes back, however late it was swept."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstore.errors import ObjectNotFound
from hpstore.testing.harness import FakeClock, Harness

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
        assert pool.rebuild().whole
        clock.advance(HORIZON + 1)
        assert pool.scrub().swept > 0
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
