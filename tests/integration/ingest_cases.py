"""A pool, a folder of images and an ingest that is cut short, for tests of ingest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.loaders import Dataset, IngestProgress, ingest, unfinished_ingests
from hpstore.pool.pool import Pool

SHARD: dict[str, Any] = {"shard_bytes": 1 << 16, "unit_bytes": 1 << 14}  # small ones: many parts


def make_pool(directory: Path) -> Pool:
    """2 + 1 over four directories."""
    devices = [directory / f"disk{i}" for i in range(4)]
    return hpstore.create(devices, data=2, parity=1, config=directory / "pool.toml")


def images(root: Path, count: int = 60, size: int = 8000) -> Path:
    """Files like JPEGs in three classes."""
    rng = np.random.default_rng(0)
    for number in range(count):
        path = root / f"class{number % 3}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = rng.bytes(size).replace(b"\xff", b"\0")
        path.write_bytes(b"\xff\xd8\xff\xda\0\2" + body + b"\xff\xd9")
    return root


def rows(pool: Pool, name: str) -> list[tuple[bytes, int]]:
    return [(sample["image"], int(sample["label"])) for sample in samples(pool, name)]


def samples(pool: Pool, name: str) -> list[dict[str, Any]]:
    """All of them. Any: values are bytes, str or tensors by field."""
    with Dataset(pool, name) as found:
        return found.__getitems__(list(range(len(found))))


def wanted_rows(root: Path) -> list[tuple[bytes, int]]:
    return [(path.read_bytes(), int(path.parent.name[-1])) for path in sorted(root.rglob("*.jpg"))]


def keys_left(pool: Pool, name: str) -> list[str]:
    return pool.list(f"data/{name}/")


class Stop(Exception):
    """Ends an ingest from its progress callback."""


def stop_after(records: int) -> Callable[[IngestProgress], None]:
    def progress(done: IngestProgress) -> None:
        if done.records >= records:
            raise Stop

    return progress


def cut_short(pool: Pool, name: str, source: object, after: int, **options: Any) -> int:
    """Ingest until an exception; returns the samples that are kept."""
    with pytest.raises(Stop):
        ingest(pool, name, source, progress=stop_after(after), **SHARD, **options)
    return unfinished_ingests(pool)[name].rows
