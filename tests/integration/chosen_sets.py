"""Two datasets of documents with labels, for tests of what a loader chooses and packs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hpstore
from hpstore.loaders import Dataset, DatasetWriter, Field

FIELDS = {
    "tokens": Field("uint16", (None,)),
    "mask": Field("uint8", (None,)),
    "label": Field("int64"),
    "score": Field("bfloat16"),
    "pair": Field("int32", (2,)),
    "image": Field("uint8", (96,)),
}
EOS = 7


class Written:
    """A dataset, and what was written into it."""

    def __init__(self, pool: hpstore.Pool, name: str, count: int, base: int) -> None:
        rng = np.random.default_rng(base)
        self.tokens, self.labels = [], []
        with DatasetWriter(pool, name, FIELDS, shard_bytes="64KiB") as writer:
            for n in range(count):
                size = int(rng.integers(0, 60)) if n % 37 else int(rng.integers(300, 900))
                made = rng.integers(base, base + 1000, size).astype(np.uint16)
                self.tokens.append(made.tolist())
                self.labels.append(n % 5)
                writer.write(
                    {
                        "tokens": made,
                        "mask": (made % 2).astype(np.uint8),
                        "label": n % 5,
                        "score": torch.tensor(n / count, dtype=torch.bfloat16),
                        "pair": np.array([n, -n], np.int32),
                        "image": np.full(96, n % 256, np.uint8),
                    }
                )
        self.data = Dataset(pool, name)


@contextmanager
def written_sets(path: Path) -> Iterator[list[Written]]:
    """Of 900 and of 350 documents, in one pool."""
    places = [path / f"d{i}" for i in range(4)]
    with hpstore.create(places, data=2, parity=1, config=path / "pool.toml") as pool:
        yield [Written(pool, "a", 900, 1000), Written(pool, "b", 350, 20_000)]


def labels(loader: Any) -> list[int]:
    """Of an epoch."""
    return [int(one) for batch in loader for one in batch["label"]]
