"""`ckpt.steps`, `ckpt.read(step)` and what else a Checkpointer shows."""

from __future__ import annotations

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SavedStep, Steps
from hpstore.errors import CheckpointError

CONTRACT = {
    "close",
    "counters",
    "delete",
    "last_restore",
    "latest_valid",
    "load",
    "per_rank",
    "prefix",
    "pool",
    "restore",
    "save",
    "steps",
    "verify",
    "wait",
}
MORE = {
    "allow_pickle",
    "before_update",
    "load_model",
    "reached_preemption",
    "read",
    "rng",
    "rollback",
    "saver",
    "should_save",
    "tiers",
    "watch",
}


def test_a_checkpointer_shows_what_the_contract_names_and_little_else(pool: hpstore.Pool) -> None:
    """Tab completion: no plumbing among what users call."""
    with Checkpointer(pool, "run") as ckpt:
        assert {name for name in dir(ckpt) if not name.startswith("_")} == CONTRACT | MORE


def test_steps_are_one_object_that_can_be_called(pool: hpstore.Pool) -> None:
    """Listed in two ways, and the short names are the same as those on it."""
    with Checkpointer(pool, "run") as ckpt:
        assert isinstance(ckpt.steps, Steps)
        assert (ckpt.steps(), ckpt.steps.list(), ckpt.steps.latest()) == ([], [], None)
        for step in (1, 2, 3):
            ckpt.save(step, {"w": torch.full((9,), float(step))}).result()
        assert ckpt.steps() == ckpt.steps.list() == [1, 2, 3]
        assert ckpt.steps.latest() == ckpt.latest_valid() == 3
        assert ckpt.steps.verify(2) == ckpt.verify(2)
        assert ckpt.steps.manifest(2).step == 2
        ckpt.steps.protect(1, "first")
        with pytest.raises(CheckpointError, match="protected as 'first'"):
            ckpt.delete(1)
        ckpt.steps.unprotect("first")
        ckpt.steps.delete(1)
        ckpt.delete(2)
        assert ckpt.steps() == [3]


def test_a_step_is_read_in_every_way_through_one_object(pool: hpstore.Pool) -> None:
    """In part, as tensors by name, and as the tree that was saved; nothing of another step."""
    weight = torch.arange(24.0).reshape(6, 4)
    state = {"model": {"weight": weight, "bias": torch.ones(4)}, "epoch": 3, "own": "a"}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(7, {**state, "own": ckpt.per_rank("mine")}).result()
        step = ckpt.read(7)
        assert isinstance(step, SavedStep)
        assert sorted(step) == ["model/bias", "model/weight"]
        assert torch.equal(step["model/weight"][2:4, 1], weight[2:4, 1])
        assert sorted(step.tensors(["model"])) == ["model/bias", "model/weight"]
        assert list(step.tensors(["model/bias"], map_location="cpu")) == ["model/bias"]
        assert torch.equal(ckpt.load(7)["model/weight"], step.tensors()["model/weight"])
        tree = step.tree()
        assert (tree["epoch"], tree["own"]) == (3, "mine")
        assert torch.equal(tree["model"]["weight"], weight)
        with pytest.raises(CheckpointError, match=r"step 7 holds no \['weight'\]"):
            step.tensors(["weight"])
        with pytest.raises(CheckpointError, match="no checkpoint of step 8"):
            ckpt.read(8)
