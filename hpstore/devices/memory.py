"""Files in memory, with the two states that a crash distinguishes: written and durable.

For tests and for pools that need no persistence. `crash()` does what a power cut does: bytes that
were never synced read as zeros, names that were never synced are gone or come back.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import RECYCLE, RECYCLE_MIN_BYTES, TMP, DirectoryEntry, Stamp, Usage
from hpstore.devices.horizon_guard import (
    HORIZON,
    HorizonGuard,
    check_record,
    decode_counter,
    encode_counter,
    risen,
)
from hpstore.devices.reserve import SPARE_BYTES, plan_spares
from hpstore.errors import DeviceError, DeviceFull, DeviceMissing, DeviceReadOnly
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.format.pool_key import PoolKey
from hpstore.format.records import POOL_FILE


class _File:
    __slots__ = ("bytes", "durable", "locked", "number", "readers")

    def __init__(self, size: int, number: int) -> None:
        self.bytes = bytearray(size)
        self.durable: bytes | None = None
        self.readers = 0
        self.locked = True  # by the writer that makes it
        self.number = number


class MemoryDevice:
    """A dict of files. `capacity_bytes` and `capacity_inodes` (files, 0: any) make it run full.

    What is vital may go beyond both by what a local device keeps in spare files.
    """

    def __init__(
        self,
        url: str = "memory://",
        *,
        capacity_bytes: int = 1 << 40,
        capacity_inodes: int = 0,
        recycle_bytes: int = 0,
        folds_names: bool = False,
    ) -> None:
        self.url, self.mode, self.folds_names = url, "memory", folds_names
        self.memory_alignment = 1
        self.capacity_bytes, self._recycle_bytes = capacity_bytes, recycle_bytes
        self.capacity_inodes = capacity_inodes
        self.files: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._lock = threading.RLock()  # guards both maps, the holds and every _File's fields
        self._numbers = itertools.count(1)
        self.registers = bytearray()  # durable as they are written
        self._holds: list[MemoryHold] = []
        self.missing = False  # set by tests: the device does not answer
        self.read_only = False  # set by tests: it refuses writes, without saying so in usage()

    def _check(self) -> None:
        if self.missing:
            raise DeviceMissing(f"device {self.url} does not answer", device=self.url)

    def _check_writable(self) -> None:
        self._check()
        if self.read_only:
            raise DeviceReadOnly(f"device {self.url} is read-only", device=self.url)

    def _name(self, path: str) -> str:
        return path.casefold() if self.folds_names else path

    def _check_room(self, nbytes: int, *, vital: bool) -> None:
        """Raise DeviceFull unless a new file of so many bytes finds room."""
        free, inodes = self.capacity_bytes - self._used(), self.capacity_inodes - len(self.files)
        spares = plan_spares(self.capacity_bytes, self.capacity_inodes).files if vital else 0
        short = self.capacity_inodes and inodes + spares < 1
        if short or nbytes > free + spares * SPARE_BYTES:
            raise DeviceFull(
                f"device {self.url} is full ({max(0, free)} of {self.capacity_bytes} bytes and "
                f"{max(0, inodes)} of {self.capacity_inodes} inodes are free)",
                device=self.url,
            )

    def _used(self) -> int:
        return sum(len(file.bytes) for file in self.files.values())

    def takes_records(self) -> bool:
        self._check()
        with self._lock:
            try:
                self._check_room(SPARE_BYTES, vital=True)
            except DeviceFull:
                return False
            return True

    def create(self, size_bytes: int, *, vital: bool = False) -> MemoryWriter:
        self._check_writable()
        with self._lock:
            old = file = self._reuse(size_bytes)
            if file is None:
                self._check_room(size_bytes, vital=vital)
                file = _File(size_bytes, next(self._numbers))
            name = f"{TMP}/{file.number}-{next(self._numbers)}"
            self.files[name] = file
            return MemoryWriter(self, file, name, recycled=old is not None)

    def create_spare(self, size_bytes: int) -> None:
        """Memory is as fast the first time."""

    def _reuse(self, size_bytes: int) -> _File | None:
        for name, file in list(self.files.items()):
            if name.startswith(RECYCLE) and not file.readers and size_bytes >= RECYCLE_MIN_BYTES:
                del self.files[name]
                file.locked = True
                del file.bytes[size_bytes:]
                file.bytes.extend(bytes(size_bytes - len(file.bytes)))
                return file
        return None

    def open(self, path: str) -> MemoryReader:
        self._check()
        with self._lock:
            file = self.files.get(self._name(path))
            if file is None or file.locked:
                raise FileNotFoundError(path)
            file.readers += 1
            return MemoryReader(self, file)

    def read_small(self, path: str, max_bytes: int) -> bytes:
        self._check()
        with self._lock:
            file = self.files.get(self._name(path))
            if file is None:
                raise FileNotFoundError(path)
            if len(file.bytes) > max_bytes:
                raise DeviceError(f"{path} on {self.url} is larger than {max_bytes} bytes")
            return bytes(file.bytes)

    def write_small(self, path: str, data: bytes) -> None:
        self._check_writable()
        with self._lock:
            self._check_room(len(data), vital=True)
            file = _File(0, next(self._numbers))
            file.bytes, file.durable, file.locked = bytearray(data), bytes(data), False
            self.files[self._name(path)] = self._durable_names[self._name(path)] = file

    def entries(self, path: str) -> list[DirectoryEntry]:
        self._check()
        prefix = f"{self._name(path).rstrip('/')}/" if path else ""
        with self._lock:
            found: dict[str, bool] = {}
            for name in self.files:
                if name.startswith(prefix):
                    first, _, rest = name[len(prefix) :].partition("/")
                    found[first] = found.get(first, False) or bool(rest)
            return [DirectoryEntry(name, is_directory) for name, is_directory in found.items()]

    def listings(self, paths: Sequence[str]) -> list[list[DirectoryEntry]]:
        return [self.entries(paths[0])]

    def counter(self, name: str, pool_key: PoolKey | None = None) -> int:
        self._check()
        with self._lock:
            file = self.files.get(name)
            data = b"" if file is None else bytes(file.bytes)
            return decode_counter(name, data, where=name, pool_key=pool_key)

    def raise_counter(self, name: str, value: int, pool_key: PoolKey | None = None) -> int:
        self._check_writable()
        with self._lock:
            file = self.files.get(name) or _File(0, next(self._numbers))
            value = risen(name, bytes(file.bytes), value, pool_key)
            file.bytes = bytearray(encode_counter(name, value, pool_key))
            file.durable, file.locked = bytes(file.bytes), False
            self.files[name] = self._durable_names[name] = file
            return value

    def stamp(self, path: str) -> Stamp | None:
        self._check()
        with self._lock:
            return self._stamp(path)

    def _stamp(self, path: str) -> Stamp | None:
        file = self.files.get(self._name(path))
        return None if file is None else (file.number, 0, len(file.bytes))

    def delete(self, path: str) -> None:
        self._check_writable()
        with self._lock:
            self.files.pop(self._name(path), None)

    def retire(self, path: str) -> None:
        self._check_writable()
        with self._lock:
            file = self.files.pop(self._name(path), None)
            if file is None or file.readers or len(file.bytes) < RECYCLE_MIN_BYTES:
                return
            kept = sum(len(f.bytes) for n, f in self.files.items() if n.startswith(RECYCLE))
            if kept + len(file.bytes) > self._recycle_bytes:
                return
            name = f"{RECYCLE}/{next(self._numbers)}"
            self.files[name] = self._durable_names[name] = file
            self._durable_names.pop(self._name(path), None)
            file.bytes[:ALIGNMENT_BYTES] = bytes(ALIGNMENT_BYTES)
            file.durable = bytes(file.bytes)

    def quarantine(self, path: str) -> None:
        self._check_writable()
        with self._lock:
            name = self._name(path)
            if name not in self.files:
                raise FileNotFoundError(path)
            new = f"quarantine/{next(self._numbers)}-{name.rsplit('/', 1)[-1]}"
            self.files[new] = self._durable_names[new] = self.files.pop(name)
            self._durable_names.pop(name, None)

    def sync_directory(self, path: str) -> None:
        self._check()
        prefix = self._name(path).rsplit("/", 1)[0] + "/"

        def inside(name: str) -> bool:
            return name.startswith(prefix) and "/" not in name[len(prefix) :]

        with self._lock:
            for name in [n for n in self._durable_names if inside(n)]:
                del self._durable_names[name]
            self._durable_names |= {n: f for n, f in self.files.items() if inside(n)}

    def sync_removals(self) -> None:
        self._check()
        with self._lock:
            for name in self._durable_names.keys() - self.files.keys():
                del self._durable_names[name]

    def sweep(self) -> int:
        self._check_writable()
        with self._lock:
            dead = [n for n, f in self.files.items() if n.startswith(TMP + "/") and not f.locked]
            for name in dead:
                del self.files[name]
            return len(dead)

    def hold(self, offset: int, nbytes: int) -> MemoryHold:
        self._check_writable()
        with self._lock:
            content = bytes(self.registers[offset : offset + nbytes]).ljust(nbytes, b"\0")
            made = MemoryHold(self, offset, nbytes, content, self._stamp(POOL_FILE))
            made.taken = not any(other.overlaps(made) for other in self._holds)
            if made.taken:
                self._holds.append(made)
            return made

    def crash(self) -> None:
        """What a power cut leaves: synced bytes under synced names; the rest zeros or gone."""
        with self._lock:
            self._let_go()
            self.files = dict(self._durable_names)
            for file in set(self.files.values()):
                file.bytes = bytearray(file.durable or bytes(len(file.bytes)))
                file.readers, file.locked = 0, False

    def restart(self) -> None:
        """What the death of all processes leaves: everything written, no lock held."""
        with self._lock:
            self._let_go()
            for file in self.files.values():
                file.readers, file.locked = 0, False

    def _let_go(self) -> None:
        for hold in self._holds:
            hold.taken = False
        self._holds.clear()

    def usage(self) -> Usage:
        with self._lock:
            return Usage(
                total=self.capacity_bytes,
                free=max(0, self.capacity_bytes - self._used()),
                inodes=self.capacity_inodes,
                free_inodes=max(0, self.capacity_inodes - len(self.files)),
            )

    def probe(self, *, write: bool) -> None:
        if write:
            self._check_writable()
        else:
            self._check()

    def close(self) -> None:
        """Keeps the files: reopening is using the object again."""

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a memory device lives in one process; it cannot be pickled")


class MemoryHold:
    """A range of the registers."""

    def __init__(
        self,
        device: MemoryDevice,
        offset: int,
        nbytes: int,
        content: bytes,
        record: Stamp | None,
    ) -> None:
        self._device, self._offset, self._end = device, offset, offset + nbytes
        self.content, self.record, self.taken = content, record, False

    def overlaps(self, other: MemoryHold) -> bool:
        """Whether both want a byte."""
        return self._offset < other._end and other._offset < self._end

    def write(self, offset: int, data: bytes) -> None:
        self._device._check_writable()
        with self._device._lock:
            if not self.taken:
                raise DeviceError(f"the hold of registers on {self._device.url} is over")
            registers, start = self._device.registers, self._offset + offset
            registers.extend(bytes(max(0, start + len(data) - len(registers))))
            registers[start : start + len(data)] = data

    def finish(self, offset: int, data: bytes) -> None:
        try:
            self.write(offset, data)
        finally:
            self.release()

    def release(self) -> None:
        with self._device._lock:
            if self.taken:
                self.taken = False
                self._device._holds.remove(self)

    def forget(self) -> None:
        """Nothing: another process has other memory."""


class MemoryWriter:
    """A file being made."""

    def __init__(self, device: MemoryDevice, file: _File, name: str, *, recycled: bool) -> None:
        self._device, self._made, self._name = device, file, name
        self.recycled = recycled

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        self._device._check_writable()
        with self._device._lock:
            for buffer in buffers:
                end = offset + len(buffer)
                if end > len(self._made.bytes):
                    self._made.bytes.extend(bytes(end - len(self._made.bytes)))
                self._made.bytes[offset:end] = buffer.data
                offset = end

    def sync(self) -> None:
        self._device._check_writable()
        with self._device._lock:
            self._made.durable = bytes(self._made.bytes)

    def publish(self, path: str, guard: HorizonGuard | None = None) -> None:
        self._device._check_writable()
        with self._device._lock:
            if guard is not None:
                guard.check(self._device.counter(HORIZON, guard.pool_key), self._device.url)
                check_record(guard, self._device.stamp(POOL_FILE), self._device.url)
            files = self._device.files
            files[self._device._name(path)] = files.pop(self._name)
            self._made.locked, self._name = False, ""

    def abort(self) -> None:
        if self._name:
            with self._device._lock:
                self._device.files.pop(self._name, None)
            self._name = ""


class MemoryReader:
    """A file being read."""

    def __init__(self, device: MemoryDevice, file: _File) -> None:
        self._device, self._open = device, file
        self.size_bytes = len(file.bytes)
        self._closed = False

    descriptor = -1

    def read_into(self, offset: int, target: Bytes) -> None:
        self._device._check()
        with self._device._lock:
            found = self._open.bytes[offset : offset + len(target)]
        if len(found) < len(target):
            raise DeviceError(f"device {self._device.url}: file ends at {offset + len(found)}")
        target[:] = np.frombuffer(found, np.uint8)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with self._device._lock:
                self._open.readers -= 1
