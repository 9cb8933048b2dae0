"""strict=True with LoadOptions: all that was chosen is loaded, or nothing changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, LoadOptions
from hpstore.errors import CheckpointMismatch, ConfigError
from tests.integration.test_load_shapes import copied, net, report_of, trained


@pytest.fixture
def ckpt(pool: hpstore.Pool) -> Iterator[Checkpointer]:
    with Checkpointer(pool, "run", rng=False) as made:
        yield made


def layers(count: int, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(count)))


def same(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize(
    "load", [None, LoadOptions(exclude="ema"), LoadOptions(transform={"model/0.*": same})]
)
def test_a_layer_more_in_a_state_dict_is_found(
    ckpt: Checkpointer, load: LoadOptions | None
) -> None:
    """model.state_dict() is an OrderedDict: what it lacks is not loaded, and not called loaded."""
    ema = {"w": torch.ones(2)}
    ckpt.save(1, {"model": layers(3, 0).state_dict(), "ema": ema, "o": OrderedDict(a=1)}).result()
    target = layers(2, 1)
    before = copied(target)
    state: dict[str, Any] = {"model": target.state_dict(), "ema": {"w": torch.zeros(2)}}
    state["o"] = OrderedDict(a=0)
    with pytest.raises(CheckpointMismatch, match=r"not taken.*2\.weight"):
        ckpt.restore(state, load=load)
    assert all(torch.equal(v, before[n]) for n, v in target.state_dict().items())
    ckpt.restore(state, strict=False, load=load)
    report = report_of(ckpt)
    assert report.unexpected == ("model/2.bias", "model/2.weight")
    assert "model/0.weight" in report.loaded
    assert "model/2.weight" not in report.loaded
    assert state["o"] == {"a": 1}
    more: dict[str, Any] = {"model": layers(4, 1).state_dict(), "o": OrderedDict(a=0, b=0)}
    more["ema"] = {"w": torch.zeros(2)}
    with pytest.raises(CheckpointMismatch, match=r"not recorded.*3\.bias"):
        ckpt.restore(more, load=load)


def test_an_optimizer_of_a_part_of_a_model_is_whole(ckpt: Checkpointer) -> None:
    """Parameters that it does not update are none that it lacks."""

    def state(seed: int) -> dict[str, Any]:
        model = net(3, seed)
        head = list(model.get_submodule("head").parameters())
        return {"model": model, "optimizer": torch.optim.SGD(head, lr=0.1 + seed), "epoch": seed}

    ckpt.save(1, state(0)).result()
    mine = state(1)
    ckpt.restore(mine, load=LoadOptions(exclude="epoch"))
    assert mine["optimizer"].param_groups[0]["lr"] == 0.1
