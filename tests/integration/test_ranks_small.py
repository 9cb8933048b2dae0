"""Small saves of many ranks: all bytes are in the manifest, which rank 0 puts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpstore.checkpoint import Checkpointer
from hpstore.errors import TooFewDevices
from hpstore.pool.pool import Pool
from tests.integration.ranks import breaking_put, launch, make_pool, open_pool, raised, together


def save_small(rank: int, world: int, directory: Path) -> None:
    """Saves that fit into a manifest, one that does not, and again one that does; what fails on
    one rank fails on all and leaves nothing."""
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        alike, own = torch.arange(10_000.0), torch.full((3_000 + rank,), float(rank))
        empty = torch.zeros(0, rank + 1)
        state = {"alike": alike, "own": ckpt.per_rank({"x": own, "empty": empty})}
        report = ckpt.save(1, state).result()
        together(report.bytes >= 4 * (10_000 + 3_000 * world), report)
        puts = keys_put(pool)
        ckpt.save(2, state).result()
        ckpt.wait()
        together(puts == ([step_key(2)] if rank == 0 else []), puts)
        large = {**state, "more": torch.zeros(500_000)}
        ckpt.save(3, large).result()
        ckpt.wait()
        together([key for key in puts if "segment" in key] != [], puts)
        puts.clear()
        own += 10

        def no_room() -> None:
            raise TooFewDevices("3 of 6 devices are full")

        undo = breaking_put(pool, "manifest", no_room) if rank == 0 else lambda: None
        said = raised(lambda: ckpt.save(4, state).result())
        together("TooFewDevices" in said and "step 3 is still current" in said, said)
        undo()
        together(ckpt.steps() == [1, 2, 3], ckpt.steps())
        ckpt.save(4, state).result()
        with torch.no_grad():
            wanted = own.clone()
            own.zero_()
        assert ckpt.restore(state) == 4
        together(torch.equal(own, wanted), own)


def step_key(step: int) -> str:
    """Of the manifest of a step."""
    return f"run/step-{step:012d}/manifest"


def keys_put(pool: Pool) -> list[str]:
    """What the pool puts from now on."""
    original, keys = pool.put, list[str]()

    def put(key: str, *args: Any, **options: Any) -> Any:
        keys.append(key)
        return original(key, *args, **options)

    pool.put = put  # type: ignore[method-assign]
    return keys


@pytest.mark.parametrize("world", [2, 5])
def test_a_small_save_of_many_ranks_is_one_put(tmp_path: Path, world: int) -> None:
    """Rank 0 puts the manifest with the bytes of all ranks; no note, no segment, nobody else."""
    make_pool(tmp_path)
    launch(tmp_path, world, save_small)
    with open_pool(tmp_path) as pool, Checkpointer(pool, "run") as ckpt:
        assert all(ckpt.verify(step).ok for step in (1, 2, 3, 4))
        assert [bool(ckpt.steps.manifest(step).within_bytes) for step in (1, 2, 3, 4)] == [
            True,
            True,
            False,
            True,
        ]
        loaded = ckpt.load(4)
        assert torch.equal(loaded["alike"], torch.arange(10_000.0))
        for rank in range(world):
            assert torch.equal(loaded[f"own@{rank}/x"], torch.full((3_000 + rank,), 10.0 + rank))
            assert loaded[f"own@{rank}/empty"].shape == (0, rank + 1)


def refused_by_one(rank: int, world: int, directory: Path) -> None:
    """Rank 1 refuses what rank 0 has read by then: its word that nothing was changed is not of the
    state of rank 0."""
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"w": torch.full((1000,), 1.0), "a": np.ones(3)}).result()
        state: dict[str, Any] = {"w": torch.zeros(1000), "a": np.zeros(3)}
        state["a"].flags.writeable = rank == 0
        said = raised(lambda: ckpt.restore(state))
        assert "read-only array" in said, said
        if rank == 0:
            assert state["w"].any()
            assert "2 tensors of the state, such as 'a', may hold parts" in said, said
            assert "Nothing was changed" not in said, said
        else:
            assert not state["w"].any()
            assert "Nothing was changed" in said, said


def test_a_rank_that_refuses_does_not_speak_for_the_others(tmp_path: Path) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 2, refused_by_one)
