"""The part of the device contract about devices that are full. Needs pytest."""

from __future__ import annotations

import pytest

from hpstore.devices.base import TMP, Device
from hpstore.devices.horizon_guard import HORIZON, MARK, HorizonGuard
from hpstore.errors import DeviceFull
from hpstore.testing import PAGE, all_files, fetch, pattern, store

_PATH, _OLD = "objects/new/place/@tombstone", "objects/a/b/@file"


class RoomContract:
    """Part of DeviceContract."""

    def make_full(self, device: Device, patch: pytest.MonkeyPatch) -> None:
        """Leave the device no byte and no inode, whatever is kept for deletes apart."""
        pytest.skip("no such device is ever full here")

    @pytest.fixture
    def full(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
        """The device, filled up, with one file."""
        store(device, _OLD, pattern(3 * PAGE))
        device.write_small("pool.json", b"old")
        self.make_full(device, monkeypatch)
        return device

    def test_a_full_device_refuses_new_files_and_is_read(self, full: Device) -> None:
        """DeviceFull says what is used up; nothing is left of the attempt."""
        with pytest.raises(DeviceFull, match="inodes are free"):
            full.create(2 * PAGE)
        assert all_files(full, TMP) == []
        assert fetch(full, _OLD) == pattern(3 * PAGE).tobytes()
        assert full.usage().free == 0 or full.mode != "memory"

    def test_a_full_device_takes_a_tombstone(self, full: Device) -> None:
        """A vital file: in a directory that has to be made; what it stands for goes then."""
        handle = full.create(2 * PAGE, vital=True)
        handle.write(0, [pattern(2 * PAGE, 7)])
        handle.sync()
        handle.publish(_PATH, HorizonGuard(counter=9))
        full.sync_directory(_PATH)
        assert fetch(full, _PATH) == pattern(2 * PAGE, 7).tobytes()
        full.retire(_OLD)
        assert all_files(full, "objects") == [_PATH]
        assert all_files(full, TMP) == []

    def test_a_full_device_takes_records_and_raises_counters(self, full: Device) -> None:
        """Small files are replaced, counters rise as ever."""
        assert full.takes_records()
        full.write_small("pool.json", b"new" * 1000)
        full.write_small("debts/x.json", b"debt")
        assert full.read_small("pool.json", 10_000) == b"new" * 1000
        assert [full.raise_counter(name, 5) for name in (HORIZON, MARK)] == [5, 5]
        assert all_files(full, TMP) == []

    def test_deletes_go_on_for_as_long_as_they_free_files(self, full: Device) -> None:
        """200 in a row: each takes a file that is kept, and gives one back."""
        old = _OLD
        for number in range(200):
            handle = full.create(2 * PAGE, vital=True)
            handle.write(0, [pattern(2 * PAGE, number)])
            handle.sync()
            handle.publish(f"objects/a/b/@{number}")
            full.retire(old)
            old = f"objects/a/b/@{number}"
            assert fetch(full, old) == pattern(2 * PAGE, number).tobytes()
        assert full.takes_records()

    def test_what_is_kept_ends(self, full: Device) -> None:
        """Without deletes: then DeviceFull, the old record stays, and the device says it before."""
        for number in range(1000):
            try:
                full.write_small(f"debts/{number}.json", bytes(16 * 1024))
            except DeviceFull:
                break
        else:
            pytest.fail("no end of what is kept")
        with pytest.raises(DeviceFull):
            full.create(2 * PAGE, vital=True)
        assert all_files(full, TMP) == []
        assert full.read_small("pool.json", 10) == b"old"
