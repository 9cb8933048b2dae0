"""Classify JPEG files on two ranks: folders train/ and val/ become two datasets of a pool.

    hpstore create pool.toml --data 4 --parity 2 disk0 disk1 disk2 disk3 disk4 disk5
    torchrun --standalone --nproc-per-node 2 examples/train_images.py --pool pool.toml
    torchrun --standalone --nproc-per-node 2 examples/train_images.py --pool pool.toml --epochs 8

The pictures are drawn by the script: circles, crosses and squares on noise. The second command goes
on from the checkpoint of the first, on any number of ranks. Needs Pillow: the extra `images`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader, Dataset, ImageDecode, ingest_splits, list_datasets

SIDE, BATCH = 32, 32  # pixels; pictures of a batch on each rank
SHAPES = ("circle", "cross", "square")  # folders: the classes


# 1. A folder as users have it: train/CLASS/*.jpg and val/CLASS/*.jpg.
def draw(shape: str, rng: np.random.Generator) -> Image.Image:
    """A white shape somewhere on a noisy ground."""
    picture = Image.fromarray(rng.integers(0, 120, (SIDE, SIDE, 3), np.uint8))
    size = int(rng.integers(12, 20))
    left, top = (int(n) for n in rng.integers(0, SIDE - size, 2))
    box = (left, top, left + size, top + size)
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill="white")
    elif shape == "square":
        pen.rectangle(box, fill="white")
    else:
        pen.line(box, fill="white", width=4)
        pen.line((box[0], box[3], box[2], box[1]), fill="white", width=4)
    return picture


def draw_folders(root: Path, train: int, val: int) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            shape = SHAPES[number % len(SHAPES)]
            folder = root / split / shape
            folder.mkdir(parents=True, exist_ok=True)
            draw(shape, rng).save(folder / f"{number:05d}.jpg", quality=90)


# 2. Each split is a dataset; the encoded bytes are kept as they are.
def store(pool: hpstore.Pool, train: int, val: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hpstore-shapes-") as root:
        draw_folders(Path(root), train, val)
        for report in ingest_splits(pool, "shapes", root).values():
            print(f"{report.name}: {report.samples} pictures, {report.bytes} bytes", flush=True)


# 3. Threads of the loader decode, and this function makes a batch what the network takes.
def as_floats(batch: dict[str, Any]) -> dict[str, Any]:
    return {"image": batch["image"].float() / 255, "label": batch["label"]}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, len(SHAPES)),
    )


# 4. Each picture of val/ is counted once, whatever the number of ranks: tail="uneven".
def evaluate(model: nn.Module, loader: DataLoader) -> tuple[int, int]:
    """Pictures that are recognised, and all of them, over all ranks."""
    found = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for batch in loader:
            right = model(batch["image"]).argmax(1) == batch["label"]
            found += torch.tensor([int(right.sum()), len(right)])
    dist.all_reduce(found)
    return int(found[0]), int(found[1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", required=True, help="pool.toml, or a pool's name")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--train", type=int, default=1800, help="pictures to draw")
    parser.add_argument("--val", type=int, default=301, help="pictures to draw")
    return parser.parse_args()


def main() -> int:
    options = parse()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with hpstore.open(options.pool) as pool:
        if dist.get_rank() == 0 and "shapes/val" not in [d.name for d in list_datasets(pool)]:
            store(pool, options.train, options.val)
        dist.barrier()
        how: dict[str, Any] = {
            "decode": {"image": ImageDecode()},
            "batch_transform": as_floats,
        }
        data, held = Dataset(pool, "shapes/train"), Dataset(pool, "shapes/val")
        training = DataLoader(data, BATCH, shuffle=True, seed=0, drop_last=True, **how)
        testing = DataLoader(held, BATCH, tail="uneven", **how)
        model = network()
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        state = {"model": model, "optimizer": optimizer, "loader": training}
        with Checkpointer(pool, "runs/shapes", keep_last=1) as checkpointer:
            done = checkpointer.restore(state) or 0
            for epoch in range(done, options.epochs):
                for batch in training:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(parallel(batch["image"]), batch["label"])
                    loss.backward()
                    optimizer.step()
                checkpointer.save(epoch + 1, state)
                right, seen = evaluate(model, testing)
                if dist.get_rank() == 0:
                    print(
                        f"epoch {epoch + 1}: loss {loss.item():.3f}, {right} of {seen} right",
                        flush=True,
                    )
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, classes {data.classes['label']}", flush=True)
        training.close()
        testing.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"train_images.py: {error}")
