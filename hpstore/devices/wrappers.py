"""Behaviour round a device: throttling, faults. Each wraps exactly one device."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import (
    Device,
    DirectoryEntry,
    Hold,
    ReadHandle,
    Stamp,
    Usage,
    WriteHandle,
    raise_device_error,
)
from hpstore.devices.horizon_guard import HorizonGuard
from hpstore.format.pool_key import PoolKey
from hpstore.runtime.clock import Clock, SystemClock
from hpstore.runtime.split_calls import Sent

T = TypeVar("T")


class DeviceWrapper:
    """Passes everything on through `around`, which subclasses override.

    `around(operation, nbytes, call)` runs `call` once; operation is one of create, open, read,
    write, sync, publish, list, stamp, delete, retire, quarantine, sync_directory, read_small,
    write_small, sweep, lock, register, probe, counter, raise_counter,
    sync_removals.
    """

    def __init__(self, inner: Device) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def mode(self) -> str:
        return self.inner.mode

    @property
    def memory_alignment(self) -> int:
        return self.inner.memory_alignment

    @property
    def folds_names(self) -> bool:
        return self.inner.folds_names

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        return call()

    def around_sent(
        self, operation: str, nbytes: int, begin: Callable[[], Sent[T] | None]
    ) -> Sent[T] | None:
        """As `around`, of a call in two halves. None where it has one here."""
        return None

    def wrapped(self, handle: ReadHandle) -> ReadHandle:
        """An open file of the device, through this one."""
        return WrappedReader(self, handle)

    def create(self, size_bytes: int, *, vital: bool = False) -> WriteHandle:
        handle = self.around(
            "create", size_bytes, lambda: self.inner.create(size_bytes, vital=vital)
        )
        return WrappedWriter(self, handle)

    def create_spare(self, size_bytes: int) -> WriteHandle | None:
        handle = self.around("create", size_bytes, lambda: self.inner.create_spare(size_bytes))
        return None if handle is None else WrappedWriter(self, handle)

    def open(self, path: str) -> ReadHandle:
        return self.wrapped(self.around("open", 0, lambda: self.inner.open(path)))

    def read_small(self, path: str, max_bytes: int) -> bytes:
        return self.around("read_small", 0, lambda: self.inner.read_small(path, max_bytes))

    def write_small(self, path: str, data: bytes) -> None:
        self.around("write_small", len(data), lambda: self.inner.write_small(path, data))

    def takes_records(self) -> bool:
        return self.inner.takes_records()

    def entries(self, path: str) -> list[DirectoryEntry]:
        return self.around("list", 0, lambda: self.inner.entries(path))

    def listings(self, paths: Sequence[str]) -> list[list[DirectoryEntry]]:
        return [self.entries(paths[0])]

    def counter(self, name: str, pool_key: PoolKey | None = None) -> int:
        return self.around("counter", 0, lambda: self.inner.counter(name, pool_key))

    def raise_counter(self, name: str, value: int, pool_key: PoolKey | None = None) -> int:
        return self.around(
            "raise_counter", 0, lambda: self.inner.raise_counter(name, value, pool_key)
        )

    def stamp(self, path: str) -> Stamp | None:
        return self.around("stamp", 0, lambda: self.inner.stamp(path))

    def delete(self, path: str) -> None:
        self.around("delete", 0, lambda: self.inner.delete(path))

    def retire(self, path: str) -> None:
        self.around("retire", 0, lambda: self.inner.retire(path))

    def quarantine(self, path: str) -> None:
        self.around("quarantine", 0, lambda: self.inner.quarantine(path))

    def sync_directory(self, path: str) -> None:
        self.around("sync_directory", 0, lambda: self.inner.sync_directory(path))

    def sync_removals(self) -> None:
        self.around("sync_removals", 0, self.inner.sync_removals)

    def sweep(self) -> int:
        return self.around("sweep", 0, self.inner.sweep)

    def usage(self) -> Usage:
        return self.inner.usage()

    def hold(self, offset: int, nbytes: int) -> Hold:
        hold = self.around("lock", 0, lambda: self.inner.hold(offset, nbytes))
        return WrappedHold(self, hold)

    def probe(self, *, write: bool) -> None:
        self.around("probe", 0, lambda: self.inner.probe(write=write))

    def close(self) -> None:
        self.inner.close()


class WrappedWriter:
    """A file being made through a wrapper."""

    def __init__(self, device: DeviceWrapper, inner: WriteHandle) -> None:
        self._device, self.inner = device, inner

    @property
    def recycled(self) -> bool:
        return self.inner.recycled

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        nbytes = sum(len(buffer) for buffer in buffers)
        self._device.around("write", nbytes, lambda: self.inner.write(offset, buffers))

    def sync(self) -> None:
        self._device.around("sync", 0, self.inner.sync)

    def publish(self, path: str, guard: HorizonGuard | None = None) -> None:
        self._device.around("publish", 0, lambda: self.inner.publish(path, guard))

    def abort(self) -> None:
        self.inner.abort()


class WrappedHold:
    """A range of registers held through a wrapper."""

    def __init__(self, device: DeviceWrapper, inner: Hold) -> None:
        self._device, self.inner = device, inner
        self.content, self.record = inner.content, inner.record

    @property
    def taken(self) -> bool:
        return self.inner.taken

    def write(self, offset: int, data: bytes) -> None:
        self._device.around("register", len(data), lambda: self.inner.write(offset, data))

    def finish(self, offset: int, data: bytes) -> None:
        try:
            self._device.around("register", len(data), lambda: self.inner.finish(offset, data))
        finally:
            self.inner.release()

    def release(self) -> None:
        self.inner.release()

    def forget(self) -> None:
        self.inner.forget()


class WrappedReader:
    """A file being read through a wrapper."""

    def __init__(self, device: DeviceWrapper, inner: ReadHandle) -> None:
        self._device, self.inner = device, inner
        self.size_bytes = inner.size_bytes

    descriptor = -1

    def read_into(self, offset: int, target: Bytes) -> None:
        def call() -> Bytes:
            self.inner.read_into(offset, target)
            return target

        self._device.around("read", len(target), call)

    def close(self) -> None:
        self.inner.close()


class Bandwidth:
    """A limit of bytes per second, shared by all devices that are given it. Thread-safe."""

    def __init__(self, bytes_per_second: float, clock: Clock | None = None) -> None:
        self._rate, self._clock = bytes_per_second, clock or SystemClock()
        self._free_at = 0.0
        self._lock = threading.Lock()  # guards _free_at

    def wait(self, nbytes: int) -> None:
        """Until so many more bytes are through; in the order of the calls."""
        with self._lock:
            now = self._clock.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._rate
            pause = self._free_at - now
        self._clock.wait(pause)


class ThrottledDevice(DeviceWrapper):
    """Reads and writes at no more than a bandwidth together: of its own, or a shared one."""

    def __init__(
        self, inner: Device, bandwidth: float | Bandwidth, clock: Clock | None = None
    ) -> None:
        super().__init__(inner)
        if not isinstance(bandwidth, Bandwidth):
            bandwidth = Bandwidth(bandwidth, clock)
        self._bandwidth = bandwidth

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation in ("read", "write") and nbytes:
            self._bandwidth.wait(nbytes)
        return call()


class SimulatedCrash(BaseException):
    """The process dies here. Not an Exception: no handler of the code under test may see it."""


_ERRORS = {"E": errno.EIO, "N": errno.ENOSPC, "O": errno.EROFS, "D": errno.ENODEV}
_PASS = {"R": "read", "W": "write", "Y": "sync", "P": "publish", "L": "list", "C": "create"}


class FaultyDevice(DeviceWrapper):
    """Fails by a plan: a short string, one letter per operation.

    R W Y P L C  let operations pass until one read / write / sync / publish / list / create has
    .            let the next operation pass, whatever it is
    E N O D      the next operation fails with EIO, ENOSPC, EROFS, ENODEV
    F            the next read returns a flipped bit
    X            the next operation and all later ones raise SimulatedCrash
    H            the next operation hangs until `released` is set

    A last letter followed by `*` goes on for ever. `operations` counts all that came through.
    """

    def __init__(self, inner: Device, plan: str = "") -> None:
        super().__init__(inner)
        self.released = threading.Event()
        self.operations = 0
        self._lock = threading.Lock()  # guards plan and operations
        self.plan = plan

    def _next(self, operation: str) -> str:
        with self._lock:
            self.operations += 1
            if not self.plan:
                return "."
            letter = self.plan[0]
            if letter == "F" and operation != "read":
                return "."
            if letter in _PASS and _PASS[letter] != operation:
                return "."
            if letter != "X" and self.plan[1:] != "*":
                self.plan = self.plan[1:]
            return letter

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        letter = self._next(operation)
        if letter == "X":
            raise SimulatedCrash(operation)
        if letter == "H":
            self.released.wait()
        if letter in _ERRORS:
            number = _ERRORS[letter]
            raise_device_error(OSError(number, os.strerror(number)), self.url, operation)
        result = call()
        if letter == "F" and result is not None:
            assert isinstance(result, np.ndarray)  # reads return their target
            result[len(result) // 2] ^= 1
        return result


class CrashCounter(DeviceWrapper):
    """Devices that share one countdown and die together before operation number `crash_at`.

    `operations` is a one-element list so that all devices of a pool count in it.
    """

    def __init__(self, inner: Device, operations: list[int], crash_at: int) -> None:
        super().__init__(inner)
        self._operations, self._crash_at = operations, crash_at

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        number = self._operations[0]
        self._operations[0] += 1
        if number >= self._crash_at:
            raise SimulatedCrash(f"{operation} on {self.url}")
        return call()
