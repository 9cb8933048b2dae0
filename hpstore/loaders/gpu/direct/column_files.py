"""Column files that direct reads use, kept open between batches."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from hpstore.errors import DeviceTimeout, HpstoreError, IntegrityError
from hpstore.loaders.gpu.direct.cufile_queue import DirectEngine
from hpstore.loaders.gpu.direct.device_columns import DirectColumn
from hpstore.objects.read.column_reader import ColumnReader
from hpstore.runtime.closing import Closing

FILES_SHARE = 8  # one part in so many of the files that a process may open
LEAST_FILES = 64
_Key = tuple[int, int]  # of the file: a repaired column is another one under the same name


@dataclass(slots=True)
class _Open:
    column: DirectColumn
    users: int


class OpenColumns(Closing):
    """DirectColumns by file, the one used longest ago closed first. Thread-safe.

    Files are opened on their device's lane: a device that hangs costs the deadline.
    """

    def __init__(self, engine: DirectEngine) -> None:
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = max(LEAST_FILES, may_open // FILES_SHARE)
        self._engine = engine
        self._open: OrderedDict[_Key, _Open] = OrderedDict()
        self._lock = threading.Lock()  # guards _open

    def borrow(
        self, wanted: Sequence[ColumnReader], deadline_seconds: float
    ) -> list[DirectColumn | Exception]:
        """The column of each reader, or why there is none; give_back() those that there are.

        Raises OSError when this process may open no more files, DirectUnavailable after a close.
        """
        keys = [_key(held) for held in wanted]
        found: dict[_Key, DirectColumn | Exception] = {}
        opening: dict[_Key, Future[DirectColumn]] = {}
        try:
            for key, held in zip(keys, wanted, strict=True):
                if key in found or key in opening:
                    continue
                kept = self._take(key, None)
                if kept is not None:
                    found[key] = kept
                else:
                    opening[key] = self._start(held)
        except BaseException:
            self.give_back([one for one in found.values() if isinstance(one, DirectColumn)])
            for future in opening.values():
                future.add_done_callback(_close_late)
            raise
        wait(opening.values(), timeout=deadline_seconds)
        for key, future in opening.items():
            found[key] = self._opened(key, future, deadline_seconds)
        return self._counted(keys, found)

    def _counted(
        self, keys: list[_Key], found: dict[_Key, DirectColumn | Exception]
    ) -> list[DirectColumn | Exception]:
        """In the order asked for; each appearance is one use."""
        seen: set[_Key] = set()
        with self._lock:
            for key in keys:
                if isinstance(found[key], DirectColumn) and key in seen:
                    self._open[key].users += 1
                seen.add(key)
        return [found[key] for key in keys]

    def _take(self, key: _Key, opened: DirectColumn | None) -> DirectColumn | None:
        """Use what is kept, or keep what was opened."""
        with self._lock:
            entry = self._open.get(key)
            if entry is None and opened is not None:
                entry = self._open[key] = _Open(opened, 0)
            if entry is None:
                return None
            entry.users += 1
            self._open.move_to_end(key)
            return entry.column

    def _start(self, held: ColumnReader) -> Future[DirectColumn]:
        # a descriptor of its own: the reader may close its one while a slow device opens this
        fd = os.dup(held.descriptor)

        def call() -> DirectColumn:
            made = DirectColumn(self._engine, fd, pool_key=held.pool_key)
            if (made.header.key, made.header.name) != (held.header.key, held.header.name):
                made.close()
                raise IntegrityError(f"{held.where} was recycled while it was opened")
            return made

        try:
            future = self._engine.submit(held.device_id, call)
        except BaseException:
            os.close(fd)
            raise
        future.add_done_callback(lambda _: os.close(fd))
        return future

    def _opened(
        self, key: _Key, future: Future[DirectColumn], deadline_seconds: float
    ) -> DirectColumn | Exception:
        if not future.done():
            future.add_done_callback(_close_late)
            return DeviceTimeout(f"a file took more than {deadline_seconds:.1f} s to open")
        try:
            made = future.result()
        except (HpstoreError, OSError) as error:
            return error
        kept = self._take(key, made)
        assert kept is not None
        if kept is not made:  # another thread was first
            made.close()
        return kept

    def give_back(self, columns: Sequence[DirectColumn]) -> None:
        """Nobody reads them for the borrower any more."""
        idle = []
        with self._lock:
            by_column = {id(entry.column): entry for entry in self._open.values()}
            for column in columns:
                if id(column) in by_column:
                    by_column[id(column)].users -= 1
            for key in [key for key, entry in self._open.items() if not entry.users]:
                if len(self._open) <= self.limit:
                    break
                idle.append(self._open.pop(key).column)
        for column in idle:
            column.close()

    def close(self) -> None:
        """Close all. Idempotent."""
        with self._lock:
            entries, self._open = list(self._open.values()), OrderedDict()
        for entry in entries:
            entry.column.close()


def _key(held: ColumnReader) -> _Key:
    found = os.fstat(held.descriptor)
    return found.st_dev, found.st_ino


def _close_late(future: Future[DirectColumn]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
