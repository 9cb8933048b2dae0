"""The order of writing: every record once, and cut anywhere it goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from hpstore.loaders.ingestion.sample_source import BLOCK_SHIFT, BlockwiseSource, IndexedSource
from hpstore.loaders.ingestion.source_rows import SourceItem
from hpstore.loaders.ingestion.write_order import (
    BlockRecords,
    IngestPosition,
    NumberedRecords,
    Records,
)


class Numbers(IndexedSource):
    """Records 0 .. length - 1."""

    kind = where = "numbers"

    def __init__(self, length: int) -> None:
        self.length = length

    def fingerprint(self) -> str:
        return ""

    def name_of(self, index: int) -> str:
        return str(index)

    def load(self, index: int) -> SourceItem:
        return SourceItem(name=str(index), origin=index, sample={"i": index})


class Blocks(BlockwiseSource):
    """Blocks of these many records; some are bad."""

    kind = where = "blocks"

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self.blocks = len(counts)

    def fingerprint(self) -> str:
        return ""

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        for number in range(start, self._counts[block]):
            bad = number % 5 == 4
            yield SourceItem(
                name=f"{block}/{number}",
                origin=block << BLOCK_SHIFT | number,
                sample=None if bad else {"b": bytes(100 * number)},
                problem="bad" if bad else "",
            )


def check_cut_anywhere(records: Records, cuts: Sequence[int], wanted: Sequence[int]) -> None:
    """Whole: each wanted origin once. Cut at `cuts`: the same row of records."""
    whole = [(p.item.origin, p.after.position) for p in records.read(IngestPosition())]
    assert sorted(origin for origin, _ in whole) == sorted(wanted)
    assert [position for _, position in whole] == list(range(1, len(whole) + 1))
    place, found = IngestPosition(), list[tuple[int, int]]()
    for cut in [*cuts, len(whole)]:
        for placed in records.read(place):
            if len(found) >= cut:
                break
            found.append((placed.item.origin, placed.after.position))
            place = IngestPosition(**placed.after.to_json())
    assert found == whole


SEEDS = st.none() | st.integers(0, 3)
CUTS = st.lists(st.integers(0, 40), max_size=4).map(sorted)


@given(length=st.integers(0, 40), seed=SEEDS, cuts=CUTS, workers=st.sampled_from([1, 3]))
def test_numbered_records_go_on_anywhere(
    length: int, seed: int | None, cuts: list[int], workers: int
) -> None:
    """Cut and continued, with any number of workers, records come as in one run."""
    check_cut_anywhere(NumberedRecords(Numbers(length), seed, workers), cuts, range(length))


@given(
    counts=st.lists(st.integers(0, 12), max_size=6),
    seed=SEEDS,
    cuts=CUTS,
    window_bytes=st.sampled_from([1, 3000, 1 << 20]),
)
def test_blocks_go_on_anywhere(
    counts: list[int], seed: int | None, cuts: list[int], window_bytes: int
) -> None:
    """Cut and continued inside windows and blocks, records come as in one run."""
    wanted = [b << BLOCK_SHIFT | n for b, count in enumerate(counts) for n in range(count)]
    check_cut_anywhere(BlockRecords(Blocks(counts), seed, window_bytes), cuts, wanted)


def test_a_seed_mixes_and_none_keeps_the_order() -> None:
    """Without a seed as they are; another seed, another order; blocks are mixed too."""
    orders = {}
    for seed in (None, 0, 1):
        numbered = NumberedRecords(Numbers(50), seed, 1)
        blocks = BlockRecords(Blocks([10] * 5), seed)
        orders[seed] = [
            [p.item.origin for p in r.read(IngestPosition())] for r in (numbered, blocks)
        ]
    for kept, first, second in zip(*orders.values(), strict=True):
        assert kept == sorted(kept)
        assert len({tuple(kept), tuple(first), tuple(second)}) == 3


def test_windows_are_mixed_each_in_its_own_way() -> None:
    """Windows of ten records that are blocks: not the same permutation again and again."""
    records = BlockRecords(Blocks([10] * 5), 0, window_bytes=8320)  # what ten of them take
    numbers = [p.item.origin & 0xFF for p in records.read(IngestPosition())]
    windows = {tuple(numbers[at : at + 10]) for at in range(0, 50, 10)}
    assert all(sorted(window) == list(range(10)) for window in windows)
    assert len(windows) > 1
