"""What a process with checkpointers does about SIGTERM: finish the save under way, or take notice.

One handler serves all checkpointers of a process. It is installed by the main thread, calls the
handler that was there before, and puts that one back when its last checkpointer is closed.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Protocol

from hpstore.errors import CheckpointError

# A launcher and the workload manager above it each send one: torchrun passes on what srun sent to
# its workers, too, some milliseconds later
DOUBLE_SECONDS = 0.5


class Drainable(Protocol):
    """Something that can be finished before the process ends."""

    def drain(self) -> None:
        """Finish it, within its limit. Raises nothing."""


class Notice:
    """Whether SIGTERM has come to this process, for those who act on it at their next step.

    take() is called by the handler, on the main thread between two bytecodes: it takes no lock.
    """

    def __init__(self) -> None:
        self.at_seconds: float | None = None  # time.monotonic() of the signal
        self.wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put() is reentrant
        self.raised: BaseException | None = None  # by the handler from before: to raise later
        self.expired = False  # a further signal is none that follows the first from elsewhere
        self._count = 0

    @property
    def told(self) -> bool:
        """Whether it has come."""
        return self.at_seconds is not None

    def take(self) -> bool:
        """Note a signal; False for one that says: now."""
        self._count += 1
        if self.at_seconds is None:
            self.at_seconds = time.monotonic()
            self.wakes.put(None)
            return True
        doubled = self._count == 2 and time.monotonic() - self.at_seconds < DOUBLE_SECONDS
        return doubled and not self.expired


class SigtermHandler:
    """Handles SIGTERM for all checkpointers of a process.

    If a checkpointer of this process asked for it, the first signal is only recorded. Otherwise,
    and at a second signal, the process ends as it would without this handler; without such a
    checkpointer, saves under way are finished first. When a handler that was installed later calls
    this one, it does not end the process.
    """

    def __init__(self, before: signal._HANDLER) -> None:
        self.before, self.pid = before, os.getpid()
        # tuples are replaced as a whole: the handler may interrupt their owner anywhere
        self._drains: tuple[weakref.ref[Drainable], ...] = ()
        self._notices: tuple[weakref.ref[Notice], ...] = ()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self.pid:  # a forked worker has no saves of its own
            notices = [found for found in (ref() for ref in self._notices) if found is not None]
            heard = [notice.take() for notice in notices]
            if any(heard):
                self._call_before(number, frame, notices[0])
                return
            if not notices:
                for drain in self._drains:
                    if (drainable := drain()) is not None:
                        drainable.drain()
        self._pass_on(number, frame)

    def _call_before(self, number: int, frame: FrameType | None, notice: Notice) -> None:
        """What it raises (sys.exit() is common) waits until the notice has been acted on."""
        if callable(self.before):
            try:
                self.before(number, frame)
            except BaseException as error:  # noqa: BLE001 (raised by Preemption.close)
                notice.raised = error

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self.before):
            self.before(number, frame)
        elif self._in_front() and self.before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def add_drain(self, drainable: Drainable) -> None:
        """To finish before the process ends by SIGTERM. Not kept alive."""
        self._drains = (*self._drains, weakref.ref(drainable))

    def add_notice(self, notice: Notice) -> None:
        """To note SIGTERM in. Not kept alive."""
        self._notices = (*self._notices, weakref.ref(notice))

    def remove(self, taker: Drainable | Notice) -> None:
        """The handler from before is back when this was the last one, where that can be done: on
        the main thread, and while no other handler was installed over this one."""
        self._drains = tuple(ref for ref in self._drains if ref() not in (None, taker))
        self._notices = tuple(ref for ref in self._notices if ref() not in (None, taker))
        if self._drains or self._notices or not on_main_thread():
            return
        if self._in_front():
            signal.signal(signal.SIGTERM, self.before)

    def _in_front(self) -> bool:
        there: object = signal.getsignal(signal.SIGTERM)
        return there is self


def on_main_thread() -> bool:
    """Whether this thread may install handlers."""
    return threading.current_thread() is threading.main_thread()


def handler_if_free() -> SigtermHandler | None:
    """The handler of this process, installed where nothing else handles SIGTERM; None where
    something does, and on another thread than the main one."""
    if not on_main_thread():
        return None
    free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return _installed(signal.SIG_DFL) if free else _there()


def require_handling() -> None:
    """Raise CheckpointError where handler_in_front() does."""
    if not on_main_thread():
        raise CheckpointError(
            'on_sigterm="save" needs a Checkpointer that is made on the main thread: Python lets '
            'no other one handle signals. Make it there, or use on_sigterm="finish"'
        )
    if signal.getsignal(signal.SIGTERM) is None:
        raise CheckpointError(
            "SIGTERM is handled by code outside of Python, which cannot be called from here: "
            'on_sigterm="save" would take its place. Use on_sigterm="finish"'
        )


def handler_in_front() -> SigtermHandler:
    """The handler of this process, installed over whatever handles SIGTERM. Raises CheckpointError
    where that cannot be done."""
    require_handling()
    return _there() or _installed(signal.getsignal(signal.SIGTERM))


def _there() -> SigtermHandler | None:
    """One that is installed already. A fork's child gets a handler of its own in its place."""
    there: object = signal.getsignal(signal.SIGTERM)
    if not isinstance(there, SigtermHandler):
        return None
    return there if there.pid == os.getpid() else _installed(there.before)


def _installed(before: signal._HANDLER) -> SigtermHandler:
    handler = SigtermHandler(before)
    signal.signal(signal.SIGTERM, handler)
    return handler
