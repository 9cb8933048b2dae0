"""Where a rank stands: which replica of the model it belongs to, and what that replica reads.

A pipeline is the set of ranks that together hold every stage once. Ranks with one data-parallel
coordinate are one replica: a pipeline alone, or several of them that share the stages' tensors
(tensor, context or expert parallelism) and so must read the same samples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader
from hpstore.loaders.sampling.data_parallel import data_dimensions, of_mesh

PIPELINE_NAMES = ("pp", "pipe", "pipeline")  # of a mesh's dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """`replica` of `replicas`; `members`: the ranks of its pipeline, in the order of their first
    stage. `told`: a mesh or the loader has said so; else each pipeline is taken for a replica."""

    replica: int
    replicas: int
    members: tuple[int, ...]
    told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """What a rank says of itself. `group`: the ranks of its pipeline; () for all ranks.

    `data`: data-parallel rank and their number, as its mesh has them; `reads`: the same, as its
    loader was told. None where nothing was said. `hungry`: it needs a loader and has none.
    """

    stages: tuple[int, ...]
    num_stages: int
    group: tuple[int, ...] = ()
    data: tuple[int, int] | None = None
    reads: tuple[int, int] | None = None
    hungry: bool = False

    def to_json(self) -> bytes:
        """For another rank."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, text: bytes) -> RankStanding:
        """Inverse of to_json()."""
        raw = json.loads(text)
        return cls(
            stages=tuple(raw["stages"]),
            num_stages=raw["num_stages"],
            group=tuple(raw["group"]),
            data=_pair(raw["data"]),
            reads=_pair(raw["reads"]),
            hungry=raw["hungry"],
        )


def _pair(raw: Sequence[int] | None) -> tuple[int, int] | None:
    return None if raw is None else (raw[0], raw[1])


# Any below: process groups and meshes, whose classes torch moves about
def pipeline_group(group: Any, mesh: Any) -> Any:
    """The process group of this rank's pipeline: that given, else the mesh's; None for all."""
    if group is not None or mesh is None:
        return group
    names = tuple(mesh.mesh_dim_names or ())
    found = [name for name in names if name in PIPELINE_NAMES]
    if len(found) != 1:
        raise ConfigError(
            f"mesh= has the dimensions {names or mesh.ndim}: one must be called pp, or give "
            "group=, the process group of this rank's pipeline"
        )
    return mesh.get_group(found[0])


def standing(
    stages: tuple[int, ...],
    num_stages: int,
    group: Any,
    mesh: Any,
    loader: DataLoader | None,
    *,
    everywhere: bool = False,
) -> RankStanding:
    """What this rank has to say. `everywhere`: all stages need data."""
    ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
    data = reads = None
    if mesh is not None:
        at = of_mesh(mesh, without=(0, 1))
        data = at.rank, at.world_size
    if loader is not None and loader.told_its_share and loader.slices is not None:
        reads = loader.slices.rank, loader.slices.world_size
    hungry = loader is None and (everywhere or 0 in stages or num_stages - 1 in stages)
    return RankStanding(
        stages=stages, num_stages=num_stages, group=ranks, data=data, reads=reads, hungry=hungry
    )


def agreed_place(ranks: Ranks, mine: RankStanding) -> RankPlace:
    """This rank's place. Collective. Raises as placed() does."""
    heard = ranks.all_gather(mine.to_json(), RankChannel.TRAINER)
    return placed([RankStanding.of_json(text) for text in heard], ranks.rank)


def placed(said: Sequence[RankStanding], rank: int) -> RankPlace:
    """A rank's place among all. Raises ConfigError, alike on all ranks. Pure."""
    everybody = tuple(range(len(said)))
    groups = sorted({one.group or everybody for one in said})
    for group in groups:
        _require_pipeline(group, said)
    hungry = [number for number, one in enumerate(said) if one.hungry]
    if hungry:
        raise ConfigError(
            "the ranks of the first and the last stage need a loader, with keywords= those of all "
            f"stages: rank {hungry[0]} has none"
        )
    shares = {group: _share(group, said) for group in groups}
    mine = next(group for group in groups if rank in group)
    members = tuple(sorted(mine, key=lambda member: said[member].stages))
    known = {group: share for group, share in shares.items() if share is not None}
    if not known:
        return RankPlace(replica=groups.index(mine), replicas=len(groups), members=members)
    if len(known) < len(groups):
        silent = next(group for group in groups if group not in known)
        raise ConfigError(
            f"the pipeline of ranks {list(silent)} does not know its data-parallel rank, others "
            "do: give every rank the same PipelineHooks(mesh=)"
        )
    _require_even(list(known.values()))
    replica, replicas = known[mine]
    return RankPlace(replica=replica, replicas=replicas, members=members, told=True)


def _require_pipeline(group: Sequence[int], said: Sequence[RankStanding]) -> None:
    """Every stage once, and nobody who takes himself to be in another group."""
    counts = {said[rank].num_stages for rank in group}
    held = sorted(stage for rank in group for stage in said[rank].stages)
    strays = [rank for rank in group if said[rank].group not in ((), tuple(group))]
    if counts != {len(held)} or held != list(range(len(held))) or strays:
        raise ConfigError(
            f"ranks {list(group)} hold the stages {held} of {sorted(counts)}: a pipeline has each "
            "stage once. With several pipelines give PipelineHooks(mesh=), or group=, the process "
            "group of this rank's pipeline."
        )


def _share(group: Sequence[int], said: Sequence[RankStanding]) -> tuple[int, int] | None:
    """What a pipeline reads, as its mesh or its loaders have it."""
    for rank in group:
        one = said[rank]
        if one.data is not None and one.reads is not None and one.data != one.reads:
            raise ConfigError(
                f"the loader of rank {rank} reads as data-parallel rank {one.reads[0]} of "
                f"{one.reads[1]}, which is {one.data[0]} of {one.data[1]} in mesh=: give the "
                "loader the same mesh"
            )
    found = {one for rank in group for one in (said[rank].data, said[rank].reads) if one}
    if len(found) > 1:
        raise ConfigError(
            f"ranks {list(group)} are one pipeline and read as different data-parallel ranks, "
            f"{sorted(found)}: inputs and targets would be those of different samples. Give each "
            "loader mesh=, the whole mesh or its data-parallel part."
        )
    return next(iter(found), None)


def _require_even(shares: Sequence[tuple[int, int]]) -> None:
    """Each data-parallel rank is read, by as many pipelines."""
    counts = {shares.count(share) for share in shares}
    replicas = {count for _, count in shares}
    read = {replica for replica, _ in shares}
    if len(replicas) > 1 or len(counts) > 1 or read != set(range(next(iter(replicas)))):
        raise ConfigError(
            f"{len(shares)} pipelines read as the data-parallel ranks {sorted(shares)} (rank, of "
            "how many): each must be read by as many pipelines. Give every rank the same mesh."
        )


def shares_tensors(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether ranks that are no data-parallel ones hold parts of these modules' tensors.

    DTensors of FSDP are parts that data-parallel ranks hold; they do not count.
    """
    for module in modules:
        sharded = any(isinstance(child, FSDPModule) for child in module.modules())
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                continue
            names = parameter.device_mesh.mesh_dim_names
            if not sharded or (names and len(data_dimensions(names)) < len(names) > 1):
                return True
    return False


def require_told(place: RankPlace, shared: Sequence[bool]) -> None:
    """Raise ConfigError, alike on all ranks, where tensors are split over pipelines that would
    each read samples of their own. `shared`: by rank, as shares_tensors says. Pure."""
    if place.replicas > 1 and not place.told and any(shared):
        raise ConfigError(
            f"the parameters of a stage are split over several ranks (tensor parallelism), and "
            f"each of the {place.replicas} pipelines would read samples of its own. Give "
            "PipelineHooks(mesh=) the whole mesh: ranks with one data-parallel coordinate then "
            "read the same. Nothing was trained."
        )
