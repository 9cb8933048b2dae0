"""A pool that its own puts have filled: nothing is lost, and what is deleted makes room again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hpstore.errors import DeviceFull, TooFewDevices
from hpstore.loaders import ingest, remove_orphans, unfinished_ingests, verify_dataset
from hpstore.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, MakeDisks, attempt, payload

pytestmark = [pytest.mark.fault, pytest.mark.root]
SIZES = (8 * MIB, 1 * MIB, 256 * KIB)
SHARDS: dict[str, Any] = {"shard_bytes": 2 * MIB, "unit_bytes": 256 * KIB, "shuffle": False}
LARGE = [{"x": np.full(MIB - 8, number, np.uint8)} for number in range(100)]


def test_a_pool_that_has_filled_itself_can_delete(bench: Bench, make_disks: MakeDisks) -> None:
    """PROTOCOL 3, 12: a put may leave less than the reserve; what is left is for tombstones."""
    disks = make_disks(3, 32 * MIB)
    with bench.create(disks, data=2, parity=1) as pool:
        for size in SIZES:
            for number in itertools.count():
                key = f"x/{size}/{number}"
                if not attempt(lambda key=key, size=size: pool.put(key, payload(key, size))):  # type: ignore[misc]
                    break
        assert not attempt(lambda: pool.put("y", b"small"))  # by now below the reserve
        keys = list(pool.list("x/"))
        assert all(pool.get(key) == payload(key, int(key.split("/")[1])) for key in keys)
        for key in keys:
            pool.delete(key)
        pool.put("y", payload("y", 8 * MIB))
        assert pool.get("y") == payload("y", 8 * MIB)


@pytest.fixture
def filled(bench: Bench, make_disks: MakeDisks) -> Iterator[Pool]:
    """An ingest of "d" has filled it, puts the rest of it: only tombstones fit."""
    with bench.create(make_disks(3, 32 * MIB), data=2, parity=1) as pool:
        with pytest.raises((TooFewDevices, DeviceFull)):
            ingest(pool, "d", LARGE, **SHARDS)
        for number in itertools.count():
            if not attempt(lambda key=f"x/{number}": pool.put(key, bytes(256 * KIB))):  # type: ignore[misc]
                break
        yield pool


def test_an_ingest_begun_anew_makes_room_for_itself(filled: Pool) -> None:
    """What the earlier one has stored goes, journal and all. One that goes on changes nothing."""
    kept = unfinished_ingests(filled)["d"].rows
    assert kept > 0
    with pytest.raises(TooFewDevices):
        ingest(filled, "d", LARGE, **SHARDS)
    assert unfinished_ingests(filled)["d"].rows == kept
    report = ingest(filled, "d", LARGE[:3], resume=False, **SHARDS)
    assert (report.samples, report.resumed_samples) == (3, 0)
    assert verify_dataset(filled, "d").clean


def test_an_ingest_that_is_killed_as_it_makes_room_leaves_orphans(
    filled: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the journal and what it named: that is known as orphans, and removed as such."""
    plain, deleted = Pool.delete, list[str]()

    def dying(self: Pool, key: str) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(key)
        plain(self, key)

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "delete", dying)
        with pytest.raises(KeyboardInterrupt):
            ingest(filled, "d", LARGE[:3], resume=False, **SHARDS)
    assert unfinished_ingests(filled) == {}
    assert remove_orphans(filled, "d") > 0
    assert ingest(filled, "d", LARGE[:3], **SHARDS).samples == 3
    assert verify_dataset(filled, "d").clean
