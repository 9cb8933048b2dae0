"""Batches made ahead by threads, handed out in order."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from hpstore.closing import Closing
from hpstore.loaders.progress import Piece

T = TypeVar("T")
_Jobs = queue.SimpleQueue["tuple[Piece, Future[T]] | None"]
JOIN_SECONDS = 5.0  # for threads at the end of the process


class BatchTimeout(Exception):
    """The next batch was not made in time."""


class Pipeline(Closing, Generic[T]):
    """Makes `make(piece)` for the pieces to come, `depth` of them ahead, on `threads` threads.

    The first one is made alone: somebody waits for it, and the others would share its cores.
    One thread takes; closing or dropping it gives up what is under way. `wait_seconds`: how long
    take() waited; `waiting`: whether it does. The threads are daemons, stopped and joined at exit:
    those of an executor are joined before anybody could wake one that waits inside `make`.
    """

    def __init__(
        self, todo: Iterator[Piece], make: Callable[[Piece], T], *, depth: int, threads: int
    ) -> None:
        self._todo, self._depth = todo, max(1, depth)
        self._flying: deque[tuple[Piece, Future[T]]] = deque()
        self._jobs: _Jobs[T] = queue.SimpleQueue()
        self._held: deque[tuple[Piece, Future[T]]] = deque()  # until the first one is made
        self._closed = threading.Event()
        self.wait_seconds = 0.0
        self.waiting = False
        self._threads = [
            threading.Thread(
                target=_work, args=(self._jobs, make, self._closed),
                name=f"hpstore-loader-{number}", daemon=True,
            )
            for number in range(threads)
        ]  # fmt: skip
        self._top_up()
        if self._held:
            first = self._held.popleft()
            self._jobs.put(first)
            held, jobs = self._held, self._jobs
            first[1].add_done_callback(lambda _: _hand_out(held, jobs))
        for thread in self._threads:
            thread.start()
        self._stop = weakref.finalize(
            self, _stop, self._closed, self._jobs, self._threads, os.getpid()
        )

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """Those that make pieces."""
        return tuple(self._threads)

    def peek(self) -> Piece | None:
        """What comes next; None when nothing does."""
        return self._flying[0][0] if self._flying else None

    def take(self, timeout_seconds: float | None = None) -> tuple[Piece, T]:
        """The next one, waited for. Raises what making it raised (it is then over), StopIteration.

        BatchTimeout when it is not there in time. That and an interrupt while it waits lose
        nothing: the next call takes the same one.
        """
        if not self._flying:
            raise StopIteration
        piece, future = self._flying[0]
        if not future.done():
            began = time.perf_counter()
            try:
                self.waiting = True
                wait([future], timeout_seconds)
                if not future.done():
                    raise BatchTimeout
                made = future.result()
            finally:
                self.waiting = False
                self.wait_seconds += time.perf_counter() - began
        else:
            made = future.result()
        self._flying.popleft()
        self._top_up()
        _hand_out(self._held, self._jobs)
        return piece, made

    def _top_up(self) -> None:
        while len(self._flying) < self._depth:
            piece = next(self._todo, None)
            if piece is None:
                return
            future: Future[T] = Future()
            self._flying.append((piece, future))
            self._held.append((piece, future))

    def close(self) -> None:
        """Give up what is not made yet; waits for what is being made. Idempotent."""
        self.abandon()
        for thread in self._threads:
            thread.join()

    def abandon(self) -> None:
        """The same without waiting."""
        self._flying.clear()
        self._stop()


def _hand_out(held: deque[tuple[Piece, Future[T]]], jobs: _Jobs[T]) -> None:
    """Put what was held into the queue. Any thread may."""
    with contextlib.suppress(IndexError):
        while True:
            jobs.put(held.popleft())


def _work(jobs: _Jobs[T], make: Callable[[Piece], T], closed: threading.Event) -> None:
    """Main function of a thread. Between two pieces it holds on to nothing."""
    while (job := jobs.get()) is not None:
        if not closed.is_set():  # else nobody waits for it
            _make(make, *job)
        del job


def _make(make: Callable[[Piece], T], piece: Piece, future: Future[T]) -> None:
    try:
        future.set_result(make(piece))
    except BaseException as error:  # noqa: BLE001 (raised again to who takes it)
        future.set_exception(error)


def _stop(
    closed: threading.Event, jobs: _Jobs[T], threads: list[threading.Thread], pid: int
) -> None:
    """Called once: when it is closed or dropped, or when the process ends."""
    if pid != os.getpid():
        return  # the threads are the parent's
    closed.set()
    for _ in threads:
        jobs.put(None)
    if not threading.main_thread().is_alive():
        until = time.monotonic() + JOIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


__all__ = ["BatchTimeout", "Pipeline"]
