"""Optimizers and state_dict()s that are not as torch's own: kept as they are, or explained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, LoadOptions
from hpstore.errors import CheckpointMismatch


class Lookahead(torch.optim.Optimizer):
    """As in the packages: it wraps another one, and its state_dict() has a form of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state
        self.defaults = inner.defaults
        groups = inner.param_groups
        self.slow = [p.detach().clone() for group in groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.slow = list(state_dict["slow"])


def net(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One real step."""
    model(torch.linspace(0, 1, 6).reshape(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("beside", [True, False])
def test_a_state_of_another_form_goes_to_its_own_load_state_dict(
    pool: hpstore.Pool, beside: bool
) -> None:
    """It was a KeyError of 'param_groups' when its model was in the state."""
    model = net(0)
    inner = torch.optim.AdamW(model.parameters())
    step(model, inner)
    optimizer = Lookahead(inner)
    other = net(1)
    taker = Lookahead(torch.optim.AdamW(other.parameters()))
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"o": optimizer} | ({"m": model} if beside else {})).result()
        ckpt.restore({"o": taker} | ({"m": other} if beside else {}))
        assert all(map(torch.equal, optimizer.slow, taker.slow))
        mine = inner.state[model[0].weight]["exp_avg"]
        assert torch.equal(taker.inner.state[other[0].weight]["exp_avg"], mine)
        plain = torch.optim.AdamW(net(2).parameters())
        with pytest.raises(CheckpointMismatch, match="'o': what was saved is not the state of an"):
            ckpt.restore({"o": plain}, load=LoadOptions(include="o"))


def test_names_that_a_wrapper_has_added_are_explained(pool: hpstore.Pool) -> None:
    """`compiled.state_dict()`: it said to pass strict=False, which loads nothing."""
    model, other = net(0), net(1)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        added = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
        ckpt.save(1, {"m": added}).result()
        with pytest.raises(CheckpointMismatch, match=r"torch.compile, DDP.*LoadOptions\(rename="):
            ckpt.restore({"m": other})
        rename = LoadOptions(rename=lambda name: name.replace("_orig_mod.", ""))
        ckpt.restore({"m": other}, load=rename)
        assert torch.equal(other[0].weight, model[0].weight)
        with pytest.raises(CheckpointMismatch, match="Pass strict=False to load what fits"):
            ckpt.restore({"m": torch.nn.Linear(2, 2)})


def test_an_optimizer_that_was_saved_by_numbers_says_how_to_load_it(pool: hpstore.Pool) -> None:
    """Most scripts save state_dict()s; objects in their place have names."""
    model = net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"m": model.state_dict(), "o": optimizer.state_dict()}).result()
        other = net(1)
        fresh = torch.optim.AdamW(other.parameters())
        with pytest.raises(CheckpointMismatch, match=r"'o' was saved .* as its state_dict\(\)"):
            ckpt.restore({"m": other, "o": fresh})
        fresh.load_state_dict(ckpt.read(1).tree()["o"])  # as it says
        mine = optimizer.state[model[0].weight]["exp_avg"]
        assert torch.equal(fresh.state[other[0].weight]["exp_avg"], mine)


def test_a_history_in_lists_is_cast_with_its_parameters(pool: hpstore.Pool) -> None:
    """LBFGS keeps vectors in lists: they stayed in fp32, and the next step raised."""
    model, other = net(0), net(1).double()

    def closure(of: torch.nn.Module, by: torch.optim.Optimizer, dtype: torch.dtype) -> Any:
        def loss() -> torch.Tensor:
            by.zero_grad()
            found: torch.Tensor = of(torch.ones(2, 3, dtype=dtype)).square().mean()
            found.backward()  # type: ignore[no-untyped-call]
            return found

        return loss

    first = torch.optim.LBFGS(model.parameters(), max_iter=4)
    second = torch.optim.LBFGS(other.parameters(), max_iter=4)
    first.step(closure(model, first, torch.float32))  # type: ignore[no-untyped-call]
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"m": model, "o": first}).result()
        ckpt.restore({"m": other, "o": second}, load=LoadOptions(cast=True))
        assert ckpt.last_restore is not None
        assert "o/state/0.weight/old_dirs/0" in ckpt.last_restore.cast
    slots = second.state[other[0].weight]
    assert {vector.dtype for vector in slots["old_dirs"]} == {torch.float64}
    second.step(closure(other, second, torch.float64))  # type: ignore[no-untyped-call]
