"""A disk of another host keeps the device contract whole, over the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")

from hpstore.devices import Device, LocalDevice
from hpstore.devices.holds import LocalHold
from hpstore.devices.host_device import HostDevice
from hpstore.errors import DeviceError
from hpstore.hosts.host_service import HostService
from hpstore.testing.device_contract import DeviceContract
from hpstore.units import MIB
from tests.full import no_room


@pytest.fixture(scope="module", autouse=True)
def _service() -> Iterator[None]:
    with HostService("127.0.0.1", 0) as service:
        TestHostDevice.service = service
        yield


class TestHostDevice(DeviceContract):
    """One service for all tests; each exports a disk of its own."""

    service: ClassVar[HostService]
    places: ClassVar[dict[str, Path]] = {}

    def make_device(self, tmp_path: Path) -> Device:
        (tmp_path / "device").mkdir()
        local = LocalDevice(str(tmp_path / "device"), recycle_bytes=64 * MIB)
        local.prepare()
        local.probe(write=True)
        host, port = self.service.address
        url = f"hpd://{host}:{port}/{self.service.export(local)}"
        self.places[url] = tmp_path / "device"
        return HostDevice(url, seconds=20.0)

    def raw_read(self, device: Device, path: str) -> bytes:
        return (self.places[device.url] / path).read_bytes()

    def raw_write(self, device: Device, path: str, data: bytes) -> None:
        with (self.places[device.url] / path).open("r+b") as file:
            file.truncate(0)
            file.write(data)

    def make_full(self, device: Device, patch: pytest.MonkeyPatch) -> None:
        no_room(patch)


def test_answers_of_another_size_than_was_asked_for_are_errors_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of 200 MB went to the parser, and a lock without its bytes was a struct.error."""
    device = TestHostDevice().make_device(tmp_path)
    device.write_small("pool.json", b"x" * 11)
    with pytest.raises(DeviceError, match=r"pool\.json on .* is larger than 10 bytes"):
        device.read_small("pool.json", 10)
    hold = LocalDevice.hold
    monkeypatch.setattr(LocalDevice, "read_small", lambda *_: b"x" * 11)  # of a service that lies
    with pytest.raises(DeviceError, match=r"pool\.json on .* is larger than 10 bytes"):
        device.read_small("pool.json", 10)
    for content in (b"", b"x" * 1025):

        def lying(local: LocalDevice, *place: int, content: bytes = content) -> LocalHold:
            held = hold(local, *place)
            held.content = content
            return held

        monkeypatch.setattr(LocalDevice, "hold", lying)
        with pytest.raises(DeviceError, match=f"1024 bytes came with {len(content)}"):
            device.hold(0, 1024)
    monkeypatch.undo()
    held = device.hold(0, 1024)
    assert held.taken  # what was given up is free
    held.release()
    device.close()
