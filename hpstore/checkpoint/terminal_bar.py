"""A line on the terminal that shows how far a save, a restore or a verification is."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from hpstore.units import format_bytes

_REFRESH_SECONDS = 0.1
_SETTLED_SECONDS = 0.5  # before it a rate is a guess
_CLEAR = "\r\x1b[K"


class TerminalBar:
    """Give it as `progress=`: one line on a terminal, gone at the end; nothing anywhere else.

        bar = TerminalBar("checkpoint")
        ckpt.save(step, state, progress=bar)
        ckpt.restore(state, progress=bar)

    It can be given again and again, and to a save in the background: thread-safe. A stream that
    cannot be written to ends no save.

    Parameters
    ----------
    what
        What the line begins with.
    stream
        Where it goes. Default: standard error.
    """

    def __init__(
        self,
        what: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._stream, self._clock = what, stream, clock
        self._began = self._shown = clock()
        self._done = 0
        self._lock = threading.Lock()  # guards all of the above

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are done."""
        stream = sys.stderr if self._stream is None else self._stream
        with self._lock, suppress(OSError, ValueError):  # ValueError: it is closed
            if stream is None or not stream.isatty():
                return
            now = self._clock()
            if done < self._done or not self._done:  # another piece of work
                self._began, self._shown = now, -math.inf
            self._done = 0 if done >= total else done
            if done >= total:
                stream.write(_CLEAR)
            elif now - self._shown >= _REFRESH_SECONDS:
                self._shown = now
                stream.write(f"{_CLEAR}{self._line(done, total, now - self._began)}")
            stream.flush()

    def _line(self, done: int, total: int, seconds: float) -> str:
        amount = (
            f"{self._what}: {done * 100 // total} %, {format_bytes(done)}/{format_bytes(total)}"
        )
        if seconds < _SETTLED_SECONDS or not done:
            return amount
        rate = done / seconds
        left = (total - done) / rate
        return f"{amount}, {format_bytes(int(rate))}/s, {left:.0f} s left"
