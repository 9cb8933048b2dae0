"""What is read for the first batch of a window shuffle: its records, or windows that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB, MIB

BATCH = 44


@pytest.fixture
def pool(tmp_path: Any) -> Iterator[hpstore.Pool]:
    with Harness(tmp_path, data=4, parity=2, devices=6).open() as opened:
        yield opened


def made(pool: hpstore.Pool, size: int, count: int) -> Dataset:
    rows = np.arange(count) % 251
    with DatasetWriter(
        pool, "d", {"x": Field("bytes"), "i": Field("int64")}, unit_bytes=256 * KIB
    ) as out:
        out.write_batch({"x": [bytes([n]) * size for n in rows.tolist()], "i": np.arange(count)})
    return Dataset(pool, "d")


@pytest.mark.parametrize("cache", [0, 256 * MIB])
@pytest.mark.parametrize(("size", "singly"), [(100 * KIB, True), (3 * KIB, False)])
def test_of_large_records_the_first_batch_is_read_by_itself(
    pool: hpstore.Pool, size: int, singly: bool, cache: int
) -> None:
    """Else windows of 1, 2, 4, ... stripes are read for it, and the next one at the same time; of
    small records the first window holds it. All the same, each sample comes once.

    Eight of the large records fill a stripe: 44 lie in windows of 1 + 2 + 4. Of 340 small ones, in
    the first.
    """
    count = 6 * BATCH if singly else 60 * BATCH
    with (
        made(pool, size, count) as data,
        closing(
            DataLoader(
                data,
                BATCH,
                shuffle="window",
                memory=LoaderMemory(window_bytes=8 * MIB),
                cache=cache,
            )
        ) as loader,
    ):
        for epoch in range(2):
            seen = []
            for number, batch in enumerate(loader):
                seen += batch["i"].tolist()
                assert all(
                    (row.numpy() == i % 251).all()
                    for row, i in zip(batch["x"], batch["i"].tolist(), strict=True)
                )
                if epoch == number == 0:
                    first = loader.stats()["records_read"]
            assert sorted(seen) == list(range(count))
        assert (first >= BATCH) == singly
        assert loader.stats()["mode"] == ("resident" if cache else "window")
        assert loader.stats()["records_gathered"] >= count
