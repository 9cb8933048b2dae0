"""A prefix of an S3 bucket as a device, through obstore (decisions/0143).

Publishing is one whole PUT; nothing is renamed (PROTOCOL 6). A PUT that the store has answered is
taken as durable and visible. There are no locks; counters are raised by conditional writes where
the store enforces them.
"""

from __future__ import annotations

import hashlib
import mmap
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import QUARANTINE, TMP, DirectoryEntry, Stamp, raise_device_error
from hpstore.devices.conditional_writes import ConditionalWrites
from hpstore.devices.horizon_guard import (
    COUNTER_BYTES,
    HORIZON,
    HorizonGuard,
    decode_counter,
    encode_counter,
    risen,
)
from hpstore.devices.multipart_sweep import sweep_uploads
from hpstore.devices.store_client import StoreChanged, StoreClient, StoredFile
from hpstore.devices.store_device import StoreDevice
from hpstore.devices.store_errors import BeyondEnd
from hpstore.devices.store_quota import StoreQuota
from hpstore.errors import DeviceError, DeviceFull
from hpstore.format.pool_key import PoolKey
from hpstore.units import KIB, MIB, format_bytes

_IN_MEMORY_BYTES = 64 * MIB  # a column larger than this waits for its PUT in a temporary file
_HEAD_BYTES = 128 * KIB  # that opening a file brings along: its header, a small one whole
_PAGE_BYTES = 4 * KIB  # a column's header
_RAISES_MOST = 64


class ObjectStoreDevice(StoreDevice):
    """Files of a device under a prefix of one bucket."""

    driver = "obstore"

    def __init__(self, client: StoreClient, prefix: str, *, capacity_bytes: int = 0) -> None:
        self.client, self.url = client, client.url
        self._base = f"{prefix}/" if prefix else ""
        self.quota = StoreQuota(self.url, capacity_bytes, self._sizes)
        self._counts = capacity_bytes > 0
        self.conditions = ConditionalWrites.of(client, f"{self._base}{TMP}")

    def _path(self, path: str) -> str:
        return f"{self._base}{path}".rstrip("/")

    def _sizes(self) -> Iterator[int]:
        return (found.size_bytes for _, found in self.client.files(self._base.rstrip("/")))

    def create(self, size_bytes: int, *, vital: bool = False) -> StoreWriter:
        usage = self.usage()
        if usage.known and size_bytes > usage.free and not vital:
            raise DeviceFull(
                f"device {self.url} is full ({format_bytes(usage.free)} of "
                f"{format_bytes(usage.total)} of its capacity_bytes are free)",
                device=self.url,
            )
        return StoreWriter(self, size_bytes)

    def store_column(self, path: str, data: Bytes) -> None:
        """One PUT of a whole column."""
        self.client.put(self._path(path), data)
        self.quota.changed(len(data))

    def open(self, path: str) -> StoreReader:
        return StoreReader(self.client, self._path(path))

    def read_small(self, path: str, max_bytes: int) -> bytes:
        # one request, not a size first: the file may be replaced in between
        data, _ = self._read_small(path, max_bytes)
        return data

    def _read_small(self, path: str, max_bytes: int) -> tuple[bytes, StoredFile]:
        target = np.empty(max_bytes + 1, np.uint8)
        found, count = read_start(self.client, self._path(path), target)
        if count > max_bytes:
            raise DeviceError(f"{path} on {self.url} is larger than {max_bytes} bytes")
        return target[:count].tobytes(), found

    def write_small(self, path: str, data: bytes) -> None:
        self.client.put(self._path(path), data)
        self.quota.changed(len(data))

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a small file unless there is one, where the store enforces conditions. False for
        another one: a write whose answer was lost and that was sent again meets itself."""
        only = "" if self.conditions.expected() else None
        try:
            self.client.put(self._path(path), data, only=only)
        except StoreChanged:
            return self.read_small(path, _HEAD_BYTES) == data
        self.quota.changed(len(data))
        return True

    def entries(self, path: str) -> list[DirectoryEntry]:
        return self.client.entries(self._path(path))

    def counter(self, name: str, pool_key: PoolKey | None = None) -> int:
        try:
            data = self.read_small(name, COUNTER_BYTES)
        except FileNotFoundError:
            return 0
        return decode_counter(name, data, where=f"{self.url}/{name}", pool_key=pool_key)

    def raise_counter(self, name: str, value: int, pool_key: PoolKey | None = None) -> int:
        """As Device has it where the store enforces conditions. Where it does not, two that raise
        it at once may leave the lower one. In either case a PUT that has been compared with the
        horizon may arrive after it was raised."""
        for _ in range(_RAISES_MOST):
            try:
                data, found = self._read_small(name, COUNTER_BYTES)
                etag = found.etag
            except FileNotFoundError:
                data, etag = b"", ""
            value = risen(name, data, value, pool_key)
            new = encode_counter(name, value, pool_key)
            if new == data:
                return value
            only = etag if self.conditions.expected() else None
            with suppress(StoreChanged):
                self.client.put(self._path(name), new, only=only)
                return value
        raise DeviceError(
            f"{name} on {self.url} was not raised: others change it all the time", device=self.url
        )

    def stamp(self, path: str) -> Stamp | None:
        """Of what a store says: one that gives equal bytes equal etags shows a replacement by them
        by its time alone, often of whole seconds."""
        found = self.client.facts(self._path(path))
        if found is None:
            return None
        mark = hashlib.blake2b(f"{found.etag} {found.changed}".encode(), digest_size=7).digest()
        return (int.from_bytes(mark), 0, found.size_bytes)

    def delete(self, path: str) -> None:
        place = self._path(path)
        found = self.client.facts(place) if self._counts else None
        self.client.delete(place)
        if found is not None:
            self.quota.changed(-found.size_bytes)

    def quarantine(self, path: str) -> None:
        name = path.rsplit("/", 1)[-1]
        place = self._path(f"{QUARANTINE}/{secrets.token_hex(4)}-{name}")
        self.client.copy(self._path(path), place)
        self.client.delete(self._path(path))

    def sweep(self) -> int:
        return sweep_uploads(self.client, self._base)

    def close(self) -> None:
        """The client owns its connections."""


class StoreWriter:
    """Collects a column until its PUT: in memory, a large one in a mapped temporary file."""

    recycled = False

    def __init__(self, device: ObjectStoreDevice, size_bytes: int) -> None:
        self._device = device
        self._bytes: Bytes | None = _blank(size_bytes, device.url)

    def _open(self) -> Bytes:
        if self._bytes is None:
            raise DeviceError(f"a file on device {self._device.url} was written after its end")
        return self._bytes

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        held = self._open()
        for buffer in buffers:
            held[offset : offset + len(buffer)] = buffer
            offset += len(buffer)

    def sync(self) -> None:
        """Nothing is durable before the PUT."""

    def publish(self, path: str, guard: HorizonGuard | None = None) -> None:
        if guard is not None:
            guard.check(self._device.counter(HORIZON, guard.pool_key), self._device.url)
        self._device.store_column(path, self._open())
        self._bytes = None

    def abort(self) -> None:
        self._bytes = None


def _blank(size_bytes: int, url: str) -> Bytes:
    """Zeros, which take no memory until they are written."""
    if size_bytes <= _IN_MEMORY_BYTES:
        return np.zeros(size_bytes, np.uint8)
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(size_bytes)
            return np.frombuffer(mmap.mmap(file.fileno(), size_bytes), np.uint8)
    except OSError as error:
        raise_device_error(error, url, "spool")


class StoreReader:
    """Range reads of one stored file; what came with its opening is in memory.

    Replaced by another one, it is read again: each call returns bytes of one file alone.
    """

    descriptor = -1

    def __init__(self, client: StoreClient, path: str) -> None:
        self._client, self._path = client, path
        self._load()

    def _load(self) -> None:
        head = np.empty(_HEAD_BYTES, np.uint8)
        found, count = read_start(self._client, self._path, head)
        self.size_bytes = found.size_bytes
        # a whole small file, else its first page: thousands of readers stay open. Exchanged as one
        # value: several threads read
        kept = count if count == found.size_bytes else min(count, _PAGE_BYTES)
        self._held = (found.etag, head[:kept].copy())

    def read_into(self, offset: int, target: Bytes) -> None:
        for _ in range(3):
            etag, head = self._held
            end = offset + len(target)
            if end <= len(head):
                target[:] = head[offset:end]
                if end == self.size_bytes:  # whoever keeps it open from now on reads by ranges
                    self._held = (etag, head[:0])
                return
            try:
                self._client.read_into(self._path, offset, target, etag=etag)
            except StoreChanged:
                self._load()
            else:
                return
        raise DeviceError(
            f"a file on device {self._client.url} was replaced while it was read",
            device=self._client.url,
        )

    def close(self) -> None:
        """Nothing is held."""


def read_start(client: StoreClient, path: str, target: Bytes) -> tuple[StoredFile, int]:
    """Read the beginning of a file, up to all of it. Raises FileNotFoundError."""
    try:
        return client.read_into(path, 0, target, short=True)
    except BeyondEnd:
        found = client.facts(path)
        if found is None:
            raise FileNotFoundError(path) from None
        if found.size_bytes:
            raise
        return found, 0
