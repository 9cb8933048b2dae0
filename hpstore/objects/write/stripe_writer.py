"""The write pipeline: fill a batch of stripes, encode, checksum, hand to the devices' lanes.

Full stripes of aligned memory are written in place, their data while the parity is still being
computed; the rest is copied into a lease first. A batch is one lease, taken at once; at most
BATCHES_IN_FLIGHT are on their way, and the next one starts when any of them is through.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

from hpstore.codec import address_of
from hpstore.codec.galois import Bytes
from hpstore.errors import BudgetExceeded
from hpstore.format.geometry import BLOCK_BYTES, Code, Geometry
from hpstore.objects.context import PoolContext
from hpstore.objects.write.column_writer import ColumnSet
from hpstore.objects.write.put_source import PutSource
from hpstore.runtime.buffers import Lease, release_after
from hpstore.runtime.scheduler import at_once
from hpstore.units import MIB, round_up

BATCHES_IN_FLIGHT = 5  # two are computed while two are written; one more evens out who is slow
ONE_CALL_BYTES = 2 * MIB  # of an object: encoded by the thread that puts it, one write a column
IN_ORDER_SECONDS = 0.25  # no batch was through for so long: the oldest is waited for by itself
Throttle = Callable[[int], None]  # told the bytes about to be written; waits as it likes


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeBatch:
    """Consecutive stripes, [first, last)."""

    first: int
    last: int
    column_offset: int
    column_bytes: int


def plan_batches(geometry: Geometry, column_bytes: int) -> Iterator[StripeBatch]:
    """Cut an object into batches of about `column_bytes` that begin on a block.

    A shrunk last stripe is a batch of its own, where that can be: it alone is copied then.
    """
    unit = geometry.unit_bytes
    if in_one_call(geometry, column_bytes):
        yield StripeBatch(
            first=0, last=geometry.stripe_count, column_offset=0, column_bytes=geometry.column_bytes
        )
        return
    count = max(1, column_bytes // unit)
    count = round_up(count * unit, max(BLOCK_BYTES, unit)) // unit
    while count * unit % BLOCK_BYTES:
        count += 1  # units are multiples of 4 KiB: at most 15 more
    whole = geometry.full_stripe_count
    starts = list(range(0, geometry.stripe_count, count))
    if 0 < whole < geometry.stripe_count and whole % count and not unit % BLOCK_BYTES:
        starts.append(whole)
    for first, last in itertools.pairwise([*starts, geometry.stripe_count]):
        start = geometry.column_offset_of(first)
        end = geometry.column_bytes if last == geometry.stripe_count else last * unit
        yield StripeBatch(first=first, last=last, column_offset=start, column_bytes=end - start)


def in_one_call(geometry: Geometry, batch_bytes: int) -> bool:
    """Whether an object is so small that each column is one call on its device: made, written and
    synced. `batch_bytes`: of one column, that the memory budget allows. Pure."""
    return 0 < geometry.size <= ONE_CALL_BYTES and geometry.column_bytes <= batch_bytes


class _Flight:
    """One batch between its lease and its last write."""

    def __init__(
        self, lease: Lease, prepared: Future[dict[int, Future[None]]], told: threading.Semaphore
    ) -> None:
        """`told` is released once, when the last write has answered or the batch has failed."""
        self.lease, self.prepared, self._told = lease, prepared, told
        self.through = False
        prepared.add_done_callback(self._watch)

    def _watch(self, prepared: Future[dict[int, Future[None]]]) -> None:
        failed = prepared.cancelled() or prepared.exception() is not None
        writes = [] if failed else list(prepared.result().values())
        if not writes:
            self._end()
        arrivals = itertools.count(1)  # next() is atomic

        def arrived(_: Future[None]) -> None:
            if next(arrivals) == len(writes):
                self._end()

        for write in writes:
            write.add_done_callback(arrived)

    def _end(self) -> None:
        self.through = True
        self._told.release()

    def drop(self) -> None:
        """Release the lease when the last write has answered (PROTOCOL 21)."""
        if not self.prepared.done() or self.prepared.exception() is not None:
            self.prepared.add_done_callback(lambda _: self.lease.release())
            return
        release_after(self.lease, self.prepared.result().values())


class StripeWriter:
    """Runs one source through the pipeline into a ColumnSet."""

    def __init__(
        self,
        store: PoolContext,
        columns: ColumnSet,
        geometry: Geometry,
        floor: int,
        batch_bytes: int,
    ) -> None:
        """`batch_bytes`: of one column."""
        self._store, self._columns, self._batch_bytes = store, columns, batch_bytes
        self._geometry, self._floor = geometry, floor
        self._whole = in_one_call(geometry, batch_bytes)
        self._told = threading.Semaphore(0)  # as often as flights were through

    def run(self, source: PutSource, throttle: Throttle | None = None) -> None:
        """Write all stripes. Stops early when fewer columns than the floor are left."""
        flying: list[_Flight] = []
        try:
            for batch in plan_batches(self._geometry, self._batch_bytes):
                if len(flying) >= BATCHES_IN_FLIGHT:
                    self._land(flying)
                if throttle is not None:
                    throttle(batch.column_bytes * self._geometry.data)
                if len(self._columns.alive()) < self._floor:
                    return
                flying.append(self._launch(batch, source, flying))
            while flying:
                self._land(flying)
        finally:
            for flight in flying:
                wait([flight.prepared])
                flight.drop()

    def _launch(self, batch: StripeBatch, source: PutSource, flying: list[_Flight]) -> _Flight:
        """Start a batch; data that lie ready need not wait for the parity."""
        rows = self._rows_in_place(batch, source)
        count = self._geometry.width if rows is None else self._geometry.parity
        lease = self._lease(count * batch.column_bytes, flying, source)
        # what is small is computed in less time than another thread wakes up in
        compute = at_once if self._whole else self._store.scheduler.compute
        try:
            if rows is None:
                prepared = compute(lambda: self._prepare_packed(batch, source, lease.array))
            else:
                early = self._start(batch, rows)
                prepared = compute(lambda: early | self._prepare_parity(batch, rows, lease))
        except BaseException:  # Ctrl-C while what is small is written here
            release_after(lease, self._columns.flying())
            raise
        return _Flight(lease, prepared, self._told)

    def _lease(self, nbytes: int, flying: list[_Flight], source: PutSource) -> Lease:
        """Memory for a batch; lands earlier ones first when it is short, so none deadlocks. Where
        the source is read through leases, too, as much is left for them."""
        buffers, spare = self._store.buffers, nbytes if source.leases else 0
        while flying:
            try:
                return buffers.lease(nbytes, 0.0, spare=spare)
            except BudgetExceeded:
                self._land(flying)
        deadline = self._store.settings.put_deadline_seconds
        return buffers.lease(nbytes, deadline, spare=spare)

    def _land(self, flying: list[_Flight]) -> None:
        """Wait for the batch that is through first, or for the oldest when that takes long: then a
        device hangs, and settle() gives its column up in time."""
        self._told.acquire(timeout=IN_ORDER_SECONDS)
        flight = next((f for f in flying if f.through), flying[0])
        flying.remove(flight)
        try:
            self._columns.settle(flight.prepared.result())
        finally:
            flight.drop()

    def _rows_in_place(
        self, batch: StripeBatch, source: PutSource
    ) -> dict[int, list[Bytes]] | None:
        """The data columns' units in the caller's memory; None when a copy must be written."""
        geometry, unit = self._geometry, self._geometry.unit_bytes
        if self._whole or geometry.code is Code.COPIES or unit % BLOCK_BYTES:
            return None
        if batch.last > geometry.full_stripe_count:
            return None
        view = source.view(batch.first * geometry.stripe_bytes, batch.last * geometry.stripe_bytes)
        step = max(c.device.memory_alignment for c in self._columns.columns.values())
        if view is None or view.ctypes.data % step:
            return None
        return {
            column: [
                view[at : at + unit]
                for at in range(column * unit, len(view), geometry.stripe_bytes)
            ]
            for column in range(geometry.data)
        }

    def _prepare_parity(
        self, batch: StripeBatch, data: dict[int, list[Bytes]], lease: Lease
    ) -> dict[int, Future[None]]:
        """Encode and checksum a batch in the caller's memory, start the writes of its parity."""
        geometry, unit = self._geometry, self._geometry.unit_bytes
        numbers = range(geometry.data, geometry.width)
        rows: dict[int, list[Bytes]] = {number: [] for number in numbers}
        encode = self._store.code.encoder(geometry.data, geometry.parity)
        parity_at = address_of(lease.array)
        for n, stripe in enumerate(range(batch.first, batch.last)):
            at = n * geometry.parity * unit
            for i, number in enumerate(numbers):
                rows[number].append(lease.array[at + i * unit : at + (i + 1) * unit])
            data_at = address_of(data[0][n])
            encode(
                [data_at + i * unit for i in range(geometry.data)],
                [parity_at + at + i * unit for i in range(geometry.parity)],
                unit,
            )
            for column, row in itertools.chain(data.items(), rows.items()):
                self._digest(column, stripe * unit, row[n])
        return self._start(batch, rows)

    def _prepare_packed(
        self, batch: StripeBatch, source: PutSource, memory: Bytes
    ) -> dict[int, Future[None]]:
        """Copy a batch into memory, column by column, zero-padded; encode, checksum, write."""
        columns = self._pack(batch, source, memory)
        if self._whole:
            return self._columns.begin(
                lambda column: column.writing_whole([columns[column.header.column]]),
                f"write {batch.column_bytes.bit_length()}",
            )
        return self._start(batch, {number: [row] for number, row in enumerate(columns)})

    def fill(self, source: PutSource, memory: Bytes) -> dict[int, Future[None]]:
        """Start to make the files of an object in one call; ColumnWriter.sync makes them durable.

        `memory`: for all columns; it stays theirs until these calls have answered.
        """
        (batch,) = plan_batches(self._geometry, self._batch_bytes)
        columns = self._pack(batch, source, memory)
        return self._columns.submit(
            lambda column: lambda: column.fill([columns[column.header.column]])
        )

    def _pack(self, batch: StripeBatch, source: PutSource, memory: Bytes) -> list[Bytes]:
        geometry, run = self._geometry, batch.column_bytes
        columns = [memory[i * run : (i + 1) * run] for i in range(geometry.width)]
        for stripe in range(batch.first, batch.last):
            unit = geometry.unit_bytes_of(stripe)
            at = geometry.column_offset_of(stripe) - batch.column_offset
            for column in range(geometry.data):
                start = stripe * geometry.stripe_bytes + column * unit
                target = columns[column][at : at + unit]
                count = max(0, min(unit, geometry.size - start))
                if count:
                    source.read_into(start, target[:count])
                target[count:] = 0
        self._store.code.encode(
            geometry.code, geometry.parity, columns[: geometry.data], columns[geometry.data :]
        )
        shared = self._columns.columns[0].checks.macs  # of whole copies, all alike
        for column, row in enumerate(columns if not shared else columns[:1]):
            self._digest(column, batch.column_offset, row)
        for column in range(1, len(columns) if shared else 1):
            self._columns.columns[column].table[:] = self._columns.columns[0].table
        return columns

    def _digest(self, column: int, column_offset: int, row: Bytes) -> None:
        writer = self._columns.columns[column]
        first = column_offset // BLOCK_BYTES
        count = -(-len(row) // BLOCK_BYTES)
        writer.checks.digests(first, row.data, writer.table[first : first + count])

    def _start(
        self, batch: StripeBatch, rows: Mapping[int, list[Bytes]]
    ) -> dict[int, Future[None]]:
        """Start the writes of these columns' rows."""
        return self._columns.submit(
            lambda column: lambda: column.write(batch.column_offset, rows[column.header.column]),
            rows,
        )
