"""Other dtypes and functions on the way from a step into a state; nothing is cast unasked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, LoadOptions
from hpstore.errors import CheckpointMismatch, ConfigError
from tests.integration.ranks import full, launch, make_pool, open_pool, raised, together
from tests.integration.test_load_shapes import copied, net, report_of, sharded, trained

CAST = LoadOptions(cast=True)


@pytest.fixture
def ckpt(pool: hpstore.Pool) -> Iterator[Checkpointer]:
    with Checkpointer(pool, "run", rng=False) as made:
        yield made


# --- cast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, True])
def test_a_bf16_model_takes_a_checkpoint_of_fp32(ckpt: Checkpointer, live: bool) -> None:
    """When asked for, and its moments with it: the next step of AdamW runs."""
    source = net(3, 0)
    old = trained(source)
    ckpt.save(1, {"model": source, "optimizer": old}).result()
    target = net(3, 1).bfloat16()
    fresh = torch.optim.AdamW(target.parameters(), lr=0.1)
    if live:
        target(torch.ones(2, 4).bfloat16()).sum().backward()
        fresh.step()
    before = copied(target)
    for strict in (True, False):
        with pytest.raises(CheckpointMismatch, match=r"bfloat16.*LoadOptions\(cast=True\)"):
            ckpt.restore({"model": target, "optimizer": fresh}, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    ckpt.restore({"model": target, "optimizer": fresh}, load=CAST)
    for name, value in target.state_dict().items():
        assert torch.equal(value, source.state_dict()[name].bfloat16()), name
    slots = fresh.state[target.get_parameter("head.weight")]
    wanted = old.state[source.get_parameter("head.weight")]["exp_avg"]
    assert torch.equal(slots["exp_avg"], wanted.bfloat16())
    assert (slots["step"].dtype, float(slots["step"])) == (torch.float32, 2.0)
    report = report_of(ckpt)
    assert {"model/head.weight", "optimizer/state/head.weight/exp_avg"} <= set(report.cast)
    assert not any(name.endswith("/step") for name in report.cast)
    target.zero_grad()
    target(torch.ones(2, 4).bfloat16()).sum().backward()
    fresh.step()


def test_moments_of_a_dtype_of_their_own_keep_it(ckpt: Checkpointer) -> None:
    """Those of float32 beside parameters of bfloat16 stay float32 beside ones of float16."""

    def made(dtype: torch.dtype) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 2, bias=False).to(dtype)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made(torch.bfloat16)
    optimizer.state[model.weight] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2) / 3}
    ckpt.save(1, {"m": model, "o": optimizer}).result()
    other, fresh = made(torch.float16)
    ckpt.restore({"m": other, "o": fresh}, load=CAST)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], torch.ones(2, 2) / 3)
    assert report_of(ckpt).cast == ("m/weight",)


def test_only_what_floats_is_cast(ckpt: Checkpointer) -> None:
    """Not whole numbers, which would wrap, nor complex ones into real ones. Up as well as down."""
    values: dict[str, Any] = {
        "f": torch.tensor([1.5, 1e30]),
        "c": torch.tensor([1 + 2j]),
        "a": np.array([0.1]),
    }
    ckpt.save(1, {**values, "i": torch.tensor([70_000])}).result()
    state: dict[str, Any] = {
        "f": torch.zeros(2, dtype=torch.float64),
        "c": torch.zeros(1, dtype=torch.complex128),
        "a": np.zeros(1, np.float32),
        "i": torch.zeros(1, dtype=torch.int64),
    }
    array = state["a"]
    ckpt.restore(state, load=CAST)
    assert state["f"].tolist() == values["f"].tolist()
    assert state["c"].tolist() == [1 + 2j]
    assert state["a"] is array
    assert array.tolist() == [float(np.float32(0.1))]
    assert report_of(ckpt).cast == ("a", "c", "f")
    for name, dtype in (("i", torch.int16), ("i", torch.float32), ("c", torch.float32)):
        first = torch.zeros(2)
        wrong = {**values, "i": torch.zeros(1, dtype=torch.int64), "f": first}
        wrong[name] = torch.zeros(1, dtype=dtype)
        with pytest.raises(CheckpointMismatch, match=f"'{name}'"):
            ckpt.restore(wrong, load=CAST)
        assert not first.any()


def test_a_read_gives_the_dtype_that_is_asked_for(ckpt: Checkpointer) -> None:
    """load() and tensors() without a state: floats alone, under new names, in part."""
    w = torch.arange(6.0).reshape(2, 3) / 7
    ckpt.save(1, {"model": {"w": w, "n": torch.arange(3)}, "x": torch.ones(2)}).result()
    load = LoadOptions(rename={"model": "net"}, include="net", cast=torch.bfloat16)
    found = ckpt.load(1, load=load)
    assert found.keys() == {"net/w", "net/n"}
    assert torch.equal(found["net/w"], w.bfloat16())
    assert found["net/n"].dtype == torch.int64
    turned = LoadOptions(transform={"model/w": lambda name, tensor: tensor.T}, cast=torch.float64)
    found = ckpt.read(1).tensors(["model/w", "x"], load=turned)
    assert torch.equal(found["model/w"], w.T.double())
    assert found["x"].dtype == torch.float64
    with pytest.raises(ConfigError, match="there is no state"):
        ckpt.load(1, load=CAST)
    with pytest.raises(ConfigError, match="the state says the dtypes"):
        ckpt.restore({"x": torch.zeros(2)}, load=LoadOptions(cast=torch.bfloat16))
    for wrong in (torch.int8, "bf16", 1):
        with pytest.raises(ConfigError, match="cast must be"):
            LoadOptions(cast=wrong)  # type: ignore[arg-type]


# --- transform ----------------------------------------------------------------------------------


def longer(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """More rows: new words of a vocabulary."""
    return torch.cat([tensor, torch.zeros(2, *tensor.shape[1:])])


def test_a_function_gives_tensors_another_shape(ckpt: Checkpointer) -> None:
    """strict holds for what it gives. Moments that were not changed with it are not loaded."""
    source = net(3, 0)
    old = trained(source)
    ckpt.save(1, {"model": source, "optimizer": old}).result()
    target = net(5, 1)
    fresh = torch.optim.AdamW(target.parameters())
    weights = {"model/head.*": longer}
    with pytest.raises(CheckpointMismatch, match=r"'model/head\.\w+': float32"):
        ckpt.restore({"model": target, "optimizer": fresh})
    ckpt.restore({"model": target, "optimizer": fresh}, load=LoadOptions(transform=weights))
    head = target.get_parameter("head.weight")
    assert torch.equal(head[:3], source.get_parameter("head.weight"))
    assert not head[3:].any()
    assert not fresh.state[head]
    assert "optimizer/state/head.weight" in report_of(ckpt).skipped
    assert "optimizer/state/body.weight/exp_avg" in report_of(ckpt).loaded
    both = {**weights, "optimizer/state/head.*/exp_avg*": longer}
    again = torch.optim.AdamW(target.parameters())
    ckpt.restore({"model": target, "optimizer": again}, load=LoadOptions(transform=both))
    wanted = old.state[source.get_parameter("head.weight")]["exp_avg"]
    assert torch.equal(again.state[head]["exp_avg"][:3], wanted)
    target(torch.ones(2, 4)).sum().backward()
    again.step()


def test_a_function_for_all_tensors_sees_each_once(ckpt: Checkpointer) -> None:
    """By its new name; values that are no tensors it does not see."""
    seen = []

    def double(name: str, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return tensor * 2

    ckpt.save(1, {"a": {"w": torch.ones(3), "n": 1}, "array": np.ones(2)}).result()
    state: dict[str, Any] = {"b": {"w": torch.zeros(3), "n": 0}, "array": np.zeros(2)}
    ckpt.restore(state, load=LoadOptions(rename={"a": "b"}, transform=double))
    assert sorted(seen) == ["array", "b/w"]
    assert state["b"]["w"].tolist() == [2, 2, 2]
    assert state["array"].tolist() == [2, 2]
    assert state["b"]["n"] == 1
    assert report_of(ckpt).loaded == ("array", "b/w")


def failing(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Of the caller."""
    raise ZeroDivisionError(name)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no tensor": (lambda name, tensor: 3, ConfigError, "transform gave a int for 'y'"),
    "sparse": (lambda name, tensor: tensor.to_sparse(), ConfigError, "dense tensor"),
    "meta": (lambda name, tensor: tensor.to("meta"), ConfigError, "that holds values"),
    "an error": (failing, ZeroDivisionError, "y"),
    "another shape": (lambda name, tensor: tensor[:1], CheckpointMismatch, "given by transform"),
    "another dtype": (lambda name, tensor: tensor.long(), CheckpointMismatch, "int64"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_function_changes_nothing(ckpt: Checkpointer, case: str) -> None:
    """It is found before the first tensor is filled."""
    call, error, says = BAD[case]
    ckpt.save(1, {"x": torch.ones(2), "y": torch.ones(2)}).result()
    state = {"x": torch.zeros(2), "y": torch.zeros(2)}
    with pytest.raises(error, match=says):
        ckpt.restore(state, load=LoadOptions(transform={"y": call}))
    with pytest.raises(CheckpointMismatch, match="'z' matches no tensor"):
        ckpt.restore(state, load=LoadOptions(transform={"z": call}))
    assert not state["x"].any()
    assert not state["y"].any()


def test_another_shape_of_a_transformed_tensor_can_be_skipped(ckpt: Checkpointer) -> None:
    ckpt.save(1, {"x": torch.ones(2), "y": torch.ones(2)}).result()
    state = {"x": torch.zeros(2), "y": torch.zeros(2)}
    ckpt.restore(state, strict=False, load=LoadOptions(transform={"y": longer}))
    assert report_of(ckpt).skipped == {"y": "(4,) was saved, (2,) is wanted"}
    assert state["x"].all()
    assert not state["y"].any()


@pytest.mark.parametrize("value", [3, {}, {"x": 3}, {3: longer}])
def test_what_is_no_function_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="transform must be"):
        LoadOptions(transform=value)


# --- several ranks ------------------------------------------------------------------------------


def changed_alike(rank: int, world: int, directory: Path) -> None:
    """Each rank gets its part of what was cast and transformed; one that fails stops all."""
    with Checkpointer(open_pool(directory), "run", rng=False) as ckpt:
        source, old = sharded(3, 1, world)
        ckpt.save(1, {"model": source, "optimizer": old}).result()
        head = full(source.get_parameter("head.weight"))
        body = full(source.get_parameter("body.weight"))
        moment = full(old.state[source.get_parameter("head.weight")]["exp_avg"])
        target, fresh = sharded(5, 2, world)
        before = full(target.get_parameter("body.weight"))
        state = {"model": target, "optimizer": fresh}
        bad: Callable[..., Any] = (lambda name, tensor: 3) if rank else longer
        said = raised(
            lambda: ckpt.restore(state, load=LoadOptions(transform={"model/head.*": bad}))
        )
        together("transform gave a int" in said, said)
        together(torch.equal(full(target.get_parameter("body.weight")), before), "half loaded")
        both = {"model/head.*": longer, "optimizer/state/head.*/exp_avg*": longer}
        ckpt.restore(state, load=LoadOptions(transform=both))
        found = full(target.get_parameter("head.weight"))
        together(torch.equal(found[:3], head) and not found[3:].any(), found)
        slots = fresh.state[target.get_parameter("head.weight")]
        together(torch.equal(full(slots["exp_avg"])[:3], moment), "moment")
        narrow = sharded(3, 3, world)[0].bfloat16()
        ckpt.load_model(narrow, load=CAST)
        found = full(narrow.get_parameter("body.weight"))
        together(torch.equal(found, body.bfloat16()), "cast")


def test_ranks_cast_and_transform_their_parts(tmp_path: Path) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 2, changed_alike)
