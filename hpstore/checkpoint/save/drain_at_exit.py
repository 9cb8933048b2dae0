"""Finish the save under way when the process is told to end: SIGTERM, exit, an uncaught exception.

A save that is not finished within the limit is waited for no longer: whether its step is committed
shows at the next restore. A writer process goes on with it.
"""

from __future__ import annotations

import logging
import weakref
from typing import Protocol

from hpstore.checkpoint.ranks.sigterm import handler_if_free
from hpstore.checkpoint.save.save_underway import Underway
from hpstore.runtime.closing import call_at_exit

_log = logging.getLogger(__name__)


class Saving(Protocol):
    """Something with a save under way."""

    underway: Underway | None

    def wait_at_most(self, seconds: float) -> bool:
        """Wait for it; False when it takes longer."""


class Draining:
    """Waits for a checkpointer's save at the end of the process, at most `seconds`.

    SIGTERM is taken only when nothing else handles it, from the main thread.
    """

    def __init__(self, owner: Saving, seconds: float) -> None:
        self._owner = weakref.ref(owner)
        self._seconds = seconds
        call_at_exit(self.drain)
        self._handler = handler_if_free()
        if self._handler is not None:
            self._handler.add_drain(self)

    def drain(self) -> None:
        """Wait for the save under way, within the limit. Raises nothing."""
        owner = self._owner()
        if owner is None or owner.wait_at_most(self._seconds) or owner.underway is None:
            return
        _log.warning("waited for %.0f s: %s", self._seconds, owner.underway.standing)

    def forget(self) -> None:
        """The checkpointer is closed."""
        if self._handler is not None:
            self._handler.remove(self)
        self._owner = lambda: None  # type: ignore[assignment]  # a reference to nothing
