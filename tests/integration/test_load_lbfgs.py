"""LBFGS and restores of a part: its history is one of all its parameters, whole or not loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, LoadOptions
from hpstore.errors import CheckpointMismatch


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


def wolfe(parameters: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe")


def test_a_history_follows_its_parameters_into_another_order(pool: hpstore.Pool) -> None:
    """It was taken as it lay: the first parameter had none, and the run began again, unsaid."""
    net, _ = fitted(0)
    optimizer = wolfe(net.parameters())
    for _ in range(3):
        train(net, optimizer)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}).result()
        other, _ = fitted(1)
        turned = wolfe(list(other.parameters())[::-1])
        ckpt.restore({"model": other, "optimizer": turned})
    mine = optimizer.state[next(net.parameters())]
    found = turned.state[list(other.parameters())[-1]]
    assert len(turned.state) == 1
    assert found["n_iter"] == mine["n_iter"]
    sizes = [p.numel() for p in net.parameters()]
    for vector, turned_vector in zip(
        [mine["d"], mine["prev_flat_grad"], *mine["old_dirs"], *mine["old_stps"]],
        [found["d"], found["prev_flat_grad"], *found["old_dirs"], *found["old_stps"]],
        strict=True,
    ):
        assert torch.equal(torch.cat(vector.split(sizes)[::-1]), turned_vector)
    assert train(other, turned) == pytest.approx(train(net, optimizer), rel=1e-4)


def test_a_history_of_fewer_parameters_is_not_loaded_into_more(pool: hpstore.Pool) -> None:
    """A layer was added: the next step added vectors of other lengths, and raised."""
    net, optimizer = fitted(0)
    train(net, optimizer)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"model": net, "optimizer": optimizer}).result()
        layers: Any = fitted(1)[0]
        other = torch.nn.Sequential(*layers, torch.nn.Linear(2, 2))
        fresh = torch.optim.LBFGS(other.parameters(), max_iter=3)
        ckpt.restore({"model": other, "optimizer": fresh}, strict=False)
        assert not fresh.state
        assert ckpt.last_restore is not None
        assert "optimizer/state/0.weight" in ckpt.last_restore.skipped
    assert train(other, fresh) >= 0


def test_a_history_without_names_must_have_the_length_of_the_parameters(pool: hpstore.Pool) -> None:
    """Saved without its model, an optimizer has numbers for names: torch took any vectors."""
    net, optimizer = fitted(0)
    train(net, optimizer)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"optimizer": optimizer}).result()
        _, other = fitted(1, outputs=5)
        with pytest.raises(CheckpointMismatch, match=r"of its history has 23 numbers, .* have 35"):
            ckpt.restore({"optimizer": other})
        assert not other.state
        same = fitted(1)[1]
        ckpt.restore({"optimizer": same})
        assert torch.equal(
            next(iter(same.state.values()))["d"], next(iter(optimizer.state.values()))["d"]
        )
