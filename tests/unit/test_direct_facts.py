"""Rungs 1 and 2 of detection: what is told from facts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpstore.loaders.gpu.direct.machine_facts import (
    MachineFacts,
    MountFacts,
    doubts,
    machine_facts,
    machine_obstacle,
    mount_facts,
    mount_obstacle,
    transport_of,
)

GOOD = MachineFacts(
    libcuda=True, bindings=True, nvfs_module=True, nvfs_nodes=True, p2pdma_kernel=True, udev=True
)
NVME = MountFacts(
    filesystem="ext4", options="rw,data=ordered", source="/dev/nvme0n1p1", transport="nvme"
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"libcuda": False}, "libcuda"),
        ({"bindings": False}, "hpstore[gpu]"),
        ({"nvfs_nodes": False}, "descriptor 0"),
        ({"nvfs_nodes": False, "nvfs_module": False}, None),
        ({"udev": False, "p2pdma_kernel": False}, None),
    ],
)
def test_machines_on_which_cufile_is_never_opened(
    change: dict[str, bool], words: str | None
) -> None:
    """No driver, no package, the container trap: each is named. All else is for the probe."""
    found = machine_obstacle(replace(GOOD, **change))
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert words in found


@pytest.mark.parametrize("filesystem", ["overlay", "tmpfs", "fuse.sshfs"])
def test_filesystems_without_a_drive_are_refused(filesystem: str) -> None:
    """No block device, no DMA."""
    assert mount_obstacle(replace(NVME, filesystem=filesystem)) is not None
    assert mount_obstacle(NVME) is None


def test_doubts_name_what_makes_cufile_bounce() -> None:
    """Each condition is one doubt; a good machine has none."""
    assert doubts(GOOD, NVME) == ()
    bare = replace(GOOD, nvfs_module=False, nvfs_nodes=False, p2pdma_kernel=False, udev=False)
    md = replace(NVME, transport="md", options="rw,data=writeback")
    assert len(doubts(bare, md)) == 4
    assert doubts(GOOD, replace(NVME, filesystem="btrfs")) == ("btrfs may not be supported",)


@pytest.mark.parametrize(
    ("path", "transport"),
    [
        ("/sys/devices/pci0000:00/0000:00:1d.0/0000:3d:00.0/nvme/nvme0/nvme0n1/nvme0n1p2", "nvme"),
        ("/sys/devices/virtual/block/md127", "md"),
        ("/sys/devices/virtual/block/dm-3", "dm"),
        ("/sys/devices/pci0000:00/0000:00:04.0/virtio2/block/vda/vda1", "virtio"),
        ("/sys/devices/pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda", "other"),
    ],
)
def test_the_transport_is_told_by_the_place_in_sysfs(path: str, transport: str) -> None:
    """The innermost name that says something."""
    assert transport_of(path) == transport


def test_this_machine_can_be_looked_at(tmp_path: object) -> None:
    """Whatever it is: the looks do not raise."""
    assert isinstance(machine_facts().libcuda, bool)
    assert mount_facts(str(tmp_path)).filesystem
