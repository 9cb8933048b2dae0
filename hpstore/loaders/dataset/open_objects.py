"""Objects kept open for reading: each thread has its own reader, over files that are shared."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import numpy as np

from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Int32s
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.runtime.closing import Closing
from hpstore.runtime.open_file_limit import may_open

# keys -> a reader of each, or what is wrong with it
_log = logging.getLogger(__name__)
Make = Callable[[list[str]], Mapping[str, PooledReader | Exception]]
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


def _required(found: PooledReader | Exception) -> PooledReader:
    if isinstance(found, Exception):
        raise found
    return found


def _close_first(first: dict[str, _First], pid: int) -> None:
    while first:
        opened = first.popitem()[1].opened
        if opened.done() and opened.exception() is None and pid == os.getpid():
            opened.result().close()


def in_reach(shards: Int32s, most: int) -> list[Int64s]:
    """Which of n ranges, by their `shards` (n,), are read at once: of `most` shards. Pure.

    A thread that opens one more closes the one that it has used longest ago: what is still to be
    read of that comes from whatever file has the descriptor's number by then, or never.
    """
    if not len(shards):
        return []
    group = np.unique(shards, return_inverse=True)[1] // most
    return [np.flatnonzero(group == number) for number in range(int(group.max()) + 1)]


class OpenShards(Closing):
    """Readers by key. Thread-safe: no two threads share one. In a forked child, made anew.

    `files_each`: that one of them keeps open. An object is looked up and opened once; the readers
    of other threads share its files. `objects`: how many there are. The process' limit of open
    files is raised to keep all of them open, as far as that may be (docs/decisions/0035); with
    fewer, what was used longest ago is closed; `reopened_total` counts what is opened again.
    """

    def __init__(self, files_each: int, *, objects: int = 0) -> None:
        allowed = may_open(objects * files_each * FILES_SHARE)
        self.limit = max(LEAST_READERS, allowed // FILES_SHARE // files_each)
        self._objects, self.reopened_total = objects, 0
        self._made_room: set[str] = set()  # keys of readers that were closed for others
        self._pid = os.getpid()
        self._shelves: weakref.WeakSet[_Shelf] = weakref.WeakSet()
        self._closed: deque[str] = deque()  # keys of readers that threads have closed
        self._own = _Own(self._shelves, self._closed)
        self._first: dict[str, _First] = {}
        self._lock = threading.Lock()  # guards _first, and sharing of what is in it
        weakref.finalize(self, _close_first, self._first, self._pid).atexit = False

    def get(self, key: str, make: Make) -> PooledReader:
        """The calling thread's reader of a key, made if need be.

        It stays open until the thread has asked for `limit` other ones; not to be closed. Raises
        what `make` says of it.
        """
        readers = self._own.shelf.readers
        if key in readers:
            readers.move_to_end(key)
            return readers[key]
        self._count_again([key])
        found = readers[key] = _required(self._shared([key], make)[key])
        self._make_room(readers)
        return found

    def get_all(self, keys: Iterable[str], make: Make) -> None:
        """As get() for many keys, which are opened together. Raises what is wrong with one of them;
        the others are open then."""
        readers = self._own.shelf.readers
        missing = []
        for key in dict.fromkeys(keys):
            if key in readers:
                readers.move_to_end(key)
            else:
                missing.append(key)
        self._count_again(missing)
        opened = self._shared(missing, make)
        for key, found in opened.items():
            if not isinstance(found, Exception):
                readers[key] = found
        self._make_room(readers)
        for found in opened.values():
            _required(found)

    def _make_room(self, readers: OrderedDict[str, PooledReader]) -> None:
        while len(readers) > self.limit:
            old, reader = readers.popitem(last=False)
            reader.close()
            self._closed.append(old)
            self._made_room.add(old)

    def _count_again(self, keys: Iterable[str]) -> None:
        again = sum(key in self._made_room for key in keys)
        said = self.reopened_total > self.limit
        self.reopened_total += again
        if self.reopened_total > self.limit and not said:
            _log.warning(
                "shards are opened again and again: there are %d, and a thread keeps %d open, an "
                "eighth of what this process may (ulimit -n, its hard limit): raise that",
                self._objects,
                self.limit,
            )

    def _shared(self, keys: list[str], make: Make) -> dict[str, PooledReader | Exception]:
        """Readers for this thread over files that those of all threads share."""
        joined, mine = dict[str, _First](), dict[str, _First]()
        with self._lock:
            unused = self._take_unused()
            for key in keys:
                if key not in self._first:
                    self._first[key] = mine[key] = _First()
                joined[key] = self._first[key]
                joined[key].users += 1
        for reader in unused:  # not under the lock: on a device that hangs it may wait
            reader.close()
        try:
            if mine:
                self._open(mine, make)
            return {key: self._share(key, first, make) for key, first in joined.items()}
        except BaseException:
            self._closed.extend(joined)
            raise

    def _open(self, mine: Mapping[str, _First], make: Make) -> None:
        made: Mapping[str, PooledReader | BaseException] = {}
        try:
            made = make(list(mine))
        except BaseException as error:
            made = dict.fromkeys(mine, error)
            raise
        finally:
            for key, first in mine.items():
                found = made[key]
                if isinstance(found, BaseException):
                    with self._lock:
                        del self._first[key]  # the next one tries again
                    first.opened.set_exception(found)
                else:
                    first.opened.set_result(found)

    def _share(self, key: str, first: _First, make: Make) -> PooledReader | Exception:
        error = first.opened.exception()  # waits for the thread that opens it
        if isinstance(error, Exception):
            return error
        opened = first.opened.result()
        with self._lock:
            if self._first.get(key) is first:
                return opened.share()
        return make([key])[key]  # it was closed meanwhile

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
