"""Many reads at a time from files into one piece of GPU memory, over a narrow driver.

The driver is what differs between cuFile and the stand-in of the tests: open, register, read one
range. Everything that can go wrong around it is here: limits, bounds and alignment, short reads,
files and memory that are let go while reads are under way, forks, hung calls.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from hpstore.errors import DirectError, DirectUnavailable
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.runtime.closing import Closing
from hpstore.runtime.metrics import Metrics
from hpstore.runtime.scheduler import Scheduler
from hpstore.units import MIB, round_up

ARENA_ALIGNMENT_BYTES = 2 * MIB  # a page of the GPU: cuFile maps registered memory by it
CLOSE_SECONDS = 10.0
THREADS = 16  # cuFile is bound by submission: one thread gets half of what many get
MAX_PENDING = 256

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Reads since the driver was opened, by the way that the bytes took."""

    p2p: int = 0  # from the drive to the GPU by PCI peer-to-peer DMA
    nvfs: int = 0  # likewise through the nvidia-fs module
    posix: int = 0  # through host memory: cuFile's compatibility mode
    errors: int = 0

    @property
    def direct(self) -> int:
        """Reads that host memory had no part in."""
        return self.p2p + self.nvfs


class DirectDriver(Protocol):
    """What reads files into GPU memory. Calls block; those on one handle may run side by side.

    Errors are DirectUnavailable before anything can be read, DirectError after.
    """

    kind: str
    open_flags: int  # that its files must be opened with

    def open(self) -> None:
        """Make it ready in this process. Called once, before all else."""

    def enter_thread(self) -> None:
        """Called on a thread before each of its reads."""

    def register_file(self, fd: int) -> int:
        """A handle for an open file; the descriptor stays open until release_file."""

    def release_file(self, handle: int) -> None:
        """Undo register_file."""

    def allocate(self, nbytes: int) -> int:
        """Address of new GPU memory, registered for reads; a multiple of 2 MiB in size and place.

        Its bytes are zero.
        """

    def free(self, address: int, nbytes: int) -> None:
        """Deregister, then free."""

    def view(self, address: int, nbytes: int) -> torch.Tensor:
        """Memory of allocate() as (nbytes,) uint8, without a copy; it does not keep it alive."""

    def read(self, handle: int, file_offset: int, length: int, address: int, offset: int) -> int:
        """Read into `address` + `offset`; returns the bytes read, or a negative code."""

    def describe(self, code: int) -> str:
        """What a negative code means."""

    def counters(self) -> Mapping[str, int] | None:
        """The fields of Counters by name; None when the driver cannot tell."""

    def close(self) -> None:
        """Undo open. No reads are under way."""


class SharedHandle:
    """Something that reads use: it is let go when its owner closed it and the last read ended."""

    def __init__(self) -> None:
        self._condition = threading.Condition()  # guards the two below
        self._users = 0
        self.closed = False

    def enter(self) -> bool:
        """Count a read; False when it is closed."""
        with self._condition:
            self._users += not self.closed
            return not self.closed

    def leave(self) -> None:
        with self._condition:
            self._users -= 1
            self._condition.notify_all()

    def shut(self, timeout_seconds: float) -> bool | None:
        """Let no read in any more and wait for those under way.

        True when none is left, False when the time is over, None when it was shut before.
        """
        with self._condition:
            if self.closed:
                return None
            self.closed = True
            return self._condition.wait_for(lambda: self._users == 0, timeout_seconds)


class DirectFile(Closing):
    """A file known to the engine, opened anew under a shared lock of its own (PROTOCOL 11)."""

    def __init__(self, engine: DirectEngine, fd: int, handle: int, name: str) -> None:
        self._engine, self._file, self.handle = engine, fd, handle
        self.held = SharedHandle()
        self.name = name

    def close(self) -> None:
        """Let go of the file, after its reads. Idempotent."""
        if self._engine.let_go(self.held, self.name):
            self._engine.driver.release_file(self.handle)
            os.close(self._file)


class DirectArena(Closing):
    """GPU memory that reads land in. `tensor`: (nbytes,) uint8 on the GPU, a view of it.

    A range belongs to its read from read() until the future is done, then to whoever works on it;
    its owner reads into it again only after the GPU's work on it is over (an event). Views must
    not be used after close().
    """

    def __init__(self, engine: DirectEngine, address: int, nbytes: int, room_bytes: int) -> None:
        self._engine, self.address, self.nbytes = engine, address, nbytes
        self._room_bytes = room_bytes
        self.held = SharedHandle()
        self.tensor = engine.driver.view(address, nbytes)

    def close(self) -> None:
        """Free the memory after its reads. Idempotent; the GPU's work on it must be over.

        Memory that a hung read may still write into is never freed (PROTOCOL 21): it is counted
        in `gpu_direct_abandoned_total`.
        """
        if self._engine.let_go(self.held, f"arena of {self.nbytes} bytes"):
            self._engine.driver.free(self.address, self._room_bytes)


def _reopen(fd: int, flags: int) -> int:
    """A descriptor of the same file with its own flags and its own shared lock, CLOEXEC.

    Not a dup: that one's lock would go when the other one unlocks.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        fcntl.flock(own, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(own)
        raise
    return own


class DirectEngine(Closing):
    """Reads ranges of files into arenas, `threads` at a time on each lane. Thread-safe.

    It belongs to the process that made it: neither CUDA nor cuFile lives through a fork, so a
    child's calls raise DirectUnavailable (PROTOCOL 22). Metrics: `gpu_direct_read_bytes`,
    `gpu_direct_read_total`, `gpu_direct_error_total`, `gpu_direct_abandoned_total`.
    """

    def __init__(
        self,
        driver: DirectDriver,
        *,
        threads: int = THREADS,
        max_pending: int = MAX_PENDING,
        close_seconds: float = CLOSE_SECONDS,
        metrics: Metrics | None = None,
    ) -> None:
        self.driver = driver
        self.metrics = Metrics() if metrics is None else metrics
        self._close_seconds = close_seconds
        self._max_pending = max_pending
        self._pid = os.getpid()
        self._closed = False
        self._open: list[DirectFile | DirectArena] = []
        self._lock = threading.Lock()  # guards _open and _closed
        self._scheduler = Scheduler(
            workers_per_device=threads, queue_depth=max_pending, compute_threads=1, threads=True
        )
        driver.open()

    def register_file(self, fd: int) -> DirectFile:
        """Take an open file. The caller may close its descriptor, and unlock it, afterwards.

        Raises DirectUnavailable for a file that cannot be opened for direct reads or that the
        driver does not take.
        """
        self._check_usable()
        name = f"file of descriptor {fd}"
        try:
            own = _reopen(fd, self.driver.open_flags)
        except OSError as error:
            raise DirectUnavailable(
                f"{name} cannot be opened for direct reads: {error.strerror}; read it over pinned "
                "memory"
            ) from error
        try:
            file = DirectFile(self, own, self.driver.register_file(own), name)
        except BaseException:
            os.close(own)
            raise
        self._keep(file)
        return file

    def allocate(self, nbytes: int) -> DirectArena:
        """GPU memory for reads: one long-lived arena, not one for each read.

        Raises DirectUnavailable when there is not enough or it cannot be registered.
        """
        self._check_usable()
        if nbytes < 1:
            raise ValueError(f"an arena of {nbytes} bytes")
        room_bytes = round_up(nbytes, ARENA_ALIGNMENT_BYTES)
        arena = DirectArena(self, self.driver.allocate(room_bytes), nbytes, room_bytes)
        self._keep(arena)
        return arena

    def _keep(self, item: DirectFile | DirectArena) -> None:
        with self._lock:
            self._open = [kept for kept in self._open if not kept.held.closed]
            self._open.append(item)

    def submit(self, lane: str, call: Callable[[], T]) -> Future[T]:
        """Run `call` on a thread of a lane, such as one that opens files of a device.

        Lanes have `threads` threads each, so that what hangs in one holds up no other. Raises
        DirectUnavailable after close() or a fork.
        """
        self._check_usable()
        return self._scheduler.submit(lane, call)

    def read(
        self,
        file: DirectFile,
        file_offset: int,
        length: int,
        arena: DirectArena,
        arena_offset: int,
        *,
        lane: str = "",
    ) -> Future[int]:
        """Read a range of a file into the arena; the future holds `length`.

        It runs on a thread of `lane`, by default of one for all files.

        Offsets and length are multiples of 4 KiB. Cancelling the future of a read that runs does
        not stop it. The future raises DirectError when the file ends before, or the driver fails:
        the range is undefined then. Bytes are not verified here. Raises ValueError for a range that
        is not aligned or not inside the arena, DirectUnavailable after close() or a fork.
        DeviceTimeout, in the future: `max_pending` reads of the lane wait already, or all of its
        threads hang.
        """
        self._check_usable()
        odd = [n for n in (file_offset, length, arena_offset) if n % ALIGNMENT_BYTES]
        if odd:
            raise ValueError(f"{odd[0]} is not a multiple of {ALIGNMENT_BYTES}")
        if file_offset < 0 or length < 1 or not 0 <= arena_offset <= arena.nbytes - length:
            raise ValueError(
                f"file [{file_offset}, {file_offset + length}) to arena offset {arena_offset}: "
                f"outside of an arena of {arena.nbytes} bytes"
            )
        self._enter(file, arena)

        def call() -> int:
            self.driver.enter_thread()
            count = self.driver.read(file.handle, file_offset, length, arena.address, arena_offset)
            return self._checked(count, file, file_offset, length)

        future = self._scheduler.submit(lane or self.driver.kind, call)

        def over(_: object) -> None:
            file.held.leave()
            arena.held.leave()

        future.add_done_callback(over)
        return future

    def _enter(self, file: DirectFile, arena: DirectArena) -> None:
        if not file.held.enter():
            raise DirectUnavailable(f"{file.name} is closed: nothing was read")
        if not arena.held.enter():
            file.held.leave()
            raise DirectUnavailable("the arena is closed: nothing was read")

    def _checked(self, count: int, file: DirectFile, file_offset: int, length: int) -> int:
        if count == length:
            self.metrics.count("gpu_direct_read_total")
            self.metrics.count("gpu_direct_read_bytes", length)
            return length
        self.metrics.count("gpu_direct_error_total")
        where = f"direct read of {length} bytes at {file_offset} of {file.name}"
        if count < 0:
            raise DirectError(
                f"{where} failed: {self.driver.describe(count)} ({count}). The file is unharmed; "
                "read it over pinned memory"
            )
        raise DirectError(f"{where} ended after {count} bytes: is the file shorter than it was?")

    def counters(self) -> Counters | None:
        """How the bytes travelled, from the driver; None when it cannot tell."""
        self._check_usable()
        found = self.driver.counters()
        return None if found is None else Counters(**found)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise DirectUnavailable(
                "direct reads do not live through a fork: make a new engine in a spawned process, "
                "or read over host memory"
            )
        if self._closed:
            raise DirectUnavailable("the engine is closed: nothing was read")

    def let_go(self, held: SharedHandle, what: str) -> bool:
        """Shut it; whether its owner may free it now. In a forked child: never."""
        if os.getpid() != self._pid:
            return False
        ended = held.shut(self._close_seconds)
        if ended is False:
            self.metrics.count("gpu_direct_abandoned_total")
            _log.warning(
                "%s: a direct read has not ended after %.0f s; it is never freed",
                what,
                self._close_seconds,
            )
        return ended is True

    def close(self) -> None:
        """Close files and arenas after their reads, then the driver. Idempotent.

        With a read that hangs, the driver stays open: the process' end closes it.
        """
        with self._lock:
            items, self._open = self._open, []
            closed, self._closed = self._closed, True
        if closed or os.getpid() != self._pid:
            return
        for item in items:
            item.close()
        self._scheduler.close(self._close_seconds)
        if not self.metrics.value("gpu_direct_abandoned_total"):
            try:
                self.driver.close()
            except DirectError as error:
                _log.warning("%s", error)
