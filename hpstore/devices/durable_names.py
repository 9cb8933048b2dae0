"""Directories of a local device whose own names are known to be durable."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

MOST = 6  # of a device; each holds a descriptor


class DurableNames:
    """Directories that were open while the directory above them was synced. Thread-safe.

    A name or an inode number alone may belong to a directory that another process has created
    again. The inode number of a directory that is held open here is not reused, so the same number
    under the same name is the same directory, and its name need not be synced again.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[int, tuple[int, int]]] = OrderedDict()
        self._lock = threading.Lock()  # guards _held

    def known(self, name: str, fd: int) -> bool:
        """Whether the directory that is open as `fd` is durable under its name."""
        with self._lock:
            held = self._held.get(name)
            if held is None or held[1] != _identity(fd) or _removed(held[0]):
                return False
            self._held.move_to_end(name)
            return True

    def hold(self, synced: Sequence[tuple[str, int]]) -> None:
        """Take these over, however it ends: name and descriptor, open since before the one above
        was synced."""
        dropped = [fd for _, fd in synced]
        try:
            known = [(name, (fd, _identity(fd))) for name, fd in synced]
            with self._lock:
                dropped = [self._held.pop(name)[0] for name, _ in known if name in self._held]
                self._held.update(known)
                while len(self._held) > MOST:
                    dropped.append(self._held.popitem(last=False)[1][0])
        finally:
            _close(dropped)

    def close(self) -> None:
        """Hold none any more."""
        with self._lock:
            held, self._held = list(self._held.values()), OrderedDict()
        _close([fd for fd, _ in held])


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # it was only looked at
            os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _removed(fd: int) -> bool:
    """Also for filesystems that give away the number of a directory that is held open here."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:  # a network file system's, removed by another host
        return True
