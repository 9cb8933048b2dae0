"""Optimizers whose parameters have numbers for names, and what these numbers mean on each rank.

An optimizer over one model of the state saves its moments by the names of that model. One over
several models, or over none of them, saves them by number. Ranks that hold other parts of a model,
as of experts, then have other parameters under one number, and one rank's moments would be saved
for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hpstore.checkpoint.state.optimizers import named_parameters
from hpstore.checkpoint.state.plain_values import is_plain
from hpstore.checkpoint.state.state_tree import MAX_DEPTH, join
from hpstore.errors import CheckpointError
from hpstore.format.checksum import digest128

# Any below: a training state holds whatever its owner puts there


class _Finder:
    """Walks the containers of a state, not what a rank keeps for itself."""

    def __init__(self) -> None:
        self.optimizers: dict[str, Optimizer] = {}
        self.models: list[tuple[str, torch.nn.Module]] = []

    def look_at(self, path: str, value: Any, depth: int = 0) -> None:
        """Enter what is in a value."""
        if isinstance(value, Optimizer):
            self.optimizers[path] = value
        elif isinstance(value, torch.nn.Module):
            self.models.append((path, value))
        elif depth < MAX_DEPTH and isinstance(value, Mapping):
            if not is_plain(value.values()):
                for name, child in value.items():
                    self.look_at(join(path, name), child, depth + 1)
        elif depth < MAX_DEPTH and isinstance(value, (list, tuple, deque)) and not is_plain(value):
            for number, child in enumerate(value):
                self.look_at(join(path, number), child, depth + 1)

    def called(self) -> dict[torch.Tensor, tuple[str, str]]:
        """Parameters by the path of their model and their name there: the least where there are
        several, as ranks may list their models in other orders."""
        found: dict[torch.Tensor, tuple[str, str]] = {}
        for path, model in self.models:
            for parameter, name in named_parameters(model).items():
                found[parameter] = min((path, name), found.get(parameter, (path, name)))
        return found


def meanings(state: Mapping[str, Any]) -> dict[str, str]:
    """Of each optimizer with moments by number a digest of the parameters that it updates."""
    finder = _Finder()
    for name, value in state.items():
        finder.look_at(name, value)
    unnamed = [
        (path, optimizer)
        for path, optimizer in finder.optimizers.items()
        if _has_moments(optimizer) and not _of_one_model(optimizer, finder.models)
    ]
    called = finder.called() if unnamed else {}
    found = {}
    for path, optimizer in unnamed:
        said = [list(called.get(p, ("", ""))) for g in optimizer.param_groups for p in g["params"]]
        found[path] = digest128(repr(said).encode()).hex()
    return found


def _has_moments(optimizer: Optimizer) -> bool:
    """Whether it keeps anything: an optimizer without momentum has empty dicts, others keep
    tensors beside those of their parameters."""
    return any(not isinstance(kept, Mapping) or kept for kept in optimizer.state.values())


def _of_one_model(optimizer: Optimizer, models: Sequence[tuple[str, torch.nn.Module]]) -> bool:
    """Whether it is saved by the names of one model, or no model has any of its parameters."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = [wanted & {id(p) for p in model.parameters()} for _, model in models]
    return wanted in held or not any(held)


def require_one_meaning(step: int, of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise CheckpointError where numbers of an optimizer mean other parameters on some rank."""
    first: dict[str, tuple[int, str]] = {}
    for rank, mine in enumerate(of_ranks):
        for path, digest in mine.items():
            holder, other = first.setdefault(path, (rank, digest))
            if other != digest:
                raise CheckpointError(
                    f"step {step} is not saved: the optimizer {path!r} updates several models, and "
                    f"other parameters on rank {rank} than on rank {holder}, so their moments have "
                    "numbers for names, and one rank's would be saved for all. Put its models into "
                    "the state as one, such as a ModuleDict of them: moments are then saved by "
                    "name. What was committed before is untouched."
                )
