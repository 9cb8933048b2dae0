"""One optimizer over several models, of which each rank holds other parts: experts, as with MoE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.state.unnamed_optimizers import meanings, require_one_meaning
from hpstore.errors import CheckpointMismatch
from tests.integration.ranks import launch, make_pool, open_pool, raised, together


def mixture(experts: list[int], seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """A layer that all have, and experts; with a step made, whose moments differ by expert."""
    torch.manual_seed(seed)
    held = torch.nn.ModuleDict({str(e): torch.nn.Linear(2, 2) for e in experts})
    model = torch.nn.ModuleDict({"shared": torch.nn.Linear(2, 2), "experts": held})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for name, parameter in model.named_parameters():
        number = int(name.split(".")[1]) if name.startswith("experts") else 9
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()
    return model, optimizer


def save(rank: int, world: int, directory: Path) -> None:
    """Each rank has one expert: the same number, another meaning."""
    model, optimizer = mixture([rank], 0)
    apart: dict[str, Any] = {"shared": model["shared"], "experts": model["experts"]}
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        said = raised(lambda: ckpt.save(1, {**apart, "optimizer": optimizer}))
        together("'optimizer' updates several models, and other parameters on rank 1" in said, said)
        ckpt.save(1, {"apart": apart, "mine": ckpt.per_rank(optimizer)}).result()
        ckpt.save(2, {"model": model, "optimizer": optimizer}).result()
        alike = torch.optim.SGD([*model["shared"].parameters()], lr=1.0, momentum=0.5)
        ckpt.save(3, {"model": model, "other": alike}).result()
        assert ckpt.steps() == [1, 2, 3]


def test_moments_of_one_rank_do_not_take_the_place_of_anothers(tmp_path: Path) -> None:
    """The experts came back with rank 0's moments, and nothing said so."""
    make_pool(tmp_path)
    launch(tmp_path, 2, save)
    model, optimizer = mixture([0, 1], 1)
    with open_pool(tmp_path) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.restore({"model": model, "optimizer": optimizer}, 2)
    for name, parameter in model.named_parameters():
        number = int(name.split(".")[1]) if name.startswith("experts") else 9
        moment = optimizer.state[parameter]["exp_avg"]
        assert torch.allclose(moment, torch.full_like(moment, 0.1 * (number + 1))), name


def test_parameters_with_numbers_must_be_as_many(pool: hpstore.Pool) -> None:
    """It was an error of zip(), after the models had been filled."""
    model, optimizer = mixture([0], 0)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"e": model["experts"], "s": model["shared"], "o": optimizer}).result()
        other, more = mixture([0, 1], 1)
        before = other["shared"].weight.clone()
        with pytest.raises(CheckpointMismatch, match=r"groups of \[4\] parameters, and has \[6\]"):
            ckpt.restore(
                {"e": other["experts"]["0"], "s": other["shared"], "o": more}, strict=False
            )
        assert torch.equal(other["shared"].weight, before)


def test_names_of_one_model_do_not_depend_on_what_else_the_state_lists() -> None:
    """A backbone beside the model that has it, or torch.compile on one rank, refused the save."""
    states: list[dict[str, Any]] = []
    for rank in range(2):
        model, optimizer = mixture([rank], 0)
        states.append({"a": model["shared"], "model": model, "optimizer": optimizer})
    assert [meanings(state) for state in states] == [{}, {}]
    states = []
    for rank in range(2):
        model, optimizer = mixture([0], 0)
        shared: Any = torch.compile(model["shared"]) if rank else model["shared"]
        parts = [("shared", shared), ("experts", model["experts"]), ("layer", model["shared"])]
        states.append({**dict(parts[:: -1 if rank else 1]), "optimizer": optimizer})
    found = [meanings(state) for state in states]
    assert found[0].keys() == {"optimizer"}
    require_one_meaning(1, found)


def go_on(rank: int, world: int, directory: Path, kind: str) -> None:
    """LBFGS over a model that is sharded evenly, or that all have: saved, and restored."""
    batch = torch.linspace(-1, 1, 32).reshape(8, 4)

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.LBFGS]:
        torch.manual_seed(seed)
        net: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        if kind == "fsdp":
            fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
        else:
            net = DistributedDataParallel(net)
        return net, torch.optim.LBFGS(net.parameters(), max_iter=3)

    def step(net: torch.nn.Module, optimizer: torch.optim.LBFGS) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return float(optimizer.step(closure).detach())  # type: ignore[no-untyped-call]

    net, optimizer = made(0)
    step(net, optimizer)
    other, fresh = made(1)
    with open_pool(directory) as pool, Checkpointer(pool, kind, rng=False) as ckpt:
        ckpt.save(1, {"m": net, "o": optimizer}).result()
        ckpt.restore({"m": other, "o": fresh})
    wanted, found = step(net, optimizer), step(other, fresh)
    assert found == pytest.approx(wanted, rel=1e-5), (kind, found, wanted)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_the_history_of_lbfgs_goes_on_over_two_ranks(tmp_path: Path, kind: str) -> None:
    """With FSDP2 its vectors came back as plain tensors, and the next step raised."""
    make_pool(tmp_path)
    launch(tmp_path, 2, go_on, kind)
