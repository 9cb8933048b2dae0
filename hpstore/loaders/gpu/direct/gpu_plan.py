"""What to read of which columns so that a batch's records arrive on the GPU, and what to check.

Records of one size at multiples of 4 KiB, none over two units. A record whose column is open is
one read; one of a lost column is k reads of the same bytes of others, and a decode. Pure, but for
what readers say of themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hpstore.format.geometry import ALIGNMENT_BYTES, BLOCK_BYTES, Code, Geometry
from hpstore.loaders.dataset.record_layout import FixedPlan, Int64s
from hpstore.loaders.gpu.direct.gpu_checksums import STEP_BYTES, Blocks
from hpstore.loaders.gpu.direct.gpu_decode import DecodeJobs
from hpstore.objects.read.column_reader import ColumnReader
from hpstore.objects.read.object_reader import ObjectReader

Bools = npt.NDArray[np.bool_]
NO_ROWS: Int64s = np.empty(0, np.int64)


def fits_direct(plan: FixedPlan | None, compression: str) -> bool:
    """Whether records of a stream can be read straight to a GPU: one size, aligned, as they are."""
    return (
        plan is not None
        and plan.per_page > 0
        and plan.stride % ALIGNMENT_BYTES == 0
        and plan.unit_bytes % ALIGNMENT_BYTES == 0
        and not compression
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnPart:
    """Records in one column of one object: column bytes low[i] .. high[i] hold row rows[i].

    `held`: that column, or the k that it is decoded from where it is lost. `inside`: where the
    record begins in what is read. Ascending by `low`.
    """

    geometry: Geometry
    column: int
    held: Mapping[int, ColumnReader]
    low: Int64s
    high: Int64s
    inside: Int64s
    rows: Int64s

    @property
    def lost(self) -> bool:
        return self.column not in self.held

    @property
    def devices(self) -> frozenset[str]:
        return frozenset(held.device_id for held in self.held.values())

    @property
    def room_bytes(self) -> int:
        """In the arena: what is read of each column, and what is decoded."""
        return (len(self.held) + self.lost) * int((self.high - self.low).sum())


class WantedRecords:
    """Records of several objects: add() for each of them, as for Scatter. One thread.

    `exact`: records are checked by their own checksums, else by the blocks that they lie in,
    which are then read whole.
    """

    def __init__(self, plan: FixedPlan) -> None:
        self._plan = plan
        self.exact = plan.length % STEP_BYTES == 0
        self.parts: list[ColumnPart] = []

    def add(self, reader: ObjectReader, starts: Int64s, numbers: Int64s) -> None:
        """Rows `numbers` begin at bytes `starts` of an open object.

        Those in its shrunk last stripe, or in columns that no descriptor leads to, are left out.
        """
        geometry, stride = reader.header.geometry, self._plan.stride
        unit = geometry.unit_bytes
        inside, whole = starts % unit, geometry.full_stripe_count * geometry.stripe_bytes
        fits = np.flatnonzero(
            (inside + stride <= unit) & (starts < whole) & (starts % ALIGNMENT_BYTES == 0)
        )
        column = starts[fits] % geometry.stripe_bytes // unit
        offset = starts[fits] // geometry.stripe_bytes * unit + inside[fits]
        for one in np.unique(column).tolist():
            held = _held(reader, one)
            if held is None:
                continue
            mine = np.flatnonzero(column == one)
            mine = mine[np.argsort(offset[mine], kind="stable")]
            low, high = self._span(offset[mine], geometry.column_bytes)
            self.parts.append(
                ColumnPart(
                    geometry=geometry,
                    column=one,
                    held=held,
                    low=low,
                    high=high,
                    inside=offset[mine] - low,
                    rows=numbers[fits[mine]].astype(np.int64),
                )
            )

    def _span(self, offset: Int64s, column_bytes: int) -> tuple[Int64s, Int64s]:
        if self.exact:
            return offset, offset + self._plan.stride
        low = offset // BLOCK_BYTES * BLOCK_BYTES
        high = -(-(offset + self._plan.stride) // BLOCK_BYTES) * BLOCK_BYTES
        return low, np.minimum(high, column_bytes)


def _held(reader: ObjectReader, column: int) -> dict[int, ColumnReader] | None:
    """The column, else k others that it can be decoded from; None when there is no way."""
    geometry = reader.header.geometry
    usable = reader.usable()
    there = {c: held for c, held in sorted(usable.items()) if held.descriptor >= 0}
    if geometry.code is Code.COPIES:  # every column is the object
        return {column: next(iter(there.values()))} if there else None
    if column in there:
        return {column: there[column]}
    if column in usable or len(there) < geometry.data:
        return None
    return dict(list(there.items())[: geometry.data])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnReads:
    """Runs of one column of a part: run i fills the arena from place[i]. run[r]: of record r."""

    part: int
    column: int
    held: ColumnReader
    low: Int64s
    high: Int64s
    place: Int64s
    run: Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArenaLayout:
    """Where all of it goes in `nbytes` of an arena, by part."""

    parts: tuple[ColumnPart, ...]
    reads: tuple[ColumnReads, ...]
    place: tuple[Int64s, ...]  # where what a record is part of begins, read or decoded
    nbytes: int

    def moved(self, by: int) -> ArenaLayout:
        """The same from another place of the arena on."""
        return replace(
            self,
            reads=tuple(replace(r, place=r.place + by) for r in self.reads),
            place=tuple(place + by for place in self.place),
        )


def land(parts: Sequence[ColumnPart]) -> ArenaLayout:
    """Places for everything; records side by side in a column are read together. Pure."""
    at, reads, places = 0, list[ColumnReads](), list[Int64s]()
    for number, part in enumerate(parts):
        size = part.high - part.low
        start, total = np.cumsum(size) - size, int(size.sum())
        new = np.ones(len(size), bool)
        new[1:] = part.low[1:] != part.high[:-1]
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(size)) - 1
        for column, held in part.held.items():
            reads.append(
                ColumnReads(
                    part=number,
                    column=column,
                    held=held,
                    low=part.low[first],
                    high=part.high[last],
                    place=at + start[first],
                    run=np.cumsum(new) - 1,
                )
            )
            at += total
        places.append((at if part.lost else at - total) + start)
        at += total * part.lost
    return ArenaLayout(parts=tuple(parts), reads=tuple(reads), place=tuple(places), nbytes=at)


def decodes(landing: ArenaLayout, good: Sequence[Bools]) -> list[DecodeJobs]:
    """How lost records are made, of those of which all sources are `good`, by part. Pure."""
    found = []
    for number, part in enumerate(landing.parts):
        if not part.lost:
            continue
        sizes, total = part.high - part.low, int((part.high - part.low).sum())
        target = landing.place[number]
        count = len(part.held)
        sources = np.stack([target - (count - i) * total for i in range(count)], axis=1)
        for length in np.unique(sizes[good[number]]).tolist():
            mine = good[number] & (sizes == length)
            found.append(
                DecodeJobs(
                    data=part.geometry.data,
                    parity=part.geometry.parity,
                    have=tuple(part.held),
                    want=(part.column,),
                    sources=sources[mine],
                    targets=target[mine][:, None],
                    length=length,
                )
            )
    return found


def record_checks(
    landing: ArenaLayout, length: int, checksum: npt.NDArray[np.uint64]
) -> tuple[Blocks, Int64s]:
    """Every record by its own checksum, and the row of each check. Pure."""
    parts = list(zip(landing.parts, landing.place, strict=True))
    rows = np.concatenate([NO_ROWS, *(part.rows for part, _ in parts)])
    starts = np.concatenate([NO_ROWS, *(place + part.inside for part, place in parts)])
    return Blocks(
        starts=starts,
        lengths=np.full(len(rows), length, np.int64),
        seeds=np.zeros(len(rows), np.uint64),
        expected=checksum[rows],
    ), rows


def pages_of(
    landing: ArenaLayout, wanted: Collection[int] | Int64s, stride: int
) -> tuple[Int64s, Int64s]:
    """The pages of 4 KiB of the arena that these rows are, row by row; and the rows. Pure."""
    first = np.concatenate(
        [
            NO_ROWS,
            *(at + part.inside for part, at in zip(landing.parts, landing.place, strict=True)),
        ]
    )
    rows = np.concatenate([NO_ROWS, *(part.rows for part in landing.parts)])
    chosen = np.isin(rows, np.asarray(wanted, np.int64))
    steps = np.arange(stride // ALIGNMENT_BYTES, dtype=np.int64)
    pages = (first[chosen] // ALIGNMENT_BYTES)[:, None] + steps
    return pages.reshape(-1), rows[chosen]
