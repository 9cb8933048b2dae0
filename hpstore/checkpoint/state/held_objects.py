"""Objects in the containers of a state: a restore gives them their values, and replaces none."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from hpstore.checkpoint.state.plain_values import holds_leaves, is_plain
from hpstore.checkpoint.state.random_state import kind_of
from hpstore.checkpoint.state.state_tree import PerRank, field_names
from hpstore.checkpoint.state.typed_objects import children_of, is_stateful
from hpstore.errors import CheckpointMismatch

# Any below: a training state holds whatever its owner puts there
_SEQUENCES = (list, tuple, deque)


def is_object(value: Any) -> bool:
    """Whether a value is filled by its own rules: a module, optimizer or Stateful, a generator."""
    if isinstance(value, torch.Tensor):
        return False
    own = isinstance(value, (torch.nn.Module, Optimizer)) or is_stateful(value)
    return own or kind_of(value) is not None


def objects_held(value: Any) -> Iterator[Any]:
    """The objects in a container, however deep."""
    todo, seen = [value], set[int]()  # containers, once each: one may contain itself
    while todo:
        here = todo.pop()
        if is_object(here):
            yield here
            continue
        if isinstance(here, PerRank):
            todo.append(here.value)
            continue
        if isinstance(here, torch.Tensor) or id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, _SEQUENCES) and is_plain(here):
            continue
        if isinstance(here, Mapping) and holds_leaves(here):
            continue
        todo += [child for _, child in children_of(here) or ()]


def holds_objects(value: Any) -> bool:
    """Whether a container has an object in it, however deep."""
    return next(objects_held(value), None) is not None


def grows(value: Any) -> bool:
    """Whether the names in a dict are data of its own, not what a state is made of."""
    if isinstance(value, Counter):
        return True
    return isinstance(value, defaultdict) and not holds_objects(value)


def is_sequence(value: Any) -> bool:
    """Whether a restore goes into a value by the numbers of its parts."""
    return type(value) in _SEQUENCES or (isinstance(value, tuple) and bool(field_names(value)))


def is_alike(target: Any, loaded: Any) -> bool:
    """Whether the parts of a container are those of a loaded one: two dicts, two sequences of one
    length, two objects of one class."""
    if isinstance(target, dict):
        return isinstance(loaded, Mapping)
    if is_sequence(target):
        return isinstance(loaded, _SEQUENCES) and len(target) == len(loaded)
    if isinstance(target, (*_SEQUENCES, Mapping)):
        return False
    return type(target) is type(loaded) and children_of(target) is not None


def named_parts(value: Any) -> dict[str, Any]:
    """What is in a container or object by the names of its paths."""
    return {str(name): part for name, part in children_of(value) or ()}


def require_like(path: str, target: Any, loaded: Any) -> None:
    """Raise CheckpointMismatch where objects in a container would be replaced by loaded values."""
    held = None if is_alike(target, loaded) else next(objects_held(target), None)
    if held is not None:
        raise CheckpointMismatch(
            f"{path!r}: {_in_words(loaded)} was saved, {_in_words(target)} with a "
            f"{type(held).__qualname__} in it is wanted. A restore fills objects and replaces "
            "none. Nothing was changed. Build the state as the saved one was, or pass strict=False "
            "to load what fits."
        )


def _in_words(value: Any) -> str:
    """A value for an error: its type, and how many it holds."""
    kind = type(value).__qualname__
    sized = isinstance(value, (*_SEQUENCES, Mapping))
    return f"({kind} of {len(value)})" if sized else f"({kind})"
