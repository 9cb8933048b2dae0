"""Whole stripe units of objects, each straight into the caller's memory and verified there.

ObjectReader reads into leases and hands out pieces of them, which costs a copy of every byte. Who
has aligned memory for whole units reads them here, and reads what is not good again through
ObjectReader, which repairs.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hpstore.codec import address_of
from hpstore.codec.galois import Bytes
from hpstore.devices.io_uring import LATE
from hpstore.errors import HpstoreError, IntegrityError
from hpstore.format.geometry import BLOCK_BYTES, Geometry
from hpstore.objects.context import PoolContext
from hpstore.objects.read.column_reader import ColumnReader
from hpstore.objects.read.metered_batch import read_metered
from hpstore.objects.read.object_reader import ObjectReader
from hpstore.objects.read.open_columns import SPARE_SECONDS
from hpstore.objects.read.record_batch_read import Int64s
from hpstore.runtime.buffers import Lease, release_after
from hpstore.runtime.deadline_wait import STEP_SECONDS
from hpstore.units import MIB

_PIECE_BYTES = 8 * MIB
_FLYING = 8  # reads of a batch in flight for each worker of a device


@dataclass(slots=True, eq=False)
class _Stripe:
    """A stripe with lost units: it is decoded when all its sources are there."""

    geometry: Geometry
    offset: int  # in every column
    held: dict[int, ColumnReader]  # k columns to decode from
    there: dict[int, int]  # column -> number of the unit; the rest of `held` nobody asked for
    lost: dict[int, int]  # column -> number of the unit
    sources: dict[int, Bytes] = field(default_factory=dict)  # column -> where its unit is read to
    landed: list[_Read] = field(default_factory=list)
    failed: bool = False

    @property
    def spare_bytes(self) -> int:
        """Of sources that nobody asked for."""
        return (len(self.held) - len(self.there)) * self.geometry.unit_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """One unit to read from a device."""

    held: ColumnReader
    offset: int  # in the column
    target: Bytes
    number: int  # of the unit that was asked for; -1 for one that is only a source
    stripe: _Stripe | None


@dataclass(frozen=True, slots=True)
class Filled:
    """What became of the units. `late`: reads that do not end may still write into their memory."""

    good: npt.NDArray[np.bool_]
    late: npt.NDArray[np.bool_]


class UnitFill:
    """Units of several objects, to be read at once: add() for each object, then run().

    `targets[i]`, of one unit, aligned to 4 KiB, is filled with unit number i, then `arrived(i)` is
    called by the thread that runs this. Their memory belongs to run() until it returns; that of
    late ones is lost (PROTOCOL 21).
    """

    def __init__(self, targets: Sequence[Bytes], arrived: Callable[[int], None]) -> None:
        self._targets, self._arrived = targets, arrived
        self._reads: defaultdict[str, list[_Read]] = defaultdict(list)  # by device
        self._good = np.zeros(len(targets), bool)
        self._stripes: list[_Stripe] = []  # with lost units
        self._ended: queue.SimpleQueue[tuple[_Read, bool]] = queue.SimpleQueue()  # read, and good
        self._scratch: list[Lease] = []  # for sources that nobody asked for
        self._rest: Bytes = np.empty(0, np.uint8)  # of the last one, not taken yet
        self._late: list[Future[Any]] = []  # reads that are not waited for
        self._abandoned = False

    def add(self, reader: ObjectReader, starts: Int64s, numbers: Int64s) -> None:
        """Units of an open object, each once: unit numbers[i] begins at byte starts[i] of it.

        Those in the shrunk last stripe, of units that are no whole blocks, or for which too few
        columns are open, are left to the caller.
        """
        geometry = reader.header.geometry
        unit = geometry.unit_bytes
        whole = geometry.full_stripe_count * geometry.stripe_bytes
        fits = np.flatnonzero((starts % unit == 0) & (starts < whole))
        if unit % BLOCK_BYTES:
            return
        stripes = starts[fits] // geometry.stripe_bytes
        columns = starts[fits] % geometry.stripe_bytes // unit
        for stripe in np.unique(stripes).tolist():
            mine = stripes == stripe
            pairs = zip(columns[mine].tolist(), numbers[fits[mine]].tolist(), strict=True)
            self._add_stripe(reader, stripe, dict(pairs))

    def _add_stripe(self, reader: ObjectReader, stripe: int, wanted: dict[int, int]) -> None:
        geometry, columns = reader.header.geometry, reader.usable()
        offset = stripe * geometry.unit_bytes
        if reader.erasures:  # a unit with a damaged block is lost; units of other stripes are not
            damaged = reader.erasures.columns_in(offset, offset + geometry.unit_bytes)
            columns = {c: held for c, held in columns.items() if c not in damaged}
        there = {c: n for c, n in wanted.items() if c in columns}
        lost = {c: n for c, n in wanted.items() if c not in columns}
        spare = sorted(columns.keys() - there.keys())[: geometry.data - len(there)] if lost else []
        if lost and len(there) + len(spare) == geometry.data:
            held = {c: columns[c] for c in sorted([*there, *spare])}
            self._stripes.append(_Stripe(geometry, offset, held, there, lost))
            return
        for column, number in there.items():
            self._add(_Read(columns[column], offset, self._targets[number], number, None))

    def _add(self, read: _Read) -> None:
        self._reads[read.held.device_id].append(read)

    def _add_sources(self, store: PoolContext) -> None:
        """Reads for stripes with lost units; where memory is short, for what is not lost alone."""
        left = sum(stripe.spare_bytes for stripe in self._stripes)
        for stripe in self._stripes:
            spare = [c for c in stripe.held if c not in stripe.there]
            unit, memory = stripe.geometry.unit_bytes, self._room(store, stripe.spare_bytes, left)
            left -= stripe.spare_bytes
            group = stripe if memory is not None else None
            places = {column: index * unit for index, column in enumerate(spare)}
            for column, held in stripe.held.items():
                number = stripe.there.get(column, -1)
                if number >= 0:
                    into = self._targets[number]
                elif memory is not None:
                    into = memory[places[column] :][:unit]
                else:
                    continue
                stripe.sources[column] = into
                self._add(_Read(held, stripe.offset, into, number, group))

    def _room(self, store: PoolContext, nbytes: int, left: int) -> Bytes | None:
        """Memory for sources that nobody asked for, of `left` that are needed from here on.

        In large pieces: devices read into huge pages at more than twice the rate.
        """
        if len(self._rest) < nbytes:
            lease = store.scratch(max(nbytes, min(left, _PIECE_BYTES)), "fill")
            if lease is None:
                return None
            self._scratch.append(lease)
            self._rest = lease.array
        found, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return found

    def run(self, store: PoolContext) -> Filled:
        """Read and decode all. What is neither good nor late is to be read in another way.

        From devices that allow it reads are one batch, made by the calling thread
        (docs/decisions/0044); others, and the first of each column, are made on their lanes.
        """
        self._add_sources(store)
        at_once, others = list[_Read](), list[_Read]()
        for device, reads in self._reads.items():
            answers = store.scheduler.answers(device)
            for read in reads:
                batched = answers and read.held.has_table and read.held.descriptor >= 0
                (at_once if batched else others).append(read)
        begun = self._submit(store, others)
        late = self._read_batch(store, at_once) if at_once else []
        if late is None:
            begun += self._submit(store, at_once)
            late = []
        self._wait(store, begun)
        under_way = [(future, read) for future, read in begun if not future.done()]
        late += [read for _, read in under_way]
        self._late += [future for future, _ in under_way]
        for lease in self._scratch:
            release_after(lease, self._late)
        found = np.zeros(len(self._good), bool)
        found[[read.number for read in late if read.number >= 0]] = True
        return Filled(self._good, found)

    def _submit(
        self, store: PoolContext, reads: Sequence[_Read]
    ) -> list[tuple[Future[bool], _Read]]:
        """Reads on the lanes of their devices."""
        submit = store.scheduler.submit
        begun = [(submit(r.held.device_id, partial(self._read, r), bulk=True), r) for r in reads]
        for future, read in begun:
            future.add_done_callback(partial(self._tell, read))
        return begun

    def _wait(self, store: PoolContext, begun: Sequence[tuple[Future[bool], _Read]]) -> None:
        """Settle reads as they end; gives up when none has for too long, or for a while where all
        can be had without the devices that owe them."""
        limit, left = store.settings.device_deadline_seconds, len(begun)
        silent = 0.0  # since the last sign of life; as wait_awake counts it
        while left:
            step, asked = min(STEP_SECONDS, limit - silent), time.monotonic()
            try:
                read, good = self._ended.get(timeout=step)
            except queue.Empty:
                silent += min(step, time.monotonic() - asked)
                if silent < limit and not (silent >= SPARE_SECONDS and _hopeless(store, begun)):
                    continue
                self._abandoned = True
                return
            left, silent = left - 1, 0.0
            self._settle(store, read, good)

    def _read_batch(self, store: PoolContext, reads: Sequence[_Read]) -> list[_Read] | None:
        """Those of one batch of reads, sorted by device, that do not end; None where no batches are
        made. The others are settled.
        """
        counts = Counter(read.held.device_id for read in reads)
        sizes = np.array([len(read.target) for read in reads])
        most = _FLYING * store.settings.workers_per_device * len(counts)

        def landed(numbers: Int64s, results: Int64s) -> None:
            for number in numbers.tolist():
                read = reads[number]
                good = bool(results[number] == len(read.target)) and _matches(read)
                self._settle(store, read, good)

        found = read_metered(
            store,
            counts,
            np.array([read.held.descriptor for read in reads]),
            np.array([read.offset for read in reads]),
            np.array([address_of(read.target) for read in reads]),
            sizes,
            keep=self,
            most=most,
            landed=landed,
        )
        if found is None:
            return None
        late = [reads[number] for number in np.flatnonzero(found.results == LATE).tolist()]
        if found.late is not None:
            self._late.append(found.late)
            return late
        for read in late:  # they have ended since
            self._settle(store, read, good=False)
        return []

    def _read(self, read: _Read) -> bool:
        if self._abandoned:
            return False
        try:
            read.held.read_into(read.offset, read.target)
        except (HpstoreError, OSError):  # who reads it in another way notes what is wrong
            return False
        return True

    def _tell(self, read: _Read, future: Future[bool]) -> None:
        # a call that the scheduler refused, or that crashed, is read in another way, too
        self._ended.put((read, _succeeded(future)))

    def _settle(self, store: PoolContext, read: _Read, good: bool) -> None:
        stripe = read.stripe
        if stripe is None:
            if good:
                self._done(read.number)
            return
        # none of a stripe arrives before it is decoded: what has arrived may be overwritten
        stripe.landed.append(read)
        stripe.failed |= not good
        if len(stripe.landed) < len(stripe.sources) or stripe.failed:
            return
        self._decode(store, stripe)
        for number in (*(r.number for r in stripe.landed), *stripe.lost.values()):
            if number >= 0:
                self._done(number)

    def _done(self, number: int) -> None:
        self._good[number] = True
        self._arrived(number)

    def _decode(self, store: PoolContext, stripe: _Stripe) -> None:
        store.metrics.count("read_degraded_total")
        geometry = stripe.geometry
        store.code.reconstruct(
            geometry.code,
            geometry.data,
            geometry.parity,
            tuple(stripe.sources),
            tuple(stripe.lost),
            list(stripe.sources.values()),
            [self._targets[number] for number in stripe.lost.values()],
        )


def _hopeless(store: PoolContext, begun: Sequence[tuple[Future[bool], _Read]]) -> bool:
    """As BatchMeter.hopeless, of reads on lanes."""
    without = {read.held.device_id for future, read in begun if not _succeeded(future)}
    return store.shows_without(without | store.owing())


def _succeeded(future: Future[bool]) -> bool:
    return future.done() and future.exception() is None and future.result()


def _matches(read: _Read) -> bool:
    """Whether what a batch has read is what was written."""
    try:
        read.held.check(read.offset, read.target)
    except IntegrityError:  # who reads it in another way notes what is wrong
        return False
    return True
