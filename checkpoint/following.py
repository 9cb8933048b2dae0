"""Reading memory behind those who fill it: a save is written while the rest is still staged."""

from __future__ import annotations

import threading

from hpstore.codec.galois import Bytes


class Watermark:
    """How much of some memory, from its start, is as it will stay.

    Moved by those who fill it in ascending order, waited for by those who follow behind them.
    """

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self._begin = memory.ctypes.data
        self._at = 0
        self._error: BaseException | None = None
        self._wanted: list[int] = []  # by those who wait
        self._moved = threading.Condition()  # guards all of the above

    def reach(self, address: int) -> None:
        """All before an address in the memory is there."""
        self._move(address - self._begin)

    def finish(self) -> None:
        """All is there."""
        self._move(len(self.memory))

    def _move(self, at: int) -> None:
        with self._moved:
            self._at = max(self._at, at)
            if any(end <= self._at for end in self._wanted):
                self._moved.notify_all()

    def fail(self, error: BaseException) -> None:
        """The rest will not come: wait() raises this for it."""
        with self._moved:
            self._error = self._error or error
            self._moved.notify_all()

    def wait(self, end: int) -> None:
        """Block until the first `end` bytes are there. Raises what fail() was told."""
        with self._moved:
            self._wanted.append(end)
            self._moved.wait_for(lambda: self._at >= end or self._error is not None)
            self._wanted.remove(end)
            if self._at < end and self._error is not None:
                raise self._error


class FollowingSource:
    """The memory below a watermark as the source of a put, which so follows those who fill it."""

    def __init__(self, mark: Watermark, size: int) -> None:
        self._mark, self.size = mark, size

    def view(self, start: int, end: int) -> Bytes | None:
        self._mark.wait(end)
        return self._mark.memory[start:end]

    def read_into(self, start: int, out: Bytes) -> None:
        self._mark.wait(start + len(out))
        out[:] = self._mark.memory[start : start + len(out)]


__all__ = ["FollowingSource", "Watermark"]
