"""What one I/O leaves behind: a few hundred nanoseconds on the thread that made it.

No lock on that path. It rests on what CPython does in one step, with and without its global lock:
both ends of a deque, setting and popping an item of a dict, `next` of a counter, copying a dict.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from hpstore.health.detect.histogram import FloatArray

ROWS_MOST = 1 << 16  # between two ticks; 14 MB a device. More are counted, not kept


class Operation(IntEnum):
    """Operations that are not compared with each other."""

    READ = 0
    WRITE = 1
    SYNC = 2  # fsync, fdatasync: seconds where a write takes a millisecond
    META = 3  # names and small records; in histograms only


class IoOutcome(IntEnum):
    """How an operation ended."""

    OK = 0
    ERROR = 1  # EIO and the like; a name that is not there is no error
    CHECKSUM = 2  # read, but damaged
    CUT = 3  # given up by who asked: it would have taken longer still


OPERATIONS = {
    "read": Operation.READ,
    "write": Operation.WRITE,
    "sync": Operation.SYNC,
    "sync_directory": Operation.SYNC,
    "register": Operation.SYNC,
}
"""By the names that device wrappers give; every other one is META."""

_Row = tuple[int, int, float, int, float, int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class IoRows:
    """I/Os of one device. An index is one I/O, or `count` alike that were made in one batch: then
    bytes and seconds are their means."""

    operation: FloatArray
    outcome: FloatArray
    nbytes: FloatArray
    in_flight: FloatArray  # at submit, this one included
    seconds: FloatArray
    count: FloatArray
    usual: FloatArray  # what its peers took in the same batch; 0 where nobody can tell


class IoRecorder:
    """I/Os of one device. `begin`, `end` and `record` are for any thread; `drain` for one."""

    __slots__ = ("_dropped", "_dropping", "_flights", "_idents", "_rows")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything. In the child of a fork: the parent's calls do not end here."""
        self._dropping = threading.Lock()  # guards _dropped
        self._idents = itertools.count()
        self._flights: dict[int, tuple[float, int]] = {}
        self._rows: deque[_Row] = deque()
        self._dropped = 0

    def begin(self, now_seconds: float) -> int:
        """A call starts; returns its ticket for `end`."""
        ticket = next(self._idents)
        flights = self._flights
        flights[ticket] = (now_seconds, len(flights) + 1)
        return ticket

    def end(
        self, ticket: int, operation: int, nbytes: int, now_seconds: float, outcome: int = 0
    ) -> None:
        """The call of that ticket is over. One from before a `reset` is ignored."""
        flight = self._flights.pop(ticket, None)
        if flight is not None:
            began, in_flight = flight
            self.record(operation, nbytes, in_flight, now_seconds - began, outcome)

    def leave(self, ticket: int) -> None:
        """The call of that ticket is over, and nobody knows how long its parts took."""
        self._flights.pop(ticket, None)

    def record(
        self,
        operation: int,
        nbytes: float,
        in_flight: int,
        seconds: float,
        outcome: int = 0,
        count: int = 1,
        usual: float = 0.0,
    ) -> None:
        """Note an I/O that is over: `seconds` of the device call, without queue and codec.

        `count` alike of one batch are noted at once: their mean bytes and seconds, and what such
        reads of its other devices took, 0 where those are too few.
        """
        rows = self._rows
        if len(rows) < ROWS_MOST:
            rows.append((operation, outcome, nbytes, in_flight, seconds, count, usual))
        else:
            with self._dropping:
                self._dropped += count

    @property
    def dropped(self) -> int:
        """I/Os that were not kept, since the beginning."""
        return self._dropped

    def oldest_seconds(self, now_seconds: float) -> float:
        """Age of the oldest call in flight; 0 when there is none."""
        began = [flight[0] for flight in self._flights.copy().values()]
        return max(0.0, now_seconds - min(began)) if began else 0.0

    def drain(self) -> IoRows:
        """Take what was recorded since the last time."""
        rows = self._rows
        taken = [rows.popleft() for _ in range(len(rows))]  # others append at the other end
        flat = itertools.chain.from_iterable(taken)
        table = np.fromiter(flat, np.float64, 7 * len(taken)).reshape(-1, 7)
        operation, outcome, nbytes, in_flight, seconds, count, usual = table.T.copy()
        return IoRows(
            operation=operation,
            outcome=outcome,
            nbytes=nbytes,
            in_flight=in_flight,
            seconds=seconds,
            count=count,
            usual=usual,
        )
