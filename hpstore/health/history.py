"""A bounded history of samples and decisions: one SQLite file on the node, never on a device.

It is for people and for the forecast; nothing that keeps data safe depends on it. So a file that is
damaged, locked or not writable is counted and told once, and everything goes on without it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from hpstore.health.detect.io_recorder import Operation
from hpstore.health.detect.telemetry import Tick
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.states import Decision, Role
from hpstore.runtime.metrics import Metrics
from hpstore.runtime.process_identity import this_process

T = TypeVar("T")
_log = logging.getLogger(__name__)

SCHEMA = 1
_WAIT_SECONDS = 2.0  # for another process that writes
_TABLES = """
CREATE TABLE IF NOT EXISTS samples (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, device TEXT NOT NULL, operation TEXT NOT NULL,
    ios INTEGER NOT NULL, score REAL NOT NULL, reference REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS samples_at ON samples (at);
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, device TEXT NOT NULL, was TEXT NOT NULL,
    becomes TEXT NOT NULL, reason TEXT NOT NULL, role TEXT NOT NULL, dry_run INTEGER NOT NULL,
    process TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS decisions_at ON decisions (at);
"""
_ADD_PROCESS = "ALTER TABLE decisions ADD COLUMN process TEXT NOT NULL DEFAULT ''"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSample:
    """One device and operation in one tick."""

    at_seconds: float
    device: str
    operation: Operation
    ios: int
    score: float  # mean time to what is usual
    reference_seconds: float


class History:
    """Samples and decisions of one node, oldest dropped first.

    Owned by one thread; others open their own, `read_only`. At most `rows_most` rows a table, none
    older than `age_most_seconds`. `problem` says why the last call did nothing, "" if it did.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metrics: Metrics,
        *,
        read_only: bool = False,
        rows_most: int = 200_000,
        age_most_seconds: float = 90 * 86400.0,
    ) -> None:
        self.path, self.problem = os.fspath(path), ""
        self._metrics, self._read_only = metrics, read_only
        self._rows_most, self._age_most_seconds = rows_most, age_most_seconds
        self._file: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None  # of the file that is open
        self._given_up = self._skipped = False

    def add_tick(self, tick: Tick, at_seconds: float) -> None:
        """Note a tick's samples; `at_seconds` since 1970."""
        rows = [
            (
                at_seconds,
                device,
                operation.name,
                sample.counts[operation],
                score,
                tick.reference_seconds,
            )
            for device, sample in tick.samples.items()
            for operation, score in sample.scores.items()
        ]
        self._add("samples", "at, device, operation, ios, score, reference", rows, at_seconds)

    def add_decisions(self, decisions: Iterable[Decision]) -> None:
        """Note what was decided."""
        rows = [
            (
                d.at_seconds,
                d.device,
                d.was.value,
                d.becomes.value,
                d.reason,
                d.role.value,
                int(d.dry_run),
                d.process or this_process(),
            )
            for d in decisions
        ]
        if rows:
            names = "at, device, was, becomes, reason, role, dry_run, process"
            self._add("decisions", names, rows, max(float(row[0]) for row in rows))

    def samples(self, device: str, since_seconds: float) -> list[PastSample]:
        """A device's samples, oldest first; none when the file cannot be read."""
        query = (
            "SELECT at, device, operation, ios, score, reference FROM samples "
            "WHERE device = ? AND at >= ? ORDER BY at, id"
        )
        return [
            PastSample(
                at_seconds=row[0],
                device=row[1],
                operation=Operation[row[2]],
                ios=row[3],
                score=row[4],
                reference_seconds=row[5],
            )
            for row in self._try(lambda file: file.execute(query, (device, since_seconds)), ())
        ]

    def decisions(self, count: int, *, until_seconds: float = math.inf) -> list[Decision]:
        """The last `count` decisions, newest first; none when the file cannot be read.

        Parameters
        ----------
        count
            At most so many rows are looked at.
        until_seconds
            Later ones are left out: a clock that was ahead has written them.

        Returns
        -------
        list[Decision]
            Without rows that this version cannot read, which are counted, and logged once.
        """
        ask = "SELECT at, device, was, becomes, reason, role, dry_run"
        rest = "FROM decisions WHERE at <= ? ORDER BY at DESC, id DESC LIMIT ?"

        def read(file: sqlite3.Connection) -> Iterable[Sequence[Any]]:
            process = "process" if _names_processes(file) else "''"
            return file.execute(f"{ask}, {process} {rest}", (until_seconds, count))

        found = [self._decision(row) for row in self._try(read, ())]
        return [decision for decision in found if decision is not None]

    def _decision(self, row: Sequence[Any]) -> Decision | None:
        """What a row says; None for one of another version, with a state that is not known here."""
        try:
            return Decision(
                at_seconds=float(row[0]),
                device=str(row[1]),
                was=HealthState(row[2]),
                becomes=HealthState(row[3]),
                reason=str(row[4]),
                role=Role(row[5]),
                dry_run=bool(row[6]),
                process=str(row[7]),
            )
        except ValueError as error:
            self._metrics.count("health_history_row_skipped_total")
            if not self._skipped:
                _log.warning(
                    "health history %s has decisions that this hpstore cannot read, which are "
                    "left out: %s",
                    self.path,
                    error,
                )
            self._skipped = True
            return None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _add(
        self, table: str, names: str, rows: Sequence[Sequence[object]], now_seconds: float
    ) -> None:
        marks = ", ".join("?" * len(names.split(",")))

        def write(file: sqlite3.Connection) -> Iterable[Sequence[object]]:
            with file:  # one transaction: all of it, or nothing
                file.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)
                file.execute(
                    f"DELETE FROM {table} WHERE at < ?", (now_seconds - self._age_most_seconds,)
                )
                # ids ascend and nothing is deleted from the middle
                file.execute(
                    f"DELETE FROM {table} WHERE id <= (SELECT MAX(id) FROM {table}) - ?",
                    (self._rows_most,),
                )
            return ()

        if rows:
            self._try(write, ())

    def _try(
        self,
        action: Callable[[sqlite3.Connection], Iterable[Sequence[T]]],
        otherwise: Iterable[Sequence[T]],
    ) -> list[Sequence[T]]:
        """Run an action on the file; what goes wrong is counted, and told once."""
        if self._given_up:
            return list(otherwise)
        try:
            if self._file is not None and _inode(self.path) != self._inode:
                self.close()  # it was tidied away: others write into a new one
            if self._file is None:
                self._file = self._open()
                self._inode = _inode(self.path)
            result = list(action(self._file))
        except sqlite3.Error as error:
            self._metrics.count("health_history_error_total")
            # busy, full or read-only may pass; a file that is no database will not
            self._given_up = not isinstance(error, sqlite3.OperationalError)
            if not self.problem:
                _log.warning(
                    "health history %s cannot be used: %s. Health goes on without it; if it is "
                    "damaged, move it away and a new one is made",
                    self.path,
                    error,
                )
            self.problem = str(error)
            if self._given_up:
                self.close()
            return list(otherwise)
        self.problem = ""
        return result

    def _open(self) -> sqlite3.Connection:
        if self._read_only:
            file = sqlite3.connect(
                f"file:{_quoted(self.path)}?mode=ro", uri=True, timeout=_WAIT_SECONDS
            )
        else:
            _make(self.path)
            file = sqlite3.connect(self.path, timeout=_WAIT_SECONDS)
        try:
            with closing(file.execute("PRAGMA user_version")) as cursor:
                (version,) = cursor.fetchone()
            if version > SCHEMA:
                raise sqlite3.DatabaseError(f"schema {version}, this hpstore knows {SCHEMA}")
            if not self._read_only:
                file.execute("PRAGMA journal_mode = WAL")
                file.execute("PRAGMA synchronous = NORMAL")
                if version == 0:
                    file.executescript(_TABLES + f"PRAGMA user_version = {SCHEMA};")
                elif not _names_processes(file):  # of an hpstore that did not write that down
                    with contextlib.suppress(sqlite3.OperationalError):  # another one adds it
                        file.execute(_ADD_PROCESS)
        except sqlite3.Error:
            file.close()
            raise
        return file


def _names_processes(file: sqlite3.Connection) -> bool:
    """Whether the file has a column for who decided."""
    with closing(file.execute("PRAGMA table_info(decisions)")) as cursor:
        return any(row[1] == "process" for row in cursor)


def _inode(path: str) -> tuple[int, int] | None:
    """What distinguishes a file from one that later has its name; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _make(path: str) -> None:
    """Create the file for its owner alone; sqlite would ask the umask.

    It is not opened: closing any descriptor of a file ends all locks that this process has on it,
    those of another connection, too. Others then take themselves for the last user, and delete the
    log (WAL) under it.
    """
    try:
        os.mknod(path, stat.S_IFREG | 0o600)
    except FileExistsError:
        # sqlite would open it for reading, and make its log such that nobody can write it later
        if not os.access(path, os.W_OK, effective_ids=True):
            raise sqlite3.OperationalError(f"Permission denied: {path!r}") from None
    except OSError as error:
        raise sqlite3.OperationalError(str(error)) from error


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
