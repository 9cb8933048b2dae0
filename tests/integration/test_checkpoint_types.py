"""What is given back: values of every type, in place where somebody may hold them, and what objects
with a format of their own made of it (r_counter, r_extra, r_fusedadam, r_noparams)."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import io
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.errors import CheckpointError, CheckpointMismatch
from tests.property.test_typed_values import Colour, same

# Any below: states hold whatever a trainer puts there


@dataclasses.dataclass
class Progress:
    step: int
    best: Any = None


@dataclasses.dataclass(frozen=True)
class Fixed:
    step: int
    weights: torch.Tensor


def restored(pool: hpstore.Pool, saved: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """`into`, after a save of the one and a restore of the other by a checkpointer that has kept
    nothing in memory."""
    with Checkpointer(pool, "run", save=SaveOptions(warm=False)) as ckpt:
        ckpt.save(1, saved).result()
    with Checkpointer(pool, "run", save=SaveOptions(warm=False)) as ckpt:
        assert ckpt.restore(into) == 1
    return into


# --- very many numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("beside", ["alone", "with a tensor", "with a list"])
def test_a_dict_of_very_many_numbers_takes_no_call_for_each_step(
    pool: hpstore.Pool, beside: str
) -> None:
    """200,000 numbers took twice as long as torch.load: 40 calls of Python for each. A few are
    left, also where something else sits among them. Values, types and the dict itself are kept."""
    other: dict[str, dict[str, Any]] = {
        "alone": {},
        "with a tensor": {"t": torch.ones(2)},
        "with a list": {"l": [1, {"a": 2}]},
    }
    count = 5000
    values = {f"k{n}": (n / 7, n, None, f"{n}", n % 2 == 0)[n % 5] for n in range(count)}
    state = {"d": {**values, **other[beside]}}
    own: dict[str, Any] = dict.fromkeys(values, 0) | copy.deepcopy(other[beside])
    into: dict[str, Any] = {"d": own}
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt:
        ckpt.save(1, state).result()
    calls = 0

    def counted(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt:
        sys.setprofile(counted)
        try:
            ckpt.restore(into)
        finally:
            sys.setprofile(None)
    assert into["d"] is own
    assert {name: own[name] for name in values} == values
    assert all(type(own[name]) is type(value) for name, value in values.items())
    assert list(own) == [*values, *other[beside]]
    assert calls < 12 * count + 10_000


def test_numbers_of_other_names_are_seen_among_very_many(pool: hpstore.Pool) -> None:
    """One more, one less, one that became a list: as with few."""
    values = dict.fromkeys(map(str, range(100)), 1)
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt:
        ckpt.save(1, {"d": values, "counts": Counter(values)}).result()
        for wrong in ({**values, "x": 1}, dict(list(values.items())[1:])):
            with pytest.raises(CheckpointMismatch, match="under 'd'"):
                ckpt.restore({"d": dict(wrong), "counts": Counter()})
        part = {"d": {"0": 5, "x": 7}, "counts": Counter(x=3)}
        ckpt.restore(part, strict=False)
        assert part == {"d": {"0": 1, "x": 7}, "counts": Counter(values)}


# --- in place -------------------------------------------------------------------------------------


def test_what_somebody_may_hold_is_filled_where_it_is(pool: hpstore.Pool) -> None:
    """Lists, deques, sets, counters, objects and generators are the same ones afterwards."""
    draws, numbers = torch.Generator().manual_seed(3), np.random.default_rng(4)
    torch.rand(5, generator=draws), numbers.random(3)
    saved = {
        "history": [1, 2, 3],
        "window": deque([4, 5], 9),
        "seen": {6},
        "counts": Counter("aab"),
        "groups": defaultdict(list, {"x": [7]}),
        "progress": Progress(8, torch.ones(2)),
        "draws": draws,
        "numbers": numbers,
        "python": random.Random(5),
        "best": Colour.GREEN,
    }
    weights = torch.zeros(2)
    into: dict[str, Any] = {
        "history": [],
        "window": deque([0], 9),
        "seen": {1, 2},
        "counts": Counter("z"),
        "groups": defaultdict(list, {"y": [0]}),
        "progress": Progress(0, weights),
        "draws": torch.Generator(),
        "numbers": np.random.default_rng(),
        "python": random.Random(),
        "best": Colour.RED,
    }
    held = dict(into)
    restored(pool, saved, into)
    for name in held.keys() - {"best"}:
        assert into[name] is held[name], name
    assert held["progress"].best is weights
    sources = ("draws", "numbers", "python")
    assert all(same(into[name], saved[name]) for name in saved if name not in sources)
    assert torch.equal(torch.rand(9, generator=into["draws"]), torch.rand(9, generator=draws))
    assert into["numbers"].random() == numbers.random()
    assert into["python"].random() == saved["python"].random()  # type: ignore[attr-defined]


def test_a_factory_that_nothing_can_hold_is_kept_by_who_has_it(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; a defaultdict with it in the state has it still, another has none."""
    saved = {"a": defaultdict(lambda: 7, {"x": 1}), "b": defaultdict(lambda: 7, {"x": 1})}
    with Checkpointer(pool, "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, saved).result()
        state: dict[str, Any] = {"a": defaultdict(lambda: 8), "b": None}
        ckpt.restore(state)
    assert sum("which no checkpoint can hold" in text for text in caplog.messages) == 2
    assert (state["a"]["x"], state["a"]["new"]) == (1, 8)
    assert state["b"] == {"x": 1}
    with pytest.raises(KeyError):
        state["b"]["new"]


class _Named(dict[str, int]):
    pass


class _Pair(tuple[int, ...]):
    pass


class _Text(str):
    __slots__ = ()


def test_a_class_that_is_lost_is_warned_of_once(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """A mapping that the state has is filled and keeps its class; all else is Python's own."""
    saved = {"a": _Named(x=1), "b": _Named(x=2), "c": _Pair((1, 2)), "d": _Text("t")}
    with Checkpointer(pool, "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, saved).result()
        state: dict[str, Any] = {"a": _Named(x=0), "b": None, "c": None, "d": None}
        ckpt.restore(state)
    assert [type(value) for value in state.values()] == [_Named, dict, tuple, str]
    assert state == saved
    warned = [text for text in caplog.messages if "comes back as a plain" in text]
    assert [text.split("plain ")[1].split(":")[0] for text in warned] == [
        "dict, unless the state that is restored has one in its place",
        "tuple",
        "str",
    ]


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.zeros(1, "M8[s]"), np.zeros(1, [("a", "i4"), ("b", "f8")])]
)
def test_arrays_that_torch_has_no_type_for_are_refused(
    pool: hpstore.Pool, array: np.ndarray[Any, Any]
) -> None:
    """With the path, and with what can be saved in their place."""
    with Checkpointer(pool, "run") as ckpt:
        with pytest.raises(CheckpointError, match=r"'x' is a numpy array of .*: save "):
            ckpt.save(1, {"x": array}).result()
        assert ckpt.latest_valid() is None


def test_a_generator_of_another_algorithm_changes_nothing(pool: hpstore.Pool) -> None:
    """Said before anything is filled."""
    weights = torch.zeros(3)
    with pytest.raises(CheckpointMismatch, match="Nothing was changed"):
        restored(
            pool,
            {"w": torch.ones(3), "r": np.random.default_rng(1)},
            {"w": weights, "r": np.random.Generator(np.random.MT19937(1))},
        )
    assert weights.sum() == 0


def test_tensors_are_filled_wherever_they_sit(pool: hpstore.Pool) -> None:
    """In tuples, deques and objects as in lists: no second copy of a large one is made."""

    def places() -> dict[str, Any]:
        weights = [torch.zeros(3) for _ in range(5)]
        return {
            "tuple": (weights[0], [weights[1]]),
            "deque": deque([weights[2]]),
            "object": Progress(0, {"m": weights[3]}),
            "ordered": OrderedDict(a=(weights[4], 1)),
        }

    def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
        first, (second,) = state["tuple"]
        return [
            first,
            second,
            state["deque"][0],
            state["object"].best["m"],
            state["ordered"]["a"][0],
        ]

    saved, into = places(), places()
    for n, tensor in enumerate(tensors(saved)):
        tensor += n + 1
    held = tensors(into)
    restored(pool, saved, into)
    assert all(a is b for a, b in zip(tensors(into), held, strict=True))
    assert [t[0].item() for t in held] == [1, 2, 3, 4, 5]


def test_a_frozen_object_is_replaced_by_one_with_its_tensors(pool: hpstore.Pool) -> None:
    """As a tuple is."""
    fixed = restored(pool, {"f": Fixed(3, torch.ones(2))}, {"f": Fixed(0, torch.zeros(2))})["f"]
    assert (fixed.step, fixed.weights.tolist()) == (3, [1, 1])


def test_models_and_optimizers_may_sit_in_tuples(pool: hpstore.Pool) -> None:
    """As they may in dicts and lists."""

    def build() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        return {"train": (model, torch.optim.Adam(model.parameters()), {"step": 0})}

    saved, into = build(), build()
    model, optimizer, _ = saved["train"]
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    saved["train"][2]["step"] = 4
    held = into["train"]
    restored(pool, saved, into)
    assert into["train"] is held
    assert same(dict(held[0].state_dict()), dict(model.state_dict()))
    assert same(held[1].state_dict()["state"], optimizer.state_dict()["state"])
    assert held[2] == {"step": 4}


def test_two_tensors_of_one_path_are_refused_with_what_to_do(pool: hpstore.Pool) -> None:
    """{"a/b": t} beside {"a": {"b": t}}: names in a checkpoint are paths (docs/checkpoints.md)."""
    with Checkpointer(pool, "run") as ckpt, pytest.raises(CheckpointError, match="rename one"):
        ckpt.save(1, {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}})


# --- objects with a format of their own -----------------------------------------------------------


class Compact(torch.optim.Optimizer):
    """Momentum in int16, with a scale beside it that is in no state_dict(), as 8-bit optimizers and
    TransformerEngine's FusedAdam have it: only its own load_state_dict() knows what to make of one.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.scale: dict[torch.Tensor, torch.Tensor] = {}

    def _put(self, parameter: torch.Tensor, moment: torch.Tensor) -> None:
        scale = moment.abs().max().clamp_min(1e-12) / 32_000
        self.scale[parameter] = scale
        self.state[parameter]["m"] = (moment / scale).round().to(torch.int16)

    def _get(self, parameter: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.state[parameter]["m"].float() * self.scale[parameter]
        return found

    @property
    def _all(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self._all:
            old = self._get(parameter) if "m" in self.state[parameter] else 0.0
            assert parameter.grad is not None
            moment = old * 0.9 + parameter.grad
            self._put(parameter, moment)
            parameter.sub_(moment, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for number, parameter in enumerate(self._all):
            if number in found["state"]:
                found["state"][number] = {"m": self._get(parameter)}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for number, slots in state_dict["state"].items():
            self._put(self._all[number], slots["m"].float())


def go(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for n in range(steps):
        model(torch.ones(2, 4) * (n + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "rolled back"])
def test_what_an_optimizer_made_of_its_state_is_not_touched(
    pool: hpstore.Pool, *, alone: bool, used: bool
) -> None:
    """r_fusedadam: the next steps are those after its load_state_dict(), by name or by number."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = Compact(model.parameters())
    go(model, optimizer, 3)
    other, plain = copy.deepcopy(model), copy.deepcopy(model)
    mine, theirs = Compact(other.parameters()), Compact(plain.parameters())
    if used:
        go(other, mine, 1)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    names = () if alone else ("model",)
    restored(
        pool,
        {"optimizer": optimizer} | dict.fromkeys(names, model),
        {"optimizer": mine} | dict.fromkeys(names, other),
    )
    assert all(slots["m"].dtype is torch.int16 for slots in mine.state.values())
    other.load_state_dict(model.state_dict())
    go(other, mine, 2)
    go(plain, theirs, 2)
    assert torch.equal(other.weight, plain.weight)


class Meta(torch.nn.Linear):
    """Its extra state is a tensor as long as its history, and a buffer grows, too."""

    def __init__(self, meta: bytes = b"") -> None:
        super().__init__(2, 2)
        self.meta = meta
        self.register_buffer("seen", torch.zeros(len(meta)))

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(list(self.meta), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.meta = bytes(state.tolist())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *more)


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_that_takes_another_size_is_let(pool: hpstore.Pool, *, strict: bool) -> None:
    """r_extra (Automodel#3814): only the module knows whether its own state may change its size."""
    saved, into = torch.nn.Sequential(Meta(b"amax history")), torch.nn.Sequential(Meta())
    with Checkpointer(pool, "run", save=SaveOptions(warm=False)) as ckpt:
        ckpt.save(1, {"m": saved}).result()
        ckpt.restore({"m": into}, strict=strict)
    assert into[0].meta == b"amax history"
    assert into[0].seen.shape == (12,)
    assert same(into[0].weight.data, saved[0].weight.data)
    with Checkpointer(pool, "run", save=SaveOptions(warm=False)) as ckpt:
        head = torch.nn.Linear(2, 3)
        wider = torch.nn.Sequential(head)
        before = head.weight.detach().clone()
        ckpt.restore({"m": wider}, strict=False)  # one without a loader of its own is not asked
        assert ckpt.last_restore is not None
        assert set(ckpt.last_restore.skipped) == {"m/0.weight", "m/0.bias"}
        assert same(wider[0].weight.data, before)


class Scales(torch.nn.Module):
    """Its extra state is a stream, as layers of TransformerEngine have it."""

    def __init__(self, scales: bytes = b"") -> None:
        super().__init__()
        self.scales = scales

    def get_extra_state(self) -> io.BytesIO:
        return io.BytesIO(self.scales)

    def set_extra_state(self, state: io.BytesIO) -> None:
        self.scales = state.read()


def test_an_extra_state_may_be_a_stream(pool: hpstore.Pool) -> None:
    """single.py `modules`: it was refused, where torch.save and DCP take it."""
    into = Scales()
    restored(pool, {"m": Scales(b"fp8 scales")}, {"m": into})
    assert into.scales == b"fp8 scales"


class Window(dict[str, Any]):
    """A dict that gives and takes its state itself, under another name."""

    def state_dict(self) -> dict[str, Any]:
        return {"content": dict(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self.update(state["content"])


def test_a_container_with_a_state_of_its_own_is_given_that(pool: hpstore.Pool) -> None:
    """What it holds is its own matter: no name in it is compared."""
    found = restored(pool, {"w": Window(a=1)}, {"w": Window(b=2)})
    assert found["w"] == {"a": 1}


def test_a_module_without_parameters_is_saved(pool: hpstore.Pool) -> None:
    """r_noparams: a loss in the state, alone or beside a model."""
    state = {"loss": torch.nn.CrossEntropyLoss(), "model": torch.nn.Linear(1, 1)}
    into = {"loss": torch.nn.CrossEntropyLoss(), "model": torch.nn.Linear(1, 1)}
    restored(pool, state, into)
    assert torch.equal(into["model"].weight, state["model"].weight)  # type: ignore[arg-type]


def test_a_zone_keeps_its_name_and_an_array_that_cannot_be_written_is_saved(
    pool: hpstore.Pool,
) -> None:
    """The name was lost without a word; torch warned of each such array, as those of jax are."""
    zone = datetime.timezone(datetime.timedelta(hours=5), "PKT")
    plain = datetime.timezone(datetime.timedelta(hours=5))
    fixed = np.arange(4.0)
    fixed.setflags(write=False)
    state = {"at": datetime.datetime(2026, 1, 1, tzinfo=zone), "zones": [zone, plain], "a": fixed}
    found = restored(pool, state, {"at": None, "zones": None, "a": None})
    assert [z.tzname(None) for z in found["zones"]] == ["PKT", "UTC+05:00"]
    assert (found["at"], found["at"].tzname()) == (state["at"], "PKT")
    assert found["a"].tolist() == fixed.tolist()


def test_what_is_refused_is_called_what_it_is(pool: hpstore.Pool) -> None:
    """An array of objects was said to be no numpy array, and a class to have no state."""
    refused = {"array of objects": np.array([1, "a"], object), "class torch": torch.nn.ReLU}
    with Checkpointer(pool, "run") as ckpt:
        for said, value in refused.items():
            with pytest.raises(CheckpointError, match=said) as error:
                ckpt.save(1, {"x": value})
            assert "state_dict() has returned" not in str(error.value)
