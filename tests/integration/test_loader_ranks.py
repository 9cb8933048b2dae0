"""Data-parallel coordinates: from torch.distributed, from a mesh, as given; no collective calls."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hpstore
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset
from hpstore.loaders.sampling.data_parallel import coordinates
from tests.integration.loader_cases import COUNT, PLAIN, flat, write
from tests.integration.ranks import launch, make_pool, open_pool


def some(rank: int, world: int, directory: Path) -> None:
    """One of four ranks: as a trainer uses loaders."""
    with open_pool(directory) as pool:
        data = Dataset(pool, "a")
        found: dict[str, Any] = {}
        train = DataLoader(data, 4, shuffle=True, seed=1, tail="uneven")
        found["train"] = flat(train)
        if rank == 0:  # the others do not come here: nothing in a loader may wait for them
            found["evaluate"] = flat(DataLoader(data, 10, shard=False))
            found["own"] = flat(DataLoader(data, 10, rank=0, world_size=1))
            train.load_state_dict(train.state_dict())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found["mesh"] = flat(DataLoader(data, 4, shuffle=True, seed=1, mesh=mesh))
        found["sub"] = flat(DataLoader(data, 4, shuffle=True, seed=1, mesh=mesh["dp"]))
        found["state"] = train.state_dict()
        (directory / f"found-{rank}").write_text(json.dumps(found))
        dist.barrier()


def test_ranks_of_torch_distributed(tmp_path: Path) -> None:
    """Four processes: each its share; rank 0 alone evaluates; a mesh's tp ranks read the same."""
    make_pool(tmp_path)
    with hpstore.open(tmp_path / "pool.toml") as pool:
        data = write(pool, "a", PLAIN, COUNT)
        order = flat(DataLoader(data, 16, shuffle=True, seed=1))
        halves = [
            flat(DataLoader(data, 4, shuffle=True, seed=1, rank=r, world_size=2)) for r in range(2)
        ]
    launch(tmp_path, 4, some)
    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(4)]
    assert sorted(label for one in found for label in one["train"]) == sorted(order)
    assert found[0]["evaluate"] == found[0]["own"] == list(range(COUNT))
    for rank, one in enumerate(found):
        assert one["mesh"] == one["sub"] == halves[rank // 2]
        assert one["state"] == found[0]["state"]


def mesh(names: tuple[str, ...] | None, sizes: tuple[int, ...], place: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        mesh_dim_names=names,
        ndim=len(sizes),
        size=lambda dimension: sizes[dimension],
        get_coordinate=lambda: list(place),
    )


@pytest.mark.parametrize(
    ("names", "sizes", "place", "wanted"),
    [
        (None, (4,), (3,), (3, 4)),
        (("anything",), (4,), (2,), (2, 4)),
        (("pp", "dp", "tp"), (2, 3, 4), (1, 2, 3), (2, 3)),
        (("dp_replicate", "dp_shard", "tp"), (2, 3, 4), (1, 2, 3), (5, 6)),
        (("data", "model"), (2, 2), (1, 0), (1, 2)),
    ],
)
def test_data_parallel_dimensions_of_a_mesh(
    names: Any, sizes: Any, place: Any, wanted: tuple[int, int]
) -> None:
    found = coordinates(None, None, mesh(names, sizes, place), shard=True)
    assert (found.rank, found.world_size) == wanted


def test_a_mesh_without_data_parallel_dimension_is_refused() -> None:
    with pytest.raises(ConfigError, match="no data-parallel dimension"):
        coordinates(None, None, mesh(("pp", "tp"), (2, 2), (0, 0)), shard=True)


def test_what_is_given_comes_before_what_is_implied() -> None:
    """rank= before a mesh; shard=False before a mesh."""
    one = mesh(("dp",), (4,), (3,))
    assert coordinates(1, 2, one, shard=True).world_size == 2
    assert coordinates(None, None, one, shard=False).world_size == 1
