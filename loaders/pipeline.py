"""Batches made ahead by threads, handed out in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from hpstore.closing import Closing
from hpstore.loaders.progress import Piece

T = TypeVar("T")


class Pipeline(Closing, Generic[T]):
    """Makes `make(piece)` for the pieces to come, `depth` of them ahead, on `threads` threads.

    One thread takes; closing gives up what is under way. `wait_seconds`: how long take() waited;
    `waiting`: whether it does.
    """

    def __init__(
        self, todo: Iterator[Piece], make: Callable[[Piece], T], *, depth: int, threads: int
    ) -> None:
        self._todo, self._make, self._depth = todo, make, max(1, depth)
        self._threads = ThreadPoolExecutor(threads, "hpstore-loader")
        self._flying: deque[tuple[Piece, Future[T]]] = deque()
        self._closed = threading.Event()
        self.wait_seconds = 0.0
        self.waiting = False
        self._top_up()

    def peek(self) -> Piece | None:
        """What comes next; None when nothing does."""
        return self._flying[0][0] if self._flying else None

    def take(self) -> tuple[Piece, T]:
        """The next one, waited for. Raises what making it raised (it is then over), StopIteration.

        An interrupt while it waits loses nothing: the next call takes the same one.
        """
        if not self._flying:
            raise StopIteration
        piece, future = self._flying[0]
        if not future.done():
            began = time.perf_counter()
            try:
                self.waiting = True
                made = future.result()
            finally:
                self.waiting = False
                self.wait_seconds += time.perf_counter() - began
        else:
            made = future.result()
        self._flying.popleft()
        self._top_up()
        return piece, made

    def _top_up(self) -> None:
        while len(self._flying) < self._depth:
            piece = next(self._todo, None)
            if piece is None:
                return
            self._flying.append((piece, self._threads.submit(self._run, piece)))

    def _run(self, piece: Piece) -> T:
        if self._closed.is_set() or not threading.main_thread().is_alive():  # the process ends
            raise RuntimeError("the loader was closed")
        return self._make(piece)

    def close(self) -> None:
        """Give up what is not made yet; waits for what is being made. Idempotent."""
        self.abandon()
        self._threads.shutdown(wait=True)

    def abandon(self) -> None:
        """The same without waiting."""
        self._closed.set()
        self._flying.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


__all__ = ["Pipeline"]
