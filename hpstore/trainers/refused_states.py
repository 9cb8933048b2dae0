"""What a trainer's checkpoint refuses because only its state would come back."""

from __future__ import annotations

import torch

from hpstore.checkpoint.state.plain_values import is_leaf
from hpstore.checkpoint.state.state_tree import MAX_DEPTH
from hpstore.checkpoint.state.typed_objects import children_of, is_stateful
from hpstore.errors import CheckpointError


def refuse_states(value: object, path: str, depth: int = 0) -> None:
    """Raise CheckpointError naming an object with a state_dict(): its state would come back in its
    place. Other types are for the Checkpointer to take or to refuse. Pure."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{path} is nested deeper than {MAX_DEPTH}")
    if isinstance(value, torch.Tensor) or is_leaf(value):
        return
    if is_stateful(value):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(
            f"{path} is a {kind}, of which only the state would come back. Save its state_dict() "
            "instead. Nothing was written."
        )
    for name, child in children_of(value) or ():
        refuse_states(child, f"{path}[{name!r}]", depth + 1)
