"""Any fsspec URL. Publishing is one whole PUT; nothing is renamed or copied (PROTOCOL 6)."""

from __future__ import annotations

import contextlib
import io
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec
import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import QUARANTINE, DirectoryEntry, Stamp, raise_device_error
from hpstore.devices.horizon_guard import (
    COUNTER_BYTES,
    HORIZON,
    HorizonGuard,
    decode_counter,
    encode_counter,
    risen,
)
from hpstore.devices.store_device import StoreDevice
from hpstore.devices.store_quota import StoreQuota
from hpstore.errors import DeviceError, DeviceMissing, HpstoreError
from hpstore.format.device_urls import without_secrets, without_secrets_of
from hpstore.format.pool_key import PoolKey
from hpstore.units import MIB

_SPOOL_BYTES = 64 * MIB  # a column larger than this waits for its PUT in a local temporary file
_COPY_BYTES = 8 * MIB
_PUT_TRIES = 16


class RemoteDevice(StoreDevice):
    """Objects of a store behind fsspec.

    A PUT is taken as durable and visible when the store has answered it. Listing caches are off.
    `sync` and `sync_directory` have nothing to do; locks do not exist, so files are not recycled.
    """

    def __init__(
        self,
        url: str,
        *,
        opened_as: str = "",
        options: Mapping[str, Any] | None = None,
        capacity_bytes: int = 0,
    ) -> None:
        """`opened_as`: the URL for fsspec where `url` is one of a named store; `options`: for the
        filesystem, shown nowhere; `capacity_bytes`: its quota, 0 where that is not known."""
        shown = without_secrets(url)
        self.url = shown
        # Any: fsspec is untyped
        self._fs: Any
        try:
            self._fs, root = fsspec.core.url_to_fs(
                opened_as or url,
                use_listings_cache=False,
                skip_instance_cache=False,
                **(options or {}),
            )
        except Exception as error:  # noqa: BLE001 (clients of stores have errors of their own)
            reason = without_secrets_of(url, str(error))
            cause = error if reason == str(error) else None  # a traceback would show it
            raise DeviceMissing(
                f"device {shown} cannot be opened: {reason}", device=shown
            ) from cause
        self._base = root.rstrip("/")
        self.driver = f"fsspec {type(self._fs).__name__}"
        self._counts = capacity_bytes > 0
        self.quota = StoreQuota(shown, capacity_bytes, self._sizes)

    def _sizes(self) -> Iterator[int]:
        with self._asking("list"):
            found = self._fs.find(self._base, detail=True)
        return (int(row["size"]) for row in found.values())

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Inside, the store is asked: botocore's errors of a connection, and those of others, are
        no OSErrors. Raises as raise_device_error()."""
        try:
            yield
        except (HpstoreError, FileExistsError, TypeError, NotImplementedError):
            raise
        except OSError as error:
            raise_device_error(error, self.url, what)
        except Exception as error:
            reason = without_secrets_of(self.url, f"{type(error).__name__}: {error}")
            raise DeviceMissing(
                f"{what} failed on device {self.url}: {reason}", device=self.url
            ) from error

    def _path(self, path: str) -> str:
        return f"{self._base}/{path}"

    def create(self, size_bytes: int, *, vital: bool = False) -> RemoteWriter:
        return RemoteWriter(self, size_bytes)

    def put_stream(self, path: str, source: Any) -> None:
        """One PUT of a whole file-like `source`."""
        for attempt in range(_PUT_TRIES):
            source.seek(0)
            try:
                with self._asking("PUT"):
                    self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
                    self._put_once(path, source)
                self.quota.changed(source.seek(0, io.SEEK_END))
            except (FileNotFoundError, FileExistsError) as error:  # a pruner is at the directory
                if attempt == _PUT_TRIES - 1:
                    raise DeviceMissing(
                        f"PUT failed on device {self.url}: {error}", device=self.url
                    ) from error
            else:
                return

    def _put_once(self, path: str, source: Any) -> None:
        file = self._fs.open(self._path(path), "wb", autocommit=False)
        try:
            while part := source.read(_COPY_BYTES):
                file.write(part)
            file.close()
            file.commit()
        except BaseException:
            with contextlib.suppress(Exception):  # the other error is raised
                file.discard()
            raise

    def open(self, path: str) -> RemoteReader:
        with self._asking("open"):
            size = int(self._fs.info(self._path(path))["size"])
        return RemoteReader(self, self._path(path), size)

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of a file."""
        with self._asking("read"):
            return bytes(self._fs.cat_file(path, start=start, end=end))

    def read_small(self, path: str, max_bytes: int) -> bytes:
        # one request, not a size first: the file may be replaced in between
        found = self.read_range(self._path(path), 0, max_bytes + 1)
        if len(found) > max_bytes:
            raise DeviceError(f"{path} on {self.url} is larger than {max_bytes} bytes")
        return found

    def write_small(self, path: str, data: bytes) -> None:
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
            spool.write(data)
            spool.seek(0)
            self.put_stream(path, spool)

    def entries(self, path: str) -> list[DirectoryEntry]:
        try:
            with self._asking("list"):
                try:
                    rows = self._fs.ls(self._path(path), detail=True, refresh=True)
                except TypeError:  # a filesystem without listing caches does not know `refresh`
                    rows = self._fs.ls(self._path(path), detail=True)
        except FileNotFoundError:
            return []
        return self._entries(path, rows)

    def _entries(self, path: str, rows: list[dict[str, Any]]) -> list[DirectoryEntry]:
        found = [(str(r["name"]).rstrip("/"), r["type"] == "directory") for r in rows]
        own = self._path(path).strip("/")
        return [
            DirectoryEntry(name.rsplit("/", 1)[-1], is_directory)
            for name, is_directory in found
            if name.strip("/") != own
        ]

    def counter(self, name: str, pool_key: PoolKey | None = None) -> int:
        try:
            data = self.read_small(name, COUNTER_BYTES)
            return decode_counter(name, data, where=f"{self.url}/{name}", pool_key=pool_key)
        except FileNotFoundError:
            return 0

    def raise_counter(self, name: str, value: int, pool_key: PoolKey | None = None) -> int:
        """Best effort: a store has no lock, so two that raise it at once may leave the lower one,
        and a PUT that has been compared with the horizon may arrive after it was raised."""
        try:
            data = self.read_small(name, COUNTER_BYTES)
        except FileNotFoundError:
            data = b""
        value = risen(name, data, value, pool_key)
        new = encode_counter(name, value, pool_key)
        if new != data:
            self.write_small(name, new)
        return value

    def stamp(self, path: str) -> Stamp | None:
        try:
            with self._asking("stat"):
                info = self._fs.info(self._path(path))
        except FileNotFoundError:
            return None
        changed = info.get("ETag") or info.get("mtime") or info.get("LastModified")
        changed = changed or info.get("created") or ""
        return (hash(str(changed)), 0, int(info["size"]))

    def delete(self, path: str) -> None:
        try:
            with self._asking("delete"):
                held = self._fs.info(self._path(path))["size"] if self._counts else 0
                self._fs.rm_file(self._path(path))
        except FileNotFoundError:
            return
        self.quota.changed(-int(held))

    def quarantine(self, path: str) -> None:
        handle = self.open(path)
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
            for start in range(0, handle.size_bytes, _COPY_BYTES):
                end = min(start + _COPY_BYTES, handle.size_bytes)
                spool.write(self.read_range(self._path(path), start, end))
            spool.seek(0)
            name = path.rsplit("/", 1)[-1]
            self.put_stream(f"{QUARANTINE}/{secrets.token_hex(4)}-{name}", spool)
        self.delete(path)

    def sweep(self) -> int:
        return 0

    def close(self) -> None:
        """fsspec owns its connections."""


class RemoteWriter:
    """Collects a column until its PUT."""

    recycled = False

    def __init__(self, device: RemoteDevice, size_bytes: int) -> None:
        self._device = device
        # Any: BytesIO or a temporary file; kept until publish or abort
        self._spool: Any = (
            io.BytesIO() if size_bytes <= _SPOOL_BYTES else tempfile.TemporaryFile()  # noqa: SIM115
        )
        self._spool.truncate(size_bytes)
        if size_bytes <= _SPOOL_BYTES:
            self._spool.write(bytes(size_bytes))

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        try:
            self._spool.seek(offset)
            for buffer in buffers:
                self._spool.write(np.ascontiguousarray(buffer).data)
        except OSError as error:
            raise_device_error(error, self._device.url, "spool")

    def sync(self) -> None:
        """Nothing is durable before the PUT."""

    def publish(self, path: str, guard: HorizonGuard | None = None) -> None:
        if guard is not None:
            guard.check(self._device.counter(HORIZON, guard.pool_key), self._device.url)
        self._spool.seek(0)
        self._device.put_stream(path, self._spool)
        self._spool.close()

    def abort(self) -> None:
        self._spool.close()


class RemoteReader:
    """Range reads of one stored file."""

    def __init__(self, device: RemoteDevice, path: str, size_bytes: int) -> None:
        self._device, self._name, self.size_bytes = device, path, size_bytes

    descriptor = -1

    def read_into(self, offset: int, target: Bytes) -> None:
        found = self._device.read_range(self._name, offset, offset + len(target))
        if len(found) != len(target):
            raise DeviceError(
                f"device {self._device.url}: {len(found)} of {len(target)} bytes at {offset}",
                device=self._device.url,
            )
        target[:] = np.frombuffer(found, np.uint8)

    def close(self) -> None:
        """Nothing is held."""
