"""What the tests of data sets share: a pool on real directories, samples by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import hpstore
from hpstore.config import Settings
from hpstore.loaders import Dataset, DatasetWriter, Field
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB

FIELDS = {
    "image": Field("uint8", (3, 40, 40)),
    "label": Field("int64"),
    "box": Field("float32", (4,)),
    "text": Field("str"),
    "raw": Field("bytes"),
    "sound": Field("float32", (None, 5)),
}
SMALL: dict[str, Any] = {"shard_bytes": 200 * KIB, "unit_bytes": 64 * KIB}


def make_pool(directory: Path, *, data: int = 3, parity: int = 2, devices: int = 5) -> Pool:
    return hpstore.create(
        [directory / f"d{i}" for i in range(devices)],
        data=data,
        parity=parity,
        config=directory / "pool.toml",
        settings=Settings(memory_bytes=32 * MIB, run_directory=str(directory / "run")),
    )


def sample(number: int) -> dict[str, Any]:
    """The sample of a number, the same in every process."""
    rng = np.random.default_rng(number)
    return {
        "image": rng.integers(0, 256, (3, 40, 40), np.uint8),
        "label": number,
        "box": rng.random(4, np.float32),
        "text": f"sample {number} é",
        "raw": rng.bytes(int(rng.integers(0, 30_000))),
        "sound": rng.random((int(rng.integers(0, 50)), 5), np.float32),
    }


def check_sample(found: dict[str, Any], number: int) -> None:
    """An assertion that also works in child processes."""
    wanted = sample(number)
    for name, value in wanted.items():
        got = found[name]
        same = (
            got == value
            if isinstance(value, str | bytes)
            else int(got) == value
            if isinstance(value, int)
            else np.array_equal(got.numpy(), value) and got.numpy().dtype == value.dtype
        )
        if not same:
            raise AssertionError(f"sample {number}: field {name!r} is not what was written")
    if list(found) != list(wanted):
        raise AssertionError(f"sample {number} has fields {list(found)}")


def write_samples(pool: Pool, name: str, numbers: range, **options: Any) -> Dataset:
    with DatasetWriter(pool, name, FIELDS, **{**SMALL, **options}) as writer:
        for number in numbers:
            writer.write(sample(number))
    return Dataset(pool, name)
