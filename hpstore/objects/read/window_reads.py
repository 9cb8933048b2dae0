"""Reads of one window on their way, and spare ones that overtake those that are late.

Every read lands in a lease. A late one goes on there after the window was delivered without it, and
the lease is released when its last read has ended (PROTOCOL 21).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial

from hpstore.codec.galois import Bytes
from hpstore.objects.context import PoolContext
from hpstore.objects.read.column_reader import ColumnReader
from hpstore.objects.read.read_plan import WindowPlan
from hpstore.runtime.buffers import Lease
from hpstore.runtime.scheduler import at_once


class WindowReads:
    """The reads of one window, on their way into one lease.

    One lease for all of a window, taken at once: two readers that each hold half of what they
    need can then not wait for each other. `before`: a flight whose columns this one uses, too.
    """

    def __init__(self, plan: WindowPlan, lease: Lease, before: WindowReads | None = None) -> None:
        self.plan, self._lease, self._before = plan, lease, before
        self.arrays: dict[int, Bytes] = {}
        self.starts: dict[int, int] = {}
        self.futures: dict[int, Future[ColumnReader | None]] = {}
        self.patience: dict[int, float] = {}  # column -> seconds that its read may take
        self.shared: set[int] = set()  # columns that are not read again
        self.began, self._opened = time.monotonic(), True
        self.waited = 0.0  # seconds that its reads have been waited for, as wait_awake counts them
        at = 0
        for column, (low, high) in (*plan.reads.items(), *plan.lost.items()):
            array = None if before is None else before.part(column, low, high)
            if array is None or column in plan.lost:
                array = lease.array[at : at + high - low]
                at += high - low
            else:
                self.shared.add(column)
            self.arrays[column], self.starts[column] = array, low

    def part(self, column: int, low: int, high: int) -> Bytes | None:
        """Bytes [low, high) of a column that has arrived."""
        future, run = self.futures.get(column), self.plan.reads.get(column)
        if future is None or run is None or not future.done() or future.exception() is not None:
            return None
        if low < run[0] or high > run[1]:
            return None
        return self.arrays[column][low - run[0] : high - run[0]]

    def late(self) -> list[int]:
        """Columns whose reads have not ended."""
        return [column for column, future in self.futures.items() if not future.done()]

    def failed(self) -> bool:
        """Whether a read has ended badly."""
        return any(f.done() and f.exception() is not None for f in self.futures.values())

    def overdue_in(self, columns: Iterable[int], otherwise: float) -> float:
        """Seconds until all of these columns are later than peers would be; may be negative."""
        patience = max((self.patience.get(column, otherwise) for column in columns), default=0.0)
        return self.began + patience - time.monotonic()

    def drop(self) -> None:
        """Give the memory back, now or when the last device has answered (PROTOCOL 21)."""
        before, self._before = self._before, None
        if before is not None:
            before.drop()
        late = [future for future in self.futures.values() if not future.done()]
        if not late:
            self._lease.release()
        arrivals = itertools.count(1)  # next() is atomic

        def arrived(_: Future[ColumnReader | None]) -> None:
            if next(arrivals) == len(late):
                self._lease.release()

        for future in late:
            future.add_done_callback(arrived)

    def adopted(self) -> None:
        """Of a spare flight: the files that it has opened belong to a reader."""
        self._opened = False

    def abandon(self) -> None:
        """Of a spare flight: give back its own memory, and the files that it has opened."""
        self._before = None
        for future in self.futures.values() if self._opened else ():
            future.add_done_callback(close_opened)
        self.drop()


def close_opened(future: Future[ColumnReader | None] | Future[ColumnReader]) -> None:
    """Close the file that a call has opened which nobody waits for any more."""
    if not future.cancelled() and future.exception() is None:
        opened = future.result()
        if opened is not None:
            opened.close()


class RebuiltRun:
    """Rebuilt column bytes in a lease that belongs to the holder until release()."""

    def __init__(self, rows: dict[int, Bytes], release: Callable[[], None]) -> None:
        self.rows, self.release = rows, release


def read_held(held: ColumnReader, low: int, target: Bytes) -> ColumnReader | None:
    """Fill `target` with verified bytes of an open column; nothing was opened for that."""
    held.read_into(low, target)
    return None


def begin_reads(
    store: PoolContext, columns: Mapping[int, ColumnReader], flight: WindowReads
) -> None:
    """Start the reads of a flight. Where a lane cannot be started it is dropped: raises what that
    raises."""
    try:
        for column, (low, _) in flight.plan.reads.items():
            reader, array = columns[column], flight.arrays[column]
            if reader.in_memory:
                flight.futures[column] = at_once(partial(read_held, reader, low, array))
                flight.patience[column] = 0.0  # what others need says when a spare read is due
                continue
            late_after = store.patience_seconds(reader.device_id, len(array))
            if late_after is not None:
                flight.patience[column] = late_after
            flight.futures[column] = store.scheduler.submit(
                reader.device_id, partial(read_held, reader, low, array)
            )
            store.routing.budget.earn(len(array))
    except BaseException:
        flight.drop()
        raise


def spare_bytes(plan: WindowPlan, before: WindowReads) -> tuple[int, int]:
    """Bytes to read for a spare plan, and memory for it, beside what has arrived of a flight."""
    reads = sum(
        high - low
        for column, (low, high) in plan.reads.items()
        if before.part(column, low, high) is None
    )
    return reads, reads + sum(high - low for low, high in plan.lost.values())
