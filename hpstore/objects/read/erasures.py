"""Which bytes of which columns of an open object cannot be read.

All columns of an object have one shape, and Reed-Solomon works position by position: the row of
64 KiB blocks with one number is the codeword. A damaged block therefore costs its row one column,
and no other row anything; only a row with fewer than k readable blocks is lost.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable, Iterator

from hpstore.format.geometry import BLOCK_BYTES, Geometry, Piece, block_span


class Erasures:
    """Damaged blocks of the columns of one open object, shared by all its readers. Thread-safe.

    Columns that are lost as a whole (missing file, damaged header) are not open, so the reader
    does not plan with them; this class records blocks of columns that stay open.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, Exception]] = {}  # column -> block -> what is wrong
        self._lock = threading.Lock()  # guards changes; readers see whole values

    def __bool__(self) -> bool:
        """Whether any block is known to be damaged."""
        return bool(self._blocks)

    def mark_blocks(self, column: int, blocks: Iterable[int], why: Exception) -> int:
        """Record damaged blocks of a column; returns how many were not known before."""
        with self._lock:
            known = self._blocks.get(column, {})
            fresh = {block: why for block in blocks if block not in known}
            if fresh:
                self._blocks = {**self._blocks, column: {**known, **fresh}}
        return len(fresh)

    def forget(self, column: int) -> None:
        """A column was opened again, from another file: what was wrong with the old one is past."""
        with self._lock:
            self._blocks = {c: blocks for c, blocks in self._blocks.items() if c != column}

    @property
    def columns(self) -> frozenset[int]:
        """Columns with at least one damaged block."""
        return frozenset(self._blocks)

    def reasons(self) -> list[str]:
        """One message for each column with damaged blocks."""
        return [str(next(iter(blocks.values()))) for blocks in self._blocks.values()]

    def columns_in(self, low: int, high: int) -> frozenset[int]:
        """Columns with a damaged block among column bytes [low, high)."""
        first, last = low // BLOCK_BYTES, -(-high // BLOCK_BYTES)
        return frozenset(
            column
            for column, blocks in self._blocks.items()
            if any(first <= block < last for block in blocks)
        )

    def edges_in(self, low: int, high: int) -> list[int]:
        """Borders of damaged blocks strictly inside column bytes (low, high), ascending."""
        borders = {
            edge
            for blocks in self._blocks.values()
            for block in blocks
            for edge in (block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
        }
        return sorted(edge for edge in borders if low < edge < high)


def rows_of(geometry: Geometry, pieces: Collection[Piece]) -> tuple[int, int]:
    """Column bytes, whole blocks, that cover every one of the pieces. Pure."""
    low = min(piece.column_offset for piece in pieces)
    high = max(piece.column_offset + piece.length for piece in pieces)
    return block_span(low, high, geometry.column_bytes)


def split_window(
    geometry: Geometry, start: int, end: int, erasures: Erasures
) -> list[tuple[int, int]]:
    """Cut object bytes [start, end) so that no part mixes damaged rows with sound ones. Pure.

    The parts are in object order and cover the window. A part without damaged rows is as long as
    it can be; a part with one lies in one column and in one run of rows.
    """
    if not erasures:
        return [(start, end)]
    return list(_parts(geometry, list(geometry.pieces(start, end)), erasures))


def _parts(
    geometry: Geometry, pieces: list[Piece], erasures: Erasures
) -> Iterator[tuple[int, int]]:
    sound: list[Piece] = []
    for piece in pieces:
        if not erasures.columns_in(*rows_of(geometry, [*sound, piece])):
            sound.append(piece)
            continue
        if sound:
            yield sound[0].object_offset, piece.object_offset
        sound = []
        if not erasures.columns_in(*rows_of(geometry, [piece])):
            sound = [piece]
            continue
        stop = piece.column_offset + piece.length
        shift = piece.object_offset - piece.column_offset
        cuts = [piece.column_offset, *erasures.edges_in(piece.column_offset, stop), stop]
        for low, high in itertools.pairwise(cuts):
            yield low + shift, high + shift
    if sound:
        yield sound[0].object_offset, sound[-1].object_offset + sound[-1].length
