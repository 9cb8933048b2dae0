"""The trainer's end of a writer process: starts it, has saves made by it (docs/decisions/0120)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TypeVar

from hpstore import errors
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.format.pack import Key, Known, Segment
from hpstore.checkpoint.ranks.collectives import Ranks
from hpstore.checkpoint.save.arena import Arena
from hpstore.checkpoint.save.job_options import Earlier, JobOptions
from hpstore.checkpoint.save.save_handle import SaveReport
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.checkpoint.save.writer_process import (
    AboutToWrite,
    BeginSave,
    GiveUp,
    MapMemory,
    PartWritten,
    SaveBegun,
    SaveCommitted,
    SaveFailed,
    WritePart,
    WriterStart,
)
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError, ConfigError, HpstoreError

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
        self.restarts_total = 0
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
        end = weakref.finalize(self, _let_end, self._connection, self._process, self._pid)
        end.atexit = False  # the end of the process closes it
        self.tell(WriterStart(config=self._catalog.pool.config, prefix=self._catalog.prefix))

    def ready(self) -> None:
        """Start it again where it has ended, or is the writer of a process that forked this one."""
        if self._process is not None and self._pid == os.getpid():
            if self._process.poll() is None:
                return
            self.restarts_total += 1
            _log.warning("%s: a new one is started", self._end())
            self._connection.close()
        self.start()

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

    def hear(self, kind: type[T], progress: Callable[[int], None] | None = None) -> T:
        """The next message, which is of this kind; those of progress are passed on. Raises what the
        writer has met, WriterGone."""
        while True:
            try:
                message: object = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._gone() from error
            if isinstance(message, SaveFailed):
                self._catalog.unclear |= message.unclear
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


def writer_of(
    catalog: StepCatalog, ranks: Ranks, arena: Arena, background: str
) -> WriterClient | None:
    """A writer process for these ranks, where saves are made by one. Raises ConfigError where it
    cannot serve them."""
    if background == "thread" or catalog.pool.read_only:
        return None
    if ranks.world > 1:
        raise ConfigError(
            f'background="process" serves a process that saves by itself, and this is one of '
            f'{ranks.world} ranks that save together: use background="thread"'
        )
    return WriterClient(catalog, arena)


class ProcessJob:
    """A SaveJob that a writer process makes: begin(), write() for each slice, commit()."""

    def __init__(
        self,
        writer: WriterClient,
        steps: StepCatalog,
        options: JobOptions,
        earlier: Earlier,
        *,
        reuse: bool,
    ) -> None:
        self._writer, self._steps, self._options = writer, steps, options
        self._earlier, self._reuse = earlier, reuse
        self._error: BaseException | None = None
        self._nonce = ""
        self.begun = False
        self.next_known: Mapping[Key, Known] = KnownByWriter()
        self.replaced: set[str] = set()
        self.differing: Sequence[str] = ()

    @property
    def noted(self) -> bool:
        """Whether begin() has succeeded."""
        return bool(self._nonce)

    def begin(self, *, fence: bool) -> None:
        """As SaveJob.begin()."""
        self.begun, self._writer.handed_over = True, False
        with self._writer.in_step():
            try:
                self._nonce = self._ask_to_begin(fence=fence)
            except WriterGone:  # as it was idle, mostly: nothing of this save was written yet
                try:
                    self._nonce = self._ask_to_begin(fence=fence)
                except WriterGone as error:
                    raise self._placed(error) from error

    def _ask_to_begin(self, *, fence: bool) -> str:
        remembered = isinstance(self._earlier.known, KnownByWriter)
        self._writer.ready()
        self._writer.tell(
            BeginSave(
                options=replace(self._options, progress=None),
                progress=self._options.progress is not None,
                fence=fence,
                reuse=self._reuse,
                earlier=None if remembered else self._earlier,
                earlier_step=self._earlier.step,
            )
        )
        return self._writer.hear(SaveBegun).nonce

    def write(self, memory: Bytes, items: Sequence[Item], *, part: int) -> Segment | None:
        """As SaveJob.write(), of what begins the arena."""
        if self._error is not None:
            return None
        last = part == self._options.slices - 1
        try:
            with self._writer.in_step():
                if len(memory):
                    self._writer.share_memory()
                self._writer.tell_part(part, len(memory), items, last=last)
                if not items:
                    return None
                return self._writer.hear(PartWritten, self._options.progress).segment
        except HpstoreError as error:
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Vote against the commit because of `error`."""
        self._error = self._error or error

    def commit(self) -> SaveReport:
        """As SaveJob.commit()."""
        if isinstance(self._error, WriterGone):
            raise self._unknown(self._error)
        if self._error is not None:
            self._give_up(self._error)
            if isinstance(self._error, HpstoreError):
                raise self._placed(self._error) from self._error
            raise self._error
        try:
            with self._writer.in_step():
                if not self._writer.handed_over:  # a state without tensors
                    self._writer.tell_part(0, 0, (), last=True)
                done = self._writer.hear(SaveCommitted, self._options.progress)
        except WriterGone as error:
            raise self._unknown(error) from error
        self.replaced, self.differing = done.replaced, done.differing
        return done.report

    def _give_up(self, why: BaseException) -> None:
        """Let the writer remove what it has written."""
        try:
            with self._writer.in_step():
                self._writer.tell(GiveUp(why=f"{type(why).__name__}: {why}"))
                self._writer.hear(SaveCommitted)
        except WriterGone:
            self._steps.unclear.add(self._nonce)
        except HpstoreError:  # what it says of giving up
            return

    def _unknown(self, error: WriterGone) -> HpstoreError:
        """The writer has ended: what it wrote is judged by what is there."""
        self._steps.unclear.add(self._nonce)
        return self._placed(error, maybe_visible=self._writer.handed_over)

    def _placed(self, error: HpstoreError, *, maybe_visible: bool = False) -> HpstoreError:
        return self._steps.unsaved(error, self._options.step, maybe_visible=maybe_visible)

    def close(self) -> None:
        """After commit(): the writer has ended the attempt."""
        self._writer.handed_over = False


AnyJob = SaveJob | ProcessJob


def job_of(
    writer: WriterClient | None,
    catalog: StepCatalog,
    ranks: Ranks,
    options: JobOptions,
    earlier: Earlier,
    reuse: bool,
) -> AnyJob:
    """A save, made by this process, or by the writer where there is one."""
    if writer is None:
        return SaveJob(catalog, ranks, options, earlier)
    return ProcessJob(writer, catalog, options, earlier, reuse=reuse)
