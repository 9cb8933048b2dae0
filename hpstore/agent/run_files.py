"""The files of a run directory, kept from programs that tidy temporary directories.

By default the directory is below /tmp. A file that goes there takes the history, an operator's
words and the lock of an agent with it, while processes still have the old one open.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TOUCH_SECONDS = 3600.0


class RunFiles:
    """Of one pool on this node; one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._touched_seconds: float | None = None

    def keep(self, now_seconds: float) -> None:
        """Make the files look used, once an hour. Monotonic seconds. Best effort: a file that goes
        meanwhile, or is another user's, is passed over."""
        last = self._touched_seconds
        if last is not None and now_seconds - last < _TOUCH_SECONDS:
            return
        self._touched_seconds = now_seconds
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    os.utime(entry.path, follow_symlinks=False)
