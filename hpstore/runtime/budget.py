"""Byte budgets: memory is leased, first come first served."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from hpstore.errors import BudgetExceeded
from hpstore.units import format_bytes

_thread = threading.local()


@contextmanager
def inside_a_lease() -> Iterator[None]:
    """Inside, this thread leases for what a lease is held for: it waits for room, and for no turn,
    since who has the turn may wait for that lease to come back."""
    before, _thread.inside = getattr(_thread, "inside", False), True
    try:
        yield
    finally:
        _thread.inside = before


class ByteBudget:
    """At most `limit_bytes` leased at a time; a larger request is admitted only when alone.

    Requests are served in order, but for those of a thread that holds a lease already, which others
    may wait for: see inside_a_lease(). `waited_total` counts requests that had to wait.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.waited_total = 0
        self.peak_bytes = 0
        self._used = 0
        self._closed = False
        self._queue: deque[object] = deque()
        self._turn = threading.Condition()  # guards all of the above

    @property
    def used_bytes(self) -> int:
        """Bytes leased now."""
        with self._turn:
            return self._used

    def acquire(self, nbytes: int, timeout_seconds: float | None = None, *, spare: int = 0) -> None:
        """Lease bytes; waits for its turn, and until `spare` bytes are left beside them. Raises
        BudgetExceeded on timeout or after close()."""
        ticket = object()
        with self._turn:
            if getattr(_thread, "inside", False):
                self._queue.appendleft(ticket)
            else:
                self._queue.append(ticket)

            def ready() -> bool:
                room = self.limit_bytes - spare
                fits = self._used + nbytes <= room or self._used == 0
                return self._closed or (self._queue[0] is ticket and fits)

            if not ready():
                self.waited_total += 1
            try:
                arrived = self._turn.wait_for(ready, timeout_seconds)
            finally:  # also when the wait is interrupted: nobody may queue behind a ghost
                self._queue.remove(ticket)
                self._turn.notify_all()
            if not arrived or self._closed:
                raise BudgetExceeded(
                    f"no {format_bytes(nbytes)} of the budget of "
                    f"{format_bytes(self.limit_bytes)} became free in time"
                )
            self._used += nbytes
            self.peak_bytes = max(self.peak_bytes, self._used)

    def release(self, nbytes: int) -> None:
        """Give leased bytes back."""
        with self._turn:
            self._used -= nbytes
            self._turn.notify_all()

    @contextmanager
    def lease(self, nbytes: int, timeout_seconds: float | None = None) -> Iterator[None]:
        """Hold bytes for the length of a with block."""
        self.acquire(nbytes, timeout_seconds)
        try:
            yield
        finally:
            self.release(nbytes)

    def close(self) -> None:
        """Wake and refuse all who wait."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()


_CGROUPS = {  # names of limit and usage; by controller in /proc/self/cgroup, "" is version 2
    "": ("/sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def available_bytes() -> int:
    """Memory that this process can still take: of the node, and of every control group that it is
    in (a container's, a batch job's), the ones above its own included.
    """
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) * 1024
    for root, limit, usage in _groups():
        numbers = [*_lines(f"{root}/{limit}"), *_lines(f"{root}/{usage}")]
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            found = min(found, max(0, int(numbers[0]) - int(numbers[1])))
    return found


def _groups() -> Iterator[tuple[str, str, str]]:
    """Directory, limit and usage of this process's groups; a container sees its own as the root."""
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller not in _CGROUPS:
                continue
            root, limit, usage = _CGROUPS[controller]
            parts = [part for part in path.split("/") if part]
            for depth in range(len(parts) + 1):
                yield "/".join([root, *parts[:depth]]), limit, usage


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return [line for line in file.read().split("\n") if line]
    except OSError:  # there is no such group
        return []
