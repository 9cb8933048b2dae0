"""Where the values of a sample lie: records, pages, shards. Pure arithmetic.

A record is the large fields of one sample, contiguous. Records fill pages and do not cross them
unless they are longer than one. A page is a stripe unit of the object, so a healthy read of a
record touches one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hpstore.errors import ConfigError
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.loaders.dataset.fields import Field, FieldKind
from hpstore.units import KIB, MIB, round_up

Int64s = npt.NDArray[np.int64]

LARGE_RECORD_BYTES = 16 * KIB  # from here on records begin at multiples of 4 KiB: direct reads
UNIT_BYTES = MIB
UNIT_CHOICES = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
PADDING_SHARE = 0.10
FEW_ROWS = 16  # below it arrays cost more than a loop
SHARD_BYTES = 256 * MIB
PAYLOAD_ALIGNMENT = 8  # of the end of a shard that is not full
MAX_ROW_FIELDS = 4  # up to so many large fields are kept together by layout="auto"


class FieldLayout(StrEnum):
    """How large fields are put together."""

    ROWS = "rows"  # one record holds all of them
    COLUMNS = "columns"  # one stream of records for each


@dataclass(frozen=True)
class Record:
    """One stream's records: which fields, where in the record. Offsets from the record's start."""

    fields: Mapping[str, Field]

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        """Names of the fixed fields, in order."""
        return tuple(n for n, f in self.fields.items() if f.kind is FieldKind.FIXED)

    @cached_property
    def ragged(self) -> tuple[str, ...]:
        """Names of the ragged fields, in order; they follow the fixed ones."""
        return tuple(n for n, f in self.fields.items() if f.kind is FieldKind.RAGGED)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each fixed field begins: at a multiple of its itemsize."""
        found, at = {}, 0
        for name in self.fixed:
            at = round_up(at, self.fields[name].storage.itemsize)
            found[name] = at
            at += self.fields[name].row_bytes
        return found

    @cached_property
    def fixed_bytes(self) -> int:
        """End of the last fixed field; the whole record when there is no ragged one."""
        if not self.fixed:
            return 0
        last = self.fixed[-1]
        return self.offsets[last] + self.fields[last].row_bytes

    @cached_property
    def alignment(self) -> int:
        """Records begin at multiples of the largest itemsize, large ones at 4 KiB."""
        return max(f.storage.itemsize for f in self.fields.values())

    @cached_property
    def has_gaps(self) -> bool:
        """Whether alignment may leave bytes between fields."""
        at = sum(self.fields[name].row_bytes for name in self.fixed)
        items = [self.fields[name].storage.itemsize for name in self.ragged]
        return at != self.fixed_bytes or any(item > 1 for item in items)

    def ragged_starts(self, lengths: Int64s) -> Int64s:
        """Where ragged fields begin and the record ends, (n, r + 1), from their lengths (n, r)."""
        found = np.empty((len(lengths), lengths.shape[1] + 1), np.int64)
        at = np.full(len(lengths), self.fixed_bytes, np.int64)
        for column, name in enumerate(self.ragged):
            item = self.fields[name].storage.itemsize
            at = (at + item - 1) // item * item
            found[:, column] = at
            at = at + lengths[:, column]
        found[:, -1] = at
        return found


def group_fields(fields: Mapping[str, Field], layout: str) -> tuple[FieldLayout, dict[str, Record]]:
    """The streams of a dataset by name: none when all fields are scalars. Raises ConfigError."""
    large = {n: f for n, f in fields.items() if f.kind is not FieldKind.SCALAR}
    if layout not in ("auto", *FieldLayout):
        raise ConfigError(f"layout {layout!r}: choose auto, rows or columns")
    if layout == "auto":
        layout = FieldLayout.ROWS if len(large) <= MAX_ROW_FIELDS else FieldLayout.COLUMNS
    if layout == FieldLayout.COLUMNS:
        return FieldLayout.COLUMNS, {name: Record({name: found}) for name, found in large.items()}
    return FieldLayout.ROWS, {"rows": Record(large)} if large else {}


def stride_of(length: int, alignment: int) -> int:
    """Distance of two records of this length."""
    return round_up(length, ALIGNMENT_BYTES if length >= LARGE_RECORD_BYTES else alignment)


def _allowed_units(limit: int) -> tuple[list[int], int]:
    """Pages of at most `limit` bytes, ascending, and the one to prefer."""
    allowed = [unit for unit in UNIT_CHOICES if unit <= limit] or [UNIT_CHOICES[0]]
    return allowed, min(UNIT_BYTES, allowed[-1])


def choose_unit(stride: int, *, limit: int = UNIT_CHOICES[-1]) -> int:
    """Page for records of one size: 1 MiB, or the smallest above with at most 10 % padding.

    Records for which every page pads more: above 1 MiB they cross pages of 1 MiB, without padding;
    else the page that pads least. `limit`: the largest unit that the pool's memory allows.
    """
    allowed, default = _allowed_units(limit)
    fitting = [unit for unit in allowed if unit >= max(stride, default)]
    for unit in fitting:
        if unit % stride <= PADDING_SHARE * unit:
            return unit
    if stride > default or not fitting:
        return default
    return min(fitting, key=lambda unit: unit % stride / unit)


def choose_unit_for_mean(mean: float, *, limit: int = UNIT_CHOICES[-1]) -> int:
    """Page for records of many sizes: half a record of padding a page is at most 10 %."""
    allowed, default = _allowed_units(limit)
    for unit in allowed:
        if unit >= default and mean / 2 <= PADDING_SHARE * unit:
            return unit
    return default


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlan:
    """Addresses of records of one size inside a shard. `per_page` is 0 when they cross pages."""

    length: int
    stride: int
    unit_bytes: int

    @classmethod
    def of(cls, record: Record, unit_bytes: int) -> FixedPlan:
        """The plan of a stream without ragged fields."""
        length = record.fixed_bytes
        stride = stride_of(length, record.alignment)
        return cls(length=length, stride=stride, unit_bytes=unit_bytes)

    @property
    def per_page(self) -> int:
        return self.unit_bytes // self.stride

    def starts(self, rows: Int64s) -> Int64s:
        """Payload offsets of rows of a shard."""
        if not self.per_page:
            return rows * self.stride
        page, slot = np.divmod(rows, self.per_page)
        found: Int64s = page * self.unit_bytes + slot * self.stride
        return found

    def start(self, row: int) -> int:
        """Payload offset of one row."""
        if not self.per_page:
            return row * self.stride
        page, slot = divmod(row, self.per_page)
        return page * self.unit_bytes + slot * self.stride

    def first_rows(self, pages: Int64s) -> Int64s:
        """The first row that begins in or after each page of a shard."""
        if self.per_page:
            return pages * self.per_page
        found: Int64s = -(-pages * self.unit_bytes // self.stride)
        return found

    def payload_bytes(self, rows: int) -> int:
        """Bytes that so many rows take."""
        return round_up(self.start(rows - 1) + self.length, PAYLOAD_ALIGNMENT) if rows else 0

    def shard_rows(self, capacity: int) -> int:
        """Rows that fit a shard's payload; at least one."""
        if self.per_page:
            return max(1, capacity // self.unit_bytes * self.per_page)
        return max(1, capacity // self.stride)


def even_rows(rows: Int64s) -> int:
    """Rows of each cut of a sequence, when all have as many (the last may have fewer); else 0.

    Then a row's cut is a division, for which numpy keeps the interpreter's lock; a search gives it
    up and has to queue for it.
    """
    if not len(rows) or not 0 < rows[-1] <= rows[0] or (rows[:-1] != rows[0]).any():
        return 0
    return int(rows[0])


def shard_capacity(shard_bytes: int, unit_bytes: int, data: int, record_bytes: int = 0) -> int:
    """Payload of a full shard: whole stripes, about `shard_bytes`, at least one record."""
    stripe = unit_bytes * data
    return max(shard_bytes // stripe, -(-record_bytes // stripe), 1) * stripe


def place(
    lengths: Sequence[int], cursor: int, capacity: int, unit_bytes: int, alignment: int
) -> list[int]:
    """Payload offsets of records of many sizes from `cursor`, until one does not fit `capacity`."""
    starts: list[int] = []
    for length in lengths:
        step = ALIGNMENT_BYTES if length >= LARGE_RECORD_BYTES else alignment
        start = -(-cursor // step) * step
        if length <= unit_bytes and start % unit_bytes + length > unit_bytes:
            start = -(-start // unit_bytes) * unit_bytes
        cursor = start + max(length, 1)  # an empty record has a place of its own
        if cursor > capacity:
            break
        starts.append(start)
    return starts


def place_many(
    lengths: Int64s, cursor: int, capacity: int, unit_bytes: int, alignment: int
) -> Int64s:
    """As place(), a page at a time where records are alike: all small, or all large."""
    large = lengths >= LARGE_RECORD_BYTES
    step = ALIGNMENT_BYTES if large[:1].any() else alignment
    if (
        len(lengths) < FEW_ROWS
        or large.any() != large.all()
        or int(lengths.max()) > unit_bytes
        or unit_bytes % step
    ):
        found = place(lengths.tolist(), cursor, capacity, unit_bytes, alignment)
        return np.array(found, np.int64)
    taken = np.maximum(lengths, 1)  # an empty record has a place of its own
    strides = -(-taken // step) * step
    flat = np.cumsum(strides) - strides  # were there no pages
    reaches = flat + lengths
    starts = np.empty(len(lengths), np.int64)
    low = 0
    while low < len(lengths) and cursor <= capacity:
        at = -(-cursor // step) * step
        page_end = (at // unit_bytes + 1) * unit_bytes
        shift = at - int(flat[low])
        high = int(np.searchsorted(reaches, page_end - shift, "right"))
        if high <= low:  # it begins on the next page
            cursor = page_end
            continue
        starts[low:high] = flat[low:high] + shift
        cursor = int(starts[high - 1] + taken[high - 1])
        low = high
    fits = starts[:low] + taken[:low] <= capacity
    return starts[: low if fits.all() else int(fits.argmin())]
