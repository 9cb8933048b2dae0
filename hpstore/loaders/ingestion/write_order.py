"""In which order a source's records are written, and where an interrupted ingest goes on.

A source read by number is permuted whole. One that is read block by block has its blocks permuted
and is then shuffled in windows of bounded bytes: not a uniform permutation, and it says so.
Both are functions of the seed and the source, so a position is the state of an ingest.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.ingestion.read_ahead import read_ahead
from hpstore.loaders.ingestion.sample_source import BlockwiseSource, IndexedSource, Source
from hpstore.loaders.ingestion.source_rows import GROUP_BYTES, SourceItem, SourceRows, pieces
from hpstore.loaders.ingestion.window_rows import WindowRows
from hpstore.loaders.sampling.order import GlobalOrder, Order, SequentialOrder
from hpstore.units import MIB

WINDOW_BYTES = 256 * MIB
INDEX_BLOCK = 1 << 16  # positions evaluated at once
ITEM_BYTES = 512  # what a record takes in memory besides its values
WITHOUT_WINDOW_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestPosition:
    """Where an ingest goes on. `position`: records taken, good and bad, in the order of writing.

    Of sources in blocks, the window that holds the position: its number, the position and the
    block (in the order of reading) at which it begins, and the record of the block.
    """

    position: int = 0
    window: int = 0
    window_position: int = 0
    block: int = 0
    record: int = 0

    def to_json(self) -> dict[str, int]:
        """For the journal."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Placed:
    """A record, and the place after it."""

    item: SourceItem
    after: IngestPosition


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Records, and the places between them. `first`: the position before the first one."""

    rows: SourceRows
    first: int
    window: IngestPosition

    def after(self, count: int) -> IngestPosition:
        """The place after the first `count` of them."""
        return replace(self.window, position=self.first + count)


class RecordOrder(ABC):
    """The records of a source in the order of writing."""

    @property
    @abstractmethod
    def expected(self) -> int | None:
        """How many records there are: as the source knows, else about, by the share of it that was
        read; None before anything was."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """How samples were mixed, as the dataset records it."""

    @abstractmethod
    def read_rows(
        self, place: IngestPosition, most_bytes: int = GROUP_BYTES
    ) -> Generator[PlacedRows, None, None]:
        """Records from a place on, some at a time: at most GROUP_ROWS and `most_bytes`."""

    def read(self, place: IngestPosition) -> Generator[Placed, None, None]:
        """Records from a place on, one by one."""
        for placed in self.read_rows(place):
            for count, item in enumerate(placed.rows.items(), 1):
                yield Placed(item, placed.after(count))


class NumberedRecords(RecordOrder):
    """The records of a source that is read by number."""

    def __init__(self, source: IndexedSource, seed: int | None, workers: int) -> None:
        self._source, self._workers = source, workers
        length = source.length
        self._order: Order = SequentialOrder(length) if seed is None else GlobalOrder(length, seed)

    @property
    def expected(self) -> int:
        return self._source.length

    def describe(self) -> dict[str, object]:
        return self._order.describe()

    def read_rows(
        self, place: IngestPosition, most_bytes: int = GROUP_BYTES
    ) -> Generator[PlacedRows, None, None]:
        position = place.position
        for read in self._source.read_rows(self._indices(position), self._workers):
            for offset, rows in pieces(read, most_bytes):
                yield PlacedRows(rows, position + offset, IngestPosition())
            position += len(read)

    def _indices(self, start: int) -> Iterator[int]:
        for first in range(start, self._source.length, INDEX_BLOCK):
            stop = min(first + INDEX_BLOCK, self._source.length)
            yield from self._order.indices(0, first, stop).tolist()


class BlockRecords(RecordOrder):
    """The records of a source that is read block by block."""

    def __init__(
        self, source: BlockwiseSource, seed: int | None, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self._source, self._seed = source, seed
        self._window_bytes = window_bytes if seed is not None else WITHOUT_WINDOW_BYTES
        self._blocks: Order = (
            SequentialOrder(source.blocks) if seed is None else GlobalOrder(source.blocks, seed)
        )
        self._seen = (0, 0)  # records, and bytes of the source; by the thread that reads
        self._source_bytes = 0  # in all, once that is asked for

    @property
    def expected(self) -> int | None:
        if self._source.length is not None:
            return self._source.length
        records, nbytes = self._seen
        if not records or not nbytes:
            return None
        if not self._source_bytes:
            self._source_bytes = sum(map(self._bytes_of, range(self._source.blocks)))
        return max(records, round(records / nbytes * self._source_bytes))

    def describe(self) -> dict[str, object]:
        if self._seed is None:
            return {"kind": "sequential"}
        return {
            "kind": "windows",
            "seed": self._seed,
            "window_bytes": self._window_bytes,
            "blocks": self._blocks.describe(),
        }

    def read_rows(
        self, place: IngestPosition, most_bytes: int = GROUP_BYTES
    ) -> Generator[PlacedRows, None, None]:
        """Those of the window of `place` that come before it are read again."""
        number, begins = place.window, place.window_position
        block, record = place.block, place.record
        reads = self._reads(block, record, begins)
        if self._source.reads_ahead:
            reads = read_ahead(reads, lambda read: int(read.rows.nbytes.sum()))
        for window in self._windows(reads):
            start = IngestPosition(
                window=number, window_position=begins, block=block, record=record
            )
            skip = max(0, place.position - begins)
            mixed = self._mixed(number, len(window))[skip:]
            for offset, rows in window.mixed(mixed, most_bytes):
                yield PlacedRows(rows, begins + skip + offset, start)
            begins += len(window)
            number += 1
            block, record = window.block, window.record

    def _mixed(self, number: int, count: int) -> Int64s:
        if self._seed is None:
            return np.arange(count)
        return GlobalOrder(count, self._seed).indices(number + 1, 0, count)

    def _reads(self, block: int, record: int, before: int) -> Generator[_Read, None, None]:
        """What is read at a time, in the order of reading. `before`: records that come earlier."""
        source = self._source
        known = source.length is not None
        done = 0 if known else sum(map(self._bytes_of, self._numbers(0, block)))
        for at in range(block, source.blocks):
            (which,) = self._numbers(at, at + 1)
            first = record if at == block else 0
            nbytes = 0 if known else self._bytes_of(which)
            for rows in source.read_rows(which, first):
                before += len(rows)
                self._seen = (before, done + min(nbytes, source.bytes_read()))
                if len(rows):
                    yield _Read(rows, at, first)
                first += len(rows)
            done += nbytes
            self._seen = (before, done)

    def _bytes_of(self, block: int) -> int:
        """For estimates alone: a file that is gone is said by whoever reads it."""
        with contextlib.suppress(OSError):
            return max(0, self._source.block_bytes(block))
        return 0

    def _numbers(self, low: int, high: int) -> list[int]:
        """Blocks of the source at these places in the order of reading."""
        found: list[int] = self._blocks.indices(0, low, high).tolist()
        return found

    def _windows(self, reads: Iterator[_Read]) -> Iterator[WindowRows]:
        """The records, until each window has `window_bytes`."""
        parts, held = list[SourceRows](), 0
        for read in reads:
            low, count = 0, len(read.rows)
            while low < count:
                ends = held + np.cumsum(ITEM_BYTES + read.rows.nbytes[low:])
                cut = low + 1 + int(np.searchsorted(ends, self._window_bytes))
                high = min(cut, count)
                parts.append(read.rows if (low, high) == (0, count) else read.rows.part(low, high))
                held, low = int(ends[high - low - 1]), high
                if held >= self._window_bytes:
                    yield WindowRows(parts, read.block, read.first + high)
                    parts, held = [], 0
        if parts:
            yield WindowRows(parts, read.block, read.first + count)


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows of a block (its place in the order of reading) from record `first` on."""

    rows: SourceRows
    block: int
    first: int


Records = NumberedRecords | BlockRecords


def records_of(source: Source, seed: int | None, window_bytes: int, workers: int) -> Records:
    """The records of a source in the order of writing; `seed` None: in that of the source."""
    if isinstance(source, IndexedSource):
        return NumberedRecords(source, seed, workers)
    assert isinstance(source, BlockwiseSource)
    return BlockRecords(source, seed, window_bytes)
