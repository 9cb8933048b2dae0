"""Open files of a local device: one being written under an exclusive lock, one being read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import NoReturn, Protocol

from hpstore.codec.galois import Bytes
from hpstore.devices.base import TMP, raise_device_error
from hpstore.devices.confined_names import open_beneath
from hpstore.devices.horizon_guard import NameGuard
from hpstore.errors import DeviceError, DeviceFull, DeviceMissing, ReadAbandoned
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.format.keys import OBJECTS
from hpstore.runtime.buffers import aligned_array
from hpstore.units import format_bytes, round_down, round_up

_log = logging.getLogger(__name__)
_MAX_IOV = 256  # below Linux's UIO_MAXIOV of 1024
ESCAPED_NAMES = "escaped-names"  # in the root of a device where keys are escaped


class LocalRoot(Protocol):
    """What an open file needs of its device."""

    url: str
    memory_alignment: int

    def root_fd(self) -> int:
        """Descriptor of the device root in this process."""

    def guarded(self, guard: NameGuard | None) -> AbstractContextManager[None]:
        """Hold the horizon while a file gets its name."""

    def rename_into_place(self, old: str, new: str) -> None:
        """Rename within the device, making directories."""

    def rename_vital(self, old: str, new: str) -> None:
        """The same, of spare directories where need be."""


def gone(url: str, operation: str) -> DeviceMissing:
    """The error for a device whose directories vanished underneath."""
    return DeviceMissing(
        f"{operation} failed on device {url}: its directories are gone (deleted or wiped?)",
        device=url,
    )


def raise_local_error(error: OSError, root: int, url: str, operation: str) -> NoReturn:
    """As raise_device_error; of a full filesystem it says what is used up, of a name that is not
    what hpstore makes there, which it is."""
    if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENXIO) and isinstance(error.filename, str):
        strange = _strange_part(root, error.filename)
        if strange:
            _log_strange(url, strange)
            error = OSError(error.errno, strange)
    if is_full(error):
        found = os.fstatvfs(root)
        free = format_bytes(found.f_bavail * found.f_frsize)
        total = format_bytes(found.f_blocks * found.f_frsize)
        raise DeviceFull(
            f"{operation} failed on device {url}: {error.strerror} ({free} of {total} and "
            f"{found.f_favail} of {found.f_files} inodes are free there)",
            device=url,
        ) from error
    raise_device_error(error, url, operation)


def _strange_part(root: int, path: str) -> str:
    """Which part of a path on a device is a link, or no directory where one belongs; else ""."""
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        name = "/".join(parts[:depth])
        try:
            mode = os.stat(name, dir_fd=root, follow_symlinks=False).st_mode
        except OSError:
            return ""
        if stat.S_ISLNK(mode) or not (stat.S_ISDIR(mode) or (depth > 2 and stat.S_ISREG(mode))):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "no directory"
            return (
                f"{name} is {kind} there, which hpstore did not make and does not follow. Move it "
                "off the device, then `hpstore scrub` makes again what is missing"
            )
    return ""


@lru_cache(maxsize=64)  # once in a process: every read of the keys behind it comes here
def _log_strange(url: str, strange: str) -> None:
    _log.warning("device %s: %s", url, strange)


def is_full(error: OSError) -> bool:
    """Whether a call failed for want of space, inodes or quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, DeviceError)


def unlock_and_close(fd: int) -> None:
    """Release the lock for all copies of a descriptor that forks have left, then close ours."""
    if fd < 0:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


class LocalWriter:
    """A file in tmp/ under an exclusive lock."""

    def __init__(
        self, device: LocalRoot, fd: int, name: str, *, recycled: bool = False, vital: bool = False
    ) -> None:
        self._device, self._file, self._name = device, fd, name
        self.recycled, self._vital = recycled, vital
        self._unsynced: OSError | None = None  # why it can never be durable

    def fileno(self) -> int:
        """The descriptor, for calls while it is being made."""
        return self._file

    @contextlib.contextmanager
    def aborted_on_error(self) -> Iterator[None]:
        """Nothing is left of the file when making it fails."""
        try:
            yield
        except OSError:
            self.abort()
            raise

    def _call(self, operation: str, act: Callable[[], None]) -> None:
        try:
            act()
        except FileNotFoundError as error:
            raise gone(self._device.url, operation) from error
        except OSError as error:
            raise_local_error(error, self._device.root_fd(), self._device.url, operation)

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        step = self._device.memory_alignment
        rows = [aligned_copy(b) if b.ctypes.data % step else b for b in buffers if len(b)]
        self._call("write", lambda: self._write_all(offset, rows))

    def _write_all(self, offset: int, rows: list[Bytes]) -> None:
        while rows:
            written = os.pwritev(self._file, [row.data for row in rows[:_MAX_IOV]], offset)
            written = round_down(written, ALIGNMENT_BYTES)  # a short write may end anywhere
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset += written
            while rows and written >= len(rows[0]):
                written -= len(rows.pop(0))
            if written:
                rows[0] = rows[0][written:]

    def sync(self) -> None:
        self._call("fdatasync", self._sync)

    def _sync(self) -> None:
        """Once it has failed it fails for ever: the kernel says of lost pages once, and a second
        call, as of a request that is sent again, would say that all is well."""
        self._require_synced()
        try:
            os.fdatasync(self._file)
        except OSError as error:
            self._unsynced = error
            raise

    def _require_synced(self) -> None:
        if self._unsynced is not None:
            raise OSError(self._unsynced.errno, f"{self._unsynced.strerror} (of an earlier sync)")

    def publish(self, path: str, guard: NameGuard | None = None) -> None:
        self._call("publish", self._require_synced)
        # unlocked first: a forked child holds a copy of the descriptor, and with it the lock
        self._call("unlock", lambda: fcntl.flock(self._file, fcntl.LOCK_UN))
        self._call(f"rename to {path}", lambda: self._rename(path, guard))
        self._call("close", self._close)

    def _rename(self, path: str, guard: NameGuard | None) -> None:
        with self._device.guarded(guard):
            device = self._device
            (device.rename_vital if self._vital else device.rename_into_place)(self._name, path)

    def _close(self) -> None:
        fd, self._file = self._file, -1
        unlock_and_close(fd)

    def abort(self) -> None:
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._device.root_fd())
        with contextlib.suppress(OSError):
            self._close()


class LocalReader:
    """A file open for reading under a shared lock.

    A late read may be under way, or still wait for its device, when its caller has given up and
    another thread closes the file. A read under way ends on this file, which is closed then; a read
    that comes later is refused, so that it never reads what has the descriptor's number by then.
    """

    def __init__(self, url: str, fd: int, size_bytes: int) -> None:
        self._url, self.size_bytes, self._owner = url, size_bytes, os.getpid()
        # No lock, which a fork could find taken: each step below is one operation of the
        # interpreter, and `_closing` is set before `_reading` is looked at.
        self._file = [fd]  # empty once closed
        self._reading: set[int] = set()  # threads
        self._closing = False

    @property
    def descriptor(self) -> int:
        return next(iter(self._file), -1)

    def read_into(self, offset: int, target: Bytes) -> None:
        self._reading.add(threading.get_ident())
        try:
            if self._closing:
                raise ReadAbandoned(f"a read of device {self._url} came too late", device=self._url)
            self._read(self._file[0], offset, target)
        finally:
            self._reading.discard(threading.get_ident())
            if self._closing:
                self.close()

    def _read(self, file: int, offset: int, target: Bytes) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(file, [target.data[done:]], offset + done)
            except OSError as error:
                raise_device_error(error, self._url, "read")
            done += count
            if not count or (done < len(target) and done % ALIGNMENT_BYTES):
                raise DeviceError(
                    f"device {self._url}: file ends at {offset + done}, "
                    f"{offset + len(target)} bytes were expected",
                    device=self._url,
                )

    def close(self) -> None:
        self._closing = True
        if self._reading:
            return  # the last of them closes
        with contextlib.suppress(IndexError):  # another thread has closed it
            fd = self._file.pop()
            # a network or FUSE file system may fail here; that says nothing of verified bytes
            with contextlib.suppress(OSError):
                unlock_and_close(fd)

    def __del__(self) -> None:
        """Who forgets to close a reader keeps no descriptor, and no lock, for good."""
        files = getattr(self, "_file", [])
        with contextlib.suppress(IndexError, OSError):
            if self._owner == os.getpid():
                unlock_and_close(files.pop())
            else:
                os.close(files.pop())  # a fork's copy: the lock is the parent's


def open_root(url: str) -> tuple[int, tuple[int, int]]:
    """A descriptor of a directory, and device and inode. Raises DeviceMissing."""
    fd = -1
    try:
        fd = os.open(url, os.O_RDONLY | os.O_DIRECTORY)
        status = os.fstat(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM):
            raise_device_error(error, url, "open")
        raise DeviceMissing(
            f"device {url} cannot be opened: {error.strerror}", device=url
        ) from error
    return fd, (status.st_dev, status.st_ino)


def sync_filesystem(fd: int) -> None:
    """Make durable all that was written to the filesystem of a descriptor, removed names too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(fd):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def temporary_path() -> str:
    """A new name in tmp/."""
    return f"{TMP}/{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(6)}"


def allocate(fd: int, size_bytes: int) -> None:
    """Reserve the blocks of a file, or give it its size where the filesystem reserves none."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size_bytes)


def names_fold(root: int) -> bool:
    """Whether keys are escaped there: the device says so, or `objects` is found under another case.

    Found out without writing.
    """
    own = os.stat(OBJECTS, dir_fd=root)
    with contextlib.suppress(FileNotFoundError):
        os.stat(ESCAPED_NAMES, dir_fd=root)
        return True
    try:
        other = os.stat(OBJECTS.upper(), dir_fd=root)
    except FileNotFoundError:
        return False
    return (other.st_dev, other.st_ino) == (own.st_dev, own.st_ino)


def names_normalise(root: int, mode: int) -> bool:
    """Whether a file is found under another Unicode form of its name (ZFS with normalization=formD,
    HFS+, some SMB mounts), though the case of names counts."""
    stem = f"{TMP}/{time.time_ns():020d}-{secrets.token_hex(6)}-"
    fd = open_beneath(root, f"{stem}\u00e9", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        os.stat(f"{stem}e\u0301", dir_fd=root)
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)
        os.unlink(f"{stem}\u00e9", dir_fd=root)
    return True


def note_names(root: int, mode: int) -> None:
    """Of a new device: where names are not kept apart, say so for good, so that keys are escaped
    there wherever its files are copied to (PROTOCOL 13). A device made before keeps its names."""
    if names_fold(root) or names_normalise(root, mode):
        os.close(open_beneath(root, ESCAPED_NAMES, os.O_WRONLY | os.O_CREAT, mode))


def aligned_copy(buffer: Bytes) -> Bytes:
    copy = aligned_array(round_up(len(buffer), ALIGNMENT_BYTES))[: len(buffer)]
    copy[:] = buffer
    return copy
