"""In which order a source's records are written, and where an interrupted ingest goes on.

A source read by number is permuted whole. One that is read block by block has its blocks permuted
and is then shuffled in windows of bounded bytes: not a uniform permutation, and it says so.
Both are functions of the seed and the source, so a position is the state of an ingest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from hpstore.loaders.ingestion.infer_fields import sample_bytes
from hpstore.loaders.ingestion.sample_source import BlockwiseSource, IndexedSource, SourceItem
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


class NumberedRecords:
    """The records of a source that is read by number."""

    def __init__(self, source: IndexedSource, seed: int | None, workers: int) -> None:
        self._source, self._workers = source, workers
        length = source.length
        self._order: Order = SequentialOrder(length) if seed is None else GlobalOrder(length, seed)

    def describe(self) -> dict[str, object]:
        """How samples were mixed, as the dataset records it."""
        return self._order.describe()

    def read(self, place: IngestPosition) -> Generator[Placed, None, None]:
        """Records from a place on."""
        found = self._source.read(self._indices(place.position), self._workers)
        for position, item in enumerate(found, place.position + 1):
            yield Placed(item, IngestPosition(position=position))

    def _indices(self, start: int) -> Iterator[int]:
        for first in range(start, self._source.length, INDEX_BLOCK):
            stop = min(first + INDEX_BLOCK, self._source.length)
            yield from self._order.indices(0, first, stop).tolist()


class BlockRecords:
    """The records of a source that is read block by block."""

    def __init__(
        self, source: BlockwiseSource, seed: int | None, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self._source, self._seed = source, seed
        self._window_bytes = window_bytes if seed is not None else WITHOUT_WINDOW_BYTES
        self._blocks: Order = (
            SequentialOrder(source.blocks) if seed is None else GlobalOrder(source.blocks, seed)
        )

    def describe(self) -> dict[str, object]:
        """How samples were mixed, as the dataset records it."""
        if self._seed is None:
            return {"kind": "sequential"}
        return {
            "kind": "windows",
            "seed": self._seed,
            "window_bytes": self._window_bytes,
            "blocks": self._blocks.describe(),
        }

    def read(self, place: IngestPosition) -> Generator[Placed, None, None]:
        """Records from a place on; those of its window that come before it are read again."""
        number, begins = place.window, place.window_position
        records = self._records(place.block, place.record)
        block, record = place.block, place.record
        while window := self._window(records):
            mixed = self._mixed(number, len(window))
            skip = max(0, place.position - begins)
            for offset, index in islice(enumerate(mixed, 1), skip, None):
                after = IngestPosition(
                    position=begins + offset,
                    window=number,
                    window_position=begins,
                    block=block,
                    record=record,
                )
                yield Placed(window[index][0], after)
            begins += len(window)
            number += 1
            _, block, record = window[-1]

    def _mixed(self, number: int, count: int) -> Sequence[int]:
        if self._seed is None:
            return range(count)
        indices: list[int] = GlobalOrder(count, self._seed).indices(number + 1, 0, count).tolist()
        return indices

    def _records(self, block: int, record: int) -> Iterator[tuple[SourceItem, int, int]]:
        """Records in the order of reading, each with the place of the next one."""
        for at in range(block, self._source.blocks):
            which = int(self._blocks.indices(0, at, at + 1)[0])
            start = record if at == block else 0
            for count, item in enumerate(self._source.read_block(which, start), start + 1):
                yield item, at, count

    def _window(
        self, records: Iterator[tuple[SourceItem, int, int]]
    ) -> list[tuple[SourceItem, int, int]]:
        """The next records, until they have `window_bytes`."""
        window, held = [], 0
        for found in records:
            window.append(found)
            held += ITEM_BYTES + (sample_bytes(found[0].sample) if found[0].sample else 0)
            if held >= self._window_bytes:
                break
        return window


Records = NumberedRecords | BlockRecords
