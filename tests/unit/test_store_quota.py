"""Room on a store with a quota: what this process writes and deletes between two counts."""

from __future__ import annotations

import pytest

from hpstore.devices.object_store import ObjectStoreDevice
from hpstore.devices.store_client import StoreClient

ROOM = 1 << 20


def test_small_files_count_until_they_are_deleted() -> None:
    """Written and deleted many times, they leave the room as it was: it grew with each delete."""
    obstore = pytest.importorskip("obstore", reason="obstore is not installed (hpstore[s3])")
    client = StoreClient(obstore.store.MemoryStore(), url="s3://m/d")
    device = ObjectStoreDevice(client, "d", capacity_bytes=ROOM)
    device.usage()
    device.quota.wait()
    assert device.usage().free == ROOM
    device.write_small("debts/other", bytes(5000))  # free is bounded by the quota
    for _ in range(3):
        device.write_small("debts/a", bytes(1000))
        assert device.usage().free == ROOM - 6000
        device.delete("debts/a")
        assert device.usage().free == ROOM - 5000
    device.probe(write=True)
    assert device.usage().free == ROOM - 5000
