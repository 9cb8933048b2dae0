"""What LoadOptions choose of a step: renamed, in part, the model alone; optimizers follow."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, LoadOptions, load_model
from hpstore.checkpoint.restore.fill_state import RestoreReport
from hpstore.errors import CheckpointError, CheckpointMismatch, ConfigError
from tests.integration.ranks import full, launch, make_pool, open_pool, raised, together
from tests.integration.test_load_shapes import copied, net, report_of, sharded, trained


@pytest.fixture
def ckpt(pool: hpstore.Pool) -> Iterator[Checkpointer]:
    with Checkpointer(pool, "run", rng=False) as made:
        yield made


def renamed(model: torch.nn.Module, names: dict[str, str]) -> torch.nn.Module:
    """The same layers by other names."""
    made = torch.nn.Sequential()
    for name, layer in model.named_children():
        made.add_module(names.get(name, name), layer)
    return made


RENAMES: dict[str, Any] = {
    "patterns": {"model/body.*": "net/trunk.*", "model/*": "net/*", "optimizer/*": "opt/*"},
    "function": lambda name: (
        name.replace("model/", "net/").replace("body.", "trunk.").replace("optimizer/", "opt/")
    ),
}


@pytest.mark.parametrize("kind", RENAMES)
def test_moments_follow_the_new_names_of_their_parameters(ckpt: Checkpointer, kind: str) -> None:
    """Model, optimizer and a layer have other names than those of the save. strict holds."""
    source = net(3, 0)
    old = trained(source)
    ckpt.save(1, {"model": source, "optimizer": old, "epoch": 3}).result()
    target = renamed(net(3, 1), {"body": "trunk"})
    state: dict[str, Any] = {"net": target, "opt": torch.optim.AdamW(target.parameters(), lr=9.0)}
    state["epoch"] = 0
    assert ckpt.restore(state, load=LoadOptions(rename=RENAMES[kind])) == 1
    for name, value in target.state_dict().items():
        assert torch.equal(value, source.state_dict()[name.replace("trunk", "body")]), name
    for name, parameter in target.named_parameters():
        wanted = old.state[source.get_parameter(name.replace("trunk", "body"))]
        assert torch.equal(state["opt"].state[parameter]["exp_avg"], wanted["exp_avg"]), name
    assert (state["opt"].param_groups[0]["lr"], state["epoch"]) == (0.1, 3)
    report = report_of(ckpt)
    assert "net/trunk.weight" in report.loaded
    assert "opt/state/trunk.weight/exp_avg" in report.loaded
    assert (report.missing, report.unexpected, report.left_out) == ((), (), ())


def test_include_and_exclude_leave_the_rest_as_it_is(ckpt: Checkpointer) -> None:
    """Also an optimizer with moments: those of the body are loaded, the head's stay."""
    source = net(3, 0)
    ckpt.save(1, {"model": source, "optimizer": trained(source), "epoch": 3}).result()
    for load in (
        LoadOptions(include=["model/body.*", "optimizer/state/body.*", "optimizer/param_groups"]),
        LoadOptions(exclude=["*head*", "epoch"]),
        LoadOptions(exclude=["model/head.*", "epoch"]),  # the moments follow
        LoadOptions(rename={"*head*": None, "epoch": None}),
    ):
        target = net(3, 1)
        fresh = trained(target, steps=1)
        before, head = copied(target), target.get_parameter("head.weight")
        moment = fresh.state[head]["exp_avg"].clone()
        state = {"model": target, "optimizer": fresh, "epoch": 7}
        strict = load.rename is None  # renamed to None, the head is wanted and not recorded
        ckpt.restore(state, strict=strict, load=load)
        assert state["epoch"] == 7
        assert torch.equal(head, before["head.weight"])
        assert torch.equal(fresh.state[head]["exp_avg"], moment)
        assert fresh.state[target.get_parameter("body.weight")]["step"] == 2
        assert torch.equal(target.state_dict()["body.weight"], source.state_dict()["body.weight"])
        report = report_of(ckpt)
        assert {"model/head.weight", "epoch"} <= set(report.left_out), load
        assert not any("head" in name for name in report.loaded)
        assert bool(report.missing) == (not strict)
        assert report.unexpected == ()


def test_a_part_is_strict_about_what_was_chosen(ckpt: Checkpointer) -> None:
    """Names that were chosen and are only recorded, or only wanted, change nothing."""
    source = net(3, 0)
    ckpt.save(1, {"model": source, "optimizer": trained(source), "x": torch.ones(2)}).result()
    more = net(3, 1)
    more.add_module("more", torch.nn.Linear(3, 2))
    less = torch.nn.Sequential(OrderedDict(body=torch.nn.Linear(4, 6)))
    for model, says in ((more, "not recorded.*more.weight"), (less, "not taken.*head.weight")):
        x = torch.zeros(2)
        before = copied(model)
        with pytest.raises(CheckpointMismatch, match=says):
            ckpt.restore({"x": x, "model": model}, load=LoadOptions(include=["x", "model"]))
        assert not x.any()
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(CheckpointMismatch, match=says):
            ckpt.restore(
                {"model": model, "opt": optimizer},
                load=LoadOptions(rename={"optimizer/*": "opt/*"}, include=["opt"]),
            )
        assert not optimizer.state


def test_layers_are_renamed_into_fewer_and_more(ckpt: Checkpointer) -> None:
    """Every other one of six into three, and six into eight, of which two stay as built."""

    def layers(count: int) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(count)))

    def every_other(name: str) -> str | None:
        number, _, last = name.removeprefix("model/").partition(".")
        return f"model/{int(number) // 2}.{last}" if int(number) % 2 == 0 else None

    source = layers(6)
    ckpt.save(1, {"model": source}).result()
    few, many = layers(3), layers(8)
    ckpt.restore({"model": few}, load=LoadOptions(rename=every_other))
    for number in range(3):
        assert torch.equal(
            few.get_parameter(f"{number}.bias"), source.get_parameter(f"{2 * number}.bias")
        )
    assert len(report_of(ckpt).left_out) == 6
    last = many.get_parameter("7.bias").detach().clone()
    ckpt.restore({"model": many}, strict=False)
    assert torch.equal(many.get_parameter("5.bias"), source.get_parameter("5.bias"))
    assert torch.equal(many.get_parameter("7.bias"), last)
    assert report_of(ckpt).missing == (
        "model/6.bias",
        "model/6.weight",
        "model/7.bias",
        "model/7.weight",
    )


def test_values_of_every_kind_are_moved_and_chosen(ckpt: Checkpointer) -> None:
    """Numbers, lists with tensors, an OrderedDict, objects with a state, values of a rank."""

    class Held:
        """An object with a state."""

        def __init__(self, seen: int) -> None:
            self.seen = seen

        def state_dict(self) -> dict[str, int]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    def state(value: int, top: str) -> dict[str, Any]:
        return {
            top: {
                "n": value,
                "list": [torch.full((2,), float(value)), value],
                "ordered": OrderedDict(a=torch.full((2,), float(value)), b=value),
                "empty": {},
            },
            "held": Held(value),
            "own": ckpt.per_rank({"at": value}),
        }

    ckpt.save(1, state(5, "old")).result()
    mine = state(0, "new")
    ckpt.restore(mine, load=LoadOptions(rename={"old": "new"}, exclude="new/ordered/a"))
    assert mine["new"]["n"] == 5
    assert mine["new"]["list"][0].tolist() == [5, 5]
    assert mine["new"]["list"][1] == 5
    assert mine["new"]["ordered"]["a"].tolist() == [0, 0]
    assert mine["new"]["ordered"]["b"] == 5
    assert (mine["held"].seen, mine["own"].value["at"]) == (5, 5)
    mine = state(0, "old")
    ckpt.restore(mine, load=LoadOptions(include=["own"]))
    assert (mine["held"].seen, mine["own"].value["at"], mine["old"]["n"]) == (0, 5, 0)
    with pytest.raises(ConfigError, match=r"'old/list' is a list.*only a part"):
        ckpt.restore(state(0, "old"), load=LoadOptions(include="old/list/0"))
    with pytest.raises(ConfigError, match=r"'old/list' is a list.*moves only a part"):
        ckpt.restore(state(0, "old"), load=LoadOptions(rename={"old/list/0": "x"}))


def test_random_generators_stay_unless_they_are_included(pool: hpstore.Pool) -> None:
    with Checkpointer(pool, "run") as ckpt:
        random.seed(3)
        ckpt.save(1, {"x": 1}).result()
        wanted = random.random()
        for load, same in (
            (LoadOptions(include="x"), False),
            (None, True),
            (LoadOptions(rename=lambda name: name), True),
            (LoadOptions(exclude="__rng__"), False),
        ):
            random.seed(4)
            ckpt.restore({"x": 0}, load=load)
            assert (random.random() == wanted) is same, load


def test_names_that_collide_are_both_named(ckpt: Checkpointer) -> None:
    """Two old names onto one, onto a place that is taken, or two parameters of an optimizer."""
    source = net(3, 0)
    ckpt.save(1, {"model": source, "optimizer": trained(source), "x": torch.ones(2)}).result()
    x = torch.zeros(2)
    for rename, says in (
        (
            {"model/body.*": "model/head.*"},
            r"'model/body\.weight' and 'model/head\.weight' would both",
        ),
        ({"x": "model/head.bias"}, "would both be called 'model/head.bias'"),
        ({"x": "model"}, "renamed to 'model': that place is taken"),
        ({"x": "model/head.bias/deep"}, "place is taken"),
        ({"x": "optimizer/state/head.bias"}, "would both|place is taken"),
    ):
        with pytest.raises(CheckpointMismatch, match=says):
            ckpt.restore({"model": net(3, 1), "x": x}, load=LoadOptions(rename=rename))
    assert not x.any()


WRONG: dict[str, Callable[[], Any]] = {
    "no patterns": lambda: LoadOptions(include=[]),
    "no text": lambda: LoadOptions(exclude=[3]),  # type: ignore[list-item]
    "other stars": lambda: LoadOptions(rename={"a*": "b"}),
    "an empty part": lambda: LoadOptions(rename={"a": "b//c"}),
    "a list of renames": lambda: LoadOptions(rename=[("a", "b")]),  # type: ignore[arg-type]
    "an empty name": lambda: LoadOptions(rename={"": "b"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused_when_they_are_made(case: str) -> None:
    with pytest.raises(ConfigError):
        WRONG[case]()


def test_a_wrong_argument_changes_nothing(ckpt: Checkpointer) -> None:
    """A function that gives no name or raises, patterns that mean nothing, no options at all."""
    ckpt.save(1, {"x": torch.ones(2), "y": torch.ones(2)}).result()
    state = {"x": torch.zeros(2), "y": torch.zeros(2)}

    def raises(name: str) -> str:
        raise KeyError(name)

    for load, error, says in (
        (LoadOptions(rename=lambda name: 3), ConfigError, "rename gave 3 for 'x'"),  # type: ignore[arg-type, return-value]
        (LoadOptions(rename=lambda name: ""), ConfigError, "rename gave ''"),
        (LoadOptions(rename=lambda name: "a/" * 99 + name), ConfigError, "deeper than"),
        (LoadOptions(rename=raises), KeyError, "x"),
        (
            LoadOptions(include="modle/*"),
            CheckpointMismatch,
            "'modle/.*' matches no name of step 1",
        ),
        (LoadOptions(rename={"z": "x"}), CheckpointMismatch, "rename='z' matches no name"),
        ({"include": "x"}, ConfigError, "load= takes LoadOptions"),
    ):
        with pytest.raises(error, match=says):
            ckpt.restore(state, load=load, strict=False)  # type: ignore[arg-type]
        assert not state["x"].any()
        assert not state["y"].any()


# --- the model alone ----------------------------------------------------------------------------


def test_the_model_alone_is_read_from_a_read_only_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By URL and by a checkpointer: the bytes of the optimizer are not read."""
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "names.toml"))
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "pool.toml"
    source = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    places = [tmp_path / f"d{n}" for n in range(5)]
    with (
        hpstore.create(places, data=3, parity=2, config=config, name="models") as pool,
        Checkpointer(pool, "runs/gpt") as ckpt,
    ):
        ckpt.save(1, {"model": source, "optimizer": optimizer, "ema": {"model": source}}).result()
        ckpt.save(2, {"model": source, "optimizer": optimizer}).result()
    size = sum(p.numel() * 4 for p in source.parameters())
    target = torch.nn.Linear(300, 300)
    report = load_model("hpstore://models/runs/gpt", target)
    assert isinstance(report, RestoreReport)
    assert torch.equal(target.weight, source.weight)
    assert (report.step, report.loaded) == (2, ("model/bias", "model/weight"))
    assert size <= report.read_bytes < 1.2 * size
    assert "optimizer/state/weight" in report.left_out
    with hpstore.open(config, read_only=True) as pool, Checkpointer(pool, "runs/gpt") as ckpt:
        other = torch.nn.Linear(300, 300)
        assert ckpt.load_model(other, 1, name="ema/model").step == 1
        assert torch.equal(other.weight, source.weight)
        half = LoadOptions(include="model/weight")
        third = torch.nn.Linear(300, 300)
        assert ckpt.load_model(third, load=half).loaded == ("model/weight",)
        with pytest.raises(CheckpointMismatch, match=r"include='net' matches no name of step 2"):
            ckpt.load_model(other, name="net")
        with pytest.raises(CheckpointMismatch, match="weight"):
            ckpt.load_model(torch.nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="no checkpoint under 'runs/none'"):
        load_model("hpstore://models/runs/none", target)
    for url in ("models/runs", "hpstore://models", "hpstore:///runs", None):
        with pytest.raises(ConfigError, match="no URL of a run"):
            load_model(url, target)  # type: ignore[arg-type]
    for model, name in (("x", "model"), (target, "a//b"), (target, 3)):
        with pytest.raises(ConfigError):
            load_model("hpstore://models/runs/gpt", model, name=name)  # type: ignore[arg-type]


# --- several ranks ------------------------------------------------------------------------------


def renamed_alike(rank: int, world: int, directory: Path) -> None:
    """FSDP2: names, moments and parts; ranks that ask for other parts are refused on all."""
    with Checkpointer(open_pool(directory), "run", rng=False) as ckpt:
        source, old = sharded(3, 1, world)
        ckpt.save(1, {"net": source, "optimizer": old}).result()
        body = full(source.get_parameter("body.weight"))
        wanted = full(old.state[source.get_parameter("body.weight")]["exp_avg"])
        target, fresh = sharded(3, 2, world)
        head = full(target.get_parameter("head.weight"))
        load = LoadOptions(rename={"net/*": "model/*"}, exclude="model/head.*")
        state: dict[str, Any] = {"model": target, "optimizer": fresh}
        said = raised(
            lambda: ckpt.restore(state, load=load if rank else LoadOptions(rename=load.rename))
        )
        together("ranks differ" in said, said)
        untouched = full(target.get_parameter("head.weight"))
        together(torch.equal(untouched, head), "something was changed")
        ckpt.restore(state, load=load)
        together(torch.equal(full(target.get_parameter("body.weight")), body), "the body")
        together(torch.equal(full(target.get_parameter("head.weight")), head), "the head")
        slots = fresh.state[target.get_parameter("body.weight")]
        together(torch.equal(full(slots["exp_avg"]), wanted), "moments")
        report = report_of(ckpt)
        together("model/head.weight" in report.left_out and not report.missing, report)
        alone = sharded(3, 3, world)[0]
        ckpt.load_model(alone, name="net")
        together(torch.equal(full(alone.get_parameter("body.weight")), body), "the model alone")


def test_all_ranks_choose_alike(tmp_path: Path) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 2, renamed_alike)
