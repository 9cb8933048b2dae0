"""A restore into a state of another form changes nothing, and nothing is saved that is not kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.config import Settings
from hpstore.errors import CheckpointError, CheckpointMismatch
from hpstore.units import MIB


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[Checkpointer]:
    settings = Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run"))
    paths = [tmp_path / f"d{i}" for i in range(5)]
    with (
        hpstore.create(paths, data=3, parity=2, config=tmp_path / "p", settings=settings) as pool,
        Checkpointer(pool, "run", rng=False) as made,
    ):
        yield made


def holder(**tensors: torch.Tensor) -> torch.nn.Module:
    """A module with parameters of these names."""
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        made.register_parameter(name, torch.nn.Parameter(tensor))
    return made


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    """One over all parameters of a module."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


OTHERS: dict[str, tuple[Any, Any]] = {
    "names in a nested module": (
        {"m": {"a": holder(w=torch.ones(2))}},
        {"m": {"a": holder(w=torch.zeros(2), more=torch.zeros(2))}},
    ),
    "names in a nested dict": ({"m": {"x": 1}}, {"m": {"y": 1}}),
    "a number for a tensor": ({"m": 5}, {"m": torch.zeros(2)}),
    "a tensor for a module": ({"m": torch.ones(2)}, {"m": holder(w=torch.zeros(2))}),
    "a list for an array": ({"m": [1, 2]}, {"m": np.zeros(2)}),
    "another dtype of a strided array": ({"m": np.ones(4)}, {"m": np.zeros(8, np.float32)[::2]}),
    "no optimizer in a list": ({"m": [1]}, {"m": [optimizer_of(holder(w=torch.zeros(2)))]}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_mismatch_anywhere_in_the_state_changes_nothing(ckpt: Checkpointer, case: str) -> None:
    """Also one that is found last: the tensor before it has its old values."""
    saved, wanted = OTHERS[case]
    ckpt.save(1, {"first": torch.ones(3), **saved}).result()
    first = torch.zeros(3)
    with pytest.raises(CheckpointMismatch):
        ckpt.restore({"first": first, **wanted})
    assert not first.any()


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_without_memory_is_refused(ckpt: Checkpointer, nested: bool) -> None:
    """torch fills no meta tensors and only warns: the run would begin with other weights."""
    ckpt.save(1, {"m": {"a": holder(w=torch.ones(2))} if nested else holder(w=torch.ones(2))})
    empty = holder(w=torch.empty(2, device="meta"))
    with pytest.raises(CheckpointMismatch, match="meta device"):
        ckpt.restore({"m": {"a": empty} if nested else empty})
    with pytest.raises(CheckpointMismatch, match="meta device"):
        ckpt.restore({"m": {"a": empty} if nested else empty}, strict=False)


def test_what_would_lose_a_part_of_itself_is_not_saved(ckpt: Checkpointer) -> None:
    """The mask of a masked array, the second of the tensors that a subclass is made of."""
    masked = np.ma.MaskedArray(np.arange(3.0), mask=[False, True, False])
    two = TwoTensor(torch.zeros(2), torch.ones(2))  # type: ignore[no-untyped-call]
    for value in (masked, two):
        with pytest.raises(CheckpointError, match="'m'"):
            ckpt.save(1, {"m": value})


def test_tied_parameters_take_only_what_was_tied(ckpt: Checkpointer) -> None:
    """Two different tensors were saved: which of them one memory gets is not left to chance."""
    apart = holder(x=torch.ones(30_000), y=torch.zeros(30_000))
    ckpt.save(1, {"m": apart}).result()
    tied = holder(x=torch.full((30_000,), 3.0))
    tied.register_parameter("y", tied.get_parameter("x"))
    with pytest.raises(CheckpointMismatch, match="are one tensor in the state"):
        ckpt.restore({"m": tied})
    assert (tied.get_parameter("x") == 3).all()
    ckpt.save(2, {"m": tied}).result()
    ckpt.restore({"m": apart}, 2)
    assert (apart.get_parameter("y") == 3).all()
    ckpt.restore({"m": tied}, 2)


def test_moments_keep_their_dtype_when_no_model_names_them(ckpt: Checkpointer) -> None:
    """An optimizer over two models: torch would cast its float32 moments to bfloat16."""
    models = [holder(w=torch.ones(5).bfloat16()) for _ in range(2)]
    state: dict[str, Any] = {"a": models[0], "b": models[1]}

    def optimizer(moment: torch.Tensor) -> torch.optim.Optimizer:
        made = torch.optim.AdamW([p for m in models for p in m.parameters()])
        for p in made.param_groups[0]["params"]:
            made.state[p] = {"step": torch.tensor(1.0), "exp_avg": moment.clone()}
        return made

    ckpt.save(1, {**state, "o": optimizer(torch.arange(5) / 3)}).result()
    back = optimizer(torch.zeros(5))
    ckpt.restore({**state, "o": back})
    for slots in back.state.values():
        assert torch.equal(slots["exp_avg"], torch.arange(5) / 3)
