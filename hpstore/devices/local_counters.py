"""Counters of a local device: files that are locked while they are compared or raised; syncs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from hpstore.devices.base import Stamp, raise_device_error
from hpstore.devices.confined_names import open_beneath, widen
from hpstore.devices.file_handles import raise_local_error, sync_filesystem, unlock_and_close
from hpstore.devices.horizon_guard import (
    COUNTER_BYTES,
    HORIZON,
    MARK,
    NameGuard,
    check_record,
    decode_counter,
    encode_counter,
    risen,
)
from hpstore.errors import LockTimeout
from hpstore.format.pool_key import PoolKey
from hpstore.format.records import POOL_FILE

_TRIES, _PAUSE_SECONDS = 100, 0.01  # a name takes microseconds; a stopped writer holds on


class LocalCounters(ABC):
    """Part of LocalDevice.

    A name is given under a shared lock on the horizon, which is raised under an exclusive one: the
    comparison and the rename are one step for a sweep. The lock is given up before the number is
    synced, so that a process that stops there holds up no writer.
    """

    url: str
    _file_mode: int

    @abstractmethod
    def root_fd(self) -> int:
        """The root descriptor of this process."""

    @abstractmethod
    def require_objects(self) -> None:
        """Raise DeviceMissing when the directory of all objects is gone."""

    @abstractmethod
    def stamp(self, path: str) -> Stamp | None:
        """What changes when a file is replaced."""

    @contextlib.contextmanager
    def _using(self, name: str) -> Iterator[None]:
        """Turn OSErrors into DeviceErrors; ENOENT passes."""
        try:
            yield
        except OSError as error:
            raise_local_error(error, self.root_fd(), self.url, f"use of {name}")

    @contextlib.contextmanager
    def _counter_file(self, name: str, flags: int) -> Iterator[int]:
        fd = -1
        try:
            with self._using(name):
                fd = open_beneath(self.root_fd(), name, flags, self._file_mode)
                if flags & os.O_RDWR:
                    widen(fd, self._file_mode)  # a process that died there may have left it closed
            yield fd
        finally:
            with contextlib.suppress(OSError):  # what was read is checked, what was written synced
                unlock_and_close(fd)

    def _creation(self, name: str) -> int:
        """What opens a counter that there may not be yet. Nothing is made on a device whose
        directories are gone: it was wiped, and must look it."""
        try:
            with self._using(name):
                os.stat(name, dir_fd=self.root_fd(), follow_symlinks=False)
        except FileNotFoundError:
            self.require_objects()
            return os.O_CREAT
        return 0

    def _decoded(self, fd: int, name: str, pool_key: PoolKey | None) -> int:
        data = os.pread(fd, COUNTER_BYTES, 0)
        return decode_counter(name, data, where=f"{self.url}/{name}", pool_key=pool_key)

    def counter(self, name: str, pool_key: PoolKey | None = None) -> int:
        try:
            with self._counter_file(name, os.O_RDONLY) as fd, self._using(name):
                fcntl.flock(fd, fcntl.LOCK_SH)
                return self._decoded(fd, name, pool_key)
        except FileNotFoundError:
            return 0

    def make_counters(self) -> None:
        """Give them their blocks while there is room: then they can be raised on a full device."""
        for name in (HORIZON, MARK):
            try:
                made = os.stat(name, dir_fd=self.root_fd()).st_size > 0
            except FileNotFoundError:
                made = False
            if not made:
                self.raise_counter(name, 0)

    def raise_counter(self, name: str, value: int, pool_key: PoolKey | None = None) -> int:
        raised = [value]

        def rise(data: bytes) -> bytes:
            raised[0] = risen(name, data, value, pool_key)
            return encode_counter(name, raised[0], pool_key)

        self._rewrite(name, rise)
        return raised[0]

    def counter_sector(self, name: str) -> bytes:
        """The bytes of a counter's file; none where it was never raised."""
        try:
            with self._counter_file(name, os.O_RDONLY) as fd, self._using(name):
                fcntl.flock(fd, fcntl.LOCK_SH)
                return os.pread(fd, COUNTER_BYTES, 0)
        except FileNotFoundError:
            return b""

    def swap_counter_sector(self, name: str, expected: bytes, new: bytes) -> bytes:
        """Write `new` over `expected`; what was there. Durable on return, also where another has
        written it. As raise_counter, for callers that decode and seal counters elsewhere."""
        found = [b""]

        def swap(data: bytes) -> bytes:
            found[0] = data
            return new if data == expected else data

        self._rewrite(name, swap)
        return found[0]

    def _rewrite(self, name: str, change: Callable[[bytes], bytes]) -> None:
        flags = os.O_RDWR | self._creation(name)
        with self._counter_file(name, flags) as fd, self._using(name):
            self._lock_exclusively(fd, name)
            data = os.pread(fd, COUNTER_BYTES, 0)
            new = change(data)
            if new != data:
                os.pwrite(fd, new, 0)
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.fdatasync(fd)  # also when another process has raised it, and not synced yet
            if not data:
                os.fsync(self.root_fd())

    def sync_removals(self) -> None:
        try:
            sync_filesystem(self.root_fd())
        except OSError as error:
            raise_device_error(error, self.url, "sync of the filesystem")

    def _lock_exclusively(self, fd: int, name: str) -> None:
        for _ in range(_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_SECONDS)
            else:
                return
        raise LockTimeout(
            f"{name} of device {self.url}: another process is about to publish there and does not "
            "go on; it may be stopped. Nothing was changed; it is tried again later."
        )

    @contextlib.contextmanager
    def guarded(self, guard: NameGuard | None) -> Iterator[None]:
        """Hold the horizon where it is while a file gets its name. Raises HorizonPassed,
        RecordReplaced."""
        if guard is None:
            yield
            return
        with self._counter_file(HORIZON, os.O_RDONLY | self._creation(HORIZON)) as fd:
            with self._using(HORIZON):
                fcntl.flock(fd, fcntl.LOCK_SH)
                guard.check_sector(os.pread(fd, COUNTER_BYTES, 0), self.url)
                if guard.record is not None:
                    check_record(guard, self.stamp(POOL_FILE), self.url)
            yield  # an error of the rename is no error of the horizon
