"""strict=False loads what fits: another head stays as it was built, and every name is listed."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.restore.fill_state import RestoreReport
from hpstore.errors import CheckpointMismatch
from tests.integration.ranks import full, launch, make_pool, open_pool, together


def net(outputs: int, seed: int) -> torch.nn.Module:
    """A body and a head."""
    torch.manual_seed(seed)
    made = torch.nn.Sequential()
    made.add_module("body", torch.nn.Linear(4, 6))
    made.add_module("head", torch.nn.Linear(6, outputs))
    return made


def trained(model: torch.nn.Module, *, groups: bool = False, steps: int = 2) -> torch.optim.AdamW:
    """AdamW after some steps; with `groups` one for the body, one for the head."""
    parts: Any = model.parameters()
    if groups:
        parts = [{"params": list(part.parameters())} for part in model.children()]
    made = torch.optim.AdamW(parts, lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        made.step()
        made.zero_grad()
    return made


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Values of now."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def ckpt_of(pool: hpstore.Pool) -> Checkpointer:
    return Checkpointer(pool, "run", rng=False)


def report_of(ckpt: Checkpointer) -> RestoreReport:
    assert ckpt.last_restore is not None
    return ckpt.last_restore


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("live", [False, True])
def test_another_head_stays_as_built_and_gets_no_old_moments(
    pool: hpstore.Pool, groups: bool, live: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The body and its moments are loaded. Moments that the head has already it keeps."""
    source = net(3, 0)
    old = trained(source, groups=groups)
    with ckpt_of(pool) as ckpt:
        ckpt.save(1, {"model": source, "optimizer": old}).result()
        target = net(5, 1)
        fresh = trained(target, groups=groups, steps=3 * live)
        fresh.param_groups[-1]["lr"] = 0.5
        before, slots = copied(target), dict(fresh.state[target.get_parameter("head.weight")])
        slots = {name: value.clone() for name, value in slots.items()}
        with pytest.raises(CheckpointMismatch, match=r"head\.weight"):
            ckpt.restore({"model": target, "optimizer": fresh})
        assert all(torch.equal(v, before[n]) for n, v in target.state_dict().items())
        assert ckpt.restore({"model": target, "optimizer": fresh}, strict=False) == 1
        report = report_of(ckpt)
    for name, value in target.state_dict().items():
        there = before[name] if name.startswith("head") else source.state_dict()[name]
        assert torch.equal(value, there), name
    body, head = target.get_parameter("body.weight"), target.get_parameter("head.weight")
    wanted = old.state[source.get_parameter("body.weight")]
    assert torch.equal(fresh.state[body]["exp_avg"], wanted["exp_avg"])
    assert fresh.state[head].keys() == slots.keys()
    assert all(torch.equal(fresh.state[head][name], value) for name, value in slots.items())
    assert fresh.param_groups[-1]["lr"] == (0.5 if groups else 0.1)  # of a group that was loaded
    fresh.zero_grad()
    target(torch.ones(2, 4)).sum().backward()
    fresh.step()
    assert report.skipped["model/head.weight"] == "(3, 6) was saved, (5, 6) is wanted"
    assert set(report.skipped) >= {
        "model/head.bias",
        "optimizer/state/head.bias",
        "optimizer/state/head.weight",
    }
    assert "model/body.weight" in report.loaded
    assert "optimizer/state/body.weight/exp_avg" in report.loaded
    assert not any("head" in name for name in report.loaded)
    assert (report.missing, report.unexpected) == ((), ())
    lines = [r.getMessage() for r in caplog.records if "tensors loaded" in r.getMessage()]
    assert len(lines) == 1
    assert "skipped, such as model/head.weight" in lines[0]


def test_tensors_of_other_shapes_stay_wherever_they_are(pool: hpstore.Pool) -> None:
    """In dicts, lists, an OrderedDict, strided arrays, models in lists, values of one rank."""

    def state(size: int, value: float, per_rank: Any) -> dict[str, Any]:
        flat = np.full((size, 2), value, np.float32)
        return {
            "list": [torch.full((size,), value), torch.full((2,), value), 7],
            "ordered": OrderedDict(a=torch.full((size,), value), b=torch.full((2,), value)),
            "tuple": (torch.full((size,), value), {"in": torch.full((2,), value)}),
            "strided": flat[:, 0],
            "models": [net(2, 0), net(size, 0)],
            "own": per_rank({"x": torch.full((size,), value), "y": torch.full((2,), value)}),
            "alone": per_rank(torch.full((size,), value)),
        }

    with ckpt_of(pool) as ckpt:
        ckpt.save(1, state(3, 1.0, ckpt.per_rank)).result()
        mine = state(4, 0.0, ckpt.per_rank)
        head = mine["models"][1].head.weight.detach().clone()
        ckpt.restore(mine, strict=False)
        assert set(report_of(ckpt).skipped) == {
            "list/0",
            "ordered/a",
            "tuple/0",
            "strided",
            "models/1/head.weight",
            "models/1/head.bias",
            "own@0/x",
            "alone@0",
        }
        assert (report_of(ckpt).missing, report_of(ckpt).unexpected) == ((), ())
    assert torch.equal(mine["models"][1].head.weight, head)
    assert not mine["list"][0].any()
    assert mine["list"][1].all()
    assert mine["list"][2] == 7
    assert not mine["ordered"]["a"].any()
    assert mine["ordered"]["b"].all()
    assert not mine["tuple"][0].any()
    assert mine["tuple"][1]["in"].all()
    assert not mine["strided"].any()
    assert not mine["own"].value["x"].any()
    assert mine["own"].value["y"].all()
    assert not mine["alone"].value.any()


def test_an_optimizer_over_two_models_gives_the_head_no_old_moments(pool: hpstore.Pool) -> None:
    """Its parameters have numbers there, no names: the number finds the model's name."""
    first, second = net(2, 0), net(3, 0)

    def over(*models: torch.nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW([p for model in models for p in model.parameters()])

    old = over(first, second)
    sum(model(torch.ones(1, 4)).sum() for model in (first, second)).backward()
    old.step()
    with ckpt_of(pool) as ckpt:
        ckpt.save(1, {"a": first, "b": second, "o": old}).result()
        one, other = net(2, 1), net(5, 1)
        fresh = over(one, other)
        ckpt.restore({"a": one, "b": other, "o": fresh}, strict=False)
        assert "o/state/6" in report_of(ckpt).skipped
    assert not fresh.state[other.get_parameter("head.weight")]
    assert torch.equal(
        fresh.state[other.get_parameter("body.weight")]["exp_avg"],
        old.state[second.get_parameter("body.weight")]["exp_avg"],
    )


def test_another_dtype_is_no_reason_to_leave_a_tensor_out(pool: hpstore.Pool) -> None:
    """A model of bfloat16 would come back all but unloaded."""
    with ckpt_of(pool) as ckpt:
        ckpt.save(1, {"model": net(3, 0)}).result()
        with pytest.raises(CheckpointMismatch, match=r"float32 .* bfloat16"):
            ckpt.restore({"model": net(3, 1).bfloat16()}, strict=False)


# --- several ranks ------------------------------------------------------------------------------


def sharded(outputs: int, seed: int, world: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """A trained FSDP2 model."""
    model = net(outputs, seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def skipped_alike(rank: int, world: int, directory: Path) -> None:
    """A sharded model with another head, and a tensor that fits one rank alone."""
    with Checkpointer(open_pool(directory), "run", rng=False) as ckpt:
        model, optimizer = sharded(3, 1, world)
        saved = {"model": model, "optimizer": optimizer, "x": torch.ones(3), "y": torch.ones(3)}
        ckpt.save(1, saved).result()
        wanted = full(optimizer.state[model.get_parameter("body.weight")]["exp_avg"])
        body = full(model.get_parameter("body.weight"))
        other, fresh = sharded(5, 2, world)
        head = other.get_parameter("head.weight")
        before, moment = full(head), full(fresh.state[head]["exp_avg"])
        state: dict[str, Any] = {
            "model": other,
            "optimizer": fresh,
            "x": torch.zeros(3 + rank),
            "y": torch.zeros(3),
        }
        ckpt.restore(state, strict=False)
        skipped = set(report_of(ckpt).skipped)
        together(
            skipped >= {"x", "model/head.weight", "optimizer/state/head.weight"}
            and not any("body" in name for name in skipped),
            skipped,
        )
        together(not state["x"].any(), "x is loaded, on rank 0 alone")
        together(bool(state["y"].all()), "y is not loaded")
        together(torch.equal(full(head), before), "the head is not as it was")
        together(torch.equal(full(fresh.state[head]["exp_avg"]), moment), "nor is its moment")
        loaded = full(other.get_parameter("body.weight"))
        together(torch.equal(loaded, body), "the body is not loaded")
        slots = fresh.state[other.get_parameter("body.weight")]
        together(torch.equal(full(slots["exp_avg"]), wanted), "nor are its moments")


def test_what_does_not_fit_one_rank_is_loaded_on_none(tmp_path: Path) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 2, skipped_alike)
