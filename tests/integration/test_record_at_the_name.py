"""PROTOCOL 4: the membership that a write was planned on is compared where the name is given."""

from __future__ import annotations

from collections import Counter

import pytest

from hpstore.devices.base import Stamp
from hpstore.objects.context import PoolContext
from hpstore.pool.pool import Pool


def test_a_record_that_is_replaced_within_a_put_is_looked_at_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device refuses the first name, as if its record had been rewritten after the look; the
    put looks again, and loses no column by it."""
    plain, asked = PoolContext.record_stamp, Counter[str]()

    def stale(store: PoolContext, device_id: str, generation: int) -> Stamp | None:
        asked[device_id] += 1
        found = plain(store, device_id, generation)
        assert found is not None
        return (found[0] + 1, *found[1:]) if asked[device_id] == 1 else found

    monkeypatch.setattr(PoolContext, "record_stamp", stale)
    info = pool.put("a", b"a" * 3_000_000)
    assert info.losses_tolerated == 2
    assert set(asked.values()) == {2}
    assert bytes(pool.get("a")) == b"a" * 3_000_000
