"""fsspec as a device: one whole PUT, no caches, little memory, errors told apart."""

from __future__ import annotations

import io
import itertools
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import hpstore
from hpstore.devices.base import DirectoryEntry
from hpstore.devices.remote import RemoteDevice
from hpstore.errors import DeviceError, DeviceMissing
from hpstore.runtime.buffers import aligned_array
from hpstore.testing import PAGE, all_files, fetch, pattern, store
from hpstore.testing.device_contract import PATH
from hpstore.units import MIB

_NUMBERS = itertools.count(1)  # memory:// is one store for the whole process


@pytest.fixture
def device() -> Iterator[RemoteDevice]:
    """An empty memory:// device of this test alone."""
    yield RemoteDevice(f"memory://remote-{next(_NUMBERS)}/d")
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("url", ["nosuch://bucket/x", "s3a-b-c://x"])
def test_a_url_that_cannot_be_opened_is_a_missing_device(url: str) -> None:
    """Unknown protocol or missing driver: DeviceMissing with the URL."""
    with pytest.raises(DeviceMissing) as caught:
        RemoteDevice(url)
    assert url in str(caught.value)


def test_another_writer_is_seen_at_once(device: RemoteDevice) -> None:
    """Listing caches are off: what a second process put or removed shows in the next listing."""
    assert device.entries("objects") == []
    other = RemoteDevice(device.url)
    store(other, "objects/a/@1", pattern(PAGE))
    assert device.entries("objects") == [DirectoryEntry("a", True)]
    assert fetch(device, "objects/a/@1") == pattern(PAGE).tobytes()
    other.delete("objects/a/@1")
    assert all_files(device, "objects") == []


class _Recursive(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """A store whose rmdir takes the contents along, as that of fsspec's hdfs:// (pyarrow) does."""

    protocol = "recursive-memory"

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix("recursive-"))

    def rmdir(self, path: str) -> None:
        prefix = self._strip_protocol(path) + "/"
        for name in [name for name in self.store if name.startswith(prefix)]:
            del self.store[name]


def test_deleting_a_file_takes_no_other_file_along(device: RemoteDevice) -> None:
    """Whatever the store's rmdir does: neighbours, and keys below and above, stay."""
    fsspec.register_implementation("recursive-memory", _Recursive, clobber=True)
    store_url = device.url.replace("memory://", "recursive-memory://")
    recursive = RemoteDevice(store_url)
    paths = ["objects/a/@1", "objects/a/@2", "objects/a/b/@3", "objects/c/@4"]
    for path in paths:
        store(recursive, path, pattern(PAGE))
    recursive.delete("objects/a/@1")
    assert all_files(recursive, "objects") == paths[1:]
    recursive.delete("objects/a/b/@3")
    assert all_files(recursive, "objects") == ["objects/a/@2", "objects/c/@4"]


@pytest.mark.parametrize("lengths", [(3000, 5000), (5000, 3000), (0, 10), (10, 0)])
def test_a_small_file_that_is_replaced_during_its_read_is_read_whole(
    device: RemoteDevice, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]
) -> None:
    """Between looking at its size and reading it, another process puts a new one."""
    old, new = b"a" * lengths[0], b"b" * lengths[1]
    other = RemoteDevice(device.url)
    device.write_small("pool.json", old)
    real = type(device._fs).info

    def replaced(self: Any, path: str, **kwargs: Any) -> Any:
        found = real(self, path, **kwargs)
        monkeypatch.undo()
        other.write_small("pool.json", new)
        return found

    monkeypatch.setattr(type(device._fs), "info", replaced)
    assert device.read_small("pool.json", 10_000) in (old, new)


class _Breaking(io.BytesIO):
    """A column whose second part cannot be read."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell():
            raise OSError(5, "Input/output error")
        return super().read(size)


class _Caching(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """A store that remembers its listings, as those of cloud vendors do."""

    protocol = "caching-memory"

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.removeprefix("caching-"))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        known = self.dircache.get(path)
        if known is None:
            known = self.dircache[path] = super().ls(path, detail=True)
        return known if detail else [row["name"] for row in known]


def test_listing_caches_of_a_store_are_switched_off(device: RemoteDevice) -> None:
    """PROTOCOL 6: a name that another process put is never missing from a list."""
    fsspec.register_implementation("caching-memory", _Caching, clobber=True)
    cached = RemoteDevice(device.url.replace("memory://", "caching-memory://"))
    store(device, "objects/a/@1", pattern(PAGE))
    assert cached.entries("objects/a") == [DirectoryEntry("@1", False)]
    store(device, "objects/a/@2", pattern(PAGE))
    assert set(cached.entries("objects/a")) == {
        DirectoryEntry("@1", False),
        DirectoryEntry("@2", False),
    }


def test_a_put_that_fails_leaves_no_object_and_no_part_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the middle: DeviceError, the old object is whole, the upload is given up."""
    for name in ("d", "parts"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "parts"))
    device = RemoteDevice(f"file://{tmp_path}/d")
    store(device, PATH, pattern(PAGE, 1))
    with pytest.raises(DeviceError, match="PUT failed"):
        device.put_stream(PATH, _Breaking(bytes(16 * MIB)))
    assert fetch(device, PATH) == pattern(PAGE, 1).tobytes()
    assert all_files(device, "objects") == [PATH]
    assert list((tmp_path / "parts").iterdir()) == []


def test_errors_of_the_store_are_device_errors(
    device: RemoteDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call: an OSError becomes a DeviceError, never "absent" and never an empty list."""
    store(device, PATH, pattern(PAGE))
    reader = device.open(PATH)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(5, "Input/output error")

    for name in ("info", "ls", "cat_file", "rm_file", "_open", "makedirs"):
        monkeypatch.setattr(device._fs, name, fail, raising=False)
    for call in (
        lambda: device.open(PATH),
        lambda: device.entries("objects"),
        lambda: device.stamp(PATH),
        lambda: device.delete(PATH),
        lambda: device.retire(PATH),
        lambda: device.quarantine(PATH),
        lambda: device.write_small("pool.json", b"x"),
        lambda: device.read_small(PATH, PAGE),
        lambda: reader.read_into(0, aligned_array(PAGE)),
        lambda: device.probe(write=True),
        lambda: device.probe(write=False),
    ):
        with pytest.raises(DeviceError):
            call()


class _NoEndpoint(Exception):
    """As botocore's errors of connections and credentials: no OSError."""


def _unreachable(*_: Any, **__: Any) -> Any:
    raise _NoEndpoint("cannot connect to https://x")


_ASKED = ("makedirs", "open", "info", "ls", "cat_file", "rm_file", "find")


def test_a_clients_own_errors_are_device_errors(
    device: RemoteDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any class: a device that does not answer is one that is away."""
    store(device, "objects/a/@1", pattern(PAGE))
    quota = RemoteDevice(device.url, capacity_bytes=MIB)
    for name in _ASKED:
        monkeypatch.setattr(MemoryFileSystem, name, _unreachable)
    for call in (
        lambda: device.open("objects/a/@1"),
        lambda: device.read_small("x", 10),
        lambda: device.write_small("x", b"1"),
        lambda: device.entries("objects"),
        lambda: device.counter("horizon"),
        lambda: device.stamp("objects/a/@1"),
        lambda: device.delete("objects/a/@1"),
        lambda: device.quarantine("objects/a/@1"),
        lambda: list(quota._sizes()),
    ):
        with pytest.raises(DeviceMissing, match="_NoEndpoint: cannot connect"):
            call()


def test_a_pool_opens_without_stores_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """m of them are away by errors of their client's own."""
    number = next(_NUMBERS)
    urls = [f"memory://away-{number}/d{n}" for n in range(4)]
    with hpstore.create(urls, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        pool.put("k", b"1" * 1000)
    for name in _ASKED:
        plain = getattr(MemoryFileSystem, name)

        def asked(self: Any, path: str, *args: Any, _plain: Any = plain, **options: Any) -> Any:
            if "/d1" in path:
                _unreachable()
            return _plain(self, path, *args, **options)

        monkeypatch.setattr(MemoryFileSystem, name, asked)
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert pool.get("k") == b"1" * 1000
        pool.put("l", b"2")
    fsspec.filesystem("memory").store.clear()


def test_a_store_that_returns_other_bytes_fails_its_probe(
    device: RemoteDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write, read back, compare."""
    real = device._fs.cat_file
    monkeypatch.setattr(device._fs, "cat_file", lambda *a, **k: real(*a, **k)[::-1])
    with pytest.raises(DeviceError, match="other bytes"):
        device.probe(write=True)


def test_a_large_column_waits_for_its_put_on_disk(device: RemoteDevice) -> None:
    """Above 64 MiB the spool is a file: creating and writing takes no such memory."""
    tracemalloc.start()
    try:
        handle = device.create(200 * MIB)
        handle.write(0, [aligned_array(MIB)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        handle.abort()
    assert peak < 80 * MIB


def test_a_file_url_with_a_relative_part_stays_below_its_root(tmp_path: Path) -> None:
    """Paths are joined to the root of the URL."""
    (tmp_path / "d").mkdir()
    device = RemoteDevice(f"file://{tmp_path}/d/")
    store(device, PATH, pattern(PAGE))
    assert (tmp_path / "d" / PATH).read_bytes() == pattern(PAGE).tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
