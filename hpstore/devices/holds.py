"""The registers of a local device: one small file, locked by ranges of bytes.

Open file description locks follow the inode, so processes exclude each other whatever directory,
user or container they run in. The descriptor is opened for each hold; its death is the lock's end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

from hpstore.devices.base import REGISTERS, REGISTERS_BYTES, raise_device_error
from hpstore.devices.local_io import allocate
from hpstore.errors import DeviceError

_FLOCK = struct.Struct("hhqqi0q")  # type, whence, start, length, process (0 for these locks)
_TRIES = 16
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalHold:
    """A range of the registers, or, not `taken`, what it held when another one had it."""

    def __init__(self, url: str, fd: int, offset: int, nbytes: int, content: bytes) -> None:
        self._url, self._file, self._offset, self._bytes = url, fd, offset, nbytes
        self.content = content

    @property
    def taken(self) -> bool:
        return self._file >= 0

    def write(self, offset: int, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._offset + offset + done)
            os.fdatasync(self._file)
        except OSError as error:
            raise_device_error(error, self._url, "write of registers")

    def release(self) -> None:
        fd, self._file = self._file, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # for copies that forks have left, too
                _set(fd, fcntl.F_UNLCK, self._offset, self._bytes)
            with contextlib.suppress(OSError):  # what was written is durable, or was said not to be
                os.close(fd)

    def forget(self) -> None:
        fd, self._file = self._file, -1
        if fd >= 0:
            os.close(fd)


def hold_range(root: int, url: str, offset: int, nbytes: int, file_mode: int) -> LocalHold:
    """Try to lock a range, and read it. `root`: the device's directory. Raises OSError."""
    for _ in range(_TRIES):
        fd = _open(root, file_mode)
        try:
            taken = _try_lock(fd, offset, nbytes)
            content = os.pread(fd, nbytes, offset) if offset < REGISTERS_BYTES else b""
            if not taken:
                os.close(fd)
                fd = -1
            elif not _current(fd, root):
                os.close(fd)  # it was removed meanwhile: another may be made and held
                continue
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        return LocalHold(url, fd, offset, nbytes, content.ljust(nbytes, b"\0"))
    raise DeviceError(f"{REGISTERS} on device {url} is removed again and again", device=url)


def _open(root: int, file_mode: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.open(REGISTERS, _OPEN, dir_fd=root)
    try:
        fd = os.open(REGISTERS, _OPEN | os.O_CREAT | os.O_EXCL, file_mode, dir_fd=root)
    except FileExistsError:
        return os.open(REGISTERS, _OPEN, dir_fd=root)
    try:
        os.fchmod(fd, file_mode)  # whatever this process' umask: other users of the pool lock it
        allocate(fd, REGISTERS_BYTES)
        os.fsync(fd)
        os.fsync(root)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _current(fd: int, root: int) -> bool:
    try:
        named = os.stat(REGISTERS, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)


def _try_lock(fd: int, offset: int, nbytes: int) -> bool:
    try:
        _set(fd, fcntl.F_WRLCK, offset, nbytes)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _set(fd: int, kind: int, offset: int, nbytes: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, nbytes, 0))


__all__ = ["LocalHold", "hold_range"]
