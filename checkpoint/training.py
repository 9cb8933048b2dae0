"""Models and optimizers by names that do not depend on how they are wrapped.

Names are those of torch.distributed.checkpoint.state_dict: no `module.`, no `_orig_mod.`, optimizer
state by parameter name. RNG states are collected and set here, too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hpstore.checkpoint.optimizers import (
    check_optimizer,
    load_optimizer,
    named_parameters,
    optimizer_tensors,
    saved_optimizer,
    unwrapped,
)
from hpstore.checkpoint.tree import (
    MAX_DEPTH,
    Absent,
    PerRank,
    check_fields,
    check_leaf,
    check_names,
    field_names,
    fill,
    join,
    require_memory,
)
from hpstore.errors import CheckpointError, CheckpointMismatch

# Any: a training state holds whatever its owner puts there
State = Mapping[str, Any]
RNG_KEY = "__rng__"


T = TypeVar("T")


def objects_in(value: Any, kind: type[T], depth: int = 0) -> Iterator[T]:
    """Objects of a type in a state, in nested dicts and lists too."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, PerRank):
        yield from objects_in(value.value, kind, depth + 1)
    elif isinstance(value, (Mapping, list)) and depth < MAX_DEPTH:
        for child in value.values() if isinstance(value, Mapping) else value:
            if not isinstance(child, torch.Tensor):  # thousands of leaves, spared a generator each
                yield from objects_in(child, kind, depth + 1)


class Names:
    """Parameters of a state's models by their names, for its optimizers."""

    def __init__(self, state: State) -> None:
        self._models = [named_parameters(model) for model in objects_in(state, torch.nn.Module)]

    def of(self, optimizer: Optimizer) -> dict[torch.Tensor, str] | None:
        """Names of the parameters of the model that it updates; None when that is not there."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self._models:
            if wanted <= {id(p) for p in model}:
                return model
        return None


def require_state(state: object) -> None:
    """Raise CheckpointError for what is no state at all."""
    if not isinstance(state, Mapping) or not all(type(name) is str for name in state):
        raise CheckpointError(
            f"a state is a dict with str names, such as {{'model': model}}, not a "
            f"{type(state).__name__}. Nothing was changed."
        )


def collect(state: State, *, rng: bool) -> dict[str, Any]:
    """Plain nested values of a state: modules and optimizers by name, Stateful by state_dict()."""
    require_state(state)
    if rng and RNG_KEY in state:
        raise CheckpointError(f"the name {RNG_KEY!r} is taken by the RNG states")
    names = Names(state)
    found = {name: _collect_value(name, value, names) for name, value in state.items()}
    if rng:
        found[RNG_KEY] = PerRank(rng_state())
    return found


def _collect_value(path: str, value: Any, names: Names, depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if depth > MAX_DEPTH:
        raise CheckpointError(f"state {path[:80]!r}... is nested deeper than {MAX_DEPTH}")
    if isinstance(value, torch.nn.Module):
        return dict(get_model_state_dict(unwrapped(value)))
    if isinstance(value, Optimizer):
        return saved_optimizer(value, names.of(value))
    if isinstance(value, PerRank):
        return PerRank(_collect_value(path, value.value, names, depth + 1))
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    if isinstance(value, dict):
        return {k: _collect_value(join(path, k), v, names, depth + 1) for k, v in value.items()}
    if type(value) is list:
        return [_collect_value(join(path, i), v, names, depth + 1) for i, v in enumerate(value)]
    return value


@dataclass(slots=True, kw_only=True)
class Destinations:
    """Tensors that a restore may fill where they are, and those whose like is to be made."""

    places: dict[str, torch.Tensor] = field(default_factory=dict)
    likes: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # "optimizer/state/NAME": parameter
    taken: set[str] = field(default_factory=lambda: {RNG_KEY})  # as a whole, with all below
    optimizers: dict[str, Optimizer] = field(default_factory=dict)  # with named parameters
    lists: set[str] = field(default_factory=set)  # replaced as a whole when the lengths differ

    def like(self, name: str) -> torch.Tensor | None:
        """The parameter that a moment of this name belongs to."""
        return self.likes.get(name.rpartition("/")[0])

    def takes(self, name: str) -> bool:
        """Whether somebody in the state takes a recorded tensor or value of this name."""
        above = name.rpartition("/")[0]
        if name in self.places or name in self.lists or above in self.lists:
            return True
        at = name
        while at:
            if at in self.taken or at.rpartition("@")[0] in self.taken or at in self.likes:
                return True
            at, _, last = at.rpartition("/")
            if at in self.optimizers and last != "state":
                return True
        return False

    def take_loaded(self) -> None:
        """What optimizers were given that belongs to no parameter has been taken."""
        for path, optimizer in self.optimizers.items():
            own = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
            self.taken.update(join(path, join("state", key)) for key in own)

    def lacking(self, recorded: Collection[str]) -> list[str]:
        """Paths of what is wanted and not among the recorded ones."""
        there = set(recorded)
        replaced = self.lists & there
        wanted = {*self.places, *self.taken, *self.optimizers} - {RNG_KEY}
        return sorted(p for p in wanted - there if p.rpartition("/")[0] not in replaced)


def destinations(state: State, rank: int) -> Destinations:
    """What can be filled in place: parameters, buffers, moments, tensors and arrays of the state.

    Not what objects give by state_dict(): whether that is their own memory is theirs to know.
    """
    found = Destinations()
    names = Names(state)
    for name, value in state.items():
        _find_places(name, value, names, found, rank)
    return found


def _find_places(path: str, value: Any, names: Names, found: Destinations, rank: int) -> None:
    if isinstance(value, torch.nn.Module):
        for name, entry in get_model_state_dict(unwrapped(value)).items():
            if isinstance(entry, torch.Tensor):
                found.places[join(path, name)] = entry
            else:
                found.taken.add(join(path, name))
    elif isinstance(value, Optimizer):
        parameters = names.of(value)
        if parameters is not None:
            found.optimizers[path] = value
            found.places.update(optimizer_tensors(value, parameters, path))
            for parameter, name in parameters.items():
                found.likes[join(path, f"state/{name}")] = parameter.detach()
        else:
            found.taken.add(path)
    elif isinstance(value, PerRank):
        _find_places(f"{path}@{rank}", value.value, names, found, rank)
    elif isinstance(value, torch.Tensor):
        found.places[path] = value
    elif isinstance(value, np.ndarray):
        found.taken.add(path)
        found.places.update(_array_place(path, value))
    elif isinstance(value, (dict, list)):
        if isinstance(value, list):
            found.lists.add(path)
        children = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in children:
            _find_places(join(path, key), child, names, found, rank)
    else:
        found.taken.add(path)


def _array_place(path: str, value: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
    """An array's own memory as a tensor, when it can be read into."""
    if not (value.flags.writeable and value.flags.c_contiguous and value.dtype.isnative):
        return {}
    try:
        return {path: torch.from_numpy(value)}
    except TypeError:  # a dtype that torch lacks: it was not saved either
        return {}


def check(state: State, loaded: Mapping[str, Any], *, strict: bool) -> None:
    """Raise CheckpointMismatch when recorded and wanted names differ, before anything is filled."""
    recorded = {name: value for name, value in loaded.items() if name != RNG_KEY}
    check_names(state, recorded, "", strict=strict)
    names = Names(state)
    for name, value in state.items():
        if name in recorded:
            _check_value(name, value, recorded[name], names, strict=strict)


def _check_value(path: str, target: Any, loaded: Any, names: Names, *, strict: bool) -> None:
    """What _apply_value() and fill() would refuse, while nothing is changed."""
    if isinstance(target, PerRank):
        if not isinstance(loaded, Absent):
            _check_value(path, target.value, loaded, names, strict=strict)
    elif isinstance(loaded, Absent):
        raise CheckpointMismatch(f"{path!r} was recorded by rank, and not for this one")
    elif isinstance(target, torch.nn.Module):
        _check_model(path, target, loaded, strict=strict)
    elif isinstance(target, Optimizer):
        check_optimizer(path, target, names.of(target), loaded, strict=strict)
    elif isinstance(target, (torch.Tensor, np.ndarray)):
        check_leaf(path, target, loaded)
    elif isinstance(target, tuple) and field_names(target):
        check_fields(path, target, loaded)
        for n, (mine, value) in enumerate(zip(target, loaded, strict=True)):
            _check_value(join(path, n), mine, value, names, strict=strict)
    elif isinstance(target, dict) and isinstance(loaded, Mapping):
        check_names(target, loaded, path, strict=strict)
        for name in target.keys() & loaded.keys():
            _check_value(join(path, name), target[name], loaded[name], names, strict=strict)
    elif type(target) is list and isinstance(loaded, list) and len(target) == len(loaded):
        for n, (mine, value) in enumerate(zip(target, loaded, strict=True)):
            _check_value(join(path, n), mine, value, names, strict=strict)


def _check_model(path: str, model: torch.nn.Module, loaded: Any, *, strict: bool) -> None:
    if not isinstance(loaded, Mapping):
        raise CheckpointMismatch(f"{path!r}: what was saved is not the state of a module")
    mine = get_model_state_dict(unwrapped(model))
    check_names(mine, loaded, path, strict=strict)
    for name, tensor in mine.items():
        if isinstance(tensor, torch.Tensor):
            require_memory(join(path, name), tensor)


def apply(
    state: State, loaded: dict[str, Any], *, filled: Destinations, strict: bool, rng: bool
) -> None:
    """Hand loaded values to the objects of a state. Raises CheckpointMismatch.

    `filled`: what holds its values already. Call check() first: a mismatch there changes nothing.
    """
    states = loaded.pop(RNG_KEY, None)
    names = Names(state)
    for name, value in state.items():  # modules first: optimizers refer to their parameters
        if name in loaded and isinstance(value, torch.nn.Module):
            _apply_model(name, value, loaded[name], filled, strict=strict)
    for name, value in state.items():
        if name in loaded and not isinstance(value, torch.nn.Module):
            replaced = _apply_value(name, value, loaded[name], names, strict=strict)
            if replaced is not value:
                _replace(state, name, replaced)
    if rng and states is not None and not isinstance(states, Absent):
        set_rng_state(states)


def _replace(state: State, name: str, value: Any) -> None:
    if not isinstance(state, dict):
        raise CheckpointMismatch(f"{name!r} is a plain value in a state that cannot be changed")
    state[name] = value


def _apply_model(
    name: str, model: torch.nn.Module, loaded: dict[str, Any], filled: Destinations, *, strict: bool
) -> None:
    """Give a module its state, unless the read has put all of it where it belongs."""
    in_place = all(filled.places.get(join(name, key)) is value for key, value in loaded.items())
    if in_place and not any(map(_loads_its_own_way, model.modules())):
        return
    try:
        set_model_state_dict(unwrapped(model), loaded, options=StateDictOptions(strict=strict))
    except RuntimeError as error:
        raise CheckpointMismatch(f"model {name!r}: {error}") from error


def _loads_its_own_way(module: torch.nn.Module) -> bool:
    """Whether loading a state into a module does more than to fill its tensors."""
    kind, plain = type(module), torch.nn.Module
    own = (
        kind._load_from_state_dict is not plain._load_from_state_dict
        and kind._load_from_state_dict is not _NormBase._load_from_state_dict
    )
    return bool(
        own
        or kind.load_state_dict is not plain.load_state_dict
        or kind.set_extra_state is not plain.set_extra_state
        or module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
    )


def _apply_value(path: str, target: Any, loaded: Any, names: Names, *, strict: bool) -> Any:
    if isinstance(target, Optimizer):
        load_optimizer(path, target, names.of(target), loaded, strict=strict)
        return target
    if isinstance(target, torch.nn.Module):
        try:
            set_model_state_dict(
                unwrapped(target), loaded, options=StateDictOptions(strict=strict)
            )  # fmt: skip
        except RuntimeError as error:
            raise CheckpointMismatch(f"model {path!r}: {error}") from error
        return target
    if isinstance(target, PerRank) and not isinstance(loaded, Absent):
        target.value = _apply_value(path, target.value, loaded, names, strict=strict)
        return target
    if isinstance(target, dict) and isinstance(loaded, Mapping):
        check_names(target, loaded, path, strict=strict)
        for name in target:
            if name in loaded:
                target[name] = _apply_value(
                    join(path, name), target[name], loaded[name], names, strict=strict
                )
        return target
    if type(target) is list and isinstance(loaded, list) and len(target) == len(loaded):
        target[:] = [
            _apply_value(join(path, n), a, b, names, strict=strict)
            for n, (a, b) in enumerate(zip(target, loaded, strict=True))
        ]
        return target
    return fill(target, loaded, path, strict=strict)


def rng_state() -> dict[str, Any]:
    """RNG states of Python, torch, CUDA when it is in use, and numpy's legacy generator."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy.random" in sys.modules:
        numpy_random = sys.modules["numpy.random"]
        found["numpy"] = numpy_random.get_state(legacy=False)
    return found


def set_rng_state(states: Mapping[str, Any]) -> None:
    """Inverse of rng_state()."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].set_state(states["numpy"])


__all__ = ["RNG_KEY", "Destinations", "Names", "apply", "check", "collect", "destinations",
           "objects_in", "require_state", "rng_state", "set_rng_state"]  # fmt: skip
