"""Write the pools that lie here as archives, with the hpstore that is on the path.

    PYTHONPATH=CHECKOUT python make_pools.py DIRECTORY

They were made with commit 6b78450 and are never made again: what a released hpstore has written is
read by each later one. Others come beside them.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.config import Settings
from hpstore.loaders import DatasetWriter, Field

KIB = 1024
SIZES = (0, 1, 4 * KIB, 100_000, 200_000, 300_001)
RECORDS = 100
DATASETS: dict[str, dict[str, Any]] = {
    "rows": {"layout": "rows"},
    "columns": {"layout": "columns"},
    "packed": {"layout": "columns", "compression": "zstd"},
}
KINDS = ("plain", "mirrored", "remote", "evicted")


def content(size: int) -> bytes:
    """Byte j of an object is (j // 97 + size) mod 256: archives of it are small."""
    return ((np.arange(size) // 97 + size) % 256).astype(np.uint8).tobytes()


def record(number: int) -> dict[str, Any]:
    """One sample of the datasets."""
    return {
        "image": np.full((3, 8, 8), number % 256, np.uint8),
        "label": np.int64(number - 7),
        "text": "ä" * (number % 5),
        "sound": np.arange(2 * (number % 4), dtype=np.float32).reshape(-1, 2) + number,
    }


def state(step: int) -> dict[str, Any]:
    """What the checkpoint of a step holds; `frozen` is referenced by the later ones."""
    model, optimizer = trained(step)
    return {
        "model": model,
        "optimizer": optimizer,
        "frozen": torch.arange(20_000, dtype=torch.float32),
        "step": step,
        "nested": {"tuple": (1, "two", None), "bytes": b"\x00\xff", "nan": float("nan")},
    }


def trained(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and AdamW with exact values that tell the step."""
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-6)
    for parameter in model.parameters():
        values = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
        parameter.data.copy_(values / 64 + step)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            "exp_avg": values / 128 - step,
            "exp_avg_sq": values / 256,
        }
    return model, optimizer


def fill(pool: hpstore.Pool) -> None:
    """Objects, datasets, checkpoints."""
    for size in SIZES:
        pool.put(f"objects/{size}", content(size))
    pool.put("objects/again", b"the first version")
    pool.put("objects/again", b"the second version")
    pool.put("objects/gone", b"deleted")
    pool.delete("objects/gone")
    fields = {
        "image": Field("uint8", (3, 8, 8)),
        "label": Field("int64"),
        "text": Field("str"),
        "sound": Field("float32", (None, 2)),
    }
    for name, options in DATASETS.items():
        with DatasetWriter(pool, name, fields, **options) as writer:
            for number in range(RECORDS):
                writer.write(record(number))
    for codec in (None, "zstd"):
        save(pool, f"runs/{codec}", codec)


def save(pool: hpstore.Pool, prefix: str, codec: str | None) -> None:
    """Three steps under a prefix. 6b78450 took `compression` itself."""
    options: dict[str, Any] = {"compression": codec}
    try:
        made = Checkpointer(pool, prefix, rng=False, **options)
    except TypeError:
        from hpstore.checkpoint import SaveOptions

        made = Checkpointer(pool, prefix, rng=False, save=SaveOptions(**options))
    with made as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).result()


def make(kind: str, root: Path) -> None:
    """One pool, below a directory that is archived."""
    data, parity = (1, 2) if kind == "mirrored" else (3, 2)
    places = [root / f"d{n}" for n in range(6)]
    for place in places:
        place.mkdir(parents=True)
    urls = [f"file://{p}" if kind == "remote" else str(p) for p in places]
    pool = hpstore.create(
        urls,
        data=data,
        parity=parity,
        config=root / "pool.toml",
        unit_bytes=64 * KIB,
        settings=Settings(run_directory=str(root / "run"), memory_bytes=32 * KIB * KIB),
    )
    with pool:
        fill(pool)
        if kind == "evicted":  # of what lies on the others some is rebuilt, and some is owed
            shutil.rmtree(places[2])
            pool.put("objects/owed", content(150_000))
    if kind == "evicted":
        shutil.rmtree(places[4])
    shutil.rmtree(root / "run", ignore_errors=True)


def main() -> None:
    """One archive a kind; the configuration says ROOT where the directory was."""
    target = Path(sys.argv[1])
    for kind in KINDS:
        root = target / kind
        make(kind, root)
        toml = root / "pool.toml"
        toml.write_text(toml.read_text().replace(str(root), "ROOT"))
        with tarfile.open(target / f"{kind}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(root, arcname=".")


if __name__ == "__main__":
    main()
