"""What can be learned of a mounted filesystem without a write: for probes of a pool that is open
read-only."""

from __future__ import annotations

import os
import secrets
from itertools import islice

import numpy as np

from hpstore.devices.confined_names import open_beneath
from hpstore.devices.io_uring import read_batch
from hpstore.devices.mount_table import MOUNTS, read_mounts
from hpstore.errors import DeviceTimeout
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.runtime.buffers import aligned_array

READ_SECONDS = 2.0  # for one page, before a disk counts as hanging
_AMONG = 16  # names of a directory of which one is taken
_DEPTH_MOST = 300  # of keys
_STOPPED = {
    "emergency_ro": "the filesystem met an error and stopped writing",
    "shutdown": "the filesystem is shut down",
}


def read_last_page(fd: int, url: str, *, past_cache: bool) -> None:
    """Read the last page of a file, and close it. Raises OSError, DeviceTimeout.

    By a ring where there is one: a thread that waits in the kernel for a disk which hangs keeps its
    process from ending, so that a command would never come back. `past_cache`: it was opened so;
    else the kernel is asked to forget it first.
    """
    page = aligned_array(ALIGNMENT_BYTES)
    late = None
    try:
        if not past_cache:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        last = max(0, os.fstat(fd).st_size - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        one = (np.array([value], np.int64) for value in (fd, last, page.ctypes.data, len(page)))
        found = read_batch(*one, seconds=READ_SECONDS, keep=page)
        if found is None:
            os.preadv(fd, [page.data], last)
            return
        late, result = found.late, int(found.results[0])
        if late is not None:
            raise DeviceTimeout(
                f"device {url} has not read a page for {READ_SECONDS:.0f} s", device=url
            )
        if result < 0:
            raise OSError(-result, os.strerror(-result))
    finally:
        if late is None:
            os.close(fd)
        else:
            late.add_done_callback(lambda _: os.close(fd))


def some_file(root: int, directory: str) -> str | None:
    """One file somewhere below a directory, another one each time; None where there is none."""
    path = directory
    for _ in range(_DEPTH_MOST):
        try:
            fd = open_beneath(root, path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            with os.scandir(fd) as entries:
                among = list(islice(entries, _AMONG))
                if not among:
                    return None
                entry = secrets.choice(among)
                path = f"{path}/{entry.name}"
                if not entry.is_dir(follow_symlinks=False):
                    return path if entry.is_file(follow_symlinks=False) else None
        finally:
            os.close(fd)
    return None


def stopped_writing(root: int, mounts: str = MOUNTS) -> str:
    """Why the filesystem of an open directory takes no writes any more, by its mount options;
    "" where they say nothing of that. ext4 says it there since Linux 6.15, and no longer in
    statvfs."""
    device = os.fstat(root).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        table = read_mounts(mounts)
    except OSError:
        return ""
    for mount in table:
        found = set(mount.options.split(",")) & _STOPPED.keys() if mount.number == number else ()
        if found:
            return _STOPPED[min(found)]
    return ""
