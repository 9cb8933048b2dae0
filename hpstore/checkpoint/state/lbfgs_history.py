"""The history of LBFGS: flat vectors over all its parameters, one after the other in their order.

Torch keeps them as the state of the first parameter. A restore brings them into the order that the
optimizer has now, and refuses those of other parameters, which torch would take and fail on later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from hpstore.errors import CheckpointMismatch

# Any below: states of optimizers hold what their optimizers put there


def require_history(path: str, optimizer: Optimizer, loaded: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch for recorded vectors that are not as long as the parameters."""
    if not isinstance(optimizer, LBFGS):
        return
    total = sum(map(_count, optimizer.param_groups[0]["params"]))
    for slots in loaded["state"].values():
        for name, vector in _vectors(slots):
            if vector.numel() != total:
                raise CheckpointMismatch(
                    f"optimizer {path!r}: {name!r} of its history has {vector.numel()} numbers, "
                    f"and its parameters have {total}: it is of others. Nothing was changed. "
                    "Leave the optimizer out (LoadOptions(exclude=)), or build it as it was saved"
                )


def in_own_order(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str], loaded: Mapping[str, Any]
) -> Mapping[str, Any]:
    """A recorded state, by names, with the vectors in the order of the optimizer's parameters."""
    if not isinstance(optimizer, LBFGS):
        return loaded
    saved = [name for group in loaded["param_groups"] for name in group["params"]]
    mine = {names[p]: _count(p) for p in optimizer.param_groups[0]["params"]}
    if saved == list(mine) or set(saved) != mine.keys() or saved[0] not in loaded["state"]:
        return loaded
    starts, start = {}, 0
    for name in saved:
        starts[name] = start
        start += mine[name]

    def moved(vector: torch.Tensor) -> torch.Tensor:
        return torch.cat([vector[starts[name] : starts[name] + mine[name]] for name in mine])

    slots = loaded["state"][saved[0]]
    others = {key: value for key, value in loaded["state"].items() if key != saved[0]}
    return {**loaded, "state": {**others, next(iter(mine)): _with_vectors(slots, moved)}}


def placed(optimizer: Optimizer, packed: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state whose vectors can be added to gradients: with FSDP2 these are DTensors, and what was
    read is whole on each rank."""
    parameters = optimizer.param_groups[0]["params"] if isinstance(optimizer, LBFGS) else []
    first = next((p for p in parameters if hasattr(p, "device_mesh")), None)
    if first is None:
        return packed
    from torch.distributed.tensor import DTensor, Replicate  # takes long, and few need it

    mesh = first.device_mesh

    def whole(vector: torch.Tensor) -> torch.Tensor:
        if isinstance(vector, DTensor):
            return vector
        local = vector.to(first.device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)

    state = {key: _with_vectors(slots, whole) for key, slots in packed["state"].items()}
    return {**packed, "state": state}


def _count(parameter: torch.Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _is_vector(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 1


def _vectors(slots: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Those of a state, with the names of their slots."""
    found = []
    for name, value in slots.items():
        parts = value if isinstance(value, list) else [value]
        found += [(str(name), part) for part in parts if _is_vector(part)]
    return found


def _with_vectors(
    slots: Mapping[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(part) for part in value]
        return change(value) if _is_vector(value) else value

    return {name: changed(value) for name, value in slots.items()}
