"""Objects in lists, dicts and namespaces of a state are filled, or refused, and never replaced."""

from __future__ import annotations

import argparse
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, LoadOptions
from hpstore.errors import CheckpointMismatch
from tests.integration.test_load_shapes import report_of


@pytest.fixture
def ckpt(pool: hpstore.Pool) -> Iterator[Checkpointer]:
    with Checkpointer(pool, "run", rng=False) as made:
        yield made


class Count:
    """A Stateful."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@dataclass
class Config:
    a: Any = None


@dataclass
class Other:
    held: Any = None


@dataclass
class Lazy:
    """A class whose field may be set later."""

    a: int
    b: Any = None

    def __post_init__(self) -> None:
        del self.b


def layer() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(layer().parameters(), 0.1)


def stepped() -> random.Random:
    made = random.Random(3)
    made.random()
    return made


OBJECTS: dict[str, Callable[[], Any]] = {
    "module": layer,
    "optimizer": sgd,
    "stateful": Count,
    "generator": torch.Generator,
    "python": stepped,
}
UNALIKE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a longer list": (lambda make: [make(), make()], lambda make: [make()]),
    "a shorter list": (lambda make: [make()], lambda make: [make(), make()]),
    "a shorter tuple": (lambda make: (make(),), lambda make: (make(), make())),
    "a longer deque": (lambda make: deque([make(), make()]), lambda make: deque([make()])),
    "an empty list": (lambda make: [], lambda make: [make()]),
    "a dict for a list": (lambda make: {"0": make()}, lambda make: [make()]),
    "a list for a dict": (lambda make: [make()], lambda make: {"0": make()}),
    "a number": (lambda make: 3, lambda make: [make()]),
    "None": (lambda make: None, lambda make: {"a": [make()]}),
    "a list in a list": (lambda make: [[make(), make()]], lambda make: [[make()]]),
    "a list in a dict in a list": (
        lambda make: [{"a": (make(), make())}],
        lambda make: [{"a": (make(),)}],
    ),
    "an object of another class": (lambda make: Config(1), lambda make: Other(make())),
    "a namespace of another class": (
        lambda make: argparse.Namespace(a=1),
        lambda make: types.SimpleNamespace(held=make()),
    ),
    "other names of a defaultdict": (
        lambda make: defaultdict(list, a=1),
        lambda make: defaultdict(list, b=make()),
    ),
}


def held(value: Any) -> list[Any]:
    """The objects in a state."""
    if isinstance(value, dict):
        return [found for child in value.values() for found in held(child)]
    if isinstance(value, (list, tuple, deque)):
        return [found for child in value for found in held(child)]
    if isinstance(value, (Config, Other, types.SimpleNamespace)):
        return held(vars(value))
    return [value]


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("case", UNALIKE)
def test_objects_in_a_container_that_is_not_alike_stay(
    ckpt: Checkpointer, case: str, kind: str
) -> None:
    """They became dicts, with strict=True too. That refuses; strict=False loads what fits."""
    saved, wanted = UNALIKE[case]
    ckpt.save(1, {"v": saved(OBJECTS[kind]), "z": 1}).result()
    state = {"v": wanted(OBJECTS[kind]), "z": 0}
    before = state["v"]
    objects = held(before)
    texts = [repr(getattr(one, "state_dict", list)()) for one in objects]
    named_alike = case in ("a dict for a list", "a list for a dict")  # all of it can be chosen
    for load in (None,) if named_alike else (None, LoadOptions(exclude="z")):
        with pytest.raises(CheckpointMismatch, match="Nothing was changed") as refused:
            ckpt.restore(state, load=load)
        assert "'v" in str(refused.value)
        assert [repr(getattr(one, "state_dict", list)()) for one in objects] == texts
        assert state == {"v": before, "z": 0}
    ckpt.restore(state, strict=False)
    found = held(state["v"])
    assert len(found) == len(objects)
    assert all(a is b for a, b in zip(found, objects, strict=True))
    report = report_of(ckpt)
    assert state["z"] == 1
    assert named_alike or report.unexpected or report.missing


def test_what_fits_of_a_list_of_another_length_is_loaded(ckpt: Checkpointer) -> None:
    """With strict=False, by the numbers; the rest is listed."""
    ckpt.save(1, {"v": [layer(), Count(5), Count(6), layer()]}).result()
    whole = ckpt.load(1)
    state: dict[str, Any] = {"v": (layer(), Count(), Count())}
    ckpt.restore(state, strict=False)
    assert torch.equal(state["v"][0].weight, whole["v/0/weight"])
    assert [each.count for each in state["v"][1:]] == [5, 6]
    assert report_of(ckpt).unexpected == ("v/3/bias", "v/3/weight")
    assert report_of(ckpt).loaded == ("v/0/bias", "v/0/weight")
    state = {"v": [layer(), Count(), Count(), layer(), Count(9), 3]}
    ckpt.restore(state, strict=False)
    assert [each.count for each in state["v"][1:3]] == [5, 6]
    assert (state["v"][4].count, state["v"][5]) == (9, 3)
    assert report_of(ckpt).missing == ("v/4", "v/5")


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace])
def test_attributes_of_a_namespace_are_compared_as_keys_are(ckpt: Checkpointer, kind: Any) -> None:
    """One that the state's lacks was dropped without a word, as was one in a list."""
    ckpt.save(1, {"n": [kind(a=1, t=torch.ones(2), deep=kind(x=1, y=2))], "z": 1}).result()
    mine = kind(b=3, t=torch.zeros(2), deep=kind(x=0))
    state: dict[str, Any] = {"n": [mine], "z": 0}
    for load in (None, LoadOptions(exclude="z")):
        with pytest.raises(CheckpointMismatch, match=r"not taken.*a'.*not recorded.*b'"):
            ckpt.restore(state, load=load)
        assert (vars(mine)["b"], mine.deep.x, mine.t.tolist()) == (3, 0, [0, 0])
    ckpt.restore(state, strict=False)
    assert report_of(ckpt).unexpected == ("n/0/a", "n/0/deep/y")
    assert report_of(ckpt).missing == ("n/0/b",)
    assert state["n"][0] is mine
    assert (mine.b, vars(mine.deep), mine.t.tolist()) == (3, {"x": 1}, [1, 1])
    ckpt.save(2, {"n": kind(a=1)}).result()
    state = {"n": kind(b=2)}
    ckpt.restore(state, strict=False)
    assert state["n"] == kind(b=2)  # nothing in common: it was replaced


def test_a_field_that_an_object_has_not_yet_is_set(ckpt: Checkpointer) -> None:
    """A dataclass whose field is set later gets what was saved of it."""
    source = Lazy(1)
    source.b = torch.ones(2)
    ckpt.save(1, {"o": source}).result()
    state = {"o": Lazy(0)}
    mine = state["o"]
    ckpt.restore(state)
    assert state["o"] is mine
    assert (mine.a, mine.b.tolist()) == (1, [1, 1])
    assert report_of(ckpt).loaded == ("o/b",)
