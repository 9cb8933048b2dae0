"""Where a rank stands: which replica of the pipeline it belongs to. Pure.

A replica is the set of ranks that together hold every stage once. All of its ranks have the same
data-parallel rank, which is the number of the replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpstore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`replica` of `replicas`; `members`: its ranks, in the order of their first stage."""

    replica: int
    replicas: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a rank says of itself. `group`: the ranks of its pipeline's group; () for all ranks."""

    stages: tuple[int, ...]
    num_stages: int
    group: tuple[int, ...] = ()


def placed(said: Sequence[Standing], rank: int) -> Place:
    """A rank's place among all. Raises ConfigError, alike on all ranks."""
    everybody = tuple(range(len(said)))
    groups = sorted({standing.group or everybody for standing in said})
    for group in groups:
        _require_replica(group, said)
    mine = next(group for group in groups if rank in group)
    members = sorted(mine, key=lambda member: said[member].stages)
    return Place(replica=groups.index(mine), replicas=len(groups), members=tuple(members))


def _require_replica(group: Sequence[int], said: Sequence[Standing]) -> None:
    """Every stage once, and nobody who takes himself to be in another group."""
    counts = {said[rank].num_stages for rank in group}
    held = sorted(stage for rank in group for stage in said[rank].stages)
    strays = [rank for rank in group if said[rank].group not in ((), tuple(group))]
    if counts != {len(held)} or held != list(range(len(held))) or strays:
        raise ConfigError(
            f"ranks {list(group)} hold the stages {held} of {sorted(counts)}: a pipeline has each "
            "stage once. With several replicas give PipelineHooks(group=) the process group of "
            "this rank's pipeline."
        )


__all__ = ["Place", "Standing", "placed"]
