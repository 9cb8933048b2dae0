"""Memory held and given up on purpose, so that a benchmark measures copies and not page faults.

A virtual machine may hand free pages back to its host (balloon, free-page reporting). A page that
was free for some seconds then costs a fault in the host at its next touch: populating huge pages
runs at 10-22 GB/s when they were freed a moment ago, at 0.2 GB/s half a minute later. Whoever
allocates or fills the page cache looks 5-15 times slower than it is; torch.save to durable took 4.5
to 9.8 s instead of 1.1. On a machine of one's own nothing of this happens, and the ballast changes
nothing.

So the process that runs the benchmark holds populated memory and gives it up right before a
measured section: every contender finds warm pages, ours as well as peers. The state and what it is
loaded into stay where they are for the whole run (checkpoint_state.SharedState), so that the pages
which come and go are few and the ballast small.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

from hpstore.units import GIB, MIB, round_up

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
LIMIT_BYTES = 16 * GIB
SPARE_BYTES = 256 * MIB
COPIES = 2.2  # of the state: one staged and one in the page cache, or one read and one cached


def memory_bytes(name: str) -> int:
    """A line of /proc/meminfo, such as MemAvailable or MemFree; 0 where the kernel has none."""
    with contextlib.suppress(OSError), Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def ballast_bytes(state_bytes: int, available: int) -> int:
    """How much to hold for a state of that size: at most half of what is there. Pure."""
    wanted = int(COPIES * state_bytes) + SPARE_BYTES
    return round_up(min(wanted, LIMIT_BYTES, available // 2), 2 * MIB)


class Ballast:
    """Up to `nbytes` of memory; hold(), then release(): so much of what is free is warm.

    `problem` says why nothing is held, "" when it works.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.problem = nbytes, ""
        self._memory = mmap.mmap(
            -1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        with contextlib.suppress(OSError):  # no huge pages here: 4 KiB ones do
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.hold(nbytes)

    def hold(self, nbytes: int) -> None:
        """Populate so much, at most what it was made for; quick where it is held already."""
        count = max(0, min(nbytes, self.nbytes)) // mmap.PAGESIZE * mmap.PAGESIZE
        if self.problem or not count:
            return
        try:
            self._memory.madvise(_POPULATE_WRITE, 0, count)
        except OSError as error:
            self.problem = f"memory cannot be populated here: {error.strerror}"
            self.release()

    def release(self) -> None:
        """Free every page now."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give it up for good. Idempotent."""
        self._memory.close()


__all__ = ["Ballast", "ballast_bytes", "memory_bytes"]
