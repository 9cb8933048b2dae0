"""Values under one name in which ranks differ: one of them is saved, counted and logged."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from hpstore.checkpoint import Checkpointer
from tests.integration.ranks import launch, make_pool, open_pool, raised, together


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


def counting(rank: int, world: int, directory: Path) -> None:
    """Counters by rank, and namespaces with attributes of their own."""
    with Checkpointer(open_pool(directory), "counting", rng=False) as ckpt:
        seen = Counter({f"file-{rank}": rank + 1, "all": 2})
        args = Namespace(lr=0.1, **{f"only_{rank}": rank})
        ckpt.save(1, {"seen": seen, "nested": [{"args": args}]}).result()
        assert ckpt.counters["saves_with_differing_values_total"] == (1 if rank == 0 else 0)
        mine = Namespace(lr=0.0, **{f"only_{rank}": 9})
        state: dict[str, Any] = {"seen": Counter(old=1), "nested": [{"args": mine}]}
        ckpt.restore(state)
        together(state["seen"] == Counter({"file-0": 1, "all": 2}), str(state))
        together(state["nested"] == [{"args": args}], str(state))
        state["nested"] = [{"args": Namespace(lr=0.0)}]
        said = raised(lambda: ckpt.restore(state))
        together("no rank takes" in said and "only_" in said, said)


def test_counters_are_those_of_rank_0_and_namespaces_each_ranks_own(tmp_path: Path) -> None:
    """A restore gave each rank the names of all; a namespace takes its own, as a dict does."""
    make_pool(tmp_path)
    launch(tmp_path, 2, counting)
