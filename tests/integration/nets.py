"""What the tests of staging and of what is written share: a net that trains, and comparisons."""

from __future__ import annotations

import copy
from typing import Any

import torch


class Net(torch.nn.Module):
    """Everything that changes in other ways than by a step: statistics, and a clipped embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(400, 64, max_norm=0.5)
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 1024)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embedding(ids)))
        return found


def backward(net: torch.nn.Module) -> None:
    net(torch.randint(0, 400, (32,))).square().mean().backward()


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        backward(net)
    optimizer.step()
    optimizer.zero_grad()


def adamw(net: torch.nn.Module, variant: str = "foreach") -> torch.optim.AdamW:
    options = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}
    return torch.optim.AdamW(net.parameters(), lr=0.01, **options[variant])  # type: ignore[arg-type]


def values(net: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    """A deep copy of everything that is to come back."""
    return copy.deepcopy([net.state_dict(), *(o.state_dict()["state"] for o in optimizers)])


def same(left: Any, right: Any) -> bool:
    """Bit by bit, dtypes included."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if not isinstance(left, torch.Tensor):
        return bool(left == right)
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return left.dtype == right.dtype and torch.equal(*flat)


def level(tensor: torch.Tensor) -> float:
    """The one value that all elements have."""
    [value] = set(tensor.tolist())
    return float(value)
