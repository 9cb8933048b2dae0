"""What stands before the first batch: objects are opened at the same time, nothing else is made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hpstore
from hpstore.errors import TooManyErasures
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.loaders.blocks import BlockTable, Table
from hpstore.loaders.pipeline import Pipeline
from hpstore.loaders.progress import Piece
from hpstore.loaders.slab import Slab
from hpstore.pool import Pool
from hpstore.pooled import PooledReader
from hpstore.units import KIB, MIB

COUNT, BATCH = 4000, 50


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    paths = [tmp_path / f"d{i}" for i in range(4)]
    with hpstore.create(paths, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        with DatasetWriter(
            pool, "a", {"x": Field("uint8", (4096,)), "y": Field("int64")},
            shard_bytes=4 * MIB, unit_bytes=256 * KIB,
        ) as writer:  # fmt: skip
            number = np.arange(COUNT)
            values = np.repeat(number.astype(np.uint8)[:, None], 4096, axis=1)
            writer.write_batch({"x": values, "y": number})
        yield pool


def check(batch: dict[str, object], numbers: np.ndarray) -> None:
    assert np.array_equal(np.asarray(batch["y"]), numbers)
    assert np.array_equal(np.asarray(batch["x"])[:, 7], numbers.astype(np.uint8))


def test_shards_of_a_batch_are_opened_at_the_same_time(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two meet while they are opened; one after the other they never would."""
    data, plain, met = Dataset(pool, "a"), pool.reader, threading.Barrier(2)

    def reader(key: str) -> PooledReader:
        if "stream-" in key and not key.endswith(".side"):
            met.wait(10)
        return plain(key)

    monkeypatch.setattr(pool, "reader", reader)
    (stream,) = data.streams
    assert stream.shard_count == 4
    rows = np.arange(0, COUNT, 100)
    outs = [np.empty(4096, np.uint8) for _ in rows]
    assert data.read_rows(stream, rows, outs)
    assert [int(out[0]) for out in outs] == (rows % 256).tolist()
    data.close()


def test_one_shard_that_does_not_open_is_told_and_closes_no_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, plain = Dataset(pool, "a"), pool.reader
    (stream,) = data.streams
    bad, opened = {data.shard_key(stream, 2)}, list[str]()

    def reader(key: str) -> PooledReader:
        if key in bad:
            raise TooManyErasures("not now", key=key)
        opened.append(key)
        return plain(key)

    monkeypatch.setattr(pool, "reader", reader)
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


def test_side_tables_of_several_objects_are_read_at_the_same_time() -> None:
    met = threading.Barrier(2)

    def load(cut: int, runs: list[tuple[int, int]]) -> list[list[Table]]:
        met.wait(10)
        return [[np.arange(first, first + count) + 1000 * cut] for first, count in runs]

    table = BlockTable([10, 10], [(np.dtype(np.int64), ())], load, block_rows=4)
    (found,) = table.get(np.array([1, 19, 5, 11]))
    assert found.tolist() == [1, 1009, 5, 1001]


def test_the_first_batch_is_made_alone() -> None:
    """Nobody begins another one before it is there; then all are made, in order."""
    others = threading.Event()

    def make(piece: Piece) -> bool:
        if piece.start:
            others.set()
            return True
        return not others.wait(0.2)

    todo = [Piece(epoch=0, start=n, stop=n + 1, after=(0, n + 1)) for n in range(9)]
    pipeline = Pipeline(iter(todo), make, depth=4, threads=3)
    taken = [pipeline.take() for _ in todo]
    assert all(alone for _, alone in taken)
    assert [piece.start for piece, _ in taken] == list(range(9))
    pipeline.close()


def test_a_run_that_begins_inside_a_window_does_not_wait_for_all_of_it(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While pages cannot be read at all, the batch that the trainer waits for comes singly."""
    plain, go = Slab.read, threading.Event()

    def read(self: Slab, *args: object) -> None:
        go.wait(60)
        plain(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Slab, "read", read)
    data = Dataset(pool, "a")
    loader = DataLoader(data, batch_size=BATCH, shuffle="window", seed=1, timeout=10)
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
