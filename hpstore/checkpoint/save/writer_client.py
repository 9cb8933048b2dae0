"""The trainer's end of a writer process: starts it, has saves made by it (docs/decisions/0120)."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TypeVar

from hpstore import errors
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.format.pack import Key, Known
from hpstore.checkpoint.save.arena import Arena
from hpstore.checkpoint.save.writer_process import (
    AboutToWrite,
    MapMemory,
    SaveFailed,
    WritePart,
    WriterStart,
)
from hpstore.errors import CheckpointError, HpstoreError

T = TypeVar("T")
_log = logging.getLogger(__name__)
_END_SECONDS = 10.0  # for a writer without a save
_MAIN = (
    "import sys; sys.path[:] = {path!r}; "
    "from hpstore.checkpoint.save.writer_process import main; "
    "main({descriptor}, {trainer})"
)


_ending: list[subprocess.Popen[bytes]] = []  # of clients that were dropped


class WriterGone(CheckpointError):
    """The writer process has ended."""


class KnownByWriter(dict[Key, Known]):
    """Stands for what the writer remembers of the last save; empty here."""


class WriterClient:
    """One writer process, started again when it has ended. One save at a time.

    Not by fork: it must not have the trainer's memory, nor its GPU. Not by multiprocessing: the
    end of the trainer would wait for it, or take it along.
    """

    def __init__(self, catalog: StepCatalog, arena: Arena) -> None:
        self._catalog, self._arena = catalog, arena
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._mapped = -1  # growth of the arena that the writer has seen
        self._items: Sequence[Item] | None = None
        self.handed_over = False  # the writer has all of the save under way, and finishes it
        self.name = ""  # of this writer, another one after a restart
        self.parted = False  # it has lost a writer of another rank: it can save no more
        self.answer_seconds: float | None = None  # for one; after it the writer is ended
        self.restarts_total = 0
        self._joining = False  # it looks for those of other ranks
        self.start()

    @property
    def process_id(self) -> int:
        """Of the writer; 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process; it is ready some seconds later, in which the trainer goes on."""
        ours, theirs = socket.socketpair()
        with theirs:
            path = [entry for entry in sys.path if isinstance(entry, str)]
            code = _MAIN.format(path=path, descriptor=theirs.fileno(), trainer=os.getpid())
            _reap()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise CheckpointError(
                    f"the writer process cannot be started: {error}. Nothing is lost; use "
                    'background="thread", or allow this user more processes'
                ) from error
        self._connection = Connection(ours.detach())
        self._pid, self._mapped, self._items = os.getpid(), -1, None
        self.name, self.parted, self._joining = secrets.token_hex(8), False, False
        end = weakref.finalize(self, _let_end, self._connection, self._process, self._pid)
        end.atexit = False  # the end of the process closes it
        self.tell(WriterStart(config=self._catalog.pool.config, prefix=self._catalog.prefix))

    def ready(self) -> None:
        """Start it again where it has ended, or is the writer of a process that forked this one."""
        if self._process is not None and self._pid == os.getpid():
            if self._process.poll() is None and not self.parted:
                return
            self._kill()
            self.restarts_total += 1
            _log.warning("%s: a new one is started", self._end())
            self._connection.close()
        self.start()

    def renew(self) -> None:
        """Replace a writer that has looked for others before: it does so once in its life."""
        self.parted = self.parted or self._joining
        self.ready()
        self._joining = True

    def _end(self) -> str:
        code = None if self._process is None else self._process.poll()
        how = "" if code is None else f" by signal {-code}" if code < 0 else f" with code {code}"
        return f"the writer process {self.process_id} has ended{how}"

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Questions and their answers. What breaks in between, as Ctrl-C does, ends the writer: its
        next answer would be taken for another one's, and it may still read the memory."""
        try:
            yield
        except HpstoreError:
            raise
        except BaseException:
            self._kill()
            raise

    def _kill(self) -> None:
        """End the writer at once: after the return it reads no memory any more."""
        if self._process is not None and self._pid == os.getpid():
            self._process.kill()
            self._process.wait()

    def tell(self, message: object) -> None:
        """Send a message. Raises WriterGone."""
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._gone() from error

    def ask(self, message: object, kind: type[T]) -> T:
        """Send a message; its answer. Raises what hear() raises."""
        with self.in_step():
            self.tell(message)
            return self.hear(kind)

    def hear(self, kind: type[T], progress: Callable[[int], None] | None = None) -> T:
        """The next message, which is of this kind; those of progress are passed on. Raises what the
        writer has met, WriterGone."""
        while True:
            try:
                if not self._connection.poll(self.answer_seconds):
                    self._kill()
                    raise WriterGone(
                        f"the writer process {self.process_id} did not answer within "
                        f"{self.answer_seconds:.0f} s and was ended; the next save starts another"
                    )
                message: object = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._gone() from error
            if isinstance(message, SaveFailed):
                self._catalog.unclear |= message.unclear
                self.parted = self.parted or message.parted
                failed = getattr(errors, message.kind, CheckpointError)
                raise failed(message.text, device=message.device, key=message.key)
            if isinstance(message, kind):
                return message
            if not isinstance(message, AboutToWrite):
                self._kill()
                raise WriterGone(f"the writer process said {type(message).__name__} out of turn")
            progress = _told(progress, message.nbytes)

    def _gone(self) -> WriterGone:
        if self._process is not None and self._pid == os.getpid():
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:  # it hears nothing any more, and must write nothing
                self._kill()
        return WriterGone(f"{self._end()}; the next save starts another")

    def share_memory(self) -> None:
        """Let the writer map what the arena is now."""
        if self._mapped != self._arena.grown_total:
            self.tell(MapMemory(nbytes=self._arena.capacity_bytes))
            try:
                send_handle(self._connection, self._arena.descriptor, self.process_id)
            except OSError as error:
                raise self._gone() from error
            self._mapped = self._arena.grown_total

    def tell_part(self, part: int, size: int, items: Sequence[Item], *, last: bool) -> None:
        """A slice is staged. Its layout is sent where it is another one than before."""
        known = items is self._items
        self.tell(WritePart(part=part, size=size, items=None if known else items, last=last))
        self._items, self.handed_over = items, last

    def close(self) -> None:
        """Let it end. No save is under way. Idempotent."""
        process, self._process = self._process, None
        if process is None or self._pid != os.getpid():
            return
        self._connection.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            _log.warning("the writer process %d takes long to end", process.pid)


def _let_end(connection: Connection, process: subprocess.Popen[bytes], pid: int) -> None:
    """Of a client that was dropped: its writer ends, without a wait here."""
    connection.close()
    if pid == os.getpid() and process.poll() is None:
        _ending.append(process)


def _reap() -> None:
    """Take note of writers that have ended since they were let go."""
    _ending[:] = [process for process in _ending if process.poll() is None]


def _told(progress: Callable[[int], None] | None, nbytes: int) -> Callable[[int], None] | None:
    """Pass progress on; None from the first time on that this fails. The save goes on: the writer
    may have all of it."""
    if progress is not None:
        try:
            progress(nbytes)
        except Exception:  # noqa: BLE001 (whatever it is, the save is not to blame)
            _log.warning("progress of a save is not shown any more", exc_info=True)
            return None
    return progress
