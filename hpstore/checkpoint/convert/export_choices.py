"""What an export holds of a step: its model alone, in which dtype. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from hpstore.checkpoint.restore.chosen_moments import Recorded, is_optimizer
from hpstore.checkpoint.restore.tree_branches import Branch, entries, opened
from hpstore.checkpoint.state.targets import RNG_KEY
from hpstore.checkpoint.state.tree_paths import leaves, only_branch
from hpstore.errors import CheckpointError, ConfigError

Json = Any  # Any: the tree of a manifest
MODEL = "model"
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}


def export_dtype(asked: object) -> torch.dtype | None:
    """The dtype that an argument names. Raises ConfigError."""
    if asked is None:
        return None
    found = DTYPES.get(asked) if isinstance(asked, str) else asked
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise ConfigError(f"dtype {asked!r} is not one of {', '.join(DTYPES)}. Nothing was written")
    return found


def narrowed(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What a tensor of a dtype is written as: floats that are wider are rounded, all else stays."""
    if wanted is None or not dtype.is_floating_point or dtype.itemsize <= wanted.itemsize:
        return dtype
    return wanted


def rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another dtype. Raises CheckpointError for values that become infinite there."""
    if tensor.dtype == dtype:
        return tensor
    found = tensor.to(dtype)
    if not torch.equal(found.isfinite(), tensor.isfinite()):
        raise CheckpointError(
            f"{name!r} holds values beyond the range of {str(dtype).removeprefix('torch.')}: "
            "export it in another dtype, such as bf16. Nothing was written"
        )
    return found


def model_keys(
    tree: Json, keys: Collection[str] | None, *, model_only: bool
) -> Collection[str] | None:
    """`keys`, or with `model_only` the path of the model in a step. Raises ConfigError,
    CheckpointError."""
    if not model_only:
        return keys
    if keys is not None:
        raise ConfigError("model_only chooses the keys: give one of both. Nothing was written")
    return [_model_path(tree)]


def _model_path(tree: Json) -> str:
    """What is called "model"; else the dict that has all parameters of an optimizer; else the only
    one that holds tensors."""
    if not isinstance(tree, dict):
        raise CheckpointError("the step holds no names. Nothing was written")
    if MODEL in tree and any(leaf.item for leaf in leaves(tree[MODEL])):
        return MODEL
    root = opened(tree, is_optimizer)
    if isinstance(root, Branch):
        recorded = Recorded(root)
        optimizers = [node for *_, node in entries(root) if is_optimizer(node)]
        found = {path for node in optimizers for path in recorded.models_of(node)} - {""}
        if len(found) == 1:
            return found.pop()
    only = only_branch(
        {n: child for n, child in tree.items() if n != RNG_KEY and not is_optimizer(child)}
    )
    if not only:
        raise CheckpointError(
            f"the step holds nothing called {MODEL!r}, and {list(tree)[:8]} do not show which is "
            "the model: choose it with keys. Nothing was written"
        )
    return only
