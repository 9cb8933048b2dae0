"""Weights and optimizers as trainers wrap them, and parts of a step that one rank reads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from hpstore.checkpoint import Checkpointer, LoadOptions
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.restore.chosen_names import choose
from hpstore.checkpoint.restore.saved_step import SavedStep
from hpstore.checkpoint.restore.verify_step import verify_step
from hpstore.errors import (
    CheckpointError,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    RedundancyError,
)

# Any: states hold whatever their owners put there
T = TypeVar("T")
UNREADABLE = (IntegrityError, RedundancyError, ObjectNotFound)
"""What is raised by a step that cannot be read now."""
_log = logging.getLogger(__name__)
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


def is_unreadable(error: HpstoreError) -> bool:
    """Whether an older step may be readable instead: also where this one was removed."""
    return isinstance(error, UNREADABLE) or isinstance(error.__cause__, UNREADABLE)


def of_nearest(checkpoints: Checkpointer, step: int, read: Callable[[StepCatalog], T]) -> T:
    """What `read` finds of a step in the nearest pool where it can be read. Raises as `read` does
    for the last of them."""
    *others, last = checkpoints.steps.catalogs_of(step)
    for catalog in others:
        try:
            return read(catalog)
        except (*UNREADABLE, CheckpointError) as error:
            _log.warning("step %d is not read from %s: %s", step, catalog.pool.config.name, error)
    return read(last)


def read_tree(checkpoints: Checkpointer, step: int, *, rank: int = 0) -> dict[str, Any]:
    """All of a step, from the nearest pool where it can be read."""

    def read(catalog: StepCatalog) -> dict[str, Any]:
        return SavedStep(
            catalog,
            catalog.manifest(step),
            rank=rank,
            allow_pickle=checkpoints.allow_pickle,
            warm=checkpoints.saver.memory(),
        ).tree()

    return of_nearest(checkpoints, step, read)


def read_without(checkpoints: Checkpointer, step: int, rank: int, *names: str) -> dict[str, Any]:
    """A saved tree without some names: what they hold is not read."""

    def read(catalog: StepCatalog) -> dict[str, Any]:
        chosen = choose(catalog.manifest(step), LoadOptions(exclude=names))
        return SavedStep(catalog, chosen.manifest, rank=rank).tree()

    return of_nearest(checkpoints, step, read)


def verify_share(checkpoints: Checkpointer, step: int, rank: int, world: int) -> None:
    """Read and verify this rank's share of a step, in the nearest pool where all of it is as it was
    saved. Raises IntegrityError, RedundancyError, ObjectNotFound.
    """

    def read(catalog: StepCatalog) -> None:
        manifest = catalog.manifest(step)
        mine = replace(manifest, items=manifest.items[rank::world])
        if damaged := verify_step(catalog.pool, mine, None).damaged:
            raise IntegrityError(f"damaged are {list(damaged)[:4]}")

    of_nearest(checkpoints, step, read)
