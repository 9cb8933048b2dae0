"""The registers of a directory: how the file comes to be, and what may happen to it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from hpstore.devices.base import REGISTERS, REGISTERS_BYTES
from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceError


@pytest.fixture
def device(tmp_path: Path) -> LocalDevice:
    (tmp_path / "d").mkdir()
    made = LocalDevice(str(tmp_path / "d"), file_mode=0o660)
    made.prepare()
    (tmp_path / "d" / REGISTERS).unlink()  # as on a device of an earlier release: made when used
    return made


def test_a_new_device_has_its_registers(tmp_path: Path) -> None:
    """With their blocks: on a device that has run full only their locks would work."""
    (tmp_path / "d").mkdir()
    LocalDevice(str(tmp_path / "d")).prepare()
    found = (tmp_path / "d" / REGISTERS).stat()
    assert found.st_size == REGISTERS_BYTES
    assert found.st_blocks * 512 >= REGISTERS_BYTES


def test_the_file_has_its_size_and_mode_whatever_the_umask(device: LocalDevice) -> None:
    """Another user of the pool must be able to lock it; nothing else is left."""
    before = os.umask(0o077)
    try:
        device.hold(0, 512).release()
    finally:
        os.umask(before)
    found = (Path(device.url) / REGISTERS).stat()
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert found.st_size == REGISTERS_BYTES
    assert found.st_blocks * 512 >= REGISTERS_BYTES
    assert not list((Path(device.url) / "tmp").iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_device_that_is_full_can_be_locked(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of a pool that is older than its registers: evictions from it must work."""

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("hpstore.devices.holds.os.pwrite", full)
    hold = device.hold(512, 512)
    assert hold.taken
    with pytest.raises(DeviceError):
        hold.write(0, b"x")
    monkeypatch.undo()
    hold.write(0, b"x")
    hold.release()
    assert device.hold(512, 512).content[:1] == b"x"


def test_a_filesystem_without_links_has_registers_too(
    device: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is then made under its own name."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("hpstore.devices.holds.os.link", refuse)
    hold = device.hold(0, 512)
    assert hold.taken
    assert (Path(device.url) / REGISTERS).stat().st_size == REGISTERS_BYTES
    assert not list((Path(device.url) / "tmp").iterdir())


def test_a_file_that_was_removed_is_made_again_and_its_old_locks_count_no_more(
    device: LocalDevice,
) -> None:
    """Whoever opened it before must not believe to hold it."""
    old = device.hold(0, 512)
    (Path(device.url) / REGISTERS).unlink()
    new = device.hold(0, 512)
    assert new.taken
    assert not device.hold(0, 512).taken
    old.release()
    assert not device.hold(0, 512).taken
    new.release()


def test_a_link_in_its_place_is_not_followed(device: LocalDevice, tmp_path: Path) -> None:
    """Nothing is written past the device."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (Path(device.url) / REGISTERS).symlink_to(victim)
    with pytest.raises(DeviceError):
        device.hold(0, 512)
    assert victim.read_text() == "precious"
