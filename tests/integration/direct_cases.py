"""What tests of direct reads through the loader share, over the stand-in and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, GpuTransfer
from hpstore.loaders.batching.batch_maker import Engine
from hpstore.loaders.gpu.direct_reader import DirectAccess
from hpstore.pool.pool import Pool
from hpstore.testing.fake_gpu import FakeGpu
from hpstore.units import KIB

ALWAYS = GpuTransfer(direct="always")
COUNT = 97
# "records" are checked by their own checksums, "blocks" (no whole KiB) by those of their blocks
KINDS: dict[str, dict[str, Field]] = {
    "records": {"image": Field("uint8", (3, 64, 64)), "label": Field("int64")},
    "blocks": {"image": Field("uint8", (3, 81, 81)), "label": Field("int64")},
    "fields": {
        "a": Field("float32", (50, 50)),
        "b": Field("bfloat16", (100,)),
        "label": Field("int64"),
        "c": Field("int16", (4000,)),
    },
}


def write_direct(pool: Pool, kind: str, count: int = COUNT, unit_bytes: int = 128 * KIB) -> Dataset:
    """A data set of a kind, in several shards; noise without NaN, label i is sample i."""
    fields = KINDS[kind]
    with DatasetWriter(pool, kind, fields, shard_bytes=768 * KIB, unit_bytes=unit_bytes) as writer:
        for number in range(count):
            rng = np.random.default_rng(number)
            made: dict[str, Any] = {"label": number}
            for name, field in fields.items():
                if name != "label":
                    raw = rng.integers(0, 64, field.row_bytes, np.uint8)
                    made[name] = field.as_tensor(raw.view(field.storage).reshape(field.inner_shape))
            writer.write(made)
    return Dataset(pool, kind)


def holders(root: Path, data: Dataset, count: int) -> list[Path]:
    """The devices below `root` that hold the first data columns of a data set's first shard."""
    key = data.shard_key(data.streams[0], 0)
    files = [next(root.glob(f"d*/objects/{key}/@*.c0{column}.*")) for column in range(count)]
    return [root / file.relative_to(root).parts[0] for file in files]


def cpu_epoch(data: Dataset, *, epoch: int = 0, **options: Any) -> list[Any]:
    """The batches of the loader that reads to the CPU, record by record."""
    settings = {"cache": 0, "batch_size": 10, "seed": 3, "shuffle": True, **options}
    loader = DataLoader(data, **settings)
    loader.set_epoch(epoch)
    found = list(loader)
    loader.close()
    return found


def seen(loader: DataLoader, data: Dataset) -> DirectAccess | None:
    """Read every record once, so that every device is known and was looked at."""
    engine = loader.engine()
    assert isinstance(engine, Engine)
    engine.start(0, 0).batch(np.arange(len(data)))
    assert engine.direct is None or engine.direct.settle(90)
    return engine.direct


def gpu_epoch(
    data: Dataset, device: Any, epochs: int = 1, **options: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Batches, in host memory, of the loader that reads to a GPU; and what stats() say of it."""
    settings = {"cache": 0, "batch_size": 10, "seed": 3, "shuffle": True, "gpu": ALWAYS}
    loader = DataLoader(data, device=device, **{**settings, **options})
    seen(loader, data)
    found = [
        {name: value.to("cpu") for name, value in batch.items()}
        for _ in range(epochs)
        for batch in loader
    ]
    stats = loader.stats()["direct"]
    loader.close()
    if isinstance(device, FakeGpu):
        assert device.driver_of_all.misuse == []
    return found, stats
