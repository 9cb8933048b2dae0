"""The save that is under way, and who may call the checkpointer meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass

from hpstore.checkpoint.save.save_handle import SaveHandle
from hpstore.errors import CheckpointError

ON_BUSY = ("wait", "skip", "error")
_JOIN_SECONDS = 1.0  # the thread has nothing left to do by then


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Underway:
    """One save in the background. `tidied` is done when all of it has ended, retention included.

    Waiting goes by the future: a Thread.join() that Ctrl-C interrupts leaves a thread that looks
    ended although it runs. In a forked child nothing is waited for: the save is its parent's.
    """

    handle: SaveHandle
    thread: threading.Thread
    tidied: Future[None]

    @property
    def busy(self) -> bool:
        """Whether this process still writes it."""
        return not self.handle.foreign and not self.handle.done()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for its end, raising nothing; False when it takes longer. May be interrupted and
        called again."""
        if self.handle.foreign:
            return True
        if self.thread is threading.current_thread():
            return False  # of its own end no thread can wait
        if self.tidied not in wait([self.tidied], seconds).done:
            return False
        self.thread.join(_JOIN_SECONDS)
        return True

    @property
    def standing(self) -> str:
        """What became of it so far, for the log of a process that ends before it has."""
        outcome = self.handle.outcome()
        if outcome is None:
            return (
                f"the save of step {self.handle.step} has not ended. It may be committed yet, by "
                "this process or its writer; the next restore takes the newest step that is"
            )
        if isinstance(outcome, BaseException):
            return f"the save of step {self.handle.step} has failed: {outcome}"
        return (
            f"step {self.handle.step} is committed; older steps that retention does not keep are "
            "left to the next save"
        )

    def raise_errors(self, borne: BaseException | None = None) -> None:
        """Raise what went wrong, unless the handle has or it is `borne`. It has ended."""
        if self.handle.foreign:
            return
        if not self.handle.delivered and self.handle.outcome() is not borne:
            self.handle.result()
        self.tidied.result()


class OneCaller:
    """Refuses a second thread while one is inside: both would stage into one arena."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._inside = ""

    @contextmanager
    def calling(self, what: str, *, patience_seconds: float = 0.0) -> Iterator[None]:
        """Run a call. Raises CheckpointError when another thread is in one for too long."""
        if not self._lock.acquire(timeout=patience_seconds):
            raise CheckpointError(
                f"{what} was called while another thread is in {self._inside or 'a call'} of the "
                "same Checkpointer. Nothing was changed by this call. Call it from one thread at a "
                "time, or give each thread a Checkpointer and a prefix of its own."
            )
        before, self._inside = self._inside, what
        try:
            yield
        finally:
            self._inside = before
            self._lock.release()
