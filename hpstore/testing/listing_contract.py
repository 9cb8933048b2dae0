"""The part of the device contract about the names in directories."""

from __future__ import annotations

from hpstore.devices.base import Device, DirectoryEntry
from hpstore.testing import PAGE, pattern, store


class ListingContract:
    """Part of DeviceContract."""

    def test_directories_list_their_names(self, device: Device) -> None:
        """Listings distinguish files and directories; missing directories are empty."""
        for path in ("objects/a/@1", "objects/a/@2", "objects/a/b/@3", "objects/c/@4"):
            store(device, path, pattern(PAGE))
        assert set(device.entries("objects/a")) == {
            DirectoryEntry("@1", False),
            DirectoryEntry("@2", False),
            DirectoryEntry("b", True),
        }
        assert set(device.entries("objects")) == {
            DirectoryEntry("a", True),
            DirectoryEntry("c", True),
        }
        assert device.entries("objects/none") == []
        assert device.entries("objects/none/deeper") == []
        assert device.entries("none") == []

    def test_several_directories_are_listed_at_once_or_in_part(self, device: Device) -> None:
        """In their order, one at least, each as it is listed alone; a missing one is empty."""
        paths = []
        for number in range(70):
            store(device, f"objects/k{number}/@1", pattern(PAGE))
            paths += [f"objects/k{number}", f"objects/none{number}"]
        found: list[list[DirectoryEntry]] = []
        while len(found) < len(paths):
            more = device.listings(paths[len(found) :])
            assert more
            found += more
        assert found == [device.entries(path) for path in paths]

    def test_the_root_lists_too(self, device: Device) -> None:
        """Whoever claims a device looks for leftovers of another pool there."""
        device.write_small("hpstore.json", b"x")
        store(device, "objects/a/b/@file", pattern(PAGE))
        found = set(device.entries(""))
        assert DirectoryEntry("hpstore.json", False) in found
        assert DirectoryEntry("objects", True) in found
