"""What optimizers keep beyond flat moments comes back; what does not fit changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.restore.rank_subset import pruned
from hpstore.checkpoint.state.scalars import TAG
from hpstore.checkpoint.state.state_tree import Decoding, decode_tree
from hpstore.errors import CheckpointError, CheckpointMismatch

Made = tuple[torch.nn.Module, torch.optim.Optimizer]


class Counting(torch.optim.SGD):
    """Keeps a count and an average of its own, which belong to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        state["average"] = torch.ones(2) * state["steps"]


class Nesting(torch.optim.SGD):
    """Moments in float32, flat, in a dict and in a list."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = torch.full(parameter.shape, 1 / 3)
                self.state[parameter].update(
                    flat=moment, dict={"a": moment}, list=[moment, (moment,)]
                )


def counting() -> Made:
    model = torch.nn.Linear(3, 2)
    return model, Counting(model.parameters(), lr=0.1)


def nesting() -> Made:
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    return model, Nesting(model.parameters(), lr=0.1)


def grouped() -> Made:
    """A model without biases has nothing in the group that does not decay."""
    model = torch.nn.Linear(4, 4, bias=False)
    large = [p for p in model.parameters() if p.dim() >= 2]
    small = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": small, "weight_decay": 0.0}, {"params": large, "weight_decay": 0.1}]
    return model, torch.optim.AdamW(groups)


def trained(made: Made, steps: int = 3) -> dict[str, Any]:
    model, optimizer = made
    for _ in range(steps):
        parameter = next(model.parameters())
        model(torch.ones(1, parameter.shape[1], dtype=parameter.dtype)).sum().backward()
        optimizer.step()
    return {"m": model, "o": optimizer}


def equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(equal(v, theirs[k]) for k, v in mine.items())
    if isinstance(mine, (list, tuple)):
        return type(mine) is type(theirs) and all(map(equal, mine, theirs))
    return bool(mine == theirs)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make", [counting, nesting, grouped])
@pytest.mark.parametrize("with_model", [True, False])
def test_all_of_an_optimizers_state_comes_back(
    pool: hpstore.Pool, make: Callable[[], Made], with_model: bool, strict: bool
) -> None:
    """With names of a model that is saved too, and by numbers without it."""
    state = trained(make())
    fresh = trained(make(), steps=0)
    if not with_model:
        del state["m"], fresh["m"]
    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, state).result()
        ckpt.restore(fresh, strict=strict)
        assert ckpt.last_restore is not None
        assert ckpt.last_restore.unexpected == ()
    assert equal(fresh["o"].state_dict(), state["o"].state_dict())


def regrouped() -> Made:
    """Two parameters in one group that were saved in two."""
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW([{"params": [p]} for p in model.parameters()])


def one_group() -> Made:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("strict", [True, False])
def test_other_groups_are_a_mismatch_before_anything_changes(
    pool: hpstore.Pool, strict: bool
) -> None:
    fresh = trained(one_group(), steps=0)
    before = {name: value.clone() for name, value in fresh["m"].state_dict().items()}
    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, trained(regrouped())).result()
        with pytest.raises(CheckpointMismatch, match="were saved in 2 groups"):
            ckpt.restore(fresh, strict=strict)
    assert equal(dict(fresh["m"].state_dict()), before)
    assert not fresh["o"].state


def test_a_tensor_whose_elements_share_memory_is_a_mismatch_before_anything_changes(
    pool: hpstore.Pool,
) -> None:
    state = {"a": torch.zeros(4, 3), "b": torch.zeros(1).expand(4, 3)}
    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"a": torch.ones(4, 3), "b": torch.ones(4, 3)}).result()
        with pytest.raises(CheckpointMismatch, match="'b' is an expanded tensor"):
            ckpt.restore(state)
    assert not state["a"].any()


def test_a_complex_number_of_numpy_comes_back(pool: hpstore.Pool) -> None:
    """Also from steps that were saved when its parts were written as numpy shows them."""
    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"v": np.complex128(1 + 2j)}).result()
        state = {"v": 0j}
        assert ckpt.restore(state) == 1
        assert state == {"v": 1 + 2j}
    old = {TAG: "complex", "v": ["np.float64(1.0)", "np.float64(nan)"]}
    assert repr(decode_tree(old, Decoding(tensor=lambda name: torch.empty(0)))) == "(1+nanj)"


def test_a_number_that_cannot_be_written_is_named(pool: hpstore.Pool) -> None:
    with Checkpointer(pool, "run") as ckpt:
        with pytest.raises(CheckpointError, match="'a/b' is a number of 16610 bits"):
            ckpt.save(1, {"a": {"b": 10**5000}})
        ckpt.save(1, {"a": 10**4000}).result()
        state = {"a": 0}
        ckpt.restore(state)
        assert state["a"] == 10**4000


def test_what_belongs_to_no_parameter_stays_where_a_rank_takes_a_part() -> None:
    """Of a pipeline's stages: parameters of others are left out, and nothing else."""
    state = trained(counting())
    model: Any = state["m"]
    group = {"params": ["weight", "bias", "other"], "lr": 0.1}
    slots = {"weight": {}, "other": {}, "steps": 3}
    tree = {"m": dict.fromkeys(model.state_dict()), "o": {"state": slots, "param_groups": [group]}}
    kept, left = pruned(tree, state)
    assert kept["o"]["state"] == {"weight": {}, "steps": 3}
    assert left == ["o/other"]
