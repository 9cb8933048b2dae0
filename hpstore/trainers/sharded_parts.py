"""Weights and optimizers as trainers wrap them, and parts of a step that one rank reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hpstore.checkpoint import Checkpointer, LoadOptions
from hpstore.checkpoint.restore.chosen_names import choose
from hpstore.checkpoint.restore.saved_step import SavedStep
from hpstore.checkpoint.restore.verify_step import verify_step

# Any: states hold whatever their owners put there
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def weights_of(model: torch.nn.Module, *, frozen: bool) -> dict[str, Any]:
    """A model's state by plain names, in its own memory; without what is not trained unless
    `frozen`."""
    state = {_plain(name): value for name, value in model.state_dict().items()}
    if frozen:
        return state
    named = model.named_parameters(remove_duplicate=False)
    out = {_plain(name) for name, parameter in named if not parameter.requires_grad}
    return {name: value for name, value in state.items() if name not in out}


def _plain(name: str) -> str:
    """Without the components that compilation and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Torch's optimizer in accelerate's."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def read_without(checkpoints: Checkpointer, step: int, rank: int, *names: str) -> dict[str, Any]:
    """A saved tree without some names: what they hold is not read."""
    chosen = choose(checkpoints.steps.manifest(step), LoadOptions(exclude=names))
    return SavedStep(checkpoints.pool, chosen.manifest, rank=rank).tree()


def damaged_share(checkpoints: Checkpointer, step: int, rank: int, world: int) -> list[str]:
    """Read and verify this rank's share of a step; names of items that are not as they were saved.

    Raises IntegrityError, RedundancyError, ObjectNotFound.
    """
    manifest = checkpoints.steps.manifest(step)
    mine = replace(manifest, items=manifest.items[rank::world])
    return list(verify_step(checkpoints.pool, mine, None).damaged)
