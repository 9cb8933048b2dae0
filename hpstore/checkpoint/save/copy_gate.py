"""When copies in the background may run: always, or only while a trainer computes nothing.

The trainer shuts the gate while it computes and opens it between; copies pass it piece by piece, so
that at most one piece is still under way after it was shut. finish() of the staging opens it: what
is left is then copied at once, as somebody waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

_log = logging.getLogger(__name__)
PATIENCE_SECONDS = 60.0  # a trainer that died while it computed opens nothing any more
RECENT_PIECES = 4096  # that are remembered, for pictures


class CopyGate:
    """Counts what was copied while the trainer computed and while it did not.

    `blocks`: copies wait while it is shut; else it only counts. One copying thread, one trainer.
    The trainer's side is called at every event of a schedule: it takes no lock and wakes nobody
    where no copy waits. A copy says that it waits before it looks again, the trainer opens before
    it looks for one: whoever comes second sees the other.
    """

    def __init__(self, *, blocks: bool) -> None:
        self.blocks = blocks
        self.idle_bytes = self.busy_bytes = 0  # of pieces that began while it was open, and shut
        self.overdue_total = 0  # pieces that did not wait any longer
        self.is_shut = False
        self.awaited = False  # a copy waits for it, or is about to
        self._opened = threading.Event()  # since the copy came that is awaited
        self._idle = True  # when the piece under way began
        self._began = 0.0
        self.recent: deque[tuple[float, float, int]] = deque(maxlen=RECENT_PIECES)
        """Pieces: begin and end in seconds of time.perf_counter(), bytes."""

    def shut(self) -> None:
        """The trainer computes."""
        self.is_shut = True

    def open(self) -> None:
        """The trainer waits for others, or is between two steps. From any thread."""
        self.is_shut = False
        if self.awaited:
            self._opened.set()

    def enter(self) -> None:
        """Wait, at most PATIENCE_SECONDS, until a piece may be copied."""
        self._idle = not self.is_shut or (self.blocks and self._wait())
        if self.blocks and not self._idle:
            self.overdue_total += 1
            if self.overdue_total == 1:
                _log.warning(
                    "a trainer has computed for %.0f s without a pause: copies of its save do not "
                    "wait for one any longer",
                    PATIENCE_SECONDS,
                )
        self._began = time.perf_counter()

    def _wait(self) -> bool:
        """Whether it was opened in time; it may be shut again by now."""
        self._opened.clear()
        self.awaited = True
        try:
            return not self.is_shut or self._opened.wait(PATIENCE_SECONDS)
        finally:
            self.awaited = False

    def copied(self, nbytes: int) -> None:
        """The piece was copied."""
        self.recent.append((self._began, time.perf_counter(), nbytes))
        if self._idle:
            self.idle_bytes += nbytes
        else:
            self.busy_bytes += nbytes
