"""Data-parallel coordinates: which rows of a global batch this process reads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.rank_slices import Slices
from hpstore.units import whole_argument

_log = logging.getLogger(__name__)
DATA_NAMES = ("dp", "data", "ddp", "fsdp", "hsdp", "replicate", "shard")  # of mesh dimensions


@dataclass(frozen=True, slots=True)
class Coordinates:
    """One of `world_size` data-parallel ranks."""

    rank: int = 0
    world_size: int = 1


# Any: a DeviceMesh, whose class torch moves about
def coordinates(rank: int | None, world_size: int | None, mesh: Any, *, shard: bool) -> Coordinates:
    """What the user says; else the mesh's data-parallel dimensions; else torch.distributed's.

    Of a mesh those dimensions count whose names are in DATA_NAMES or begin with "dp_" or "data_",
    or all of them when it has one dimension. Raises ConfigError.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together: give both or none")
    if rank is not None and world_size is not None:
        rank = whole_argument("rank", rank, least=0)
        world_size = whole_argument("world_size", world_size, least=1)
        if rank >= world_size:
            raise ConfigError(f"rank {rank} of {world_size} data-parallel ranks")
        return Coordinates(rank, world_size)
    if not shard:
        return Coordinates()
    if mesh is not None:
        return of_mesh(mesh)
    if not (dist.is_available() and dist.is_initialized()):
        return Coordinates()
    return Coordinates(dist.get_rank(), dist.get_world_size())


def coordinates_of(loader: Any) -> Coordinates:
    """Of a loader, whatever decides its order."""
    if loader.slices is not None:
        return Coordinates(loader.slices.rank, loader.slices.world_size)
    return coordinates(loader.rank, loader.world_size, loader.mesh, shard=loader.shard)


class RankShares:
    """How an epoch is dealt out to this rank, as far as that is known by now.

    torch.distributed is asked each time: loaders may be made before it is set up.
    """

    def __init__(
        self, whole: Slices, rank: int | None, world_size: int | None, mesh: Any, *, shard: bool
    ) -> None:
        """`whole`: for a world of one. Raises ConfigError."""
        self._found = whole
        self._rank, self._world_size, self._mesh, self._shard = rank, world_size, mesh, shard
        coordinates(rank, world_size, mesh, shard=shard)

    def tell(self, rank: int, world_size: int) -> None:
        """The share is that of one of `world_size` ranks, whatever torch.distributed says."""
        coordinates(rank, world_size, None, shard=True)
        self._rank, self._world_size = rank, world_size

    def now(self) -> Slices:
        """What holds now. What torch.distributed implies is logged once."""
        place = coordinates(self._rank, self._world_size, self._mesh, shard=self._shard)
        if (place.rank, place.world_size) != (self._found.rank, self._found.world_size):
            if self._rank is None and self._mesh is None:
                _log.info(
                    "rank %d of %d reads its share of every batch (from torch.distributed); with "
                    "pipeline or tensor parallelism give mesh=, to read everything shard=False",
                    place.rank,
                    place.world_size,
                )
            self._found = replace(self._found, rank=place.rank, world_size=place.world_size)
        return self._found


def data_dimensions(names: Sequence[str]) -> list[int]:
    """Which dimensions of a mesh are data-parallel, by their names."""
    return [
        n for n, name in enumerate(names) if name in DATA_NAMES or name.startswith(("dp_", "data_"))
    ]


def of_mesh(mesh: Any, *, without: tuple[int, int] | None = None) -> Coordinates:
    """This process' coordinates in a mesh; `without`: those in one that has no such dimension.

    Raises ConfigError.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise ConfigError(f"mesh is a {type(mesh).__name__}, not a DeviceMesh of torch.distributed")
    names = tuple(mesh.mesh_dim_names or ())
    chosen = data_dimensions(names)
    if mesh.ndim == 1 and not (without and names):
        chosen = [0]
    place = mesh.get_coordinate()
    if place is not None and not chosen and without is not None and names:
        return Coordinates(*without)
    if not chosen or place is None:
        raise ConfigError(
            f"no data-parallel dimension in a mesh of {names or mesh.ndim}: name one dp or data, "
            'or pass mesh["..."]'
        )
    rank, size = 0, 1
    for dimension in chosen:
        rank = rank * mesh.size(dimension) + place[dimension]
        size *= mesh.size(dimension)
    return Coordinates(rank, size)
