"""Room in one piece of memory: ranges of it, taken and given back in any order."""

from __future__ import annotations

import threading

from hpstore.units import round_up


class Ranges:
    """Ranges of `nbytes`, first fit, at multiples of `alignment`. Thread-safe; never waits."""

    def __init__(self, nbytes: int, alignment: int) -> None:
        self._alignment = alignment
        self._free = [(0, nbytes)] if nbytes else []  # (start, end), ascending, not touching
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()  # guards both

    def take(self, nbytes: int) -> int | None:
        """Where a range of `nbytes` begins that is the caller's until give(); None without room."""
        size = round_up(max(nbytes, 1), self._alignment)
        with self._lock:
            for place, (start, end) in enumerate(self._free):
                if end - start >= size:
                    self._free[place : place + 1] = [(start + size, end)] * (end - start > size)
                    self._taken[start] = start + size
                    return start
        return None

    def give(self, start: int) -> None:
        """The range that begins there is free. KeyError when none does."""
        with self._lock:
            joined = sorted([*self._free, (start, self._taken.pop(start))])
            self._free = []
            for low, high in joined:
                if self._free and self._free[-1][1] == low:
                    low = self._free.pop()[0]
                self._free.append((low, high))

    @property
    def taken_bytes(self) -> int:
        """In all ranges that are out."""
        with self._lock:
            return sum(end - start for start, end in self._taken.items())
