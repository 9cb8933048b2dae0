"""Registers of pools that a host's service keeps: one SQLite file, for hosts without etcd.

A change is one transaction, durable before it is answered. SQLite is what is in the standard
library for that: a crash leaves all of a change or nothing, and a service that is restarted while
the old one still ends finds its lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from hpstore.errors import ConfigError, DeviceError
from hpstore.format.host_calls import MOST_BODY_BYTES
from hpstore.format.record_calls import HostRecord, RecordSwap

T = TypeVar("T")
_log = logging.getLogger(__name__)
FILE = "registers.sqlite"
MOST_RECORDS = 1 << 20  # of all pools: some 200 of them, with a few places that they have left
_BUSY_SECONDS = 2.0
_TURN_SECONDS = 5.0  # behind others: where the disk hangs, no thread waits for it but one
_TABLES = (
    "CREATE TABLE IF NOT EXISTS records"
    " (name TEXT PRIMARY KEY, revision INTEGER NOT NULL, data BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS last (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER)",
    "INSERT OR IGNORE INTO last VALUES (1, 0)",
)


class RecordFile:
    """The file in a directory. Thread-safe; calls take turns.

    Raises ConfigError where it cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / FILE
        self._turn = threading.Lock()  # held while a transaction is made
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            self._file = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = FULL")  # each commit is on the disk
            for statement in _TABLES:
                self._file.execute(statement)
            _sync_directory(self.path.parent)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"registers cannot be kept in {self.path}: {error}. Give another directory, or "
                "look at its rights and its disk"
            ) from error

    def read(self, names: Sequence[str], *, most_bytes: int = MOST_BODY_BYTES) -> list[HostRecord]:
        """Records as they are now, all at one time. Raises DeviceError, also where they hold more
        than so many bytes together."""

        def look() -> list[HostRecord]:
            if self._bytes(names) > most_bytes:
                raise DeviceError(f"these registers have more than {most_bytes} bytes now")
            return [self._record(name) for name in names]

        return self._transaction("BEGIN", look)

    def nbytes(self, names: Sequence[str]) -> int:
        """What records hold now, together. Raises DeviceError."""
        return self._transaction("BEGIN", lambda: self._bytes(names))

    def _bytes(self, names: Sequence[str]) -> int:
        asked = "SELECT length(data) FROM records WHERE name = ?"
        rows = (self._file.execute(asked, (name,)).fetchone() for name in names)
        return sum(row[0] for row in rows if row is not None)

    def swap(self, swaps: Sequence[RecordSwap]) -> bool:
        """Make all of these changes, durably, or, where a record is of another revision, none.

        Raises DeviceError; then they may have been made.
        """

        def change() -> bool:
            if any(self._record(one.name).revision != one.revision for one in swaps):
                return False
            fresh = sum(one.revision == 0 for one in swaps)
            if fresh and self._count() + fresh > MOST_RECORDS:
                raise DeviceError(f"{self.path} has {MOST_RECORDS} registers, its limit")
            (last,) = self._file.execute("SELECT revision FROM last").fetchone()
            self._file.execute("UPDATE last SET revision = ?", (last + len(swaps),))
            self._file.executemany(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?)",
                [(one.name, last + 1 + at, one.data) for at, one in enumerate(swaps)],
            )
            return True

        return self._transaction("BEGIN IMMEDIATE", change)

    def remove(self, names: Sequence[str]) -> None:
        """Remove records; absent ones are fine. Raises DeviceError."""

        def change() -> None:
            self._file.executemany(
                "DELETE FROM records WHERE name = ?", [(name,) for name in names]
            )

        self._transaction("BEGIN IMMEDIATE", change)

    def _record(self, name: str) -> HostRecord:
        row = self._file.execute(
            "SELECT revision, data FROM records WHERE name = ?", (name,)
        ).fetchone()
        return HostRecord() if row is None else HostRecord(revision=row[0], data=bytes(row[1]))

    def _count(self) -> int:
        (count,) = self._file.execute("SELECT count(*) FROM records").fetchone()
        return int(count)

    def _transaction(self, begin: str, act: Callable[[], T]) -> T:
        with self._in_turn(), self._failures():
            self._file.execute(begin)
            try:
                found = act()
                self._file.execute("COMMIT")
            except BaseException:
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")
                raise
            return found

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=_TURN_SECONDS):
            raise DeviceError(
                f"the registers of this host have kept others waiting for {_TURN_SECONDS:.0f} s: "
                "its disk hangs, or they are asked too much"
            )
        try:
            yield
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            _log.warning("registers in %s: %s", self.path, error)
            raise DeviceError(f"the registers of this host cannot be used: {error}") from error

    def close(self) -> None:
        """Idempotent. A call that hangs on its disk is left behind, and the file with it."""
        with contextlib.suppress(DeviceError), self._in_turn():
            self._file.close()


def _sync_directory(path: Path) -> None:
    for place in (path, path.parent):
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
