"""Files in a directory that others may be able to write to: only this user's own are used.

Checksums of cached blocks find damage, not intent: whoever can write the files can write matching
ones. And a link that another user has laid under a name that is known beforehand would lead a
write to any file of this user.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat

_log = logging.getLogger(__name__)
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OLD = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def open_own(path: str) -> int:
    """Open a file for reading and writing, made if it is not there; the descriptor.

    What is there and is not this user's alone is removed, logged, and made again. Raises OSError.
    """
    if _is_own(path):
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, _OLD)
            if _own(os.fstat(fd)):  # the name may have another file by now
                return fd
            os.close(fd)
    return new_own(path)


def new_own(path: str) -> int:
    """Make an empty file in place of whatever has its name; the descriptor. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if not _own(os.lstat(path)):
            _log.warning(
                "%s is a link, or another user's, or may be written by others: what it holds is "
                "not used, and it is made again",
                path,
            )
        os.unlink(path)
    return os.open(path, _NEW, 0o600)


def own_opener(path: str, _: int) -> int:
    """As `opener` of open(), to read: a descriptor of a file that is this user's alone. Raises
    OSError, for any other file, too, and waits for none (a FIFO)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not _own(os.fstat(fd)):
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a file of this user alone", path)
    return fd


def _is_own(path: str) -> bool:
    try:
        return _own(os.lstat(path))
    except OSError:
        return False


def open_lock(path: str) -> int:
    """Open a file to be locked, made if it is not there: another process may hold it, so it is
    never removed. Raises OSError, for a link and for what is no file, too.
    """
    fd = os.open(path, _OLD | os.O_CREAT, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EPERM, f"{path} is not a file of one name: remove it")
    return fd


def _own(found: os.stat_result) -> bool:
    """Regular, of one name, not to be written by others."""
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and found.st_nlink == 1
        and not found.st_mode & 0o022
    )
