"""Large records of many sizes: read some at a time, in memory that is used again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpstore
from hpstore.errors import AlreadyClosed, HpstoreError, IntegrityError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.loaders.dataset import large_records
from hpstore.loaders.dataset.large_records import (
    PART_BYTES,
    aligned_bytes,
    aligned_rows,
    part_bounds,
    read_parts,
)
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Stream
from hpstore.objects.read import metered_batch
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB

COUNT, BATCH = 300, 32
LENGTHS = np.random.default_rng(3).integers(0, 40_000, COUNT)


def value(index: int) -> np.ndarray:
    return np.full(LENGTHS[index], index % 251, np.uint8)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    paths = [tmp_path / f"d{i}" for i in range(6)]
    with hpstore.create(paths, data=3, parity=2, config=tmp_path / "pool.toml") as pool:
        fields = {
            "x": Field("uint8", (None,)),
            "text": Field("str"),
            "z": Field("int32", (None, 4)),
            "fixed": Field("uint8", (5000,)),
            "y": Field("int64"),
        }
        with DatasetWriter(
            pool, "a", fields, shard_bytes=4 * MIB, unit_bytes=128 * KIB, layout="rows"
        ) as writer:
            for index in range(COUNT):
                writer.write(
                    {
                        "x": value(index),
                        "text": f"number {index}",
                        "y": index,
                        "z": np.full((index % 7, 4), index, np.int32),
                        "fixed": np.full(5000, index % 250, np.uint8),
                    }
                )
    return tmp_path


@pytest.fixture
def pool(home: Path) -> Iterator[Pool]:
    with hpstore.open(home / "pool.toml") as pool:
        yield pool


def holders(home: Path) -> list[Path]:
    """The devices with the first and the second data column of a shard."""
    files = [
        file for column in ("c00", "c01") for file in home.glob(f"d*/objects/data/**/@*.{column}.*")
    ]
    largest = max(files, key=lambda file: file.stat().st_size).parent.relative_to(home).parts[1:]
    return [
        home / f.relative_to(home).parts[0]
        for f in files
        if f.parent.relative_to(home).parts[1:] == largest
    ]


def check(loader: DataLoader) -> None:
    """An epoch has every sample, whole."""
    seen = []
    for batch in loader:
        for row, index in enumerate(batch["y"].tolist()):
            assert np.array_equal(batch["x"][row].numpy(), value(index))
            assert batch["text"][row] == f"number {index}"
            assert batch["z"][row].tolist() == [[index] * 4] * (index % 7)
            assert set(batch["fixed"][row].tolist()) == {index % 250}
            seen.append(index)
    assert sorted(seen) == list(range(COUNT))


@given(st.lists(st.integers(0, PART_BYTES + 10_000), max_size=40))
def test_parts_are_all_records_in_order_and_bounded(lengths: list[int]) -> None:
    """One after the other; more than a part is a single record; none could take the next too."""
    array = np.array(lengths, np.int64)
    bounds = part_bounds(array)
    assert [a for a, _ in bounds] == [0, *[b for _, b in bounds]][: len(bounds)]
    assert (bounds[-1][1] if bounds else 0) == len(lengths)
    for first, last in bounds:
        assert aligned_bytes(array[first:last]) <= PART_BYTES or last == first + 1
        if last < len(lengths):
            assert aligned_bytes(array[first : last + 1]) > PART_BYTES


@given(st.lists(st.integers(0, 20_000), max_size=10))
def test_rows_in_aligned_memory_do_not_touch_each_other(lengths: list[int]) -> None:
    """Each begins at 4 KiB and is as long as asked; rooms are whole steps, side by side."""
    array = np.array(lengths, np.int64)
    memory = np.zeros(aligned_bytes(array), np.uint8)
    rows, room = aligned_rows(memory, array)
    assert [len(row) for row in rows] == lengths
    for number, (row, behind) in enumerate(zip(rows, room, strict=True)):
        assert len(behind) % 4096 == 0
        assert not behind.any()
        behind[:] = number + 1
        assert (row == number + 1).all()
    assert memory.all()


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("part_bytes", [1, 60_000, PART_BYTES])
@pytest.mark.parametrize("cache", [0, 64 * MIB])
def test_batches_in_parts_are_whole(
    home: Path, monkeypatch: pytest.MonkeyPatch, lost: int, part_bytes: int, cache: int
) -> None:
    """With devices missing too; each record a part of its own, some, all of a batch. All of the
    pool's memory has come back.
    """
    monkeypatch.setattr(large_records, "PART_BYTES", part_bytes)
    for device in holders(home)[:lost]:
        shutil.rmtree(device)
    with hpstore.open(home / "pool.toml", read_only=True) as pool:
        loader = DataLoader(Dataset(pool, "a"), BATCH, shuffle=True, seed=1, cache=cache)
        check(loader)
        loader.close()
        assert pool.metrics.value("records_without_memory_total") == 0
        assert pool.metrics.value("scatter_without_memory_total") == 0
        assert pool._store.buffers.budget.used_bytes == 0
        if not cache:  # which reads whole pages
            assert bool(pool.metrics.value("read_degraded_total")) == (lost > 0)


def test_batches_in_parts_are_whole_where_reads_are_made_one_by_one(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metered_batch, "read_batch", lambda *_, **__: None)
    monkeypatch.setattr(large_records, "PART_BYTES", 60_000)
    data = Dataset(pool, "a")
    loader = DataLoader(data, BATCH, shuffle=True, seed=1, cache=0)
    check(loader)
    loader.close()
    for index, sample in enumerate(data.__getitems__(range(BATCH))):
        assert np.array_equal(sample["x"], value(index))


def test_memory_of_the_pool_that_is_in_use_is_counted_and_others_takes_its_place(
    pool: Pool,
) -> None:
    lease = pool._store.buffers.lease(pool._store.buffers.budget.limit_bytes - PART_BYTES // 2)
    loader = DataLoader(Dataset(pool, "a"), 100, shuffle=True, cache=0)  # 2.5 MB a batch
    check(loader)
    loader.close()
    assert pool.metrics.value("records_without_memory_total") > 0
    lease.release()
    assert pool._store.buffers.budget.used_bytes == 0


def test_a_part_whose_read_hangs_is_never_used_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 21: its memory stays charged, the records come in other memory."""
    data = Dataset(pool, "a")
    (stream,) = data.streams
    given = list[Any]()

    def hangs(stream: Stream, indices: Int64s, rows: Any, **_: Any) -> bool:
        given.extend(rows)
        return len(given) > BATCH  # the first part alone

    monkeypatch.setattr(data, "read_rows", hangs)
    monkeypatch.setattr(large_records, "PART_BYTES", 2 * MIB)
    wanted = np.arange(BATCH)
    lengths = data.locate(stream, wanted).length
    ((_, found),) = read_parts(data, stream, wanted, lengths)
    assert len(found) == len(given) == BATCH
    assert not any(np.shares_memory(a, b) for a, b in zip(found, given, strict=True))
    records, _ = data.read_records(stream, wanted)
    assert all(np.array_equal(a, b) for a, b in zip(found, records, strict=True))
    assert pool._store.buffers.budget.used_bytes == MIB
    for _, rows in read_parts(data, stream, wanted, lengths):
        assert not any(np.shares_memory(a, given[0]) for a in rows)
    data.close()


@pytest.mark.parametrize("error", [IntegrityError("sample 3"), AlreadyClosed("sample 3")])
def test_a_record_that_cannot_be_read_gives_the_memory_back(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, error: HpstoreError
) -> None:
    """PROTOCOL 21: not so where the pool was closed meanwhile, as some reads may be under way."""
    data = Dataset(pool, "a")
    (stream,) = data.streams

    def bad(*_: Any, **__: Any) -> bool:
        raise error

    monkeypatch.setattr(data, "read_rows", bad)
    wanted = np.arange(BATCH)
    with pytest.raises(type(error), match="sample 3"):
        next(read_parts(data, stream, wanted, data.locate(stream, wanted).length))
    assert bool(pool._store.buffers.budget.used_bytes) == isinstance(error, AlreadyClosed)
    data.close()
