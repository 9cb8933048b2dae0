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
from collections.abc import Callable

from hpstore.devices.base import REGISTERS, REGISTERS_BYTES, Stamp, raise_device_error
from hpstore.devices.confined_names import stamp_beneath
from hpstore.devices.file_handles import allocate, temporary_path
from hpstore.errors import DeviceError
from hpstore.format.records import POOL_FILE

_FLOCK = struct.Struct("hhqqi0q")  # type, whence, start, length, process (0 for these locks)
_TRIES = 16
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalHold:
    """A range of the registers, or, not `taken`, what it held when another one had it."""

    def __init__(
        self, url: str, fd: int, offset: int, nbytes: int, content: bytes, record: Stamp | None
    ) -> None:
        self._url, self._file, self._offset, self._bytes = url, fd, offset, nbytes
        self.content, self.record = content, record

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

    def finish(self, offset: int, data: bytes) -> None:
        try:
            self.write(offset, data)
        finally:
            self.release()

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
            record = stamp_beneath(root, POOL_FILE)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        return LocalHold(url, fd, offset, nbytes, content.ljust(nbytes, b"\0"), record)
    raise DeviceError(f"{REGISTERS} on device {url} is removed again and again", device=url)


def make_registers(root: int, file_mode: int) -> None:
    """Make the file while there is room: on a full filesystem only its locks would work."""
    os.close(_open(root, file_mode))


def _open(root: int, file_mode: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.open(REGISTERS, _OPEN, dir_fd=root)
    if not _link_filled(root, file_mode):  # a filesystem without links
        with contextlib.suppress(FileExistsError):
            fd = os.open(REGISTERS, _OPEN | os.O_CREAT | os.O_EXCL, file_mode, dir_fd=root)
            _prepare(fd, file_mode, lambda: allocate(fd, REGISTERS_BYTES))
    os.fsync(root)
    return os.open(REGISTERS, _OPEN, dir_fd=root)


def _link_filled(root: int, file_mode: int) -> bool:
    """Make the file of zeros and give it its name unless it is there; False where that cannot be.

    Zeros, not only room: a later write in place is then no change of the filesystem's own, and its
    sync takes less than half of the time. Under another name, as others write as soon as it is
    there.
    """
    name = temporary_path()
    try:
        fd = os.open(name, _OPEN | os.O_CREAT | os.O_EXCL, file_mode, dir_fd=root)
    except FileNotFoundError:
        return False
    try:
        _prepare(fd, file_mode, lambda: _fill(fd))
        os.link(name, REGISTERS, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
    except FileExistsError:
        return True
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            return False
        raise
    finally:
        os.unlink(name, dir_fd=root)
    return True


def _prepare(fd: int, file_mode: int, fill: Callable[[], None]) -> None:
    """Fill a new file, durably, and close it. Whatever the umask: other users lock it, too."""
    try:
        os.fchmod(fd, file_mode)
        fill()
        os.fsync(fd)
    finally:
        os.close(fd)


def _fill(fd: int) -> None:
    done = 0
    try:
        while done < REGISTERS_BYTES:
            done += os.pwrite(fd, bytes(REGISTERS_BYTES - done), done)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.ftruncate(fd, 0)  # a pool that is full already: locks need no room, and so it can be
        os.ftruncate(fd, REGISTERS_BYTES)  # evicted from


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
