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

from hpstore.checkpoint.state.state_tree import MAX_DEPTH, is_plain, join
from hpstore.errors import CheckpointError
from hpstore.format.checksum import digest128

# Any below: a training state holds whatever its owner puts there


class _Finder:
    """Walks the containers of a state, not what a rank keeps for itself."""

    def __init__(self) -> None:
        self.optimizers: dict[str, Optimizer] = {}
        self.called: dict[torch.Tensor, tuple[str, str]] = {}  # path of the model, name there

    def look_at(self, path: str, value: Any, depth: int = 0) -> None:
        """Enter what is in a value."""
        if isinstance(value, Optimizer):
            self.optimizers[path] = value
        elif isinstance(value, torch.nn.Module):
            for name, parameter in value.named_parameters():
                self.called.setdefault(parameter, (path, name))
        elif depth < MAX_DEPTH and isinstance(value, Mapping):
            if not is_plain(value.values()):
                for name, child in value.items():
                    self.look_at(join(path, name), child, depth + 1)
        elif depth < MAX_DEPTH and isinstance(value, (list, tuple, deque)) and not is_plain(value):
            for number, child in enumerate(value):
                self.look_at(join(path, number), child, depth + 1)


def meanings(state: Mapping[str, Any]) -> dict[str, str]:
    """Of each optimizer with moments by number a digest of the parameters that it updates."""
    finder = _Finder()
    for name, value in state.items():
        finder.look_at(name, value)
    found = {}
    for path, optimizer in finder.optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owners = {finder.called.get(p, ("", ""))[0] for p in parameters}
        if len(owners) > 1 and any(optimizer.state.values()):
            said = [list(finder.called.get(p, ("", ""))) for p in parameters]
            found[path] = digest128(repr(said).encode()).hex()
    return found


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
