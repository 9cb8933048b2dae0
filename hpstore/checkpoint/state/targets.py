"""Where a restore reads to: tensors of the state that are filled where they are, and those whose
like is made because somebody else puts them where they belong."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hpstore.checkpoint.state.held_objects import grows
from hpstore.checkpoint.state.module_state import free_sizes, module_state
from hpstore.checkpoint.state.optimizers import (
    clean_name,
    local_part,
    named_parameters,
    numbered,
    optimizer_tensors,
    unwrapped,
)
from hpstore.checkpoint.state.plain_values import JSON_TYPES, is_leaf, is_plain
from hpstore.checkpoint.state.state_tree import MAX_DEPTH, PerRank, join, require_depth
from hpstore.checkpoint.state.typed_objects import children_of, is_stateful

# Any below: a training state holds whatever its owner puts there
_log = logging.getLogger(__name__)
State = Mapping[str, Any]
RNG_KEY = "__rng__"


T = TypeVar("T")
_CONTAINERS = (list, tuple, deque, Mapping)
_LEAVES = {torch.Tensor, torch.nn.Parameter, int, float, str, bool, bytes, type(None)}


def objects_in(value: Any, kind: type[T]) -> Iterator[T]:
    """Objects of a type in a state, in nested dicts, lists and tuples too, in their order."""
    todo = [(value, 0)]
    seen: set[int] = set()  # containers, once each: one may contain itself
    while todo:
        here, depth = todo.pop()
        if type(here) in (tuple, list) and is_plain(here):
            continue
        if isinstance(here, _CONTAINERS):
            if id(here) in seen:
                continue
            seen.add(id(here))
        if isinstance(here, kind):
            yield here
        elif isinstance(here, PerRank):
            todo.append((here.value, depth + 1))
        elif depth < MAX_DEPTH:
            inside = _inside(here)
            if not is_plain(inside):  # millions of numbers are not asked one by one
                todo += [
                    (child, depth + 1)
                    for child in reversed(list(inside))
                    if type(child) not in _LEAVES
                ]


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, (list, tuple, deque)):
        return value
    return value.values() if isinstance(value, Mapping) else ()


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
    patterns: dict[str, torch.Tensor] = field(default_factory=dict)  # sharded, by their own names
    free: set[str] = field(default_factory=set)  # places that their module may resize
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # not read into in place
    models: dict[str, torch.nn.Module] = field(default_factory=dict)
    parameters: dict[tuple[str, str], torch.Tensor] = field(
        default_factory=dict
    )  # by the path of its optimizer and its name, or number, there

    def stays(self, name: str) -> torch.Tensor:
        """What the state has in a place, for a restore that leaves it as it is."""
        if name in self.places:
            return self.places[name]
        array = self.arrays[name]
        native = array.astype(array.dtype.newbyteorder("="), copy=True)
        return torch.from_numpy(np.ascontiguousarray(native).reshape(array.shape))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor or array in a place; None for what decides itself what it takes."""
        place = self.places.get(name)
        if place is None:
            return self.arrays[name].shape if name in self.arrays else None
        return None if name in self.free else tuple(place.shape)

    def owners(self) -> dict[tuple[str, str], tuple[str, str]]:
        """By optimizer and name there, the paths of a parameter's model and of itself."""
        named: dict[torch.Tensor, tuple[str, str]] = {}
        for path, model in self.models.items() if self.parameters else ():
            inner = unwrapped(model)
            for name, parameter in inner.named_parameters():
                named.setdefault(parameter, (path, join(path, clean_name(inner, name))))
        return {key: named[p] for key, p in self.parameters.items() if p in named}

    def names(self) -> dict[tuple[str, str], list[str]]:
        """As owners(), all paths of a parameter: a shared one has several."""
        named: dict[torch.Tensor, list[str]] = {}
        for path, model in self.models.items() if self.parameters else ():
            inner = unwrapped(model)
            for name, parameter in inner.named_parameters(remove_duplicate=False):
                named.setdefault(parameter, []).append(join(path, clean_name(inner, name)))
        return {key: named[p] for key, p in self.parameters.items() if p in named}

    def updated(self) -> dict[str, set[str]]:
        """Names of the parameters that each optimizer updates, by its path."""
        there = {
            path: {id(p) for group in optimizer.param_groups for p in group["params"]}
            for path, optimizer in self.optimizers.items()
        }
        found: dict[str, set[str]] = {path: set() for path in there}
        for (path, name), parameter in self.parameters.items():
            if id(parameter) in there.get(path, ()):
                found[path].add(name)
        return found

    def like(self, name: str) -> torch.Tensor | None:
        """What a tensor of this name is sharded like: its Stateful's own, or, for a moment, its
        parameter."""
        return self.patterns.get(name, self.likes.get(name.rpartition("/")[0]))

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


def destinations(state: State, rank: int, recorded: Collection[str]) -> Destinations:
    """What can be filled in place: parameters, buffers, moments, tensors and arrays of the state.

    Not what objects give by state_dict(): whether that is their own memory is theirs to know. In a
    job of several ranks they are asked for it all the same, for how their tensors are sharded.
    `recorded`: names of the items in the checkpoint.
    """
    finder = _Finder(Names(state), rank, recorded)
    for name, value in state.items():
        finder.look_at(name, value)
    return finder.found


class _Finder:
    """Walks a state by the names that encode_tree() gives its parts."""

    def __init__(self, names: Names, rank: int, recorded: Collection[str]) -> None:
        self.found = Destinations()
        self._names, self._rank, self._recorded = names, rank, recorded

    def look_at(self, path: str, value: Any, depth: int = 0) -> None:
        """Enter a value and what is in it. Raises CheckpointError for one that contains itself."""
        require_depth(path, depth)
        if is_leaf(value):
            self.found.taken.add(path)
        elif isinstance(value, torch.nn.Module):
            self._module(path, value)
        elif isinstance(value, Optimizer):
            self._optimizer(path, value)
        elif isinstance(value, PerRank):
            self.look_at(f"{path}@{self._rank}", value.value, depth + 1)
        elif isinstance(value, torch.Tensor):
            self.found.places[path] = value
        elif isinstance(value, np.ndarray):
            self.found.taken.add(path)
            place = _array_place(path, value)
            self.found.places.update(place)
            if not place:
                self.found.arrays[path] = value
        elif is_stateful(value):
            self.found.taken.add(path)
            self._stateful(path, value)
        else:
            self._container(path, value, depth)

    def _container(self, path: str, value: Any, depth: int) -> None:
        parts = children_of(value)
        if not isinstance(value, dict) or grows(value):
            self.found.taken.add(path)
        if parts is None:
            return
        if isinstance(value, (list, tuple)) and is_plain(value):
            self.found.lists.add(path)
            return
        if not isinstance(value, dict) or grows(value):
            self.found.lists.add(path)
        taken = self.found.taken
        for key, child in parts:
            where = join(path, key)
            if type(child) in JSON_TYPES:  # of which there may be very many
                taken.add(where)
            else:
                self.look_at(where, child, depth + 1)

    def _module(self, path: str, model: torch.nn.Module) -> None:
        self.found.models[path] = model
        entries = module_state(model)
        free = free_sizes(model, entries)
        for name, entry in entries.items():
            where = join(path, name)
            if isinstance(entry, torch.Tensor):
                self.found.places[where] = entry
            else:
                self.found.taken.add(where)
            if name in free:
                self.found.free.add(where)

    def _optimizer(self, path: str, optimizer: Optimizer) -> None:
        parameters = self._names.of(optimizer)
        if parameters is None:
            self.found.taken.add(path)
            called: Mapping[torch.Tensor, object] = numbered(optimizer)
        else:
            self.found.optimizers[path] = local_part(optimizer)
            self.found.places.update(optimizer_tensors(optimizer, parameters, path))
            called = parameters
        for parameter, name in called.items():
            self.found.likes[join(path, f"state/{name}")] = parameter.detach()
            self.found.parameters[path, str(name)] = parameter

    def _stateful(self, path: str, value: Any) -> None:
        """Tensors that are sharded over the ranks have their shards read, each by its rank."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        start = f"{path}/"
        if not any(name.startswith(start) for name in self._recorded):
            return
        try:
            now = value.state_dict()
        except Exception:  # noqa: BLE001 (code of the object's owner)
            _log.warning(
                "%r has no state_dict() before its first load_state_dict(): its tensors are read "
                "whole by each rank",
                path,
                exc_info=True,
            )
            return
        for name, tensor in _tensors_in(path, now):
            if hasattr(tensor, "to_local"):
                self.found.patterns[name] = tensor.detach()


def _tensors_in(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < MAX_DEPTH:
        for name, child in children_of(value) or ():
            yield from _tensors_in(join(path, name), child, depth + 1)


def _array_place(path: str, value: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
    """An array's own memory as a tensor, when it can be read into."""
    if not (value.flags.writeable and value.flags.c_contiguous and value.dtype.isnative):
        return {}
    try:
        return {path: torch.from_numpy(value)}
    except TypeError:  # a dtype that torch lacks: it was not saved either
        return {}
