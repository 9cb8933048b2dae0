"""Checkpoints that tests export and import, and tensors compared by their bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import hpstore
from hpstore.checkpoint import Checkpointer, export_checkpoint

RUN = "runs/a"
FORMATS = ("safetensors", "torch", "dcp")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (first.dtype, first.shape, bits(first)) == (second.dtype, second.shape, bits(second))


def all_dtypes(dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    """A tensor of each dtype with random bits, and shapes at the edges."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in dtypes:
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, high, (15 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        found[str(dtype).removeprefix("torch.")] = raw.view(dtype).reshape(3, 5)
    found["scalar"] = torch.tensor(1.5, dtype=torch.bfloat16)
    found["empty"] = torch.empty(0, 4)
    found["odd"] = torch.arange(3, dtype=torch.uint8)
    found["turned"] = torch.arange(6.0).reshape(2, 3).t()
    return found


def training(seed: int) -> dict[str, Any]:
    """A model with a used optimizer and values of several types."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
    return {"model": net, "optimizer": optimizer, "epoch": seed, "note": "x", "list": [1, (2.5,)]}


def save(pool: hpstore.Pool, step: int, state: dict[str, Any], prefix: str = RUN) -> None:
    with Checkpointer(pool, prefix) as checkpointer:
        checkpointer.save(step, state).result()


def export(pool: hpstore.Pool, target: Path, **options: Any) -> Any:
    return export_checkpoint(pool, RUN, 1, target, **options)
