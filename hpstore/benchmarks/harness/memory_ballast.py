"""Memory held and given up on purpose, so that a benchmark measures copies and not page faults.

A virtual machine may hand free pages back to its host (balloon, free-page reporting). A page that
was free for some seconds then costs a fault in the host at its next touch: populating huge pages
runs at 10-22 GB/s when they were freed a moment ago, at 0.2 GB/s half a minute later. Whoever
allocates or fills the page cache looks 5-15 times slower than it is; torch.save to durable took 4.5
to 9.8 s instead of 1.1. On a machine of one's own nothing of this happens, and the ballast changes
nothing.

So the process that runs the benchmark holds populated memory and gives some of it up right before
each section: every contender finds warm pages, ours as well as peers. What a section did not take
is taken back before it turns cold; regain() knows how much that is, since whatever is free beyond
what was free while all was held was freed a moment ago. Cold memory populated and left to turn cold
again was a third of a repetition. The state and what it is loaded into stay where they are for the
whole run (checkpoint_state.SharedState), so that the pages which come and go are few.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from pathlib import Path

from hpstore.units import GIB, MIB, round_up

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_STEP_BYTES = 2 * MIB  # of a huge page
LIMIT_BYTES = 16 * GIB
SPARE_BYTES = 256 * MIB
COPIES = 3.5  # of the state: what a session keeps (staging, two files) and what a section needs


def memory_bytes(name: str) -> int:
    """A line of /proc/meminfo, such as MemAvailable or MemFree; 0 where the kernel has none."""
    with contextlib.suppress(OSError), Path("/proc/meminfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def ballast_bytes(state_bytes: int, available: int) -> int:
    """How much to hold for a state of that size: at most half of what is there. Pure."""
    wanted = int(COPIES * state_bytes) + SPARE_BYTES
    return round_up(min(wanted, LIMIT_BYTES, available // 2), 2 * MIB)


class MemoryBallast:
    """Up to `nbytes` of memory, all of it held at first; see the module for its use.

    `problem` says why nothing is held, "" when it works. `free_bytes` says what is free here.
    """

    def __init__(
        self, nbytes: int, free_bytes: Callable[[], int] = lambda: memory_bytes("MemFree")
    ) -> None:
        self.nbytes, self.problem = nbytes // mmap.PAGESIZE * mmap.PAGESIZE, ""
        self._free_bytes = free_bytes
        self._memory = mmap.mmap(
            -1, max(self.nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        with contextlib.suppress(OSError):  # no huge pages here: 4 KiB ones do
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._given = self.nbytes  # held is the rest, [_given, nbytes)
        self._cold_bytes = self._free_bytes()
        self.hold(self.nbytes)

    @property
    def held_bytes(self) -> int:
        """What is populated now."""
        return self.nbytes - self._given

    def hold(self, nbytes: int) -> None:
        """Populate until so much is held, at most what it was made for; less is never given up."""
        wanted = max(0, self.nbytes - round_up(max(0, nbytes), _STEP_BYTES))
        if self.problem or wanted >= self._given:
            return
        try:
            self._memory.madvise(_POPULATE_WRITE, wanted, self._given - wanted)
        except OSError as error:
            self.problem = f"memory cannot be populated here: {error.strerror}"
            self._memory.madvise(mmap.MADV_DONTNEED)
            wanted = self.nbytes
        self._given = wanted
        if not wanted:
            self._cold_bytes = self._free_bytes()

    def regain(self) -> None:
        """Take back what is free and still warm."""
        self.hold(self.held_bytes + max(0, self._free_bytes() - self._cold_bytes))

    def release(self, nbytes: int) -> None:
        """Free so much of what is held now."""
        count = min(round_up(max(0, nbytes), _STEP_BYTES), self.held_bytes)
        if count:
            self._memory.madvise(mmap.MADV_DONTNEED, self._given, count)
            self._given += count

    def close(self) -> None:
        """Give it up for good. Idempotent."""
        self._memory.close()
