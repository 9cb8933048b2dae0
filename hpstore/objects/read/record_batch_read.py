"""Many small ranges of objects, each straight into the caller's memory, without block checks.

The pool's blocks are 64 KiB: to verify a 12 KiB record by them costs five times its bytes. Who has
a checksum of each range reads them here, checks them on the thread that read them, and reads what
did not match again through ObjectReader, which verifies, decodes and repairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from hpstore.codec import address_of
from hpstore.codec.galois import Bytes
from hpstore.errors import HpstoreError
from hpstore.format.geometry import ALIGNMENT_BYTES, Geometry
from hpstore.objects.context import PoolContext
from hpstore.objects.read.column_reader import ColumnReader
from hpstore.objects.read.hedge import probe_avoided
from hpstore.objects.read.metered_batch import read_metered
from hpstore.objects.read.object_reader import ObjectReader
from hpstore.runtime.buffers import Lease, release_after
from hpstore.runtime.deadline_wait import wait_awake
from hpstore.units import round_up

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Check = Callable[[int, Bytes], bool]  # (number of the range, its bytes): are they right?


@dataclass(frozen=True, slots=True)
class Scattered:
    """What became of the ranges. `late`: reads that still write into the caller's memory."""

    good: Bools
    late: tuple[Future[None], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """Reads from one column: `low` and `size` are multiples of 4 KiB.

    `place` is where in scratch memory each goes, -1 for straight into its range's target. `number`
    is that of the range; None for sources of lost ones, of which `arrived` says which came.
    """

    held: ColumnReader
    low: Int64s
    size: Int64s
    place: Int64s
    number: Int64s | None
    inside: Int64s  # where the range begins in what is read
    arrived: Bools

    def some(self, which: Int64s | slice) -> _Part:
        """Some of the reads. `arrived` of a slice is a view."""
        return replace(
            self,
            low=self.low[which],
            size=self.size[which],
            place=self.place[which],
            number=None if self.number is None else self.number[which],
            inside=self.inside[which],
            arrived=self.arrived[which],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lost:
    """Ranges of a lost column, made from the same bytes of k others.

    Scratch memory from `place`: `total` bytes for each source, then as many for what is decoded.
    """

    geometry: Geometry
    column: int
    sources: dict[int, _Part]
    place: int
    total: int
    start: Int64s  # where each range begins in what is decoded
    number: Int64s


class Scatter:
    """Ranges of several objects, to be read at once: add() for each object, then run().

    `targets[i]` is filled with range number i, where `check` says that its bytes are right. Their
    memory belongs to run() until it returns, and longer while `late` is not empty (PROTOCOL 21).
    `addresses`: where they begin, when that is known. `room[i]`: targets[i] with what may be
    overwritten behind it. A range that begins at a multiple of 4 KiB, in the object and in memory,
    is read in place when its last 4 KiB have room; others cost a copy.
    """

    def __init__(
        self,
        targets: Sequence[Bytes],
        check: Check,
        addresses: Int64s | None = None,
        room: Sequence[Bytes] | None = None,
    ) -> None:
        count = len(targets)
        self._targets, self._check = targets, check
        self._lengths = np.fromiter(map(len, targets), np.int64, count)
        self._room = targets if room is None else room
        self._limits = (
            self._lengths if room is None else np.fromiter(map(len, room), np.int64, count)
        )
        self._addresses = (
            np.fromiter((address_of(t) if len(t) else 0 for t in targets), np.int64, count)
            if addresses is None
            else addresses
        )
        self._parts: defaultdict[str, list[_Part]] = defaultdict(list)  # by device
        self._lost: list[_Lost] = []
        self._scratch_bytes = 0
        self._good = np.zeros(count, bool)

    def add(self, reader: ObjectReader, starts: Int64s, numbers: Int64s) -> None:
        """Ranges of an open object: range numbers[i] begins at byte starts[i] of it.

        Ranges that cross a unit, lie in the shrunk last stripe, or for which too few columns are
        open are left to the caller. With columns lost, or on devices that reads avoid, a range is
        decoded from the same bytes of k others. One in a damaged block is read all the same: its
        own checksum says whether its bytes are among the damaged ones.
        """
        geometry, usable = reader.header.geometry, reader.usable()
        unit, lengths = geometry.unit_bytes, self._lengths[numbers]
        inside = starts % unit
        whole = geometry.full_stripe_count * geometry.stripe_bytes
        fits = np.flatnonzero((inside + lengths <= unit) & (starts < whole) & (lengths > 0))
        column = starts[fits] % geometry.stripe_bytes // unit
        offset = starts[fits] // geometry.stripe_bytes * unit + inside[fits]
        low = offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        size = -(-(offset + lengths[fits]) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES - low
        chosen = numbers[fits].astype(np.int64)
        for one in np.unique(column).tolist():
            mine = np.flatnonzero(column == one)
            held = usable.get(one)
            reads = (low[mine], size[mine], chosen[mine], (offset - low)[mine])
            if held is not None:
                self._add_held(held, *reads)
            else:
                self._add_lost(geometry, usable, one, *reads)
        if reader.store.routing.avoided and len(fits):
            probe_avoided(reader, int(low[0]), int(low[0] + size[0]))

    def _add_held(
        self, held: ColumnReader, low: Int64s, size: Int64s, number: Int64s, inside: Int64s
    ) -> None:
        aligned = (inside | self._addresses[number]) % ALIGNMENT_BYTES == 0
        room = np.where(aligned & (size <= self._limits[number]), 0, size)
        place = np.where(room > 0, self._scratch_bytes + np.cumsum(room) - room, -1)
        self._scratch_bytes += int(room.sum())
        self._parts[held.device_id].append(
            _Part(
                held=held,
                low=low,
                size=size,
                place=place,
                number=number,
                inside=inside,
                arrived=np.zeros(len(low), bool),
            )
        )

    def _add_lost(
        self,
        geometry: Geometry,
        usable: Mapping[int, ColumnReader],
        column: int,
        low: Int64s,
        size: Int64s,
        number: Int64s,
        inside: Int64s,
    ) -> None:
        sources = sorted(usable.items())[: geometry.data]
        if len(sources) < geometry.data:
            return
        first, total = self._scratch_bytes, int(size.sum())
        start = np.cumsum(size) - size
        parts = {
            source: _Part(
                held=held,
                low=low,
                size=size,
                place=first + index * total + start,
                number=None,
                inside=inside,
                arrived=np.zeros(len(low), bool),
            )
            for index, (source, held) in enumerate(sources)
        }
        for part in parts.values():
            self._parts[part.held.device_id].append(part)
        self._scratch_bytes += (geometry.data + 1) * total
        self._lost.append(
            _Lost(
                geometry=geometry,
                column=column,
                sources=parts,
                place=first,
                total=total,
                start=start + inside,
                number=number,
            )
        )

    def run(self, store: PoolContext) -> Scattered:
        """Read all. What is not good is to be read in another way.

        From devices that allow it all reads are one batch, made by the calling thread; from others
        on their lanes.
        """
        lease = self._take_scratch(store)
        memory = _NOTHING if lease is None else lease.array
        at_once = {
            device: parts
            for device, parts in self._parts.items()
            if all(part.held.descriptor >= 0 for part in parts) and store.scheduler.answers(device)
        }
        futures = self._submit(store, self._parts.keys() - at_once.keys(), memory)
        late = self._read_batch(store, at_once, memory)
        if late is None:
            futures += self._submit(store, at_once.keys(), memory)
            late = []
        else:
            for parts in at_once.values():
                self._settle(parts, memory)
        wait_awake(futures, store.settings.device_deadline_seconds)
        late += [future for future in futures if not future.done()]
        for lost in self._lost:
            self._decode(store, lost, memory)
        if lease is not None:
            release_after(lease, late)
        return Scattered(self._good, tuple(late))

    def _submit(
        self, store: PoolContext, devices: Collection[str], memory: Bytes
    ) -> list[Future[None]]:
        """Reads of these devices on their lanes."""
        return [
            store.scheduler.submit(device, partial(self._read, share, memory))
            for device in devices
            for share in _shares(self._parts[device], store.settings.workers_per_device)
        ]

    def _take_scratch(self, store: PoolContext) -> Lease | None:
        """Memory for what does not go straight into targets; without it, that is left out."""
        if not self._scratch_bytes:
            return None
        step = 1 << max(0, self._scratch_bytes.bit_length() - 3)
        # few different sizes, so that memory is used again
        found = store.scratch(round_up(self._scratch_bytes, step), "scatter")
        if found is None:
            self._lost = []
            for device, parts in self._parts.items():
                straight = [part.some(np.flatnonzero(part.place < 0)) for part in parts]
                self._parts[device] = [part for part in straight if len(part.low)]
        return found

    def _read_batch(
        self, store: PoolContext, devices: dict[str, list[_Part]], memory: Bytes
    ) -> list[Future[None]] | None:
        """What is late of one batch of reads; None where no batches are made."""
        parts = [part for mine in devices.values() for part in mine]
        if not parts:
            return []
        base = address_of(memory) if len(memory) else 0
        sizes = np.concatenate([part.size for part in parts])
        counts = [len(part.low) for part in parts]
        found = read_metered(
            store,
            _by_device(devices, counts),
            np.repeat([part.held.descriptor for part in parts], counts),
            np.concatenate([part.low for part in parts]),
            np.concatenate(
                [
                    base + part.place
                    if part.number is None
                    else np.where(part.place < 0, self._addresses[part.number], base + part.place)
                    for part in parts
                ]
            ),
            sizes,
            keep=(self, memory),
        )
        if found is None:
            return None
        at = 0
        for part in parts:
            part.arrived[:] = found.results[at : at + len(part.low)] == part.size
            at += len(part.low)
        return [] if found.late is None else [found.late]

    def _read(self, parts: Sequence[_Part], memory: Bytes) -> None:
        """Reads of one device, on a thread of it."""
        for part in parts:
            self._read_one_by_one(part, memory)
        self._settle(parts, memory)

    def _read_one_by_one(self, part: _Part, memory: Bytes) -> None:
        places = zip(part.low.tolist(), part.size.tolist(), part.place.tolist(), strict=True)
        for index, (low, size, place) in enumerate(places):
            if place >= 0:
                into = memory[place : place + size]
            else:
                assert part.number is not None
                into = self._room[part.number[index]][:size]
            try:
                part.held.read_raw(low, into)
            except (HpstoreError, OSError):  # who reads it in another way notes what is wrong
                continue
            part.arrived[index] = True

    def _settle(self, parts: Sequence[_Part], memory: Bytes) -> None:
        """Check what has arrived."""
        targets, check, good = self._targets, self._check, self._good
        for part in parts:
            if part.number is None:
                continue
            found = np.flatnonzero(part.arrived)
            starts = np.where(part.place < 0, -1, part.place + part.inside)[found].tolist()
            for number, start in zip(part.number[found].tolist(), starts, strict=True):
                target = targets[number]
                if start >= 0:
                    target[:] = memory[start : start + len(target)]
                good[number] = check(number, target)

    def _decode(self, store: PoolContext, lost: _Lost, memory: Bytes) -> None:
        """Lost ranges whose sources have all arrived."""
        arrived = np.all([part.arrived for part in lost.sources.values()], axis=0)
        if not arrived.any():
            return
        store.metrics.count("read_degraded_total", int(arrived.sum()))
        rows = [
            memory[lost.place + index * lost.total :][: lost.total]
            for index in range(len(lost.sources) + 1)
        ]
        geometry = lost.geometry
        store.code.reconstruct(
            geometry.code,
            geometry.data,
            geometry.parity,
            tuple(lost.sources),
            (lost.column,),
            rows[:-1],
            rows[-1:],
        )
        starts = lost.start[arrived].tolist()
        for number, start in zip(lost.number[arrived].tolist(), starts, strict=True):
            target = self._targets[number]
            target[:] = rows[-1][start : start + len(target)]
            self._good[number] = self._check(number, target)


_NOTHING: Bytes = np.empty(0, np.uint8)


def _by_device(devices: Mapping[str, Sequence[_Part]], counts: Sequence[int]) -> dict[str, int]:
    """Reads by device, of devices that have any; `counts`: of all parts in their order."""
    found, at = {}, 0
    for device, parts in devices.items():
        found[device] = sum(counts[at : at + len(parts)])
        at += len(parts)
    return {device: count for device, count in found.items() if count}


def _shares(parts: Sequence[_Part], workers: int) -> list[list[_Part]]:
    """Reads of a device, for so many of its threads."""
    shares = [[part.some(slice(w, None, workers)) for part in parts] for w in range(workers)]
    filled = ([part for part in share if len(part.low)] for share in shares)
    return [share for share in filled if share]
