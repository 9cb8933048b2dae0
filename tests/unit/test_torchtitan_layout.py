"""The layout of torchtitan's checkpoints: flattened optimizers and back, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from hpstore.checkpoint.convert.torchtitan_layout import (
    from_torchtitan,
    grouped_optimizer,
    require_layout,
    to_torchtitan,
)
from hpstore.errors import CheckpointError, ConfigError


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with an optimizer of two groups, after a step."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 1)})
    groups = [{"params": [p], "lr": 0.1 if p.ndim == 1 else 0.2} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups)
    model["b"](model["a"](torch.ones(2, 3))).sum().backward()
    optimizer.step()
    return model, optimizer


def test_torchs_flattened_optimizer_is_grouped_by_its_options() -> None:
    """Two groups of four come back, with every moment by its parameter's name."""
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    found = grouped_optimizer(flat)
    assert [(g["lr"], g["params"]) for g in found["param_groups"]] == [
        (0.2, ["a.weight", "b.weight"]),
        (0.1, ["a.bias", "b.bias"]),
    ]
    for name, parameter in model.named_parameters():
        assert found["state"][name].keys() == optimizer.state[parameter].keys()
        for slot, value in optimizer.state[parameter].items():
            assert torch.equal(found["state"][name][slot], value)
    back = to_torchtitan({"model": model.state_dict(), "optimizer": found})
    assert back["optimizer"].keys() == flat.keys()
    again = from_torchtitan(back)
    assert again["model"].keys() == model.state_dict().keys()
    assert again["optimizer"]["param_groups"] == found["param_groups"]


def test_nested_slots_and_dots_in_names_survive() -> None:
    """Shampoo has dicts in its state; options may be tensors and tuples."""
    state: dict[str, Any] = {
        "model": {"l.0.w": 1, "l.0.w2": 2},
        "optimizer": {
            "state": {"l.0.w": {"factors": {"0": 5, "1": 6}, "step": 1}, "l.0.w2": {"step": 2}},
            "param_groups": [
                {"lr": torch.tensor(0.5), "betas": (0.9, 0.95), "params": ["l.0.w", "l.0.w2"]}
            ],
        },
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": None,
    }
    flat = to_torchtitan(state)
    assert flat["optimizer"]["state.l.0.w.factors.1"] == 6
    assert flat["optimizer"]["param_groups.l.0.w2.betas"] == (0.9, 0.95)
    assert from_torchtitan(flat) == state


def test_parameters_without_moments_keep_their_options() -> None:
    found = grouped_optimizer({"param_groups.w.lr": 0.1})
    assert found == {"state": {}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        ({"state": {}, "param_groups": []}, "'state'"),
        ({"state.w.exp_avg": 1}, "state.w.exp_avg"),
        ({"param_groups.w.lr": 0.1, "state.other.exp_avg": 1}, "state.other.exp_avg"),
        ({"param_groups.w.lr": 0.1, "state.w": 1}, "state.w"),
        ({"param_groups.w.lr": 0.1, "state.w.a": 1, "state.w.a.b": 2}, "state.w.a.b"),
        ({"param_groups.w.lr": 0.1, "state.w.a.b": 1, "state.w.a": 2}, "state.w.a"),
        ({}, "no parameters"),
    ],
)
def test_what_is_no_flattened_optimizer_is_refused(flat: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        from_torchtitan({"w": torch.zeros(1), "optimizer": flat})


def test_other_states_are_refused() -> None:
    """Without a model, with names twice, with an optimizer by numbers."""
    others: list[dict[str, Any]] = [{"model": {"w": 1}}, {"optimizer": {}}, {"model": {}, "w": 1}]
    for other in others:
        with pytest.raises(CheckpointError, match="not at its top"):
            from_torchtitan(other)
    with pytest.raises(CheckpointError, match="no 'model'"):
        to_torchtitan({"net": {"w": 1}})
    with pytest.raises(CheckpointError, match="one name"):
        to_torchtitan({"model": {"step": 1}, "step": 2})
    numbers = {"state": {0: {"step": 1}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(CheckpointError, match="without names"):
        to_torchtitan({"model": {"w": 1}, "optimizer": numbers})
    with pytest.raises(ConfigError, match="is not 'torchtitan'"):
        require_layout("megatron", "dcp")
    with pytest.raises(ConfigError, match="one of dcp"):
        require_layout("torchtitan", "torch")
