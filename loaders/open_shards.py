"""Objects kept open for reading: each thread has its own reader, over files that are shared."""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from hpstore.closing import Closing
from hpstore.loaders.together import together
from hpstore.pooled import PooledReader

FILES_SHARE = 8  # a thread keeps at most one part in so many of the files that a process may open
LEAST_READERS = 4


class _Own(threading.local):
    """What one thread has open, the one used longest ago first; closed when the thread ends."""

    def __init__(self, everyone: weakref.WeakSet[_Shelf], closed: deque[str]) -> None:
        self.shelf = _Shelf(closed)
        everyone.add(self.shelf)


class _Shelf:
    def __init__(self, closed: deque[str]) -> None:
        self.readers: OrderedDict[str, PooledReader] = OrderedDict()
        finalizer = weakref.finalize(self, _close_all, self.readers, closed, os.getpid())
        finalizer.atexit = False


def _close_all(readers: OrderedDict[str, PooledReader], closed: deque[str], pid: int) -> None:
    """Not in a forked child: its descriptors share their locks with the parent's."""
    while readers:
        key, reader = readers.popitem()
        if pid == os.getpid():
            reader.close()
            closed.append(key)


class _First:
    """The reader of an object of which those of all threads come, and how many these are."""

    def __init__(self) -> None:
        self.opened: Future[PooledReader] = Future()
        self.users = 0


def _close_first(first: dict[str, _First], pid: int) -> None:
    while first:
        opened = first.popitem()[1].opened
        if opened.done() and opened.exception() is None and pid == os.getpid():
            opened.result().close()


class OpenShards(Closing):
    """Readers by key. Thread-safe: no two threads share one. In a forked child, made anew.

    `files_each`: that one of them keeps open. An object is looked up and opened once; the readers
    of other threads share its files.
    """

    def __init__(self, files_each: int) -> None:
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = max(LEAST_READERS, may_open // FILES_SHARE // files_each)
        self._pid = os.getpid()
        self._shelves: weakref.WeakSet[_Shelf] = weakref.WeakSet()
        self._closed: deque[str] = deque()  # keys of readers that threads have closed
        self._own = _Own(self._shelves, self._closed)
        self._first: dict[str, _First] = {}
        self._lock = threading.Lock()  # guards _first, and sharing of what is in it
        weakref.finalize(self, _close_first, self._first, self._pid).atexit = False

    def get(self, key: str, make: Callable[[], PooledReader]) -> PooledReader:
        """The calling thread's reader of a key, made if need be.

        It stays open until the thread has asked for `limit` other ones; not to be closed.
        """
        readers = self._own.shelf.readers
        if key in readers:
            readers.move_to_end(key)
            return readers[key]
        found = readers[key] = self._shared(key, make)
        self._make_room(readers)
        return found

    def get_all(self, wanted: Mapping[str, Callable[[], PooledReader]]) -> None:
        """As get() for many keys, which are opened at the same time. Raises what one of them does;
        the others are open then."""
        readers = self._own.shelf.readers
        for key in wanted.keys() & readers.keys():
            readers.move_to_end(key)
        missing = [key for key in wanted if key not in readers]
        opened = together([partial(self._shared, key, wanted[key]) for key in missing])
        for key, outcome in zip(missing, opened, strict=True):
            if outcome.exception() is None:
                readers[key] = outcome.result()
        self._make_room(readers)
        for outcome in opened:
            outcome.result()

    def _make_room(self, readers: OrderedDict[str, PooledReader]) -> None:
        while len(readers) > self.limit:
            old, reader = readers.popitem(last=False)
            reader.close()
            self._closed.append(old)

    def _shared(self, key: str, make: Callable[[], PooledReader]) -> PooledReader:
        with self._lock:
            unused = self._take_unused()
            first = self._first.get(key)
            mine = first is None
            if first is None:
                first = self._first[key] = _First()
            first.users += 1
        for reader in unused:  # not under the lock: on a device that hangs it may wait
            reader.close()
        try:
            if mine:
                self._open(key, first, make)
            opened = first.opened.result()
        except BaseException:
            self._closed.append(key)
            raise
        with self._lock:
            if self._first.get(key) is first:
                return opened.share()
        return make()  # it was closed meanwhile

    def _open(self, key: str, first: _First, make: Callable[[], PooledReader]) -> None:
        try:
            first.opened.set_result(make())
        except BaseException as error:
            with self._lock:
                del self._first[key]  # the next one tries again
            first.opened.set_exception(error)
            raise

    def _take_unused(self) -> list[PooledReader]:
        """What no thread has open any more, to be closed: what was replaced is then seen."""
        found = []
        while self._closed:
            key = self._closed.popleft()
            first = self._first.get(key)
            if first is not None:
                first.users -= 1
                if first.users <= 0 and first.opened.done():
                    del self._first[key]
                    found.append(first.opened.result())
        return found

    def close(self) -> None:
        """Close what all threads have open; none of them reads now. Idempotent."""
        with self._lock:
            _close_first(self._first, self._pid)
        for shelf in list(self._shelves):
            _close_all(shelf.readers, self._closed, self._pid)


__all__ = ["OpenShards"]
