"""Where the bytes of an object lie: stripes, units and columns. Pure arithmetic.

An object of `size` bytes is cut into stripes of k data units; parity adds m units. Column i holds
unit i of every stripe back to back. The last stripe shrinks its unit, so that a small object does
not pay k full units. Since all columns have the same shape and Reed-Solomon works position-wise,
the bytes [a, b) of any k columns determine the bytes [a, b) of every other column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hpstore.errors import ConfigError
from hpstore.units import KIB, MIB, div_ceil, round_up

ALIGNMENT_BYTES = 4 * KIB
BLOCK_BYTES = 64 * KIB
SMALL_OBJECT_BYTES = 128 * KIB
MAX_WIDTH = 32
MAX_PARITY = 8
MAX_UNIT_BYTES = 64 * MIB


class Code(StrEnum):
    """How the columns of an object are made."""

    COPIES = "copies"  # every column is the whole object
    RS_CAUCHY = "rs-cauchy"  # systematic Reed-Solomon over GF(2^8), Cauchy matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of object bytes inside one column."""

    column: int
    column_offset: int
    object_offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shape of one stored object. `data` is k, `parity` is m."""

    data: int
    parity: int
    unit_bytes: int
    size: int
    code: Code = Code.RS_CAUCHY

    def __post_init__(self) -> None:
        check_width(self.data, self.parity)
        if self.code is Code.COPIES and self.data != 1:
            raise ConfigError(f"copies have one data column, not {self.data}")
        if self.size < 0:
            raise ConfigError(f"size {self.size} is negative")
        check_unit_bytes(self.unit_bytes)

    @property
    def width(self) -> int:
        """Number of columns, k + m."""
        return self.data + self.parity

    @property
    def stripe_bytes(self) -> int:
        """Object bytes in a full stripe."""
        return self.data * self.unit_bytes

    @property
    def full_stripe_count(self) -> int:
        return self.size // self.stripe_bytes

    @property
    def last_unit_bytes(self) -> int:
        """Unit of the shrunk last stripe; 0 when the size is a multiple of the stripe."""
        rest = self.size - self.full_stripe_count * self.stripe_bytes
        return round_up(div_ceil(rest, self.data), ALIGNMENT_BYTES)

    @property
    def stripe_count(self) -> int:
        return self.full_stripe_count + (1 if self.last_unit_bytes else 0)

    @property
    def column_bytes(self) -> int:
        """Bytes of unit data in each column (padded with zeros past the end of the object)."""
        return self.full_stripe_count * self.unit_bytes + self.last_unit_bytes

    @property
    def block_count(self) -> int:
        """Checksummed blocks in each column."""
        return div_ceil(self.column_bytes, BLOCK_BYTES)

    def unit_bytes_of(self, stripe: int) -> int:
        """Unit length of a stripe."""
        return self.unit_bytes if stripe < self.full_stripe_count else self.last_unit_bytes

    def stripe_at(self, object_offset: int) -> int:
        """The stripe that holds an object offset."""
        return min(object_offset // self.stripe_bytes, max(self.stripe_count - 1, 0))

    def column_offset_of(self, stripe: int) -> int:
        """Where a stripe begins in every column."""
        return stripe * self.unit_bytes

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """The data-column runs that make up object bytes [start, end), in object order."""
        at = start
        while at < end:
            stripe = self.stripe_at(at)
            unit = self.unit_bytes_of(stripe)
            inside = at - stripe * self.stripe_bytes
            column, offset = divmod(inside, unit)
            length = min(unit - offset, end - at)
            yield Piece(
                column=column,
                column_offset=self.column_offset_of(stripe) + offset,
                object_offset=at,
                length=length,
            )
            at += length

    def fewest_to_acknowledge(self) -> int:
        """Fewest columns at which a put may be acknowledged (PROTOCOL 5)."""
        if self.code is Code.COPIES:
            return self.parity + 1
        return max(self.data + 1, self.parity + 1)


def check_width(data: int, parity: int) -> None:
    """Raise ConfigError unless k and m are a geometry that hpstore can code."""
    if data < 1:
        raise ConfigError(f"data={data}: at least one data unit is needed")
    if not 1 <= parity <= MAX_PARITY:
        raise ConfigError(f"parity={parity}: choose 1 to {MAX_PARITY} parity units")
    if data + parity > MAX_WIDTH:
        raise ConfigError(f"data+parity={data + parity}: at most {MAX_WIDTH} units a stripe")


def check_unit_bytes(unit_bytes: int) -> None:
    """Raise ConfigError unless the unit is a multiple of 4 KiB within limits."""
    if not ALIGNMENT_BYTES <= unit_bytes <= MAX_UNIT_BYTES or unit_bytes % ALIGNMENT_BYTES:
        raise ConfigError(
            f"unit of {unit_bytes} bytes: choose a multiple of 4 KiB from 4 KiB to 64 MiB"
        )


def plan_geometry(size: int, *, data: int, parity: int, unit_bytes: int, usable: int) -> Geometry:
    """Shape for a new object on `usable` devices: k' = min(k, usable - m), full parity.

    Small objects become m + 1 whole copies. The caller has checked that k' >= 1.
    """
    shrunk = min(data, usable - parity)
    if size <= SMALL_OBJECT_BYTES:
        return Geometry(data=1, parity=parity, unit_bytes=unit_bytes, size=size, code=Code.COPIES)
    return Geometry(data=shrunk, parity=parity, unit_bytes=unit_bytes, size=size)


def block_span(start: int, end: int, column_bytes: int) -> tuple[int, int]:
    """The smallest run of whole checksummed blocks that covers column bytes [start, end)."""
    return start // BLOCK_BYTES * BLOCK_BYTES, min(round_up(end, BLOCK_BYTES), column_bytes)
