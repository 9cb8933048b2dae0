"""Train a small CNN on scikit-learn's digits: ingest, split, augment, stop and go on.

    hpstore create pool.toml --data 4 --parity 2 disk0 disk1 disk2 disk3 disk4 disk5
    python examples/digits.py --pool pool.toml --epochs 6
    python examples/digits.py --pool pool.toml --epochs 12 --resume

A checkpoint is taken every 20 steps, in mid-epoch too. Kill it whenever you like: `--resume` goes
on with the very next batch. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader, Dataset, ingest, list_datasets

BATCH, EVERY = 64, 20
CLASSES = 10


def shifted(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The picture moved by up to one pixel; `rng` depends on seed, epoch and position alone."""
    down, right = (int(n) for n in rng.integers(-1, 2, 2))
    picture = torch.roll(sample["image"].float() / 16, (down, right), (0, 1))
    return {"image": picture.unsqueeze(0), "label": sample["label"]}


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """The fast path: a whole batch at once, no work per sample."""
    return {"image": batch["image"].float().unsqueeze(1) / 16, "label": batch["label"]}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """Share of the held-out samples that are recognised."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for batch in loader:
            right += int((model(batch["image"]).argmax(1) == batch["label"]).sum())
            total += len(batch["label"])
    model.train()
    return right / total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", required=True, help="pool.toml, or a pool's name")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--stop-after", type=int, help="leave after so many steps, as if killed")
    parser.add_argument("--prefix", default="runs/digits")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    with hpstore.open(options.pool) as pool:
        if "digits" not in [found.name for found in list_datasets(pool)]:
            found = load_digits()
            arrays = {"image": found.images.astype(np.uint8), "label": found.target}
            print(f"ingested {ingest(pool, 'digits', arrays).samples} pictures")
        data = Dataset(pool, "digits")
        held = len(data) // 5  # samples were shuffled on write: any part is a random one
        test = torch.utils.data.Subset(data, range(held))
        rest = torch.utils.data.Subset(data, range(held, len(data)))
        training = DataLoader(rest, BATCH, shuffle=True, seed=0, transform=shifted, drop_last=True)
        testing = DataLoader(test, 256, batch_transform=plain)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        state = {"model": model, "optimizer": optimizer, "loader": training}
        with Checkpointer(pool, options.prefix, keep_last=2) as checkpointer:
            step = (checkpointer.restore(state) or 0) if options.resume else 0
            while step < options.epochs * len(training):
                for batch in training:
                    loss = functional.cross_entropy(model(batch["image"]), batch["label"])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    step += 1
                    if step % EVERY == 0:
                        checkpointer.save(step, state)
                    if step == options.stop_after:
                        return 0
                print(
                    f"step {step}: loss {loss.item().hex()}, {accuracy(model, testing):.3f} right"
                )
        training.close()
        testing.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"digits.py: {error}")
