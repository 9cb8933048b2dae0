"""Names on a device are names beneath its root: no symbolic link leads out, no pipe is waited for.

A device may come from elsewhere, or be written to by another user. A link where a file or directory
of ours should be would let a put, a repair or a delete change files anywhere on the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import stat
from collections.abc import Iterator
from functools import lru_cache

_log = logging.getLogger(__name__)
_OPENAT2 = 437  # openat2(2), Linux 5.6; one number on all architectures but Alpha
_NO_SYMLINKS, _BENEATH = 0x04, 0x08
_MADE = os.O_CREAT | os.O_EXCL  # what is opened so is a new regular file
_HOW_BYTES = 24  # of struct open_how
# the types are said once: ctypes finds them out at each call else, for half of what the call takes
_syscall = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    use_errno=True,
)(("syscall", ctypes.CDLL(None)))
_supported = True
SHARED = 0o077  # rights of other users


class _How(ctypes.Structure):
    """struct open_how."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@lru_cache(maxsize=64)
def _how(flags: int, mode: int) -> tuple[_How, int]:
    """How files are opened, and where that is in memory. Read by the kernel alone."""
    how = _How(flags, mode if flags & os.O_CREAT else 0, _NO_SYMLINKS | _BENEATH)
    return how, ctypes.addressof(how)


def open_beneath(root: int, path: str, flags: int, mode: int = 0o600) -> int:
    """os.open() of a path relative to `root` of which no component is a symbolic link.

    Raises OSError: ELOOP where one is, ENXIO for what is no regular file or directory. On a kernel
    without openat2 only the last component is looked at. A new file gets `mode` regardless of the
    umask: other members of the pool's group use it, too.
    """
    if flags & os.O_DIRECTORY:
        return _open(root, path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    fd = _open(root, path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if flags & _MADE == _MADE:
        widen(fd, mode)
        return fd
    kind = os.fstat(fd).st_mode
    if stat.S_ISDIR(kind) or stat.S_ISREG(kind):
        if flags & os.O_CREAT:
            widen(fd, mode)
        return fd
    os.close(fd)
    raise OSError(errno.ENXIO, "no regular file", path)


def _open(root: int, path: str, flags: int, mode: int) -> int:
    global _supported
    while _supported:
        _kept, how = _how(flags, mode)
        fd = int(_syscall(_OPENAT2, root, os.fsencode(path), how, _HOW_BYTES))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number in (errno.EINTR, errno.EAGAIN):
            continue
        if number not in (errno.ENOSYS, errno.EPERM):
            raise OSError(number, os.strerror(number), path)
        fd = os.open(path, flags, mode, dir_fd=root)  # raises EPERM where it is the file's
        _supported = False  # the kernel or a sandbox has refused
        _log.warning(
            "openat2 is not available (%s): only the last component of a name on a device is "
            "checked for symbolic links",
            os.strerror(number),
        )
        return fd
    return os.open(path, flags, mode, dir_fd=root)


def widen(fd: int, mode: int) -> None:
    """Give a file or directory of this user the rights of `mode` that the umask took from others;
    the set-group-id bit stays."""
    if not mode & SHARED:
        return
    found = os.fstat(fd)
    has = stat.S_IMODE(found.st_mode)
    if mode & ~has and found.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # a filesystem without modes
            os.fchmod(fd, has | mode)


def rename_beneath(root: int, old: str, new: str) -> None:
    """os.rename() within a device."""
    with parent_beneath(root, old) as (here, name), parent_beneath(root, new) as (there, last):
        os.rename(name, last, src_dir_fd=here, dst_dir_fd=there)


@contextlib.contextmanager
def parent_beneath(root: int, path: str) -> Iterator[tuple[int, str]]:
    """A descriptor of the directory of `path`, as open_beneath opens it, and the name in it."""
    parent, _, name = path.rpartition("/")
    if not parent:
        yield root, name
        return
    fd = open_beneath(root, parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield fd, name
    finally:
        os.close(fd)


def stamp_beneath(root: int, path: str) -> tuple[int, int, int] | None:
    """Inode, time in ns and size of a file or link; None where there is none. Raises OSError."""
    try:
        status = os.stat(path, dir_fd=root, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def is_foreign(error: OSError) -> bool:
    """Whether open_beneath refused something that is not ours: a link, a pipe, a device node."""
    return error.errno in (errno.ELOOP, errno.ENXIO)
