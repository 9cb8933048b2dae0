"""Writer processes whose trainers have died: restarts wait for them, within a limit.

Each writer keeps a record in the pool's run directory, which is this user's and this host's alone.
Who restores waits for a writer that runs while its trainer does not, and then finds its step. One
that takes too long is ended as a collector ends dead saves (PROTOCOL 18): its step is there before
the restore looks, or never comes (docs/decisions/0123).
"""

from __future__ import annotations

import json
import logging
import os
import select
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpstore.checkpoint.catalog.writer_fence import began, here
from hpstore.config import private_directory
from hpstore.errors import ConfigError, IntegrityError
from hpstore.format.untrusted_bytes import parsing, whole
from hpstore.pool.pool import Pool
from hpstore.runtime.text_files import write_atomically

_log = logging.getLogger(__name__)
_FOLDER = "checkpoint-writers"
_RECORD_BYTES = 64 * 1024
_MOST_RECORDS = 1000
_POLL_SECONDS = 0.1  # where the kernel has no descriptors of processes


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRecord:
    """A writer process, and the trainer that it writes for. `ticks` as writer_fence.began().

    `step`: of the save that it has begun last, None before the first.
    """

    pool_id: str
    prefix: str
    boot: str
    namespace: str  # of process ids
    pid: int
    ticks: int
    trainer_pid: int
    trainer_ticks: int
    step: int | None = None
    replaces: bool = False  # the step may take the place of another one

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> WriterRecord:
        """Inverse of what WriterNotice writes. Raises IntegrityError."""
        with parsing(where):
            body: Any = json.loads(data)  # Any: JSON
            step = body["step"]
            return cls(
                pool_id=str(body["pool_id"]),
                prefix=str(body["prefix"]),
                boot=str(body["boot"]),
                namespace=str(body["namespace"]),
                pid=whole(body["pid"], "pid"),
                ticks=whole(body["ticks"], "ticks"),
                trainer_pid=whole(body["trainer_pid"], "trainer_pid"),
                trainer_ticks=whole(body["trainer_ticks"], "trainer_ticks"),
                step=None if step is None else whole(step, "step"),
                replaces=bool(body["replaces"]),
            )

    @property
    def process(self) -> tuple[int, int]:
        """What names the writer until the next boot."""
        return self.pid, self.ticks


class WriterNotice:
    """The record of this process, a writer. What fails is logged: saves go on without it."""

    def __init__(self, pool: Pool, prefix: str, trainer_pid: int) -> None:
        _, boot, namespace = here()
        self._record = WriterRecord(
            pool_id=pool.admin.record.pool_id,
            prefix=prefix,
            boot=boot,
            namespace=namespace,
            pid=os.getpid(),
            ticks=began(os.getpid()) or 0,
            trainer_pid=trainer_pid,
            trainer_ticks=began(trainer_pid) or 0,
        )
        self._directory = pool.admin.run_directory / _FOLDER
        self._write()

    def saves(self, step: int, *, replaces: bool) -> None:
        """A save begins."""
        self._record = replace(self._record, step=step, replaces=replaces)
        self._write()

    def remove(self) -> None:
        """This process ends."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._record.pid}-{self._record.ticks}.json"

    def _write(self) -> None:
        try:
            private_directory(self._directory.parent)
            private_directory(self._directory)
            write_atomically(self._path, json.dumps(asdict(self._record)), durable=False)
        except (OSError, ConfigError) as error:
            _log.warning("a restart will not wait for this writer: no record of it: %s", error)


class LeftWriters:
    """Those of dead trainers that save under a prefix of a pool. Used by one thread at a time."""

    def __init__(
        self, pool: Pool, prefix: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool, self._prefix, self._clock = pool, prefix, clock
        self._given_up: set[tuple[int, int]] = set()  # waited for once, in vain
        self.patience_seconds = 60.0  # as SaveOptions(drain_seconds=)

    def wait(self, at_most_seconds: float | None = None) -> Sequence[WriterRecord]:
        """Wait until they have ended, at most `patience_seconds`; those that have not. Each is
        waited for by one call, later ones return at once."""
        if self._pool.read_only:
            return []
        limits = [self.patience_seconds]
        if at_most_seconds is not None:
            limits.append(at_most_seconds)
        end = self._clock() + min(limits)
        left = []
        for found in self._running():
            if found.process in self._given_up:
                left.append(found)
                continue
            _log.warning(
                "process %d still writes step %s under %r for a trainer that has ended: it is "
                "waited for, at most %.0f s",
                found.pid,
                "?" if found.step is None else found.step,
                self._prefix,
                max(0.0, end - self._clock()),
            )
            if not self._ended(found, end):
                self._given_up.add(found.process)
                left.append(found)
        return left

    def _running(self) -> list[WriterRecord]:
        directory = self._pool.admin.run_directory / _FOLDER
        if not os.path.lexists(directory):
            return []
        try:
            private_directory(directory.parent)
            private_directory(directory)
            names = sorted(os.listdir(directory))[:_MOST_RECORDS]
        except (OSError, ConfigError) as error:
            _log.warning("writers of earlier processes are not looked for: %s", error)
            return []
        found = [self._looked_at(directory / name) for name in names if name.endswith(".json")]
        return [record for record in found if record is not None]

    def _looked_at(self, path: Path) -> WriterRecord | None:
        """A record, if its writer runs, its trainer does not, and both are of this pool and
        prefix. Removes that of a writer that has ended."""
        try:
            record = WriterRecord.decode(_own_bytes(path), where=str(path))
        except (OSError, IntegrityError) as error:
            _log.debug("%s is no record of a writer: %s", path, error)
            return None
        _, boot, namespace = here()
        if not boot or (record.boot == boot and record.namespace != namespace):
            return None  # of another container: its process ids say nothing here
        if record.boot != boot or not _runs(record.pid, record.ticks):
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        mine = (self._pool.admin.record.pool_id, self._prefix)
        if (record.pool_id, record.prefix) != mine:
            return None
        return None if _runs(record.trainer_pid, record.trainer_ticks) else record

    def _ended(self, record: WriterRecord, end: float) -> bool:
        """Wait for its end; False when that takes too long."""
        with _descriptor_of(record.pid) as descriptor:
            while _runs(record.pid, record.ticks):
                left = end - self._clock()
                if left <= 0:
                    return False
                if descriptor is None:
                    time.sleep(min(left, _POLL_SECONDS))
                else:
                    select.select([descriptor], [], [], left)
        return True


@contextmanager
def _descriptor_of(pid: int) -> Iterator[int | None]:
    """What is readable once a process has ended; None where there is none."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _own_bytes(path: Path) -> bytes:
    """A file of this user. Raises OSError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(f"{path} is not a file of this user")
        data = file.read(_RECORD_BYTES + 1)
    if len(data) > _RECORD_BYTES:
        raise OSError(f"{path} is too large")
    return data


def _runs(pid: int, ticks: int) -> bool:
    """Whether this process is there, of this user, and no zombie."""
    if pid <= 0 or ticks <= 0 or began(pid) != ticks:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state not in (b"Z", b"X") and os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except (OSError, IndexError):
        return False
