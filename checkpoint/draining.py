"""Finish the save under way when the process is told to end: SIGTERM, exit, an uncaught exception.

A save that is not finished within the limit is abandoned: the step before it stays current.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import weakref
from typing import Protocol

_log = logging.getLogger(__name__)


class Drainable(Protocol):
    """Something with a save under way."""

    def wait_at_most(self, seconds: float) -> bool:
        """Wait for it; False when it takes longer."""


class _OnTerm:
    """Handles SIGTERM for all checkpointers of a process, then lets it end as it would have."""

    def __init__(self) -> None:
        self.waiting: weakref.WeakSet[Draining] = weakref.WeakSet()
        self.pid = os.getpid()

    def __call__(self, number: int, _frame: object) -> None:
        if os.getpid() == self.pid:  # a forked worker has no saves of its own
            for draining in list(self.waiting):
                draining.drain()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class Draining:
    """Waits for a checkpointer's save at the end of the process, at most `seconds`.

    SIGTERM is taken only when nobody else handles it, from the main thread.
    """

    def __init__(self, owner: Drainable, seconds: float) -> None:
        self._owner = weakref.ref(owner)
        self._seconds = seconds
        # before concurrent.futures forbids new work, which the atexit functions come after
        register = getattr(threading, "_register_atexit", atexit.register)
        me = weakref.ref(self)
        register(lambda: _drain(me))
        self._handle_term()

    def _handle_term(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        there = signal.getsignal(signal.SIGTERM)
        if there is signal.SIG_DFL or (isinstance(there, _OnTerm) and there.pid != os.getpid()):
            there = _OnTerm()
            signal.signal(signal.SIGTERM, there)
        if isinstance(there, _OnTerm):
            there.waiting.add(self)

    def drain(self) -> None:
        """Wait for the save under way, within the limit. Raises nothing."""
        owner = self._owner()
        if owner is not None and not owner.wait_at_most(self._seconds):
            _log.warning("the save under way is given up after %.0f s; the step before it is "
                         "still current", self._seconds)  # fmt: skip

    def forget(self) -> None:
        """The checkpointer is closed."""
        there = signal.getsignal(signal.SIGTERM)
        if isinstance(there, _OnTerm):
            there.waiting.discard(self)
        self._owner = lambda: None  # type: ignore[assignment]  # a reference to nothing


def _drain(reference: weakref.ref[Draining]) -> None:
    draining = reference()
    if draining is not None:
        draining.drain()


__all__ = ["Draining"]
