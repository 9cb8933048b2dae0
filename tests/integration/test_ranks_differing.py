"""Values under one name in which ranks differ: one of them is saved, counted and logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpstore.checkpoint import Checkpointer
from tests.integration.ranks import launch, make_pool, open_pool


def differing(rank: int, world: int, directory: Path) -> None:
    """Tensors under one name, of which one rank's is saved; alike ones, parts, and per_rank()."""
    with Checkpointer(open_pool(directory), "differing") as ckpt:
        torch.manual_seed(1)
        state: dict[str, Any] = {
            "model": torch.nn.Linear(2, 2),
            "alike": torch.ones(300),
            "nested": {"count": torch.tensor([rank])},
            "own": ckpt.per_rank(torch.tensor(float(rank))),
            f"only-{rank}": torch.ones(rank + 1),
        }
        ckpt.save(1, state).result()
        assert ckpt.counters["saves_with_differing_values_total"] == 1
        state["nested"]["count"] = torch.tensor([5])
        ckpt.save(2, state).result()
        assert ckpt.counters["saves_with_differing_values_total"] == 1


def test_tensors_that_differ_between_ranks_are_counted(tmp_path: Path) -> None:
    """m_more_names: numbers were, a tensor was not."""
    make_pool(tmp_path)
    launch(tmp_path, 2, differing)
