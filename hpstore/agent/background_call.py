"""One call in the background, again and again, never twice at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from hpstore.errors import HpstoreError
from hpstore.runtime.threads import start_thread

T = TypeVar("T")


class CallSlot(Generic[T]):
    """Of one thread, which starts calls and takes what came of them.

    Calls run on threads that die with the process: one that hangs does not keep it. With
    `threads=False` they run at once.
    """

    def __init__(self, name: str, *, threads: bool) -> None:
        self._name, self._threads = name, threads
        self._future: Future[T] | None = None

    @property
    def free(self) -> bool:
        """Whether none is under way or waits to be taken."""
        return self._future is None

    def start(self, call: Callable[[], T]) -> None:
        """Begin a call; the slot is free."""
        future: Future[T] = Future()
        self._future = future

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 (taken, or raised, by `take`)
                future.set_exception(error)

        if self._threads:
            name = f"hpstore-agent-{self._name}"
            start_thread(threading.Thread(target=run, name=name, daemon=True))
        else:
            run()

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
