"""Train from a pool on slow remote storage, without the cache and with it: same batches, less time.

    python examples/remote_cache.py
    python examples/remote_cache.py --latency-ms 50 --share 8 --epochs 4

The three devices are an fsspec filesystem in memory that answers every read after a pause, as an
object store does. Samples are drawn by their importance, some more often than others; the cache
has room for a part of them (`--share`: one part in so many) and is told each epoch's draws.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import WeightedRandomSampler

import hpstore
from hpstore.loaders import Cache, DataLoader, Dataset, DatasetWriter, Field

BATCH, CLASSES, SIDE = 32, 10, 48
FIELDS = {"image": Field("uint8", (3, SIDE, SIDE)), "label": Field("int64")}


class SlowStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """slow://: objects in memory; reading a range takes `pause_seconds`."""

    protocol = "slow"
    pause_seconds = 0.0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("slow://", "memory://", 1)))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        time.sleep(self.pause_seconds)
        return bytes(super().cat_file(path, start=start, end=end, **options))


def write_pictures(pool: hpstore.Pool, count: int) -> None:
    """Noise with a brighter square whose place says the class."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, count)
    images = rng.integers(0, 192, (count, 3, SIDE, SIDE), np.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        down, right = divmod(label, 4)
        image[:, 12 * down : 12 * down + 12, 12 * right : 12 * right + 12] += 63
    with DatasetWriter(pool, "pictures", FIELDS) as writer:
        writer.write_batch({"image": images, "label": labels})


def train(
    data: Dataset, cache: Cache | None, epochs: int
) -> tuple[list[str], float, dict[str, Any]]:
    """Losses of all steps, exactly; seconds; what the loader counted."""
    torch.manual_seed(0)
    weights = torch.exp(1.2 * torch.randn(len(data), generator=torch.Generator().manual_seed(1)))
    sampler = WeightedRandomSampler(
        weights.tolist(), len(data), generator=torch.Generator().manual_seed(2)
    )
    loader = DataLoader(data, BATCH, sampler=sampler, cache=cache or 0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, 2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )
    model(torch.zeros(BATCH, 3, SIDE, SIDE)).sum().backward()  # torch's own start is not counted
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.zero_grad()
    losses, began = [], time.perf_counter()
    for _ in range(epochs):
        for batch in loader:
            found = model(batch["image"].float() / 256)
            loss = functional.cross_entropy(found, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
    seconds, stats = time.perf_counter() - began, loader.stats()
    loader.close()
    return losses, seconds, stats


def compare(root: Path, samples: int, epochs: int, share: int) -> Table:
    """Both runs. Raises SystemExit when they differ."""
    places = [f"slow://{root.name}-{letter}" for letter in "abc"]
    config = root / "pool.toml"
    table = Table("", "seconds", "stall", "hits", "late", "misses", title="two runs, same losses")
    with hpstore.create(places, data=2, parity=1, config=config) as pool:
        write_pictures(pool, samples)
    with hpstore.open(config) as pool, Dataset(pool, "pictures") as data:
        memory = samples * 3 * SIDE * SIDE // share
        wanted, seconds, stats = train(data, None, epochs)
        table.add_row("no cache", f"{seconds:.1f}", f"{stats['wait_seconds']:.1f}", *"---")
        with Cache(memory) as cache:
            losses, seconds, stats = train(data, cache, epochs)
        if losses != wanted:
            raise SystemExit("remote_cache.py: the losses differ: not the same batches")
        counts = [
            f"{stats['cache'].get(name, 0):.0f}"
            for name in ("memory_hit_total", "late_total", "miss_total")
        ]
        table.add_row(
            f"cache of 1/{share}", f"{seconds:.1f}", f"{stats['wait_seconds']:.1f}", *counts
        )
    table.caption = f"{epochs} epochs of {samples} draws, last loss {float.fromhex(wanted[-1]):.3f}"
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=10.0, help="of every read")
    parser.add_argument("--share", type=int, default=4, help="the data are so many times the cache")
    options = parser.parse_args()
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    SlowStore.pause_seconds = options.latency_ms / 1000
    with contextlib.ExitStack() as held:
        root = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hpstore-remote-")))
        table = compare(root, options.samples, options.epochs, options.share)
        Console().print(table)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"remote_cache.py: {error}")
