"""What a process of a soak writes down: JSON lines, each appended by one call, so a kill tears none
but the last. Times are of the machine's monotonic clock, which all processes share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

# Any: JSON
from typing import Any


class Journal:
    """A file that several lives of a process append to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **facts: Any) -> None:
        """One line, with the time and the process."""
        row = {"event": event, "at": time.monotonic(), "pid": os.getpid(), **facts}
        os.write(self._fd, f"{json.dumps(row)}\n".encode())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Its lines, oldest first; those that a kill cut off are left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
