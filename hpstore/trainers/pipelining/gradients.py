"""What the stages of a pipeline must do together with their gradients, before the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def _gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    if isinstance(gradient, DTensor):
        local: torch.Tensor = gradient.to_local()
        return local.detach()
    return gradient.detach()


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    """Without sums that are still to be made over a mesh. Collective over it then."""
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        return gradient.full_tensor()
    return gradient


# Any below: torch's process groups have no public type
def clip_norm(
    parameters: Iterable[torch.nn.Parameter],
    max_norm: float,
    group: Any,
    device: torch.device,
    *,
    but: Collection[int] = (),
) -> float:
    """Scale the gradients of all stages so that their common norm is at most `max_norm`; the norm.

    Collective over `group`, and over the meshes of DTensors, whose shards are summed. Summed in
    double precision: neither the split into stages nor that into shards shows. `but`: ids of
    parameters that another rank counts; they are scaled as well.
    """
    parameters = list(parameters)
    counted = _gradients(p for p in parameters if id(p) not in but)
    total = _squares([_whole(gradient) for gradient in counted], device)
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    norm_of_all = float(total.sqrt())
    factor = max_norm / (norm_of_all + 1e-6)
    if factor < 1:
        for gradient in _gradients(parameters):
            gradient.mul_(factor)
    return norm_of_all


def _squares(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of the squares of all elements, those on other ranks of a DTensor's mesh included."""
    sums: dict[tuple[Any, ...], torch.Tensor] = {}  # by the mesh dimensions to be summed over
    for gradient in gradients:
        over: tuple[Any, ...] = ()
        if isinstance(gradient, DTensor):
            mesh, places = gradient.device_mesh, gradient.placements
            over = tuple((mesh, n) for n, p in enumerate(places) if not p.is_replicate())
        square = torch.linalg.vector_norm(_local(gradient), dtype=torch.float64).to(device) ** 2
        sums[over] = sums[over] + square if over in sums else square
    total = torch.zeros((), dtype=torch.float64, device=device)
    for over, square in sums.items():  # in the order of the parameters: alike on all ranks of it
        for mesh, dimension in over:
            dist.all_reduce(square, group=mesh.get_group(dimension))
        total += square
    return total


def all_finite(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> bool:
    """Whether this rank's gradients are. One look at the device for all of them."""
    gradients = [_local(gradient) for gradient in _gradients(parameters)]
    finite = [torch.isfinite(gradient).all().to(device) for gradient in gradients]
    return not finite or bool(torch.stack(finite).all())


def share_overflow(
    optimizers: Sequence[Sequence[torch.nn.Parameter]], device: torch.device
) -> bool:
    """Whether any rank has a gradient that is not finite; then each optimizer gets one.

    So that the GradScalers of all ranks skip the same steps, and all of a rank's optimizers.
    `optimizers`: the parameters of each. Collective over all ranks; two looks at the device,
    however many parameters there are.
    """
    mine = not all_finite([p for parameters in optimizers for p in parameters], device)
    found = torch.tensor([float(mine)], device=device)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if not bool(found):
        return False
    for parameters in optimizers:
        gradients = [_local(gradient) for gradient in _gradients(parameters)]
        first = next((gradient for gradient in gradients if gradient.numel()), None)
        if first is not None:
            first[(0,) * first.dim()] = float("inf")  # a reshape of a strided one would be a copy
    return True
