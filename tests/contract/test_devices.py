"""Every device and every wrapper keeps the device contract."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

import fsspec
import pytest

from hpstore.devices import Device, LocalDevice, MemoryDevice, RemoteDevice
from hpstore.devices.wrappers import CrashCounter, DeviceWrapper, FaultyDevice, ThrottledDevice
from hpstore.health.detect.io_recorder import IoRecorder
from hpstore.health.detect.metered_device import DeviceMeter, MeteredDevice
from hpstore.testing import ManualClock
from hpstore.testing.device_contract import DeviceContract
from hpstore.testing.slow_device import SlowableDevice
from hpstore.units import MIB
from tests.full import no_room

_RECYCLE_BYTES = 64 * MIB
_NUMBERS = itertools.count(1)  # memory:// is one store for the whole process


class LocalRaw(DeviceContract):
    """Raw access to a directory by plain file calls."""

    def raw_read(self, device: Device, path: str) -> bytes:
        return (Path(device.url) / path).read_bytes()

    def raw_write(self, device: Device, path: str, data: bytes) -> None:
        with (Path(device.url) / path).open("r+b") as file:
            file.truncate(0)
            file.write(data)

    def make_full(self, device: Device, patch: pytest.MonkeyPatch) -> None:
        no_room(patch)


def local_device(tmp_path: Path, *, direct: bool) -> LocalDevice:
    (tmp_path / "device").mkdir()
    device = LocalDevice(str(tmp_path / "device"), direct=direct, recycle_bytes=_RECYCLE_BYTES)
    device.prepare()
    device.probe(write=True)
    return device


class TestLocalDirect(LocalRaw):
    """A directory, O_DIRECT where its filesystem takes it."""

    def make_device(self, tmp_path: Path) -> Device:
        return local_device(tmp_path, direct=True)


class TestLocalBuffered(LocalRaw):
    """A directory through the page cache."""

    def make_device(self, tmp_path: Path) -> Device:
        return local_device(tmp_path, direct=False)


class TestLocalWithoutRecycling(LocalRaw):
    """A directory that keeps no retired files."""

    def make_device(self, tmp_path: Path) -> Device:
        (tmp_path / "device").mkdir()
        device = LocalDevice(str(tmp_path / "device"), recycle_bytes=0)
        device.prepare()
        device.probe(write=True)
        return device


class MemoryRaw(DeviceContract):
    """Raw access to the dict of a MemoryDevice, also behind a wrapper."""

    def files(self, device: Device) -> MemoryDevice:
        inner = device.inner if isinstance(device, DeviceWrapper) else device
        return cast(MemoryDevice, inner)

    def make_full(self, device: Device, patch: pytest.MonkeyPatch) -> None:
        inner = self.files(device)
        inner.capacity_bytes = sum(len(file.bytes) for file in inner.files.values())
        inner.capacity_inodes = len(inner.files)

    def raw_read(self, device: Device, path: str) -> bytes:
        return bytes(self.files(device).files[path].bytes)

    def raw_write(self, device: Device, path: str, data: bytes) -> None:
        self.files(device).files[path].bytes[:] = data


class TestMemory(MemoryRaw):
    """Files in memory, recycling on."""

    def make_device(self, tmp_path: Path) -> Device:
        return MemoryDevice(recycle_bytes=_RECYCLE_BYTES)


def metered(inner: Device) -> MeteredDevice:
    """With a recorder of its own that nobody drains."""
    return MeteredDevice(inner, DeviceMeter(IoRecorder(), ManualClock().monotonic, lambda: None))


class TestMetered(MemoryRaw):
    """Noting changes nothing."""

    def make_device(self, tmp_path: Path) -> Device:
        return metered(MemoryDevice(recycle_bytes=_RECYCLE_BYTES))


class TestThrottled(MemoryRaw):
    """A throttle changes nothing but the time."""

    def make_device(self, tmp_path: Path) -> Device:
        return ThrottledDevice(MemoryDevice(recycle_bytes=_RECYCLE_BYTES), 1e9, ManualClock())


class TestSlowable(MemoryRaw):
    """Slow from the beginning: it takes time, and changes nothing."""

    def make_device(self, tmp_path: Path) -> Device:
        device = SlowableDevice(MemoryDevice(recycle_bytes=_RECYCLE_BYTES), ManualClock())
        device.throttle(1e9)
        return device


class TestFaultyWithoutFaults(MemoryRaw):
    """An empty plan lets everything pass."""

    def make_device(self, tmp_path: Path) -> Device:
        return FaultyDevice(MemoryDevice(recycle_bytes=_RECYCLE_BYTES))


class TestCrashCounterFarAway(MemoryRaw):
    """A crash that never comes."""

    def make_device(self, tmp_path: Path) -> Device:
        return CrashCounter(MemoryDevice(recycle_bytes=_RECYCLE_BYTES), [0], 1 << 60)


class TestMeteredLocal(LocalRaw):
    """A wrapper round a real directory."""

    def make_device(self, tmp_path: Path) -> Device:
        return metered(local_device(tmp_path, direct=True))


class RemoteRaw(DeviceContract):
    """Raw access by a filesystem object of our own."""

    holds_registers = False

    holds_readers = False
    prunes_directories = False

    def place(self, device: Device, path: str) -> tuple[fsspec.AbstractFileSystem, str]:
        filesystem, root = fsspec.core.url_to_fs(device.url)
        return filesystem, f"{root}/{path}"

    def raw_read(self, device: Device, path: str) -> bytes:
        filesystem, place = self.place(device, path)
        return bytes(filesystem.cat_file(place))

    def raw_write(self, device: Device, path: str, data: bytes) -> None:
        filesystem, place = self.place(device, path)
        filesystem.pipe_file(place, data)


class TestRemoteMemory(RemoteRaw):
    """fsspec's memory filesystem: a store without locks and rename."""

    def make_device(self, tmp_path: Path) -> Device:
        return RemoteDevice(f"memory://contract-{next(_NUMBERS)}/device")

    @pytest.fixture(autouse=True)
    def _empty_store(self) -> None:
        """Nothing is left of the test before."""
        fsspec.filesystem("memory").store.clear()
        fsspec.filesystem("memory").pseudo_dirs[:] = [""]


class TestRemoteFile(RemoteRaw):
    """fsspec's local filesystem, as any mounted or remote one with directories."""

    def make_device(self, tmp_path: Path) -> Device:
        (tmp_path / "device").mkdir()
        return RemoteDevice(f"file://{tmp_path}/device")
