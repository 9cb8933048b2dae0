"""What memory a process takes, and the page cache of what it has written."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_SAMPLE_SECONDS = 0.02


def resident_bytes() -> int:
    """Memory of this process, exactly (statm is off by megabytes), and what processes that it
    started have to themselves: what they share with it is counted here.
    """
    own = _rollup("self", "Rss:")
    return own + sum(_rollup(pid, "Private_Clean:", "Private_Dirty:") for pid in _descendants())


def _rollup(pid: str, *names: str) -> int:
    """Bytes in these lines of a process's smaps_rollup; 0 when it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
    return 0


def _descendants() -> list[str]:
    """Processes that this one started, and those that they started."""
    found, front = [], [str(os.getpid())]
    while front:
        children: list[str] = []
        for pid in front:
            for listing in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    children += listing.read_text().split()
        found += children
        front = children
    return found


class PeakMemory:
    """Highest resident memory while it is entered, sampled by a thread."""

    def __enter__(self) -> PeakMemory:
        self.bytes = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory")
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.bytes = max(self.bytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def drop_cache(directory: Path) -> None:
    """Nothing under a directory is in the page cache afterwards; all of it was synced before.

    A file that goes meanwhile, as a pool recycles those of deleted objects, takes its pages along.
    """
    for path in directory.rglob("*"):
        if not path.is_file():
            continue
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
