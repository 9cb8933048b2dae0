"""Readers that stay open take back columns that the pool has healed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpstore.errors import TooManyErasures
from hpstore.format.column_header import HEADER_BYTES
from hpstore.format.geometry import BLOCK_BYTES
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.objects.read.pooled_reader import RETAKE_SECONDS
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness

BODY = np.random.default_rng(0).bytes(900_000)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """4+2 over eight devices."""
    return Harness(tmp_path, data=4, parity=2, devices=8, clock=FakeClock())


def read(pool: Pool, reader: object, start: int = 0, end: int = len(BODY)) -> bytes:
    buffer = bytearray(end - start)
    reader.read_into(buffer, start)  # type: ignore[attr-defined]
    return bytes(buffer)


def flip_column(harness: Harness, key: str, number: int) -> None:
    """Every block of one column."""
    for url, path in harness.columns(key):
        if f".c{number:02d}." in path:
            size = len(harness.devices[url].files[path].bytes)
            for at in range(HEADER_BYTES, size - HEADER_BYTES, BLOCK_BYTES):
                harness.flip(url, path, at)


def lose_and_heal(harness: Harness, pool: Pool, key: str, turn: int) -> None:
    """The device that holds column 0 is gone for good; another process evicts it and rebuilds."""
    url = next(url for url, path in harness.columns(key) if f".c{turn:02d}." in path)
    harness.lose([url])
    with harness.open() as other:
        other.evict(url)
        assert other.rebuild().whole


def rot_and_heal(harness: Harness, pool: Pool, key: str, turn: int) -> None:
    """One column decays after another; a scrub of another process mends it."""
    flip_column(harness, key, turn)
    with pool.open(key) as another:
        assert read(pool, another) == BODY
    with harness.open() as other:
        other.scrub(resume=False)


@pytest.mark.parametrize("harm", [lose_and_heal, rot_and_heal])
def test_a_reader_outlives_any_number_of_losses_that_were_healed(
    harness: Harness, harm: Callable[[Harness, Pool, str, int], None]
) -> None:
    """three_disks_in_turn, reader_keeps_lost_columns: no more than m columns lack at one time."""
    with harness.open() as pool:
        pool.put("k", BODY)
        with pool.open("k") as reader:
            assert read(pool, reader) == BODY
            for turn in range(4):
                if harm is rot_and_heal:
                    flip_column(harness, "k", turn)
                    assert read(pool, reader) == BODY
                harm(harness, pool, "k", turn)
                assert read(pool, reader) == BODY


def test_a_loader_outlives_any_number_of_losses_that_were_healed(harness: Harness) -> None:
    """three_disks_in_turn, by a loader whose shards stay open."""
    with harness.open() as pool:
        with DatasetWriter(pool, "t", {"x": Field("uint8", (4096,))}) as writer:
            writer.write_batch({"x": np.zeros((256, 4096), np.uint8)})
        loader = DataLoader(Dataset(pool, "t"), batch_size=64, shuffle=True, cache=0)
        key = next(key for key in pool.list("data/") if key.endswith("stream-0/000000"))
        for turn in range(4):
            assert sum(len(batch["x"]) for batch in loader) == 256
            lose_and_heal(harness, pool, key, turn)
        loader.close()


def test_a_reader_takes_columns_back_although_no_read_fails(harness: Harness) -> None:
    """What was lost is looked for after a while: a degraded reader becomes a healthy one."""
    with harness.open() as pool:
        pool.put("k", BODY)
        reader = pool.open("k")
        flip_column(harness, "k", 0)
        assert read(pool, reader) == BODY
        assert reader._reader.impaired
        with harness.open() as other:
            other.scrub(resume=False)
        assert read(pool, reader) == BODY
        assert reader._reader.impaired  # not at every read
        assert isinstance(harness.clock, FakeClock)
        harness.clock.advance(RETAKE_SECONDS)
        assert read(pool, reader) == BODY
        assert not reader._reader.impaired
        reader.close()


def test_a_look_again_that_finds_no_more_raises_and_can_be_tried_again(harness: Harness) -> None:
    """m + 1 devices away: an error that names them; back again: the same reader reads on."""
    with harness.open() as pool:
        pool.put("k", BODY)
        with pool.open("k") as reader:
            harness.lose([url for url, _ in harness.columns("k")][:3])
            with pytest.raises(TooManyErasures):
                read(pool, reader)
            harness.bring_back()
            assert read(pool, reader) == BODY
