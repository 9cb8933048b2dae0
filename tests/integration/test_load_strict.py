"""strict=True with LoadOptions: all that was chosen is loaded, or nothing changes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, LoadOptions
from hpstore.checkpoint.restore.chosen_names import choose
from hpstore.errors import CheckpointMismatch, ConfigError, HpstoreError
from tests.integration.ranks import launch, make_pool, open_pool, raised, together
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


# --- optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [{}, [{}, {}], {"lambdas": [{}], "deep": {"er": {}}}, [{"x": torch.ones(2)}], ({"n": 1}, {})],
    ids=str,
)
def test_what_holds_nothing_chosen_is_left_out(ckpt: Checkpointer, other: Any) -> None:
    """Empty dicts, as of a LambdaLR, and lists of which nothing is chosen do not want a taker."""
    saved = torch.nn.Linear(2, 2)
    ckpt.save(1, {"model": saved, "other": other}).result()
    for load in (LoadOptions(include="model"), LoadOptions(exclude="other")):
        target = torch.nn.Linear(2, 2)
        assert ckpt.restore({"model": target}, load=load) == 1
        assert torch.equal(target.weight, saved.weight)
    back: dict[str, Any] = {"other": copy.deepcopy(other)}
    assert ckpt.restore(back, load=LoadOptions(include="other")) == 1


def averaged(seed: int, ckpt: Checkpointer) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """A step in which an average with the same names stands before the model."""
    model = net(3, seed)
    optimizer = trained(model)
    ckpt.save(1, {"ema": net(3, 5), "model": model, "optimizer": optimizer, "epoch": 3}).result()
    return model, optimizer


@pytest.mark.parametrize(
    "load",
    [
        LoadOptions(rename={"ema": None}),
        LoadOptions(rename={"ema/*": None}),
        LoadOptions(rename=lambda name: None if name.startswith("ema/") else name),
        LoadOptions(exclude="ema"),
    ],
)
def test_moments_do_not_follow_an_average_that_is_left_out(
    ckpt: Checkpointer, load: LoadOptions
) -> None:
    _, old = averaged(0, ckpt)
    model = net(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    ckpt.restore({"model": model, "optimizer": optimizer, "epoch": 0}, load=load)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == len(old.state) == 4


@pytest.mark.parametrize("strict", [True, False])
def test_moments_follow_the_model_that_is_renamed(ckpt: Checkpointer, strict: bool) -> None:
    """Not the average, which stays; two that are moved apart are an error that names both."""
    source, old = averaged(0, ckpt)
    model = torch.nn.ModuleDict({"net": net(3, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    state = {"model": model, "optimizer": optimizer, "ema": net(3, 2), "epoch": 0}
    ckpt.restore(state, strict=strict, load=LoadOptions(rename={"model/*": "model/net.*"}))
    moment = optimizer.state[model.get_parameter("net.body.weight")]["exp_avg"]
    assert torch.equal(moment, old.state[source.get_parameter("body.weight")]["exp_avg"])
    apart = LoadOptions(rename={"model/*": "model/net.*", "ema/*": "ema/other.*"})
    with pytest.raises(ConfigError, match=r"optimizer 'optimizer' are named in \['ema', 'model'\]"):
        ckpt.restore(state, strict=strict, load=apart)


def test_an_optimizer_without_recorded_parameters_is_missing(ckpt: Checkpointer) -> None:
    """Not even one group is left: strict=True does not give a fresh optimizer."""
    model = net(3, 0)
    ckpt.save(1, {"old": model, "optimizer": trained(model)}).result()
    target = net(3, 1)
    optimizer = torch.optim.AdamW(target.parameters(), lr=9.0)
    with pytest.raises(CheckpointMismatch, match=r"not recorded.*optimizer/state/body\.bias"):
        ckpt.restore(
            {"optimizer": optimizer, "new": {"m": target}},
            load=LoadOptions(rename={"old/*": None}, exclude="new"),
        )
    assert optimizer.param_groups[0]["lr"] == 9.0


@pytest.mark.parametrize("kind", ["SGD", "LBFGS", "frozen AdamW"])
def test_parameters_without_moments_can_be_excluded(ckpt: Checkpointer, kind: str) -> None:
    """A plain SGD has none, LBFGS has those of all at the first, a frozen layer has none."""

    def state(seed: int) -> dict[str, Any]:
        model = layers(2, seed)
        if kind == "frozen AdamW":
            model.get_submodule("1").requires_grad_(False)
        made: Any = getattr(torch.optim, kind.rpartition(" ")[2])
        return {"model": model, "optimizer": made(model.parameters(), lr=0.1 * (1 + seed))}

    source = state(0)

    def closure() -> torch.Tensor:
        source["optimizer"].zero_grad()
        loss = torch.as_tensor(source["model"](torch.ones(2, 2)).square().sum())
        torch.autograd.backward(loss)
        return loss

    source["optimizer"].step(closure)
    ckpt.save(1, source).result()
    target = state(1)
    before = copied(target["model"])
    ckpt.restore(target, load=LoadOptions(exclude="model/1.*"))
    after = target["model"].state_dict()
    assert torch.equal(after["0.weight"], source["model"].get_parameter("0.weight"))
    assert torch.equal(after["1.weight"], before["1.weight"])
    whole = kind == "LBFGS"  # one history of all its parameters: it gets nothing
    assert target["optimizer"].param_groups[0]["lr"] == (0.2 if whole else 0.1)
    assert "optimizer/state/1.weight" in report_of(ckpt).skipped


@pytest.mark.parametrize(
    "load",
    [
        LoadOptions(exclude="optimizer/param_groups"),
        LoadOptions(exclude="optimizer/state/0"),
        LoadOptions(include=["optimizer/state/[12]", "epoch"]),
    ],
)
def test_an_optimizer_by_numbers_is_chosen_whole(ckpt: Checkpointer, load: LoadOptions) -> None:
    source = net(3, 0)
    ckpt.save(1, {"optimizer": trained(source), "epoch": 3}).result()
    target = net(3, 1)
    mine = trained(target, steps=1)
    mine.param_groups[0]["lr"] = 9.0
    with pytest.raises(ConfigError, match="'optimizer' was saved without names"):
        ckpt.restore({"optimizer": mine, "epoch": 0}, load=load)
    assert mine.param_groups[0]["lr"] == 9.0
    assert mine.state[target.get_parameter("body.weight")]["step"] == 1
    for whole in (LoadOptions(exclude="epoch"), LoadOptions(include="optimizer")):
        ckpt.restore({"optimizer": mine}, load=whole)
        assert mine.state[target.get_parameter("body.weight")]["step"] == 2
    ckpt.restore({"epoch": 0}, load=LoadOptions(exclude="optimizer"))


@pytest.mark.parametrize("groups", [False, True])
def test_a_skipped_parameter_of_an_optimizer_of_two_models_keeps_its_moments(
    ckpt: Checkpointer, groups: bool
) -> None:
    """Its state goes by numbers. A group of such parameters alone keeps its options."""

    def state(outputs: int, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, outputs)
        parts: list[Any] = [*a.parameters(), *b.parameters()]
        if groups:
            parts = [{"params": parts[:2]}, {"params": parts[2:]}]
        made = torch.optim.AdamW(parts, lr=0.1 + seed)
        torch.autograd.backward(b(a(torch.ones(2, 4))).square().sum())
        made.step()
        return {"a": a, "b": b, "optimizer": made}

    source, target = state(3, 0), state(5, 1)
    ckpt.save(1, source).result()
    mine: Any = target["optimizer"]
    before = {slot: v.clone() for slot, v in mine.state[target["b"].weight].items()}
    ckpt.restore(target, strict=False)
    after = mine.state[target["b"].weight]
    assert all(torch.equal(after[slot], value) for slot, value in before.items())
    wanted = source["optimizer"].state[source["a"].weight]["exp_avg"]
    assert torch.equal(mine.state[target["a"].weight]["exp_avg"], wanted)
    assert [g["lr"] for g in mine.param_groups] == ([0.1, 1.1] if groups else [0.1])


# --- tied weights -------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.tok(x)))


def times(factor: int) -> Any:
    return lambda name, tensor: tensor * factor


def test_two_names_of_one_memory_are_transformed_alike(ckpt: Checkpointer) -> None:
    source = Tied(0)
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.1)
    source(torch.arange(6)).sum().backward()
    optimizer.step()
    ckpt.save(1, {"model": source, "optimizer": optimizer}).result()
    for transform in (
        {"model/head.weight": times(2)},
        {"model/tok.weight": times(2)},
        {"model/tok.weight": times(2), "model/head.weight": times(3)},
        lambda name, tensor: tensor * 3 if "head" in name else tensor,
    ):
        target = Tied(1)
        before = copied(target)
        with pytest.raises(CheckpointMismatch, match="are one tensor in the state"):
            ckpt.restore(
                {"model": target, "optimizer": torch.optim.AdamW(target.parameters())},
                load=LoadOptions(transform=transform),
            )
        assert torch.equal(target.tok.weight, before["tok.weight"])
    both = LoadOptions(transform={"model/*": times(2)})
    second = LoadOptions(exclude="model/tok.weight", transform={"model/head.weight": times(2)})
    for load in (both, second):
        target = Tied(1)
        fresh = torch.optim.AdamW(target.parameters())
        ckpt.restore({"model": target, "optimizer": fresh}, load=load)
        assert torch.equal(target.tok.weight, source.tok.weight * 2)
        assert not fresh.state
    again = LoadOptions(transform=times(2))
    ckpt.restore({"model": target, "optimizer": fresh}, load=again)
    assert len(fresh.state) == 1


# --- bytes from an enemy ------------------------------------------------------------------------

GROUPS = [{"params": ["a"]}]
HOSTILE: dict[str, Any] = {
    "a list for a name": {"state": {}, "param_groups": [{"params": [["a"]]}]},
    "a state that is a tensor": {"state": {"$": "tensor", "item": "w"}, "param_groups": GROUPS},
    "a state without rows": {"state": {"$": "dict"}, "param_groups": GROUPS},
    "a group with a tag": {"state": {}, "param_groups": [{"$": "float", "params": ["a"]}]},
    "a dict without rows": {"$": "dict"},
    "a tensor that is no text": {"$": "tensor", "item": 3},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tree_is_chosen_or_refused(ckpt: Checkpointer, case: str) -> None:
    """Never by an error of Python's; one of the caller's function comes as it is."""
    ckpt.save(1, {"w": torch.ones(2)}).result()
    found = ckpt.steps.manifest(1)
    hostile = replace(found, tree={**found.tree, "o": HOSTILE[case]})
    for load in (
        LoadOptions(rename={"w": "v"}),
        LoadOptions(rename={"o": "q"}),
        LoadOptions(exclude="o"),
        LoadOptions(rename=lambda name: name),
    ):
        with suppress(HpstoreError):
            choose(hostile, load)

    def fails(name: str) -> str:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        choose(found, LoadOptions(rename=fails))


# --- several ranks ------------------------------------------------------------------------------


def stages(rank: int, world: int, directory: Path) -> None:
    """Each rank has a layer of its own; a pattern means that of one of them."""
    with Checkpointer(open_pool(directory), "run", rng=False) as ckpt:

        def stage(seed: int) -> torch.nn.Module:
            torch.manual_seed(seed)
            made = torch.nn.Module()
            made.add_module(str(rank), torch.nn.Linear(4, 4))
            return made

        source, target = stage(rank), stage(7)
        ckpt.save(1, {"model": source}).result()
        ckpt.restore({"model": target}, load=LoadOptions(transform={"model/1.*": times(2)}))
        for name, value in target.state_dict().items():
            wanted = source.state_dict()[name] * (2 if rank == 1 else 1)
            together(torch.equal(value, wanted), name)
        said = raised(
            lambda: ckpt.restore(
                {"model": target}, load=LoadOptions(transform={"model/2.*": times(2)})
            ),
        )
        together("matches no tensor" in said, said)


def test_a_function_for_a_tensor_of_one_rank(tmp_path: Path) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 2, stages)


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_a_dict_or_a_module_in_a_list_lacks_is_not_called_loaded(
    ckpt: Checkpointer, kind: Any
) -> None:
    """The list is taken, the names in it are not: strict=True refuses, strict=False lists them."""
    inside = {"a": torch.ones(2), "b": torch.ones(3), "n": 5, "deep": {"c": torch.ones(1)}}
    ckpt.save(1, {"l": kind([inside, layers(2, 0)]), "z": 1}).result()
    target = layers(1, 1)
    before = copied(target)
    state: dict[str, Any] = {"l": kind([{"a": torch.zeros(2)}, target])}
    lost = ["l/0/b", "l/0/deep/c", "l/0/n", "l/1/1.bias", "l/1/1.weight"]
    for load in (LoadOptions(exclude="z"), LoadOptions(include="l/*")):
        with pytest.raises(CheckpointMismatch) as refused:
            ckpt.restore(state, load=load)
        assert f"recorded but not taken {lost}" in str(refused.value)
        assert not state["l"][0]["a"].any()
        assert all(torch.equal(v, before[n]) for n, v in target.state_dict().items())
    ckpt.restore(state, strict=False, load=LoadOptions(exclude="z"))
    report = report_of(ckpt)
    assert list(report.unexpected) == lost
    assert report.loaded == ("l/0/a", "l/1/0.bias", "l/1/0.weight")
    assert state["l"][0].keys() == {"a"}
    state = {"l": kind([{"a": torch.zeros(2)}])}  # of another length: replaced as a whole
    ckpt.restore(state, load=LoadOptions(include="l/0/*"), strict=False)
    assert report_of(ckpt).unexpected == ()


@pytest.mark.parametrize("rename", [{"l": "m/x"}, {"l/*": "m/x/*"}])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_that_is_renamed_as_a_whole_stays_one(
    ckpt: Checkpointer, kind: Any, rename: dict[str, str]
) -> None:
    """It became a dict with numbers for names; one of which a part moves has none to be."""
    deep = kind([{"b": torch.ones(3)}])
    ckpt.save(1, {"l": kind([{"a": torch.ones(2)}, {"in": deep}]), "z": 1}).result()
    state: dict[str, Any] = {"z": 0, "m": {"x": kind([{"a": torch.zeros(2)}, {"in": None}])}}
    state["m"]["x"][1]["in"] = kind([{"b": torch.zeros(3)}])
    ckpt.restore(state, load=LoadOptions(rename=rename))
    found = state["m"]["x"]
    assert (type(found), type(found[1]["in"]), len(found)) == (kind, kind, 2)
    assert found[0]["a"].all()
    assert found[1]["in"][0]["b"].all()
    other: dict[str, Any] = {"m": {"0": {"a": torch.zeros(2)}}}
    ckpt.restore(other, load=LoadOptions(rename={"l/0": "m/0", "l/1": None, "z": None}))
    assert other["m"]["0"]["a"].all()
