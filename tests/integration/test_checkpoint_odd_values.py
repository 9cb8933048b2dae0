"""Values that are rare in a state: empty scalars of numpy, classes of arrays, orders of dicts,
arrays beside tensors of other devices, RNG states of GPUs that are not there."""

from __future__ import annotations

import enum
import logging
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, LoadOptions, SaveOptions
from hpstore.checkpoint.state.scalars import StandIn
from hpstore.checkpoint.state.state_tree import Decoding, decode_tree
from hpstore.checkpoint.state.training_state import rng_state, set_rng_state
from hpstore.checkpoint.state.tree_paths import children, leaves
from hpstore.errors import CheckpointError, CheckpointMismatch, IntegrityError

# Any below: states hold whatever a trainer puts there


def restored(pool: hpstore.Pool, saved: dict[str, Any], into: dict[str, Any]) -> dict[str, Any]:
    """`into`, after a save of the one and a restore of the other."""
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt:
        ckpt.save(1, saved).result()
        assert ckpt.restore(into) == 1
    return into


# --- scalars of numpy ---------------------------------------------------------------------------


def test_an_empty_text_of_numpy_comes_back(pool: hpstore.Pool) -> None:
    """Its type has an itemsize of 0, and numpy writes the end of it: no step that had one in it,
    as a value or as a key, could be restored."""
    saved = {"text": np.str_(""), "bytes": np.bytes_(b""), "seen": Counter({np.str_(""): 3})}
    into = restored(pool, saved, {"text": "x", "bytes": b"x", "seen": Counter()})
    assert into == saved
    assert [type(into[name]) for name in ("text", "bytes")] == [np.str_, np.bytes_]
    (key,) = into["seen"]
    assert type(key) is np.str_
    with Checkpointer(pool, "run") as ckpt:
        tree = ckpt.steps.manifest(1).tree
    assert [leaf.shown() for leaf in leaves(tree["text"])] == ["np.str_('')"]
    assert [name for name, _ in children(tree["seen"])] == [""]


@pytest.mark.parametrize("dtype", ["<U0", "|S0", ">U0"])
def test_an_empty_scalar_is_of_zeros_alone(dtype: str) -> None:
    """As it is in steps that were written before; other bytes are none of a save."""
    nothing = Decoding(tensor=dict[str, torch.Tensor]().__getitem__)
    assert decode_tree({"$": "scalar", "dtype": dtype, "v": "00000000"}, nothing) in ("", b"")
    with pytest.raises(IntegrityError):
        decode_tree({"$": "scalar", "dtype": dtype, "v": "41000000"}, nothing)


# --- arrays beside tensors ------------------------------------------------------------------------


def test_arrays_stay_on_the_host_where_tensors_go_to_a_device(pool: hpstore.Pool) -> None:
    """The state of numpy's generator is an array in nearly every step."""
    saved = {"t": torch.ones(3), "a": np.arange(4), "list": [np.ones(2), torch.zeros(2)]}
    with Checkpointer(pool, "run", save=SaveOptions(warm=False)) as ckpt:
        ckpt.save(1, saved).result()
        tree = ckpt.read(1).tree(map_location="meta")
    assert (tree["t"].device.type, tree["list"][1].device.type) == ("meta", "meta")
    assert tree["a"].tolist() == [0, 1, 2, 3]
    assert tree["list"][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["of bfloat16", "with a gradient"])
def test_an_array_is_not_put_into_a_tensor_that_is_none(pool: hpstore.Pool, kind: str) -> None:
    """Such a tensor was called a damaged step, and every older one was tried."""
    place = {
        "of bfloat16": torch.zeros(3, dtype=torch.bfloat16),
        "with a gradient": torch.zeros(3, requires_grad=True),
    }[kind]
    first = torch.zeros(2)
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(warm=False)) as ckpt:
        ckpt.save(1, {"first": torch.ones(2), "x": np.ones(3, np.float32)}).result()
        with pytest.raises(CheckpointMismatch, match="'x': a numpy array was saved"):
            ckpt.restore({"first": first, "x": place}, load=LoadOptions(cast=True))
    assert not first.any()
    assert not place.detach().any()


# --- classes and orders ---------------------------------------------------------------------------


class Metres(np.ndarray[Any, Any]):
    """An array with a unit."""


class Label(torch.Tensor):
    """A tensor with a meaning."""


def test_a_class_that_is_lost_is_said(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Once for each class, as of dicts and texts. Of a map and a buffer nothing is lost."""
    mapped = np.memmap(tmp_path / "map", np.float32, mode="w+", shape=(3,))
    state: dict[str, Any] = {
        "length": np.ones(3).view(Metres),
        "label": torch.ones(3).as_subclass(Label),
        "map": mapped,
        "buffer": torch.nn.Buffer(torch.ones(3)),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }
    with Checkpointer(pool, "run", rng=False) as ckpt, caplog.at_level(logging.WARNING):
        ckpt.save(1, state).result()
        ckpt.save(2, state).result()
        said = [r.getMessage() for r in caplog.records if "comes back as a plain" in r.getMessage()]
        into = {"length": np.zeros(3).view(Metres), "label": torch.zeros(3).as_subclass(Label)}
        ckpt.restore(into, 2, strict=False)
    assert [text.split(" is a ")[0] for text in said] == ["'length'", "'label'"]
    assert "plain ndarray, unless the state that is restored has one" in said[0]
    assert "plain Tensor, unless" in said[1]
    assert [type(value) for value in into.values()] == [Metres, Label]
    assert all(np.asarray(value).tolist() == [1.0, 1.0, 1.0] for value in into.values())


class _Held(dict[str, Any]):
    pass


class _Ordered(OrderedDict[str, Any]):
    pass


class _Listed(defaultdict[str, Any]):
    pass


@pytest.mark.parametrize("kind", [_Held, _Ordered, _Listed])
@pytest.mark.parametrize("value", [1, torch.ones(2), [torch.ones(2)], torch.nn.Linear(1, 1)])
def test_a_class_of_dicts_is_warned_of_whatever_is_in_it(
    pool: hpstore.Pool, kind: Any, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With a tensor in it, it was taken for a plain dict before its class was looked at."""

    class Own(kind):  # type: ignore[misc]
        pass

    saved = Own()
    saved["x"] = value
    with Checkpointer(pool, "run", rng=False) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"a": [saved]}).result()
    (warned,) = [text for text in caplog.messages if "comes back as a plain" in text]
    plain = "defaultdict" if kind is _Listed else "dict"
    assert "'a/0' is a " in warned
    assert f"Own, which comes back as a plain {plain}, unless" in warned


def test_a_class_that_is_not_loaded_is_read_as_its_error_advises(pool: hpstore.Pool) -> None:
    """tree() had no `strict`, which the error says to pass."""
    module = types.ModuleType("gone")
    Kind = enum.Enum("Kind", {"A": 1}, module="gone")  # noqa: N806
    vars(module)["Kind"] = Kind
    sys.modules["gone"] = module
    with Checkpointer(pool, "run", rng=False) as ckpt:
        try:
            ckpt.save(1, {"kind": Kind(1), "t": torch.ones(2)}).result()
        finally:
            del sys.modules["gone"]
        step = ckpt.read(1)
        with pytest.raises(CheckpointError, match=r"gone:Kind.*strict=False"):
            step.tree()
        found = step.tree(strict=False)
    assert isinstance(found["kind"], StandIn)
    assert (found["kind"].class_name, found["kind"].value) == ("gone:Kind", "A")
    assert found["t"].tolist() == [1, 1]


def test_an_ordered_dict_comes_back_in_its_order(pool: hpstore.Pool) -> None:
    """Which is a part of its value: a cache would throw out other entries."""
    saved = {"cache": OrderedDict(a=1, b=torch.ones(2), c=3), "in": [OrderedDict(x=1, y=[2])]}
    cache = OrderedDict(c=0, b=torch.zeros(2), a=0)
    into = restored(pool, saved, {"cache": cache, "in": [OrderedDict(y=[0], x=0)]})
    assert into["cache"] is cache
    assert list(cache) == ["a", "b", "c"]
    assert into["in"] == saved["in"]
    assert cache["b"].tolist() == [1.0, 1.0]


# --- random generators of GPUs --------------------------------------------------------------------


def test_rng_states_of_more_gpus_than_are_visible_set_those(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run on eight GPUs goes on where one is visible. torch raised IndexError at the very end of
    a restore. torch's functions are stand-ins: there is no GPU here."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.extend)
    saved = [torch.full((16,), number, dtype=torch.uint8) for number in range(3)]
    states = {**rng_state(), "cuda": saved}
    set_rng_state(states)
    assert [int(state[0]) for state in given] == [0]
    assert "3 GPUs were saved, and 1 are visible" in caplog.text
    caplog.clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    set_rng_state(states)
    assert len(given) == 4
    assert not caplog.records
