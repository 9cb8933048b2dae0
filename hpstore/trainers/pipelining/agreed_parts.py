"""What the ranks of a pipeline train and save together, agreed on before anything is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.state.module_state import module_state
from hpstore.checkpoint.state.optimizers import FIRST_NAMES, clean_name
from hpstore.errors import ConfigError
from hpstore.trainers.pipelining.joint_optimizers import Optimizers
from hpstore.trainers.pipelining.rank_coordinates import RankPlace, require_told, shares_tensors
from hpstore.trainers.pipelining.stages import (
    HeldStages,
    bare,
    counted_elsewhere,
    merged,
    require_own_names,
    require_own_parameters,
)
from hpstore.trainers.pipelining.step_agreement import Votes
from hpstore.trainers.pipelining.tied_tensors import Tied, marks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Of one rank: its optimizers, one module of its stages, the votes that each step needs, and
    the tied tensors that an earlier rank counts."""

    optimizers: Optimizers
    model: torch.nn.Module
    votes: Votes
    elsewhere: frozenset[str]


# Any below: containers of optimizers are classes of their trainers
def agreed_parts(
    ranks: Ranks,
    place: RankPlace,
    built: Sequence[PipelineStage],
    optimizer: Any,
    tied: Tied,
    votes: Votes,
    check: Callable[[], None],
) -> Parts:
    """Compare with the other ranks. `built`: the stages of this one; `votes`: those it needs;
    `check`: raises ConfigError for what else is wrong here. Collective: an error on one rank is
    raised on every rank."""
    model, optimizers, fault = torch.nn.Module(), None, ""
    tensors: dict[str, torch.Tensor] = {}
    modules = [stage.submod for stage in built]
    try:
        check()
        optimizers = Optimizers(optimizer)
        model = merged(modules)
        require_own_parameters(model, optimizers)
        tensors = dict(_named_parameters(modules))
        tied.require_one(tensors)
    except ConfigError as error:
        fault = str(error)
    mine = HeldStages(
        stages=tuple(sorted(stage.stage_index for stage in built)),
        names=tuple(module_state(model)),
        fault=fault,
        split=shares_tensors(modules),
        votes=votes,
        optimizers=optimizers.kinds if optimizers else (),
        tied=marks_of(tied, tensors),
    )
    heard = [
        HeldStages.of_json(text) for text in ranks.all_gather(mine.to_json(), RankChannel.TRAINER)
    ]
    require_own_names(heard, tied)
    require_told(place, [held.split for held in heard])
    tied = tied.with_found([held.tied for held in heard], [held.stages for held in heard])
    if tied.groups or hasattr(model, FIRST_NAMES):  # of an earlier restore()
        setattr(model, FIRST_NAMES, tied.first_names())
    assert optimizers is not None  # else there was a fault
    return Parts(
        optimizers=optimizers,
        model=model,
        votes=Votes.of_any([held.votes for held in heard]),
        elsewhere=counted_elsewhere(place.members, ranks.rank, heard, tied),
    )


def _named_parameters(
    modules: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """By all names in the model, wrappers taken off."""
    for module in map(bare, modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield clean_name(module, name), parameter
