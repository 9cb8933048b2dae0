"""How many records there will be: known, estimated by the share that was read, or unknown."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.loaders import IngestProgress, ingest, open_source
from hpstore.loaders.ingestion.sample_source import BlockwiseSource
from hpstore.loaders.ingestion.write_order import BlockRecords, IngestPosition
from hpstore.pool.pool import Pool
from tests.integration.ingest_cases import Stop, images, make_pool
from tests.unit.test_ingest_sources import shard, write_tar

COUNT = 6000
SHARD: dict[str, Any] = {"shard_bytes": 1 << 18, "unit_bytes": 1 << 14}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def lines(first: int, count: int) -> bytes:
    """Objects of some 120 bytes that compress by half."""
    rng = np.random.default_rng(first)
    return b"".join(
        json.dumps({"n": n, "s": rng.bytes(50).hex()}).encode() + b"\n"
        for n in range(first, first + count)
    )


def one_compressed(folder: Path) -> Path:
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(0, COUNT)))
    return path


def several(folder: Path) -> Path:
    """A compressed one, a plain one, and one that is much smaller."""
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(0, COUNT // 2)))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(0, COUNT // 2 - 100)))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines(0, 100)))
    return folder


def one_tar(folder: Path) -> Path:
    path = folder / "a.tar.gz"
    write_tar(path, shard(0, 1500), "w:gz")
    return path


@pytest.mark.parametrize("make", [one_compressed, several, one_tar])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_end_is_estimated_from_what_was_read(
    pool: Pool, tmp_path: Path, make: object, shuffle: bool
) -> None:
    """Never fewer than there are so far, about right in the middle, right at the end."""
    assert callable(make)
    source = make(tmp_path)
    told: list[IngestProgress] = []
    report = ingest(
        pool, "a", source, shuffle=shuffle, window_bytes=1 << 17, progress=told.append, **SHARD
    )
    assert all(one.estimated for one in told)
    totals = [one.total or 0 for one in told]
    assert all(total >= one.records for total, one in zip(totals, told, strict=True))
    middle = totals[len(totals) // 2]
    assert 0.5 * report.samples < middle < 2 * report.samples
    assert totals[-1] == report.samples == told[-1].records


def test_a_resumed_ingest_counts_what_came_before(pool: Pool, tmp_path: Path) -> None:
    """The estimate of the second run is not that of its own records alone."""
    source = several(tmp_path)

    def stop(done: IngestProgress) -> None:
        if done.records > COUNT * 0.8:
            raise Stop

    options = {"shuffle": False, "window_bytes": 1 << 17, **SHARD}
    with pytest.raises(Stop):
        ingest(pool, "a", source, progress=stop, **options)
    told: list[IngestProgress] = []
    report = ingest(pool, "a", source, progress=told.append, **options)
    assert report.resumed_samples > COUNT // 2
    assert all(0.5 * COUNT < (one.total or 0) < 2 * COUNT for one in told)
    assert told[-1].total == COUNT


def test_a_file_that_is_gone_is_a_bad_record(tmp_path: Path) -> None:
    """Its size, for the estimate, cannot be asked for: that ends nothing."""
    source = open_source(several(tmp_path))
    assert isinstance(source, BlockwiseSource)
    assert source.fields
    (tmp_path / "c.jsonl.gz").unlink()
    records = BlockRecords(source, None, 1 << 14)
    rows = records.read_rows(IngestPosition(), 1 << 14)
    items = [item for placed in rows for item in placed.rows.items()]
    assert len(items) == COUNT - 100 + 1
    assert "FileNotFound" in items[-1].problem
    assert records.expected == len(items)


def test_a_known_length_is_no_estimate(pool: Pool, tmp_path: Path) -> None:
    told: list[IngestProgress] = []
    ingest(pool, "a", images(tmp_path / "in", 20), progress=told.append, **SHARD)
    assert {(one.total, one.estimated) for one in told} == {(20, False)}


def test_an_iterable_has_no_end_until_it_ends(pool: Pool) -> None:
    """Of one block nothing says how much is left."""
    told: list[IngestProgress] = []
    rows = ({"n": n} for n in itertools.chain(range(3000)))
    ingest(pool, "a", rows, shuffle=False, progress=told.append, **SHARD)
    assert told[0].total in (None, 3000)
    assert told[-1].records == 3000
