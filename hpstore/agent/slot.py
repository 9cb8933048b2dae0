"""One call in the background, again and again, never twice at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from hpstore.errors import HpstoreError

T = TypeVar("T")


class Slot(Generic[T]):
    """Of one thread, which starts calls and takes what came of them. Without threads a call runs
    at once."""

    def __init__(self, threads: ThreadPoolExecutor | None) -> None:
        self._threads = threads
        self._future: Future[T] | None = None

    @property
    def free(self) -> bool:
        """Whether none is under way or waits to be taken."""
        return self._future is None

    def start(self, call: Callable[[], T]) -> None:
        """Begin a call; the slot is free."""
        if self._threads is not None:
            self._future = self._threads.submit(call)
            return
        self._future = Future()
        try:
            self._future.set_result(call())
        except (HpstoreError, OSError) as error:
            self._future.set_exception(error)

    def take(self) -> T | HpstoreError | OSError | None:
        """What came of it, once; None when it is under way or there is none. Crashes are raised."""
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, (HpstoreError, OSError)):
            return error
        raise error


__all__ = ["Slot"]
