"""LBFGS and restores of a part: its history is one of all its parameters, whole or not loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, LoadOptions


def fitted(seed: int, outputs: int = 2) -> tuple[torch.nn.Module, torch.optim.LBFGS]:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, outputs))
    return net, torch.optim.LBFGS(net.parameters(), max_iter=3)


def train(net: torch.nn.Module, optimizer: torch.optim.LBFGS) -> float:
    batch = torch.linspace(-1, 1, 32).reshape(8, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    loss: torch.Tensor = optimizer.step(closure)  # type: ignore[no-untyped-call]
    return float(loss.detach())


@pytest.mark.parametrize(
    ("load", "strict", "outputs"),
    [
        (None, False, 5),
        (LoadOptions(rename={"model/1.*": None}), False, 5),
        (LoadOptions(exclude="model/1.*"), True, 2),
        (LoadOptions(include="model"), True, 2),
        (LoadOptions(exclude="optimizer"), False, 5),
    ],
    ids=str,
)
def test_a_history_of_other_parameters_is_not_loaded(
    pool: hpstore.Pool, load: LoadOptions | None, strict: bool, outputs: int
) -> None:
    """The next step failed on vectors of another length, or mixed up what belongs to whom."""
    net, optimizer = fitted(0)
    train(net, optimizer)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}).result()
        other, fresh = fitted(1, outputs)
        ckpt.restore({"model": other, "optimizer": fresh}, load=load, strict=strict)
        assert torch.equal(other[0].weight, net[0].weight)  # type: ignore[index]
        assert not fresh.state
        report = ckpt.last_restore
        assert report is not None
        assert not [name for name in report.loaded if name.startswith("optimizer/state")]
        apart = {*report.skipped, *report.left_out}
        assert {name for name in apart if name.startswith("optimizer/state")}
    assert train(other, fresh) >= 0


def test_all_of_it_goes_on_where_it_was(pool: hpstore.Pool) -> None:
    net, optimizer = fitted(0)
    train(net, optimizer)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}).result()
        other, fresh = fitted(1)
        state: dict[str, Any] = {"model": other, "optimizer": fresh}
        ckpt.restore(state, load=LoadOptions(include=["model", "optimizer"]))
    assert train(other, fresh) == train(net, optimizer)
