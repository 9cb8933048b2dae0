"""Batches made ahead by threads, handed out in order."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from hpstore.loaders.batching.batch_counters import Waits
from hpstore.loaders.sampling.batch_plan import BatchPiece
from hpstore.runtime.closing import Closing
from hpstore.runtime.threads import start_some

T = TypeVar("T")
JOIN_SECONDS = 20.0  # at the end of the process: a batch of slow transforms, not a hung disk
_leaving: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # they end with their piece


class BatchTimeout(Exception):
    """The next batch was not made in time."""


class _Job(Generic[T]):
    """A piece and what becomes of it: a future without callbacks, a condition and their locks.

    Who takes a batch makes the job for another one, with cold caches after each training step.
    `weight`: samples that count for the depth.
    """

    __slots__ = ("_busy", "done", "done_at", "error", "made", "piece", "weight")

    def __init__(self, piece: BatchPiece, weight: int) -> None:
        self.piece, self.weight = piece, weight
        self.done, self.done_at = False, 0.0
        self.made: T | None = None
        self.error: BaseException | None = None
        self._busy = threading.Lock()  # held until it is done
        self._busy.acquire()

    def settle(self, made: T | None, error: BaseException | None) -> None:
        """It is done. Once."""
        self.done_at = time.perf_counter()
        self.made, self.error, self.done = made, error, True
        self._busy.release()

    def wait(self, seconds: float | None) -> bool:
        """Whether it is done, waited for. One thread at a time; an interrupt does no harm."""
        if not self.done and self._busy.acquire(timeout=-1 if seconds is None else seconds):
            self._busy.release()
        return self.done


_Jobs = queue.SimpleQueue["_Job[T] | None"]


class Pipeline(Closing, Generic[T]):
    """Makes `make(piece)` for the pieces to come, `depth` of them ahead, on `threads` threads.

    It is filled up when a quarter of them was taken: threads are woken less often. The first one
    is made alone: somebody waits for it, and the others would share its cores. Of pieces of `rows`
    samples that is: one more is ahead where a small one, the last of an epoch, is among them.
    Otherwise a thread that is done with the small one had nothing to do until it is taken.
    One thread takes; closing or dropping it gives up what is under way. `waits`: where take() adds
    how long it waited, or was waited for; `waiting`: whether it does. The threads are daemons,
    stopped and joined at exit: those of an executor are joined before anybody could wake one that
    waits inside `make`.
    """

    def __init__(
        self,
        todo: Iterator[BatchPiece],
        make: Callable[[BatchPiece], T],
        *,
        depth: int,
        threads: int,
        rows: int = 1,
        waits: Waits | None = None,
    ) -> None:
        self._todo, self._depth, self._rows = todo, max(1, depth), max(1, rows)
        self._low = self._depth - max(1, self._depth // 4)  # it is filled up from here
        self._interrupted = False  # in the midst of `todo`
        self._flying: deque[_Job[T]] = deque()
        self._jobs: _Jobs[T] = queue.SimpleQueue()
        self._held: deque[_Job[T]] = deque()  # until the first one is made
        self._closed = threading.Event()
        self._waits = waits or Waits()
        self.waiting = False
        threads_made = [
            threading.Thread(
                target=_work,
                args=(self._jobs, make, self._closed, self._held),
                name=f"hpstore-loader-{number}",
                daemon=True,
            )
            for number in range(threads)
        ]
        self._top_up()
        if self._held:
            self._jobs.put(self._held.popleft())
        self._threads = start_some(threads_made)
        self._stop = weakref.finalize(
            self, _stop, self._closed, self._jobs, self._threads, os.getpid()
        )

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """Those that make pieces."""
        return tuple(self._threads)

    def peek(self) -> BatchPiece | None:
        """What comes next; None when nothing does."""
        return self._flying[0].piece if self._flying else None

    @property
    def cut_short(self) -> bool:
        """Whether nothing comes next because an interrupt ended the order of pieces."""
        return self._interrupted and not self._flying

    @property
    def ready(self) -> int:
        """How many batches can be taken at once, without waiting for one."""
        return sum(1 for _ in itertools.takewhile(lambda job: job.done, tuple(self._flying)))

    def take(self, timeout_seconds: float | None = None) -> tuple[BatchPiece, T]:
        """The next one, waited for. Raises what making it raised (it is then over), StopIteration.

        BatchTimeout when it is not there in time. That and an interrupt while it waits lose
        nothing: the next call takes the same one.
        """
        if not self._flying:
            raise StopIteration
        job, waits, asked = self._flying[0], self._waits, time.perf_counter()
        if job.done:
            waits.began = waits.began or asked
            waits.trainer_seconds += max(0.0, asked - max(job.done_at, waits.until))
            waits.until = asked
        else:
            try:
                self.waiting = True
                if not job.wait(timeout_seconds):
                    raise BatchTimeout
            finally:
                self.waiting = False
                waits.waited(asked)
        if job.error is not None:
            raise job.error
        self._top_up(job)  # first: an interrupt in it loses no batch
        self._flying.popleft()
        _hand_out(self._held, self._jobs)
        return job.piece, cast(T, job.made)

    def _top_up(self, taken: _Job[T] | None = None) -> None:
        """Fill up, as if `taken` were gone."""
        gone = taken.weight if taken else 0
        if self._places(gone) > self._low:
            return
        most = self._depth + 1 + (taken is not None)  # however small they are
        while self._places(gone) < self._depth and len(self._flying) < most:
            if self._interrupted:
                return
            try:
                piece = next(self._todo, None)
            except BaseException:  # a generator is over then, and does not tell
                self._interrupted = True
                raise
            if piece is None:
                return
            job = _Job[T](piece, min(piece.samples, self._rows))
            self._flying.append(job)
            self._held.append(job)

    def _places(self, gone: int) -> int:
        """How many batches of `rows` samples are in flight, rounded. Counted anew: an interrupt
        could leave a count behind that is too high, and the order would end early.
        """
        samples = sum([job.weight for job in self._flying])
        return (samples - gone + self._rows // 2) // self._rows

    def close(self) -> None:
        """Give up what is not made yet; waits for what is being made. Idempotent."""
        self.abandon()
        for thread in self._threads:
            thread.join()

    def abandon(self) -> None:
        """The same without waiting."""
        self._flying.clear()
        self._stop()


def _hand_out(held: deque[_Job[T]], jobs: _Jobs[T]) -> None:
    """Put what was held into the queue. Any thread may."""
    with contextlib.suppress(IndexError):
        while True:
            jobs.put(held.popleft())


def _work(
    jobs: _Jobs[T], make: Callable[[BatchPiece], T], closed: threading.Event, held: deque[_Job[T]]
) -> None:
    """Main function of a thread. Between two pieces it holds on to nothing."""
    while (job := jobs.get()) is not None:
        if not closed.is_set():  # else nobody waits for it
            _make(make, job)
        del job
        _hand_out(held, jobs)  # after the first one


def _make(make: Callable[[BatchPiece], T], job: _Job[T]) -> None:
    try:
        made = make(job.piece)
    except BaseException as error:  # noqa: BLE001 (raised again to who takes it)
        job.settle(None, error)
    else:
        job.settle(made, None)


def _stop(
    closed: threading.Event, jobs: _Jobs[T], threads: list[threading.Thread], pid: int
) -> None:
    """Called once: when it is closed or dropped, or when the process ends."""
    if pid != os.getpid():
        return  # the threads are the parent's
    closed.set()
    for _ in threads:
        jobs.put(None)
    _leaving.update(threads)
    if not threading.main_thread().is_alive():
        _join_leaving()


@atexit.register
def _join_leaving() -> None:
    """Wait for threads that were told to stop: one that comes back out of C++ to an interpreter
    that is gone takes the whole process down with it (SIGABRT), whatever its exit status was."""
    until = time.monotonic() + JOIN_SECONDS
    for thread in list(_leaving):
        thread.join(max(0.0, until - time.monotonic()))
