"""One bad block in each of several columns, at different offsets: data sets lose nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hpstore
from hpstore.config import Settings
from hpstore.format.column_header import HEADER_BYTES
from hpstore.format.geometry import BLOCK_BYTES
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.units import MIB

ROWS, LENGTH = 400, 5000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """2+1 over three directories, with a data set of one shard of ragged records."""
    settings = Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run"))
    rng = np.random.default_rng(0)
    disks = [tmp_path / f"d{i}" for i in range(3)]
    toml = tmp_path / "pool.toml"
    with (
        hpstore.create(disks, data=2, parity=1, config=toml, settings=settings) as pool,
        DatasetWriter(pool, "t", {"i": Field("int64"), "x": Field("bytes")}) as writer,
    ):
        for i in range(ROWS):
            writer.write({"i": i, "x": rng.bytes(LENGTH)})
    return tmp_path


def damage(root: Path, blocks: dict[int, int]) -> None:
    """Flip bytes in one block of each column of the shard: column -> block."""
    for column, block in blocks.items():
        (path,) = (p for p in root.glob(f"d*/objects/data/t/*/stream-0/000000/@*.c{column:02d}.*"))
        raw = bytearray(path.read_bytes())
        raw[HEADER_BYTES + block * BLOCK_BYTES + 100] ^= 0xFF
        path.write_bytes(raw)


@pytest.mark.parametrize(
    "how",
    [
        {"shuffle": True, "cache": 0},
        {"shuffle": "window", "cache": 0},
        {"shuffle": True},
    ],
)
def test_every_sample_is_read_with_bad_blocks_in_different_rows(
    root: Path, how: dict[str, object]
) -> None:
    """r1_two_bad_blocks: records, pages and the cache decode each row from sound columns."""
    damage(root, {0: 4, 1: 9, 2: 2})
    with hpstore.open(root / "pool.toml") as pool:
        loader = DataLoader(Dataset(pool, "t"), 50, **how)  # type: ignore[arg-type]
        assert sorted(int(i) for batch in loader for i in batch["i"]) == list(range(ROWS))
        loader.close()
        data = Dataset(pool, "t")
        assert [int(data[i]["i"]) for i in range(ROWS)] == list(range(ROWS))


def test_only_samples_of_a_lost_row_are_skipped(root: Path) -> None:
    """r1c: two bad blocks in one row lose that row's samples in both columns, and no others."""
    damage(root, {0: 4, 1: 4})
    per_block = BLOCK_BYTES // LENGTH + 2
    with hpstore.open(root / "pool.toml") as pool:
        loader = DataLoader(Dataset(pool, "t"), 50, cache=0, on_error="skip")
        seen = sum(len(batch["i"]) for batch in loader)
        loader.close()
    assert ROWS - 2 * per_block <= seen < ROWS
