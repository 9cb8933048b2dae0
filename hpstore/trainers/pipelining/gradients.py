"""What the stages of a pipeline must do together with their gradients, before the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from hpstore.errors import ConfigError


# Any below: torch's process groups have no public type
def _gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    found = [p.grad for p in parameters if p.grad is not None]
    if any(hasattr(gradient, "to_local") for gradient in found):
        raise ConfigError(
            "gradients that are DTensors are not clipped or checked here: use "
            "torch.nn.utils.clip_grad_norm_ on each stage. Nothing was changed."
        )
    return found


def clip_norm(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, group: Any, device: torch.device
) -> float:
    """Scale the gradients of all stages so that their common norm is at most `max_norm`; the norm.

    Collective over `group`. Summed in double precision: the split into stages does not show.
    """
    gradients = _gradients(parameters)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
        total += norm.to(device) ** 2
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    norm_of_all = float(total.sqrt())
    factor = max_norm / (norm_of_all + 1e-6)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm_of_all


def share_overflow(
    parameters: Iterable[torch.nn.Parameter], group: Any, device: torch.device
) -> bool:
    """Whether any stage has a gradient that is not finite; then each gets one.

    So that the GradScalers of all stages skip the same steps. Collective over `group`.
    """
    gradients = _gradients(parameters)
    mine = any(not bool(torch.isfinite(gradient).all()) for gradient in gradients)
    found = torch.tensor([float(mine)], device=device)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    first = next((gradient for gradient in gradients if gradient.numel()), None)
    if bool(found) and not mine and first is not None:
        first[(0,) * first.dim()] = float("inf")  # a reshape of a strided one would be a copy
    return bool(found)


__all__ = ["clip_norm", "share_overflow"]
