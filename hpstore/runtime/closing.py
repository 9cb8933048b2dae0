"""What every object with a close() has in common: `with`, and the end of the process."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Closing(ABC):
    """`with` closes it. close() is idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def call_at_exit(method: Callable[[], object]) -> None:
    """Call a bound method when the process ends, if its object lives; the last one that was given
    is called first. Threads still run, and executors still take work. It must not raise.

    A thread that comes back out of C++ to an interpreter that is gone takes the process down with
    it (SIGABRT): what has a thread in torch stops and joins it in such a method.
    """
    reference, pid = weakref.WeakMethod(method), os.getpid()

    def call() -> None:
        alive = reference()
        if alive is not None and os.getpid() == pid:  # a child has not the threads
            alive()

    # before concurrent.futures forbids new work, which the atexit functions come after
    register = getattr(threading, "_register_atexit", atexit.register)
    register(call)
