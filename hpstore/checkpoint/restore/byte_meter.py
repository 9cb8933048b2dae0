"""How far a read by several threads is."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ByteMeter:
    """Adds up bytes for a callback, which gets those that are done and all of them. Never more than
    `total`, never fewer than before: what is read again counts once. Thread-safe; one call of
    `progress` at a time."""

    def __init__(self, progress: Callable[[int, int], None], total: int) -> None:
        self._progress, self._total = progress, total
        self._done = 0
        self._lock = threading.Lock()  # guards _done, and that calls come in order

    def add(self, count: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            done = min(self._total, self._done + count)
            if done > self._done:
                self._done = done
                self._progress(done, self._total)

    def end(self) -> None:
        """All is done, also what lay between two reads."""
        self.add(self._total)
