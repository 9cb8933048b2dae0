"""The process of SaveOptions(background="process"): makes saves from memory that it shares.

It is started by writer_client.py and talks to it over a socket that no other process has. A save
of which it has the last part needs the trainer no more: it is finished when the trainer is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING

import numpy as np

from hpstore.checkpoint.catalog.left_writers import WriterNotice
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.ranks.collectives import Ranks
from hpstore.checkpoint.ranks.writer_ranks import StoreAddress, join_writers, open_store
from hpstore.checkpoint.save.job_options import Earlier, JobOptions
from hpstore.checkpoint.save.save_handle import SaveReport
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.codec.galois import Bytes
from hpstore.config import PoolConfig
from hpstore.errors import CheckpointError, HpstoreError
from hpstore.pool.pool import Pool

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_POLL_SECONDS = 1.0  # a fork of the trainer may hold its end of the socket open


# --- what the trainer says ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterStart:
    """The first message."""

    config: PoolConfig
    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """Of rank 0: let the writers of other ranks find this one."""

    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRanks:
    """Find the writers of the other ranks; saves are made together with them from then on."""

    address: StoreAddress
    rank: int
    world: int
    commit_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginSave:
    """Note a save. `earlier`: None for what this process remembers of `earlier_step`."""

    options: JobOptions  # without `progress`
    progress: bool
    fence: bool
    reuse: bool
    earlier: Earlier | None
    earlier_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MapMemory:
    """The descriptor of shared memory follows, of so many bytes."""

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePart:
    """The first `size` bytes of the memory are slice `part`; after the last one commit."""

    part: int
    size: int
    items: Sequence[Item] | None  # None: those of the last such message
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The save cannot be made: remove what was written."""

    why: str


# --- what the writer says -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOpened:
    """Where others find this process."""

    address: StoreAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksJoined:
    """All have found each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegun:
    """The save is noted in the pool."""

    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutToWrite:
    """So many bytes are about to be written."""

    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWritten:
    """A slice was written, or kept for the commit to fail by."""

    segment: Segment | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCommitted:
    """The manifest is durable."""

    report: SaveReport
    replaced: set[str]
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """An error, by the name of its class in hpstore.errors. `unclear`: nonces of saves that may
    yet be read. `parted`: a writer of another rank is gone."""

    kind: str
    text: str
    device: str | None = None
    key: str | None = None
    unclear: frozenset[str] = frozenset()
    parted: bool = False

    @classmethod
    def of(
        cls,
        error: BaseException,
        unclear: frozenset[str] = frozenset(),
        *,
        parted: bool = False,
    ) -> SaveFailed:
        """What to send of it."""
        if isinstance(error, HpstoreError):
            return cls(
                kind=type(error).__name__,
                text=str(error),
                device=error.device,
                key=error.key,
                unclear=unclear,
                parted=parted,
            )
        text = f"{type(error).__name__}: {error}"
        return cls(kind=CheckpointError.__name__, text=text, unclear=unclear, parted=parted)


class _Writer:
    """The saves of one checkpointer, one after the other."""

    def __init__(self, connection: Connection, start: WriterStart, trainer: int) -> None:
        self._connection, self._trainer = connection, trainer
        self._pool = Pool(start.config)
        self._catalog = StepCatalog(self._pool, start.prefix)
        self._ranks = Ranks(0.0, alone=True)
        self._store: TCPStore | None = None
        self._memory: Bytes = np.empty(0, np.uint8)
        self._items: Sequence[Item] = ()
        self._remembered = Earlier()
        self._job: SaveJob | None = None
        self._reuse = True
        self._notice = WriterNotice(self._pool, start.prefix, trainer)

    def run(self) -> None:
        """Until the trainer ends."""
        try:
            while (message := self._next()) is not None:
                if isinstance(message, BeginSave):
                    self._begin(message)
                elif isinstance(message, OpenStore | JoinRanks):
                    self._join(message)
                elif isinstance(message, MapMemory):
                    self._map(message)
                elif isinstance(message, WritePart):
                    self._write(message)
                elif isinstance(message, GiveUp):
                    self._give_up(message.why)
            self._give_up("the trainer has ended before all of the state was handed over")
        finally:
            self._notice.remove()
            self._pool.close()

    def _next(self) -> object:
        """The next message; None when the trainer is gone."""
        try:
            while not self._connection.poll(_POLL_SECONDS):
                if os.getppid() != self._trainer:
                    return None
            message: object = self._connection.recv()
        except (EOFError, OSError):
            return None
        return message

    def _say(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone: the save goes on
            self._connection.send(message)

    def _join(self, order: OpenStore | JoinRanks) -> None:
        try:
            if isinstance(order, OpenStore):
                self._store = open_store(order.timeout_seconds)
                self._say(StoreOpened(address=StoreAddress.of_this_host(self._store.port)))
                return
            self._ranks = join_writers(
                self._store, order.address, order.rank, order.world, order.commit_seconds
            )
            self._say(RanksJoined())
        except BaseException as error:  # noqa: BLE001 (raised by the trainer)
            self._say(SaveFailed.of(error, parted=True))

    def _begin(self, order: BeginSave) -> None:
        earlier = order.earlier
        if earlier is None:
            known = self._remembered.step == order.earlier_step
            earlier = self._remembered if known else Earlier()
        self._remembered, self._reuse = Earlier(), order.reuse
        options = replace(order.options, progress=self._tell if order.progress else None)
        job = SaveJob(self._catalog, self._ranks, options, earlier)
        self._notice.saves(options.step, replaces=options.overwrite)
        try:
            job.begin(fence=order.fence)
        except BaseException as error:  # noqa: BLE001 (raised by the trainer)
            job.close()
            self._say(SaveFailed.of(error, parted=self._ranks.lost))
            return
        self._job = job
        self._say(SaveBegun(nonce=job.nonce))

    def _tell(self, nbytes: int) -> None:
        self._say(AboutToWrite(nbytes=nbytes))

    def _map(self, message: MapMemory) -> None:
        self._memory = np.empty(0, np.uint8)  # the old one goes before the new one comes
        descriptor = recv_handle(self._connection)
        try:
            memory = mmap.mmap(descriptor, message.nbytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        self._memory = np.frombuffer(memory, np.uint8)

    def _write(self, message: WritePart) -> None:
        job = self._job
        if job is None:
            return
        if message.items is not None:
            self._items = message.items
        if self._items:
            segment = job.write(self._memory[: message.size], self._items, part=message.part)
            self._say(PartWritten(segment=segment))
        if message.last:
            self._commit(job)

    def _commit(self, job: SaveJob) -> None:
        self._job = None
        try:
            report = job.commit()
        except BaseException as error:  # noqa: BLE001 (raised by the trainer)
            job.close()
            unclear = frozenset(self._catalog.unclear)
            self._say(SaveFailed.of(error, unclear, parted=self._ranks.lost))
            return
        job.close()
        if self._reuse:
            self._remembered = Earlier(step=report.step, known=job.next_known)
        self._say(
            SaveCommitted(report=report, replaced=job.replaced, differing=tuple(job.differing))
        )

    def _give_up(self, why: str) -> None:
        job = self._job
        if job is not None:
            job.fail(CheckpointError(why))
            self._commit(job)


def main(descriptor: int, trainer: int) -> None:
    """Serve the trainer that has the other end of a socket."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the trainer's to handle; this ends after it
        signal.signal(ignored, signal.SIG_IGN)
    with Connection(descriptor) as connection:
        start = connection.recv()
        try:
            writer = _Writer(connection, start, trainer)
        except BaseException as error:  # noqa: BLE001 (raised by the trainer)
            with contextlib.suppress(OSError):
                connection.send(SaveFailed.of(error))
            return
        writer.run()
