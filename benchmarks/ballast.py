"""Memory held and given up on purpose, so that a benchmark measures copies and not page faults.

A virtual machine may hand free pages back to its host (balloon, free-page reporting). A page that
was free for some seconds then costs a fault in the host at its next touch: populating huge pages
runs at 10-22 GB/s when they were freed a moment ago, at 0.2 GB/s half a minute later. Whoever
allocates or fills the page cache looks 5-15 times slower than it is; torch.save to durable took 4.5
to 9.8 s instead of 1.1. On a machine of one's own nothing of this happens, and the ballast changes
nothing.

So the process that runs the benchmark holds populated memory, gives it up right before a measured
section and takes it back right after it: every contender finds warm pages, ours as well as peers.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

from hpstore.units import GIB, MIB, round_up

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
LIMIT_BYTES = 8 * GIB
SPARE_BYTES = 256 * MIB
COPIES = 2.5  # of the state: a section fills one staging copy and one page cache copy, and breathes


def available_bytes() -> int:
    """Memory that can be taken without swapping; 0 where the kernel does not say."""
    with contextlib.suppress(OSError), Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def ballast_bytes(state_bytes: int, available: int) -> int:
    """How much to hold for a state of that size: at most a third of what is there. Pure."""
    wanted = int(COPIES * state_bytes) + SPARE_BYTES
    return round_up(min(wanted, LIMIT_BYTES, available // 3), 2 * MIB)


class Ballast:
    """`nbytes` of memory that hold() populates and release() gives back to the kernel.

    `problem` says why nothing is held, "" when it works.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.problem = nbytes, ""
        self._memory = mmap.mmap(
            -1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        with contextlib.suppress(OSError):  # no huge pages here: 4 KiB ones do
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def hold(self) -> None:
        """Populate; cheap for what is held already."""
        if self.problem or not self.nbytes:
            return
        try:
            self._memory.madvise(_POPULATE_WRITE)
        except OSError as error:
            self.problem = f"memory cannot be populated here: {error.strerror}"
            self.release()

    def release(self) -> None:
        """Free every page now."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give it up for good. Idempotent."""
        self._memory.close()


__all__ = ["Ballast", "available_bytes", "ballast_bytes"]
