"""A filesystem that is full for this process: no new inode, no new block."""

from __future__ import annotations

import errno
import os

import pytest

from hpstore.devices import confined_names


def no_room(patch: pytest.MonkeyPatch) -> None:
    """From now on files and directories cannot be made, and none gets longer by fallocate."""
    plain_open, plain_mkdir, plain_allocate = os.open, os.mkdir, os.posix_fallocate

    def opened(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & os.O_CREAT:
            return plain_open(path, flags, mode, dir_fd=dir_fd)
        try:
            os.stat(path, dir_fd=dir_fd)
        except FileNotFoundError:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        return plain_open(path, flags, mode, dir_fd=dir_fd)

    def mkdir(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        try:
            os.stat(path, dir_fd=dir_fd)
        except FileNotFoundError:
            if os.path.dirname(path):
                os.stat(os.path.dirname(path), dir_fd=dir_fd)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        plain_mkdir(path, mode, dir_fd=dir_fd)

    def allocate(fd: int, offset: int, length: int) -> None:
        if os.fstat(fd).st_size < offset + length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain_allocate(fd, offset, length)

    patch.setattr(confined_names, "_supported", False)  # then it is os.open() that opens
    patch.setattr(os, "open", opened)
    patch.setattr(os, "mkdir", mkdir)
    patch.setattr(os, "posix_fallocate", allocate)
