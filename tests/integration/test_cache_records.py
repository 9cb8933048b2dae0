"""Records of a data set in a pool, through the cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.loaders import Dataset, DatasetWriter, Field
from hpstore.loaders.cache import AnyAttached, Cache, MemoryLost
from hpstore.loaders.cache.record_source import RecordSource
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.pool.pool import Pool
from hpstore.units import KIB

COUNT = 60


def written(pool: Pool, seed: int, *, ragged: bool) -> Dataset:
    """A data set of random records."""
    rng = np.random.default_rng(seed)
    fields = {"x": Field("bytes") if ragged else Field("uint8", (700,))}
    with DatasetWriter(
        pool, "train", fields, unit_bytes=16 * KIB, shard_bytes=40 * KIB, overwrite=True
    ) as writer:
        for number in range(COUNT):
            data = rng.integers(0, 256, 700 + 40 * number * ragged, dtype=np.uint8)
            writer.write({"x": data.tobytes() if ragged else data})
    return Dataset(pool, "train")


def checked(reader: AnyAttached, data: Dataset, source: RecordSource, rows: Int64s) -> None:
    """What the cache gives is what the data set gives."""
    wanted, _ = data.read_records(data.streams[0], rows)
    targets = [np.zeros(len(record), np.uint8) for record in wanted]
    reader.read(rows, targets)
    for target, record in zip(targets, wanted, strict=True):
        assert np.array_equal(target, record)


@pytest.mark.parametrize("ragged", [False, True])
def test_records_come_from_the_pool_once(pool: Pool, ragged: bool) -> None:
    """Of one size and of many: right bytes, and from memory the second time."""
    data = written(pool, 0, ragged=ragged)
    source = RecordSource(data, data.streams[0])
    with Cache(1 << 20) as cache, cache.attach(source, batch_blocks=16) as reader:
        for _ in range(2):
            for at in range(0, COUNT, 16):
                checked(reader, data, source, np.arange(at, min(at + 16, COUNT)))
        stats = cache.stats()
    assert stats["source_blocks"] == COUNT
    assert stats["memory_hit_total"] == COUNT


def test_a_data_set_that_was_written_again_is_another_source(pool: Pool, tmp_path: Path) -> None:
    """Same name, other bytes: nothing of the old one is served, neither from memory nor disk."""
    old = written(pool, 0, ragged=False)
    with Cache(1 << 20, disk_path=tmp_path / "tier", disk_bytes=1 << 20) as cache:
        source = RecordSource(old, old.streams[0])
        with cache.attach(source) as reader:
            checked(reader, old, source, np.arange(COUNT))
        new = written(pool, 1, ragged=False)
        source = RecordSource(new, new.streams[0])
        with cache.attach(source) as reader:
            checked(reader, new, source, np.arange(COUNT))


def test_a_read_that_hangs_is_said_to_the_reader(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The targets are lost, not the cache: nobody waits, the next read is served (PROTOCOL 21)."""
    data = written(pool, 0, ragged=False)
    source = RecordSource(data, data.streams[0])
    with Cache(1 << 20) as cache, cache.attach(source) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(data, "read_rows", lambda *_, **__: False)
            with pytest.raises(MemoryLost):
                reader.read(np.arange(5), np.zeros((5, 700), np.uint8))
        checked(reader, data, source, np.arange(COUNT))


def test_a_closed_data_set_fails_as_without_a_cache(pool: Pool) -> None:
    """For what is not in memory."""
    data = written(pool, 0, ragged=False)
    source = RecordSource(data, data.streams[0])
    with Cache(1 << 20) as cache, cache.attach(source) as reader:
        checked(reader, data, source, np.arange(10))
        data.close()
        reader.read(np.arange(10), np.zeros((10, 700), np.uint8))
        with pytest.raises(ConfigError, match="closed"):
            reader.read(np.arange(20), np.zeros((20, 700), np.uint8))
