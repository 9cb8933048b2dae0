"""Which bytes of which columns a read needs. Pure.

A read is cut into windows of whole stripes. In a window every data column needs one run of bytes,
widened to whole checksummed blocks; a lost column needs the same run of k others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpstore.format.geometry import BLOCK_BYTES, Geometry, Piece, block_span
from hpstore.units import KIB, MIB

WINDOW_COLUMN_BYTES = 4 * MIB  # 4 MiB reads saturate what was measured with 2 in flight
BACKGROUND_RUN_BYTES = 512 * KIB  # of rebuilds: runs of 4 MiB made p99 of readers 2 to 6 x as long


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """One window of a read."""

    pieces: tuple[Piece, ...]  # what to hand out, in object order
    reads: dict[int, tuple[int, int]]  # column -> run of column bytes to read
    lost: dict[int, tuple[int, int]]  # column -> run to decode
    have: tuple[int, ...]  # the k columns to decode from; empty when nothing is lost

    @property
    def bytes(self) -> int:
        """Memory for reads and decoded runs."""
        return sum(b - a for a, b in (*self.reads.values(), *self.lost.values()))


def run_bytes(width: int, memory_bytes: int) -> int:
    """Column bytes of one window or batch: several of them must fit the memory budget."""
    share = memory_bytes // (8 * width) // BLOCK_BYTES * BLOCK_BYTES
    return min(WINDOW_COLUMN_BYTES, max(BLOCK_BYTES, share))


def background_run_bytes(width: int, memory_bytes: int) -> int:
    """The same of work that nobody waits for: what somebody reads queues up behind one run."""
    return min(BACKGROUND_RUN_BYTES, run_bytes(width, memory_bytes))


def windows(
    geometry: Geometry, start: int, end: int, column_bytes: int = WINDOW_COLUMN_BYTES
) -> Iterator[tuple[int, int]]:
    """Cut object bytes [start, end) at stripe borders into windows of about `column_bytes`."""
    stripes = max(1, column_bytes // geometry.unit_bytes)
    while start < end:
        border = (geometry.stripe_at(start) // stripes + 1) * stripes * geometry.stripe_bytes
        stop = min(end, border)
        yield start, stop
        start = stop


def plan_window(
    geometry: Geometry, start: int, end: int, available: frozenset[int]
) -> WindowPlan | None:
    """Plan one window from the columns that are available; None when they are too few."""
    pieces = tuple(geometry.pieces(start, end))
    runs: dict[int, tuple[int, int]] = {}
    for piece in pieces:
        low, high = block_span(
            piece.column_offset, piece.column_offset + piece.length, geometry.column_bytes
        )
        before = runs.get(piece.column, (low, high))
        runs[piece.column] = (min(low, before[0]), max(high, before[1]))
    lost = {column: run for column, run in runs.items() if column not in available}
    reads = {column: run for column, run in runs.items() if column in available}
    if not lost:
        return WindowPlan(pieces=pieces, reads=reads, lost={}, have=())
    if len(available) < geometry.data:
        return None
    preferred = sorted(available, key=lambda column: (column not in reads, column))
    have = tuple(sorted(preferred[: geometry.data]))
    low = min(run[0] for run in lost.values())
    high = max(run[1] for run in lost.values())
    for column in have:
        own = reads.get(column, (low, high))
        reads[column] = (min(low, own[0]), max(high, own[1]))
    return WindowPlan(pieces=pieces, reads=reads, lost=dict.fromkeys(lost, (low, high)), have=have)


def plan_rebuild(
    geometry: Geometry, low: int, high: int, available: frozenset[int], wanted: tuple[int, ...]
) -> WindowPlan | None:
    """Plan to make the run [low, high) of columns `wanted`; None when too few are available.

    A wanted column that is available (on a device that is leaving) is read, the rest decoded.
    """
    lost = tuple(column for column in wanted if column not in available)
    if lost and len(available) < geometry.data:
        return None
    have = tuple(sorted(available))[: geometry.data] if lost else ()
    readable = {*have, *(column for column in wanted if column in available)}
    return WindowPlan(
        pieces=(),
        reads=dict.fromkeys(sorted(readable), (low, high)),
        lost=dict.fromkeys(lost, (low, high)),
        have=have,
    )
