"""What stands before the first batch: objects are opened together, nothing else is made."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import hpstore
from hpstore.errors import TooManyErasures
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory
from hpstore.loaders.batching.batch_maker import Session
from hpstore.loaders.batching.batch_queue import BatchTimeout, Pipeline
from hpstore.loaders.batching.page_memory import PageMemory
from hpstore.loaders.dataset.block_table import BlockTable, Runs, Table
from hpstore.loaders.sampling.batch_plan import BatchPiece
from hpstore.loaders.sampling.window_shuffle import WindowOrder
from hpstore.objects.read.pooled_reader import Readers
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.common import poll

COUNT, BATCH = 4000, 50


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    paths = [tmp_path / f"d{i}" for i in range(4)]
    with hpstore.create(paths, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        with DatasetWriter(
            pool,
            "a",
            {"x": Field("uint8", (4096,)), "y": Field("int64")},
            shard_bytes=4 * MIB,
            unit_bytes=256 * KIB,
        ) as writer:
            number = np.arange(COUNT)
            values = np.repeat(number.astype(np.uint8)[:, None], 4096, axis=1)
            writer.write_batch({"x": values, "y": number})
        yield pool


def check(batch: dict[str, object], numbers: np.ndarray) -> None:
    assert np.array_equal(np.asarray(batch["y"]), numbers)
    assert np.array_equal(np.asarray(batch["x"])[:, 7], numbers.astype(np.uint8))


def test_what_a_batch_needs_is_opened_together(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four shards and what lies beside them: one look-up for all of a kind. Tables are small and
    read at once, shards stay open."""
    data, plain, asked = Dataset(pool, "a"), pool.open_many, list[tuple[list[str], bool]]()

    def readers(keys: list[str], *, preload: bool = False) -> Readers:
        asked.append((list(keys), preload))
        return plain(keys, preload=preload)

    monkeypatch.setattr(pool, "open_many", readers)
    (stream,) = data.streams
    assert stream.shard_count == 4
    rows = np.arange(0, COUNT, 100)
    outs = [np.empty(4096, np.uint8) for _ in rows]
    assert data.read_rows(stream, rows, outs)
    assert [int(out[0]) for out in outs] == (rows % 256).tolist()
    shards = [data.shard_key(stream, shard) for shard in range(4)]
    assert asked == [([f"{key}.side" for key in shards], True), (shards, False)]
    data.close()


def test_one_shard_that_does_not_open_is_told_and_closes_no_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, plain = Dataset(pool, "a"), pool.open_many
    (stream,) = data.streams
    bad, opened = {data.shard_key(stream, 2)}, list[str]()

    def readers(keys: list[str], *, preload: bool = False) -> Readers:
        opened.extend(key for key in keys if key not in bad)
        found = plain(keys, preload=preload)
        return found | {key: TooManyErasures("not now", key=key) for key in bad & set(keys)}

    monkeypatch.setattr(pool, "open_many", readers)
    rows = np.arange(0, COUNT, 100)
    outs = [np.empty(4096, np.uint8) for _ in rows]
    with pytest.raises(TooManyErasures):
        data.read_rows(stream, rows, outs)
    good = [data.shard_key(stream, shard) for shard in (0, 1, 3)]
    assert set(good) <= set(opened)
    opened.clear()
    late, bad = bad, set()
    assert data.read_rows(stream, rows, outs)
    assert set(opened) == late
    data.close()


def test_blocks_of_several_objects_are_read_by_one_call() -> None:
    asked = list[dict[int, Runs]]()

    def load(wanted: dict[int, Runs]) -> list[list[list[Table]]]:
        asked.append(wanted)
        return [
            [[np.arange(first, first + count) + 1000 * cut] for first, count in runs]
            for cut, runs in wanted.items()
        ]

    table = BlockTable([10, 10], [(np.dtype(np.int64), ())], load, block_rows=4)
    (found,) = table.get(np.array([1, 19, 5, 11]))
    assert found.tolist() == [1, 1009, 5, 1001]
    assert asked == [{0: [(0, 4), (4, 4)], 1: [(0, 4), (8, 2)]}]


def test_the_first_batch_is_made_alone() -> None:
    """Nobody begins another one before it is there; then all are made, in order."""
    others = threading.Event()

    def make(piece: BatchPiece) -> bool:
        if piece.start:
            others.set()
            return True
        return not others.wait(0.2)

    todo = [BatchPiece(epoch=0, start=n, stop=n + 1, after=(0, n + 1)) for n in range(9)]
    pipeline = Pipeline(iter(todo), make, depth=4, threads=3)
    taken = [pipeline.take() for _ in todo]
    assert all(alone for _, alone in taken)
    assert [piece.start for piece, _ in taken] == list(range(9))
    pipeline.close()


def numbered(count: int) -> Iterator[BatchPiece]:
    return iter([BatchPiece(epoch=0, start=n, stop=n + 1, after=(0, n + 1)) for n in range(count)])


def test_a_pipeline_is_filled_up_by_the_quarter() -> None:
    """Threads are woken once for two of eight batches; no more than eight are ever ahead."""
    made = list[int]()
    pipeline = Pipeline(numbered(40), lambda piece: made.append(piece.start), depth=8, threads=2)
    poll(60, lambda: pipeline.ready == 8)
    for taken in range(1, 33):
        assert pipeline.take()[0].start == taken - 1
        expected = 8 + taken // 2 * 2
        time.sleep(0.02)  # a batch too many, made by another thread, would show by now
        poll(60, lambda expected=expected: len(made) == expected)  # type: ignore[misc]
        assert pipeline.ready == expected - taken
    assert [pipeline.take()[0].start for _ in range(8)] == list(range(32, 40))
    with pytest.raises(StopIteration):
        pipeline.take()
    assert pipeline.ready == 0
    pipeline.close()


def test_the_samples_of_a_piece_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch that was taken counted those of all that were ahead, twice."""
    counted = list[int]()

    def count(piece: BatchPiece) -> int:
        counted.append(piece.start)
        return piece.stop - piece.start

    monkeypatch.setattr(BatchPiece, "samples", property(count))
    pipeline = Pipeline(numbered(40), lambda piece: piece.start, depth=8, threads=1)
    for _ in range(40):
        pipeline.take()
    pipeline.close()
    assert counted == list(range(40))


def of_sizes(*sizes: int) -> Iterator[BatchPiece]:
    ends = list(itertools.accumulate(sizes, initial=0))
    places = enumerate(itertools.pairwise(ends))
    return iter([BatchPiece(epoch=0, start=a, stop=b, after=(0, n + 1)) for n, (a, b) in places])


def test_a_small_batch_takes_no_place_of_a_whole_one() -> None:
    """Who has made the last of an epoch goes on with the next, while that before it is made."""
    gate, begun = threading.Event(), list[int]()

    def make(piece: BatchPiece) -> None:
        begun.append(piece.samples)
        if len(begun) == 2:
            gate.wait(60)

    pipeline = Pipeline(of_sizes(8, 7, 3, 8, 8), make, depth=2, threads=2, rows=8)
    pipeline.take()
    poll(60, lambda: begun == [8, 7, 3, 8])
    gate.set()
    assert [pipeline.take()[0].samples for _ in range(4)] == [7, 3, 8, 8]
    pipeline.close()


@pytest.mark.parametrize(("sizes", "ahead"), [([8] * 9, 2), ([5] * 9, 3), ([1] * 9, 3)])
def test_as_many_batches_are_ahead_as_there_is_memory_for(sizes: list[int], ahead: int) -> None:
    """Of batches of five one more than of eight; of the smallest not more than that."""
    made = list[BatchPiece]()
    pipeline = Pipeline(of_sizes(*sizes), made.append, depth=2, threads=2, rows=8)
    for taken in range(len(sizes) - ahead):
        poll(60, lambda taken=taken: len(made) == taken + ahead)  # type: ignore[misc]
        time.sleep(0.01)  # one too many would show by now
        assert len(made) == taken + ahead
        pipeline.take()
    pipeline.close()


def test_what_is_ready_is_what_comes_next() -> None:
    """A later batch that is done does not count while one before it is not."""
    go, gate = threading.Event(), threading.Event()

    def make(piece: BatchPiece) -> None:
        if piece.start == 1:
            gate.wait(60)
        if piece.start == 3:
            go.set()

    pipeline = Pipeline(numbered(4), make, depth=4, threads=2)
    assert go.wait(60)
    poll(60, lambda: pipeline.ready == 1)
    with pytest.raises(BatchTimeout):
        (pipeline.take(), pipeline.take(0.01))
    gate.set()
    assert [pipeline.take()[0].start for _ in range(3)] == [1, 2, 3]
    pipeline.close()


def test_an_error_that_looks_like_a_timeout_is_the_makers() -> None:
    """It is raised as it is, each time, and what was made before it comes first."""

    def make(piece: BatchPiece) -> int:
        if piece.start == 2:
            raise TimeoutError("of the user's own")
        return piece.start

    pipeline = Pipeline(numbered(4), make, depth=4, threads=2)
    assert [pipeline.take(5)[1] for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(TimeoutError, match="of the user's own"):
            pipeline.take(5)
    pipeline.close()


@pytest.mark.parametrize("cache", [0, None])
def test_a_run_that_begins_inside_a_window_fills_nothing_before_its_first_batch(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, cache: int | None
) -> None:
    """It comes singly: pages that are read meanwhile only take its share of the devices."""
    events, plain, make = list[str](), PageMemory.read, Session.make

    def read(self: PageMemory, *args: object) -> None:
        events.append("page")
        plain(self, *args)  # type: ignore[arg-type]

    def slow(self: Session, piece: BatchPiece) -> object:
        time.sleep(0.1 if not events else 0)  # a filler that is not held would read now
        found = make(self, piece)
        events.append("batch")
        return found

    monkeypatch.setattr(PageMemory, "read", read)
    monkeypatch.setattr(Session, "make", slow)
    data = Dataset(pool, "a")
    loader = DataLoader(data, batch_size=BATCH, shuffle="window", seed=1, cache=cache)
    loader.load_state_dict(loader.state_dict() | {"samples": COUNT // 2})
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    assert events[0] == "batch"
    assert "page" in events
    loader.close()
    data.close()


def test_a_rank_whose_first_rows_lie_beyond_the_window_begins_too(pool: Pool) -> None:
    """The run begins at the last sample of a window, the other rank's: nobody waits for pages that
    are filled only after the first batch.
    """
    data = Dataset(pool, "a")
    loader = DataLoader(
        data,
        BATCH,
        rank=1,
        world_size=2,
        shuffle="window",
        seed=1,
        memory=LoaderMemory(window_bytes="2MiB"),
        cache=0,
        timeout=60,
    )
    order = loader.order
    assert isinstance(order, WindowOrder)
    at = order.window_of(0, COUNT // 2).stop - 1
    loader.load_state_dict(loader.state_dict() | {"samples": at})
    check(next(iter(loader)), order.indices(0, at + BATCH, at + 2 * BATCH))
    loader.close()
    data.close()


@pytest.mark.parametrize("fields", [None, ["y"]])
def test_who_has_nothing_left_to_fill_ends(pool: Pool, fields: list[str] | None) -> None:
    """Windows of data that fit beside them, or of scalars alone: no thread runs for ever."""
    data = Dataset(pool, "a", fields=fields)
    loader = DataLoader(
        data, BATCH, shuffle="window", seed=1, memory=LoaderMemory(window_bytes="256MiB"), cache=0
    )
    batches = iter(loader)
    next(batches)
    poll(60, lambda: not [t for t in threading.enumerate() if "hpstore-fill" in t.name])
    assert sum(len(batch["y"]) for batch in batches) == COUNT - BATCH
    order = loader.order
    assert order is not None
    for epoch in (1, 2):
        found = torch.cat([batch["y"] for batch in loader])
        assert torch.equal(found, torch.from_numpy(order.indices(epoch, 0, COUNT)))
    loader.close()
    data.close()


def test_a_run_that_begins_inside_a_window_does_not_wait_for_all_of_it(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While pages cannot be read at all, the batch that the trainer waits for comes singly."""
    plain, go = PageMemory.read, threading.Event()

    def read(self: PageMemory, *args: object) -> None:
        go.wait(60)
        plain(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PageMemory, "read", read)
    data = Dataset(pool, "a")
    loader = DataLoader(data, batch_size=BATCH, shuffle="window", seed=1, timeout=60)
    loader.load_state_dict(loader.state_dict() | {"samples": COUNT // 2})
    batches = iter(loader)
    order = loader.order
    assert order is not None
    for at in range(COUNT // 2, COUNT // 2 + 3 * BATCH, BATCH):
        check(next(batches), order.indices(0, at, at + BATCH))
    go.set()
    for at in range(COUNT // 2 + 3 * BATCH, COUNT, BATCH):
        check(next(batches), order.indices(0, at, at + BATCH))
    loader.close()
    data.close()
