"""The write pipeline: fill a batch of stripes, encode, checksum, hand to the devices' lanes.

Full stripes of aligned memory are written in place; the rest is copied into a lease first. A batch
is one lease, taken at once; at most BATCHES_IN_FLIGHT are on their way.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

from hpstore.buffers import Lease
from hpstore.checksum import block_digests
from hpstore.codec import address_of
from hpstore.codec.galois import Bytes
from hpstore.errors import BudgetExceeded
from hpstore.geometry import BLOCK_BYTES, Code, Geometry
from hpstore.objects.columnset import ColumnSet
from hpstore.objects.source import Source
from hpstore.objects.store import Store
from hpstore.units import round_up

BATCHES_IN_FLIGHT = 4
Throttle = Callable[[int], None]  # told the bytes about to be written; waits as it likes


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Consecutive stripes, [first, last)."""

    first: int
    last: int
    column_offset: int
    column_bytes: int


def plan_batches(geometry: Geometry, column_bytes: int) -> Iterator[Batch]:
    """Cut an object into batches of about `column_bytes` that begin on a block.

    A shrunk last stripe is a batch of its own, where that can be: it alone is copied then.
    """
    unit = geometry.unit_bytes
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
        yield Batch(first=first, last=last, column_offset=start, column_bytes=end - start)


class _Flight:
    """One batch between its lease and its last write."""

    def __init__(self, lease: Lease, prepared: Future[dict[int, Future[None]]]) -> None:
        self.lease, self.prepared = lease, prepared

    def drop(self) -> None:
        """Release the lease when the last write has answered (PROTOCOL 21)."""
        if not self.prepared.done() or self.prepared.exception() is not None:
            self.prepared.add_done_callback(lambda _: self.lease.release())
            return
        late = [f for f in self.prepared.result().values() if not f.done()]
        if not late:
            self.lease.release()
        arrivals = itertools.count(1)  # next() is atomic

        def arrived(_: Future[None]) -> None:
            if next(arrivals) == len(late):
                self.lease.release()

        for future in late:
            future.add_done_callback(arrived)


class StripeWriter:
    """Runs one source through the pipeline into a ColumnSet."""

    def __init__(
        self, store: Store, columns: ColumnSet, geometry: Geometry, floor: int, batch_bytes: int
    ) -> None:
        """`batch_bytes`: of one column."""
        self._store, self._columns, self._batch_bytes = store, columns, batch_bytes
        self._geometry, self._floor = geometry, floor

    def run(self, source: Source, throttle: Throttle | None = None) -> None:
        """Write all stripes. Stops early when fewer columns than the floor are left."""
        flying: deque[_Flight] = deque()
        patience = self._store.settings.put_deadline_seconds
        try:
            for batch in plan_batches(self._geometry, self._batch_bytes):
                if len(flying) >= BATCHES_IN_FLIGHT:
                    self._land(flying.popleft())
                if throttle is not None:
                    throttle(batch.column_bytes * self._geometry.data)
                if len(self._columns.alive()) < self._floor:
                    return
                in_place = self._in_place(batch, source)
                rows = self._geometry.parity if in_place else self._geometry.width
                lease = self._lease(rows * batch.column_bytes, flying, patience)
                if in_place:
                    prepared = self._store.scheduler.compute(
                        lambda b=batch, x=lease: self._prepare_in_place(b, source, x)  # type: ignore[misc]
                    )
                else:
                    prepared = self._store.scheduler.compute(
                        lambda b=batch, x=lease: self._prepare_packed(b, source, x)  # type: ignore[misc]
                    )
                flying.append(_Flight(lease, prepared))
            while flying:
                self._land(flying.popleft())
        finally:
            for flight in flying:
                wait([flight.prepared])
                flight.drop()

    def _lease(self, nbytes: int, flying: deque[_Flight], patience: float) -> Lease:
        """Memory for a batch; lands earlier ones first when it is short, so nobody deadlocks."""
        while flying:
            try:
                return self._store.buffers.lease(nbytes, 0.0)
            except BudgetExceeded:
                self._land(flying.popleft())
        return self._store.buffers.lease(nbytes, patience)

    def _land(self, flight: _Flight) -> None:
        try:
            self._columns.settle(flight.prepared.result())
        finally:
            flight.drop()

    def _in_place(self, batch: Batch, source: Source) -> bool:
        """Whether the batch can be written from the caller's memory without a copy."""
        geometry = self._geometry
        if geometry.code is Code.COPIES or geometry.unit_bytes % BLOCK_BYTES:
            return False
        if batch.last > geometry.full_stripe_count:
            return False
        start = batch.first * geometry.stripe_bytes
        view = source.view(start, batch.last * geometry.stripe_bytes)
        step = max(c.device.memory_alignment for c in self._columns.columns.values())
        return view is not None and view.ctypes.data % step == 0

    def _prepare_in_place(
        self, batch: Batch, source: Source, lease: Lease
    ) -> dict[int, Future[None]]:  # fmt: skip
        """Encode and checksum a batch in the caller's memory, then start its writes."""
        geometry, unit = self._geometry, self._geometry.unit_bytes
        rows: list[list[Bytes]] = [[] for _ in range(geometry.width)]
        encode = self._store.code.encoder(geometry.data, geometry.parity)
        parity_at = address_of(lease.array)
        for stripe in range(batch.first, batch.last):
            start = stripe * geometry.stripe_bytes
            data = source.view(start, start + geometry.stripe_bytes)
            assert data is not None  # _in_place has checked
            units = [data[i * unit : (i + 1) * unit] for i in range(geometry.data)]
            at = (stripe - batch.first) * geometry.parity * unit
            parity = [
                lease.array[at + i * unit : at + (i + 1) * unit] for i in range(geometry.parity)
            ]
            data_at = address_of(data)
            encode(
                [data_at + i * unit for i in range(geometry.data)],
                [parity_at + at + i * unit for i in range(geometry.parity)],
                unit,
            )
            for column, row in enumerate((*units, *parity)):
                rows[column].append(row)
                self._digest(column, stripe * unit, row)
        return self._start(batch, rows)

    def _prepare_packed(
        self, batch: Batch, source: Source, lease: Lease
    ) -> dict[int, Future[None]]:  # fmt: skip
        """Copy a batch into its lease, column by column, zero-padded; encode, checksum, write."""
        geometry, run = self._geometry, batch.column_bytes
        columns = [lease.array[i * run : (i + 1) * run] for i in range(geometry.width)]
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
        for column, row in enumerate(columns):
            self._digest(column, batch.column_offset, row)
        return self._start(batch, [[row] for row in columns])

    def _digest(self, column: int, column_offset: int, row: Bytes) -> None:
        writer = self._columns.columns[column]
        first = column_offset // BLOCK_BYTES
        count = -(-len(row) // BLOCK_BYTES)
        block_digests(writer.header.seed, first, row.data, writer.table[first : first + count])

    def _start(self, batch: Batch, rows: list[list[Bytes]]) -> dict[int, Future[None]]:
        return self._columns.submit(
            lambda column: lambda: column.write(batch.column_offset, rows[column.header.column])
        )


__all__ = ["Batch", "StripeWriter", "Throttle", "plan_batches"]
