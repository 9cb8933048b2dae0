"""States that contain themselves: refused by name, in a moment, in a save and in a restore."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.errors import CheckpointError


def parents() -> dict[str, Any]:
    """A tree whose nodes know their parents: 2^32 ways down to the deepest level."""
    top: dict[str, Any] = {"weight": torch.zeros(1)}
    top["children"] = [{"parent": top, "weight": torch.zeros(1)} for _ in range(2)]
    return top


def itself(kind: type) -> Any:
    """The shortest."""
    found: Any = kind()
    found["again"] = found
    return found


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "value",
    [parents(), [parents()], (parents(),), itself(dict)],
    ids=["dict", "list", "tuple", "itself"],
)
def test_a_save_refuses_it(pool: hpstore.Pool, value: Any) -> None:
    """The search for models in it never ended."""
    with Checkpointer(pool, "run") as ckpt:
        with pytest.raises(CheckpointError, match=r"'tree/.*contains itself. Nothing was changed"):
            ckpt.save(1, {"tree": value})
        assert ckpt.steps() == []
        ckpt.save(1, {"tree": 1}).result()


@pytest.mark.timeout(30)
def test_a_restore_into_one_refuses_it(pool: hpstore.Pool) -> None:
    """A parent that was linked after the save: RecursionError."""
    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"tree": {"weight": torch.ones(1), "children": []}}).result()
        target = parents()
        for strict in (True, False):
            with pytest.raises(
                CheckpointError, match=r"'tree/.*contains itself. Nothing was chang"
            ):
                ckpt.restore({"tree": target}, strict=strict)
        assert target["weight"] == 0


def test_what_is_in_two_places_is_no_recursion(pool: hpstore.Pool) -> None:
    """One list, and one model, by two names."""
    shared, model = [torch.ones(2)], torch.nn.Linear(2, 2)
    state: dict[str, Any] = {"a": shared, "b": {"c": shared}, "m": [model], "n": (model,)}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state).result()
        tree = ckpt.read(1).tree()
        assert torch.equal(tree["a"][0], tree["b"]["c"][0])
        assert tree["m"][0].keys() == tree["n"][0].keys()
        ckpt.restore(state)
