"""Numbers beside a save: of any type, or an error that names them, on all ranks alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.errors import ConfigError
from tests.integration.ranks import launch, make_pool, open_pool, raised, together


@pytest.mark.parametrize(
    "value", [1, 0.5, True, np.float32(2), torch.tensor(3.0), torch.tensor([4.0]), math.inf]
)
def test_any_number_is_recorded(pool: hpstore.Pool, value: Any) -> None:
    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"x": 1}, metrics={"loss": value}).result()
        assert ckpt.steps.manifest(1).metrics == {"loss": float(value)}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss": None}, r"metrics\['loss'\] is None, not a number"),
        ({"loss": "0.5"}, r"metrics\['loss'\] is '0.5', not a number"),
        ({"loss": 10**400}, r"metrics\['loss'\] is 1000.*\.\.\., not a number"),
        ({"loss": torch.ones(2)}, r"is tensor\(\[1., 1.\]\), not a number"),
        ({"loss": 1j}, "is 1j, not a number"),
        ("loss", "takes numbers by name, not a str"),
    ],
)
def test_what_is_no_number_is_refused_and_the_next_save_is_none_the_worse(
    pool: hpstore.Pool, metrics: Any, said: str
) -> None:
    """It was a TypeError of float() that named nothing."""
    with Checkpointer(pool, "run") as ckpt:
        with pytest.raises(ConfigError, match=said):
            ckpt.save(1, {"x": 1}, metrics=metrics)
        assert ckpt.steps() == []
        ckpt.save(1, {"x": 1}, metrics={"loss": 1}).result()
        with pytest.raises(ConfigError, match=said):
            ckpt.save(1, {"x": 1}, metrics=metrics, overwrite=True)


def differ(rank: int, world: int, directory: Path) -> None:
    """Rank 1 alone has none to give."""
    with open_pool(directory) as pool, Checkpointer(pool, "run") as ckpt:
        metrics: Any = {"loss": 0.5 if rank == 0 else None}
        said = raised(lambda: ckpt.save(1, {"x": torch.ones(2)}, metrics=metrics))
        together("metrics['loss'] is None" in said, said)
        together(("rank 1: " in said) is (rank == 0), said)
        ckpt.save(1, {"x": torch.ones(2)}, metrics={"loss": 0.5}).result()


def test_one_rank_with_a_wrong_number_keeps_none_waiting(tmp_path: Path) -> None:
    """The others waited for its vote for half an hour."""
    make_pool(tmp_path)
    launch(tmp_path, 2, differ)
