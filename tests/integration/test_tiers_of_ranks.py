"""Tiers where all ranks restore, and an object that comes from another pool."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Tier
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.pool.pool import Pool
from tests.integration import rolled_back
from tests.integration.ranks import launch, make_pool, open_pool
from tests.integration.rolled_back import RUN, checkpointer

cold = rolled_back.cold  # a fixture
PATIENCE = 60.0


def restore_from_a_tier(rank: int, world: int, directory: Path) -> None:
    """All ranks, the same step."""
    with (
        open_pool(directory) as pool,
        hpstore.open(directory / "cold.toml") as cold,
        checkpointer(pool, tiers=[Tier(pool=cold)]) as ckpt,
    ):
        state: dict[str, Any] = {"x": torch.zeros(3), "mine": ckpt.per_rank(torch.zeros(1))}
        assert ckpt.restore(state) == 1
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.tier == "cold"
        assert state["x"].tolist() == [3.0] * 3
        assert state["mine"].value.tolist() == [float(rank)]
        ckpt.save(2, state).result()
        assert ckpt.tiers.wait(PATIENCE)
        assert ckpt.steps() == [1, 2]


def save_into_a_tier(rank: int, world: int, directory: Path) -> None:
    with hpstore.open(directory / "cold.toml") as cold, checkpointer(cold) as ckpt:
        mine = ckpt.per_rank(torch.full((1,), float(rank)))
        ckpt.save(1, {"x": torch.full((3,), 3.0), "mine": mine}).result()


def test_all_ranks_restore_from_the_same_pool(tmp_path: Path, cold: Pool) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 2, save_into_a_tier)
    launch(tmp_path, 2, restore_from_a_tier)
    assert StepCatalog(cold, RUN).all() == [1, 2]


def test_an_object_of_another_pool_can_be_put(pool: Pool, cold: Pool) -> None:
    """One version of it; what may be replaced in the middle is refused."""
    data = os.urandom(3_000_000)
    version = pool.put("x", data).version
    pool.put("empty", b"")
    with pool.open("x", version=version) as opened:
        assert cold.put("y", opened).size == len(data)
    assert cold.get("y") == data
    with pool.open("empty", version=pool.stat("empty").version) as opened:
        assert cold.put("z", opened).size == 0
    with pool.open("x") as opened, pytest.raises(TypeError, match="may be replaced"):
        cold.put("y", opened)
