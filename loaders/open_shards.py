"""Objects kept open for reading, by each thread for itself."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

from hpstore.closing import Closing
from hpstore.pooled import PooledReader

FILES_SHARE = 8  # a thread keeps at most one part in so many of the files that a process may open
LEAST_READERS = 4


class _Own(threading.local):
    """What one thread has open, the one used longest ago first; closed when the thread ends."""

    def __init__(self, everyone: weakref.WeakSet[_Shelf]) -> None:
        self.shelf = _Shelf()
        everyone.add(self.shelf)


class _Shelf:
    def __init__(self) -> None:
        self.readers: OrderedDict[str, PooledReader] = OrderedDict()
        finalizer = weakref.finalize(self, _close_all, self.readers, os.getpid())
        finalizer.atexit = False


def _close_all(readers: OrderedDict[str, PooledReader], pid: int) -> None:
    """Not in a forked child: its descriptors share their locks with the parent's."""
    while readers:
        _, reader = readers.popitem()
        if pid == os.getpid():
            reader.close()


class OpenShards(Closing):
    """Readers by key. Thread-safe: no two threads share one. In a forked child, made anew.

    `files_each`: that one of them keeps open.
    """

    def __init__(self, files_each: int) -> None:
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = max(LEAST_READERS, may_open // FILES_SHARE // files_each)
        self._pid = os.getpid()
        self._shelves: weakref.WeakSet[_Shelf] = weakref.WeakSet()
        self._own = _Own(self._shelves)

    def get(self, key: str, make: Callable[[], PooledReader]) -> PooledReader:
        """The calling thread's reader of a key, made if need be.

        It stays open until the thread has asked for `limit` other ones; not to be closed.
        """
        readers = self._own.shelf.readers
        if key in readers:
            readers.move_to_end(key)
            return readers[key]
        found = readers[key] = make()
        if len(readers) > self.limit:
            readers.popitem(last=False)[1].close()
        return found

    def close(self) -> None:
        """Close what all threads have open; none of them reads now. Idempotent."""
        for shelf in list(self._shelves):
            _close_all(shelf.readers, self._pid)


__all__ = ["OpenShards"]
