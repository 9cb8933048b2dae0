"""Tensors that are sharded over ranks, wherever in a state they sit: each loads on other meshes."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from hpstore.checkpoint import Checkpointer
from tests.integration.ranks import (
    Values,
    assert_same,
    build,
    full,
    launch,
    make_pool,
    open_pool,
    train,
    values,
)
from tests.thorough import LONG

# Any below: states hold whatever a trainer puts there


class App:
    """PyTorch's own recipe for its distributed checkpoints."""

    def __init__(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


class ModelWrapper:
    """As torchtitan's."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        return dict(get_model_state_dict(self.net))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.net, state)


class OptimizersContainer:
    """As torchtitan's: moments by flat names."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self.net, self.optimizer, options=self.options))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.net, self.optimizer, state, options=self.options)


@dataclasses.dataclass
class Weights:
    first: Any
    others: list[Any]


def state_of(way: str, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A model and its optimizer in a state, in one of the ways that people have."""
    ways: dict[str, Any] = {
        "recipe": {"app": App(net, optimizer)},
        "torchtitan": {"m": ModelWrapper(net), "o": OptimizersContainer(net, optimizer)},
        "tuple": {"both": (net, optimizer)},
        "alone": {"m": ModelWrapper(net), "o": optimizer},
    }
    found: dict[str, Any] = ways[way]
    return found


WAYS = ("recipe", "torchtitan", "tuple", "alone")


def save_ways(rank: int, world: int, directory: Path, kind: str) -> None:
    with open_pool(directory) as pool:
        net, optimizer = build(kind, 1)
        train(net, optimizer)
        wanted = values(net, optimizer)
        for way in WAYS:
            with Checkpointer(pool, f"run/{way}") as ckpt:
                ckpt.save(3, state_of(way, net, optimizer)).result()
        with Checkpointer(pool, "run/held") as ckpt:
            ckpt.save(3, held(net, 1.0)).result()
    if rank == 0:
        torch.save(wanted, directory / "wanted.pt")


def held(net: torch.nn.Module, factor: float) -> dict[str, Any]:
    """Copies of sharded parameters in an object, a tuple and a deque."""
    copies = [p.detach().clone().mul_(factor) for p in net.parameters()]
    return {"w": Weights(copies[0], [copies[1]]), "t": (copies[2],), "d": deque(copies[3:])}


def load_ways(rank: int, world: int, directory: Path, kind: str) -> None:
    wanted: Values = torch.load(directory / "wanted.pt")
    with open_pool(directory) as pool:
        for way in WAYS:
            net, optimizer = build(kind, 2)
            with Checkpointer(pool, f"run/{way}") as ckpt:
                assert ckpt.restore(state_of(way, net, optimizer)) == 3
                assert ckpt.last_restore is not None
                assert ckpt.last_restore.missing == ckpt.last_restore.unexpected == ()
            assert_same(values(net, optimizer), wanted, f"{way} in {kind} on {rank} of {world}")
            train(net, optimizer, 1)
        net, _ = build(kind, 2)
        state = held(net, 0.0)
        tensors = [state["w"].first, *state["w"].others, *state["t"], *state["d"]]
        with Checkpointer(pool, "run/held") as ckpt:
            assert ckpt.restore(state) == 3
        for tensor, (name, _) in zip(tensors, net.named_parameters(), strict=True):
            assert torch.equal(full(tensor), wanted[name]), name


MESHES = [("2d", (4, 2)), *([("fsdp", (2, 3))] if LONG else [])]


@pytest.mark.parametrize(("saved", "worlds"), MESHES)
def test_sharded_tensors_in_objects_load_on_other_meshes(
    tmp_path: Path, saved: str, worlds: tuple[int, int]
) -> None:
    """PyTorch's recipe, torchtitan's wrappers, tuples, an optimizer whose model is in a wrapper,
    and plain tensors in objects: bit by bit, on as many ranks, on others and alone, and the next
    step works. Each rank had been given whole tensors, which no sharded model takes."""
    make_pool(tmp_path)
    launch(tmp_path, worlds[0], save_ways, saved)
    for world in worlds:
        launch(tmp_path, world, load_ways, "fsdp" if world == 3 else saved)
    load_ways(0, 1, tmp_path, "plain")
