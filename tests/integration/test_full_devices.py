"""Pools whose devices run full: what a put leaves, what an error says, what a change leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstore.devices.base import TMP, Device
from hpstore.devices.reserve import reserve_bytes
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import DeviceFull, MembershipError, PoolFull
from hpstore.format.records import POOL_FILE, DeviceState
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB, MIB


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """Four devices of 32 MiB with 400 inodes each, 2+1."""
    made = Harness(tmp_path, data=2, parity=1, devices=4)
    for device in made.devices.values():
        device.capacity_bytes, device.capacity_inodes = 32 * MIB, 400
    return made


def put_until_full(pool: object, size: int) -> list[str]:
    """Keys of objects of a size that went in before the pool said that it is full."""
    keys: list[str] = []
    while True:
        try:
            pool.put(f"{size}/{len(keys)}", bytes(size))  # type: ignore[attr-defined]
        except PoolFull:
            return keys
        keys.append(f"{size}/{len(keys)}")


def test_puts_leave_the_reserve_however_large_they_are_rule_3(harness: Harness) -> None:
    """Small ones may take half of it, so a manifest fits after the segments; deletes need less."""
    with harness.open() as pool:
        large = put_until_full(pool, 6 * MIB)
        assert len(large) >= 8
        for device in harness.devices.values():
            assert device.usage().free >= reserve_bytes(device.usage())
        assert pool.put("manifest", bytes(20 * KIB)).size == 20 * KIB
        put_until_full(pool, 20 * KIB)
        for device in harness.devices.values():
            assert device.usage().free >= reserve_bytes(device.usage()) // 2
            assert [name for name in device.files if name.startswith(TMP)] == []
        for key in pool.list():
            pool.delete(key)
        pool.put("again", bytes(6 * MIB))


def test_the_error_names_what_is_used_up_and_where(harness: Harness) -> None:
    """Bytes or inodes, of which device, and what to do."""
    with harness.open() as pool:
        put_until_full(pool, 100)
        with pytest.raises(
            PoolFull, match=r"Full: memory://d\d \(\d+ of 400 inodes are free, .*Delete objects"
        ):
            pool.put("100/more", b"x")
        assert pool.get("100/0") == bytes(100)
        for key in pool.list():
            pool.delete(key)
        for device in harness.devices.values():
            device.capacity_inodes = 0
        put_until_full(pool, 8 * MIB)
        with pytest.raises(
            PoolFull,
            match=r"memory://d\d \([\d.]+ .iB of 32.0 MiB are free, .* [48].0 MiB are needed",
        ):
            pool.put("more", bytes(8 * MIB))


def test_devices_without_room_make_objects_narrower_not_puts_fail(harness: Harness) -> None:
    """One of four is full: three take 2+1."""
    harness.devices["memory://d0"].capacity_bytes = 300 * KIB
    with harness.open() as pool:
        for number in range(8):
            pool.put(f"x/{number}", bytes(MIB))
        assert all("memory://d0" not in dict(harness.columns(f"x/{n}")) for n in range(8))


@pytest.mark.parametrize(("change", "fails_at"), [("evict", 1), ("evict", 2), ("drain", 1)])
def test_a_change_that_runs_full_half_way_is_not_followed_by_another_rule_14(
    harness: Harness, change: str, fails_at: int
) -> None:
    """Its first record, or its second, reaches one device; then there is room again. The newest
    record decides: one more, of a higher generation, could beat what is committed meanwhile."""
    written = dict.fromkeys(harness.urls, 0)
    failing = [True]

    class RunsFull(DeviceWrapper):
        def write_small(self, path: str, data: bytes) -> None:
            if path == POOL_FILE:
                written[self.url] += 1
                late = written[self.url] >= fails_at and self.url != "memory://d3"
                if failing[0] and late:
                    failing[0] = len([u for u in written if written[u] >= fails_at]) < 4
                    raise DeviceFull(f"device {self.url} is full", device=self.url)
            super().write_small(path, data)

    def wrap(_: str, device: Device) -> Device:
        return RunsFull(device)

    with harness.open(wrap) as pool:
        pool.put("k", bytes(300_000))
        with pytest.raises(MembershipError, match="too few"):
            getattr(pool, change)("memory://d0")
    with harness.open() as pool:
        assert len(pool.admin.record.members) == (4 if fails_at == 1 else 3)
        assert pool.admin.record.generation == 1 + fails_at
        pool.readmit("memory://d0")
        assert all(m.state is DeviceState.ONLINE for m in pool.admin.record.members)
        assert pool.get("k") == bytes(300_000)


def test_an_add_that_is_refused_leaves_the_place_as_it_was(harness: Harness) -> None:
    """Old members have no room for a record: the new place is not claimed, nor in the settings."""
    with harness.open() as pool:
        pool.put("k", bytes(6 * MIB))
        for url in harness.urls:
            harness.devices[url].capacity_bytes = 1
        with pytest.raises(MembershipError, match=r"Nothing was changed\. Full: memory://d\d"):
            pool.add_device("memory://new")
        assert "memory://new" not in harness.config.path.read_text()
        assert not harness.devices["memory://new"].files
