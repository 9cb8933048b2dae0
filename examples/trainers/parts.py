"""What the scripts here share: a tiny net, its rows in the pool, and the hash of its weights."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping

import torch
from torch import nn

import hpstore
from hpstore.loaders import Dataset, DatasetWriter, Field, list_datasets

ROWS, WIDTH = 96, 16


def options(description: str | None) -> argparse.Namespace:
    """Of every script: the pool, how many steps, and how often they are saved."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("pool", help="pool.toml, or a pool's name")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3, help="steps between two saves")
    parser.add_argument("--workers", type=int, default=1, help="processes, where Ray starts them")
    return parser.parse_args()


def write_rows(pool: hpstore.Pool) -> None:
    """Put the data set, once: one process does it before the others start."""
    if "toy" in list_datasets(pool):
        return
    fields = {"x": Field("float32", (WIDTH,)), "y": Field("float32", (1,))}
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    with DatasetWriter(pool, "toy", fields) as writer:
        writer.write_batch({"x": x.numpy(), "y": x.sum(1, keepdim=True).tanh().numpy()})


def rows(pool: hpstore.Pool) -> Dataset:
    """Dicts of "x" and "y"."""
    return Dataset(pool, "toy")


def net() -> nn.Module:
    """Alike in every process and every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of one batch."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def show(step: int, weights: Mapping[str, torch.Tensor]) -> None:
    """The last line of a script: equal weights have equal hashes."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    print(f"step {step} weights {found.hexdigest()[:16]}", flush=True)
