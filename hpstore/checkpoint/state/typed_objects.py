"""Containers and objects of a training state that are more than a list, tuple or dict. Pure.

Each is recorded as the tuple or dict of its parts, with its type beside them: whoever walks a tree
of JSON, or reads it with an older hpstore, sees a tuple or dict. No constructor of a saved class
runs when a value is made again, and its class is never imported (see scalars.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import logging
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpstore.checkpoint.state.scalars import Classes, StandIn, Unrestorable, class_name
from hpstore.errors import CheckpointError

# Any below: values of every type, and their JSON
_log = logging.getLogger(__name__)
Extra = dict[str, Any]  # what is recorded beside the parts
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        bool,
        bytes,
        complex,
        dict,
        float,
        frozenset,
        int,
        list,
        set,
        str,
        tuple,
        Counter,
        OrderedDict,
        deque,
    )
}
_DEPTH = 64
_MAPPINGS = frozenset({dict, OrderedDict, Counter, defaultdict})  # whose class is recorded
_PLAIN: tuple[type, ...] = (str, tuple, np.ndarray, torch.Tensor, defaultdict)
_plain_again: set[type] = set()  # of which a warning was given
_NAMESPACES = {"Namespace": argparse.Namespace, "SimpleNamespace": types.SimpleNamespace}


def sequence_parts(value: Any) -> tuple[Extra, Sequence[Any]] | None:
    """What is recorded beside the parts of a set, deque, slice or range, and these; else None.

    Parts of a set are in an order that is the same in every process.
    """
    kind = type(value)
    if kind in (set, frozenset):
        return {"type": kind.__name__}, sorted(value, key=_order)
    if kind is deque:
        return {"type": "deque", "maxlen": value.maxlen}, list(value)
    if kind in (slice, range):
        return {"type": kind.__name__}, [value.start, value.stop, value.step]
    return None


def _order(value: Any) -> tuple[str, str]:
    return type(value).__qualname__, repr(value)


def of_sequence(node: Mapping[str, Any], parts: list[Any]) -> Any:
    """Inverse of sequence_parts. Raises ValueError, TypeError, KeyError."""
    kind = node["type"]
    if kind == "deque":
        return deque(parts, node["maxlen"])
    if kind in ("slice", "range"):
        start, stop, step = parts
        return slice(start, stop, step) if kind == "slice" else range(start, stop, step)
    if kind not in ("set", "frozenset"):
        raise ValueError(f"a sequence of the unknown type {kind!r}")
    return set(parts) if kind == "set" else frozenset(parts)


def mapping_type(value: Mapping[Any, Any], path: str) -> Extra:
    """What is recorded beside the entries of a dict; {} for one that comes back as a plain dict."""
    kind = type(value)
    if kind in (OrderedDict, Counter):
        return {"type": kind.__name__}
    warn_of_class(kind, path)
    if not isinstance(value, defaultdict):
        return {}
    factory = value.default_factory
    name = "" if factory is None else getattr(factory, "__name__", "?")
    if factory is not None and _FACTORIES.get(name) is not factory:
        _warn_of_factory(path, str(getattr(factory, "__qualname__", type(factory).__qualname__)))
        name = "?"
    return {"type": "defaultdict", "factory": name}


@functools.lru_cache(maxsize=1024)
def _warn_of_factory(path: str, factory: str) -> None:
    """Once for each place, not at every save."""
    _log.warning(
        "%r is a defaultdict of %s, which no checkpoint can hold: restore() keeps the factory of a "
        "defaultdict in its place, and makes one without a factory elsewhere",
        path,
        factory,
    )


def warn_of_class(kind: type, path: str) -> None:
    """Once for each class of mappings, tuples, texts, arrays or tensors that comes back as that of
    Python, numpy or torch."""
    if kind in _MAPPINGS or kind in _plain_again:
        return
    _plain_again.add(kind)
    plain = next((p for p in _PLAIN if issubclass(kind, p)), dict)
    _log.warning(
        "%r is a %s.%s, which comes back as a plain %s%s: a checkpoint holds neither its class nor "
        "its attributes",
        path,
        kind.__module__,
        kind.__qualname__,
        plain.__name__,
        "" if plain in (str, tuple) else ", unless the state that is restored has one in its place",
    )


def object_parts(value: Any, path: str) -> tuple[Extra, dict[str, Any]] | None:
    """What is recorded beside the parts of a dataclass or a namespace, and these by name; None for
    other objects. Raises CheckpointError naming the path."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        extra = {"type": "dataclass", "class": class_name(type(value), path)}
        return extra, _fields_of(value, path)
    if is_namespace(value):
        return {"type": type(value).__name__}, dict(vars(value))
    return None


def is_namespace(value: Any) -> bool:
    """Whether an object is nothing but its attributes, of any names."""
    return _NAMESPACES.get(type(value).__name__) is type(value)


def _fields_of(value: Any, path: str) -> dict[str, Any]:
    """Fields of a dataclass. Raises Unrestorable for what else it is or was given."""
    if isinstance(value, (BaseException, int, float, str, bytes, list, tuple, set, frozenset)):
        raise Unrestorable(
            f"state {path!r} is a {type(value).__qualname__}, which is a "
            f"{type(value).__mro__[-2].__name__}, too: its fields are not all of it. Nothing was "
            "written."
        )
    found = {
        f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)
    }
    for name in getattr(value, "__dict__", {}):
        cached = isinstance(getattr(type(value), name, None), functools.cached_property)
        if name not in found and not cached:
            raise Unrestorable(
                f"state {path!r} is a {type(value).__qualname__} that was given {name!r}, which is "
                "no field of it and would be lost. Nothing was written."
            )
    return found


def of_mapping(node: Mapping[str, Any], parts: dict[Any, Any], classes: Classes) -> Any:
    """Inverse of mapping_type and object_parts. Raises ValueError, TypeError, KeyError, and
    CheckpointError for a class that is not loaded."""
    kind = node["type"]
    if kind == "OrderedDict":
        return OrderedDict(parts)
    if kind == "Counter":
        counts: Counter[Any] = Counter()
        dict.update(counts, parts)
        return counts
    if kind == "defaultdict":
        return defaultdict(_FACTORIES.get(node["factory"]), parts)
    if kind == "dataclass":
        return _dataclass(node["class"], parts, classes)
    if kind in _NAMESPACES:
        return _NAMESPACES[kind](**parts)
    raise ValueError(f"an object of the unknown type {kind!r}")


def _dataclass(name: str, parts: dict[Any, Any], classes: Classes) -> Any:
    """Made without its constructor, which would run code on values that somebody chose."""
    found = classes.find(name, dataclasses.is_dataclass)
    if found is None:
        return StandIn(name, parts)
    fields = {field.name: field for field in dataclasses.fields(found)}
    if parts.keys() - fields.keys():
        raise CheckpointError(
            f"{name} was saved with {sorted(parts.keys() - fields.keys())}, which it does not have "
            "now. Nothing was changed."
        )
    made: Any = object.__new__(found)
    for key, field in fields.items():
        if key in parts:
            object.__setattr__(made, key, parts[key])
        elif field.default is not dataclasses.MISSING:
            object.__setattr__(made, key, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            object.__setattr__(made, key, field.default_factory())
    return made


def children_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Names and values in a container or object that a restore goes into, by which it names what
    is in there; None for a value that is one whole."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple, deque)) and not isinstance(value, torch.Size):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (f.name, getattr(value, f.name))
            for f in dataclasses.fields(value)
            if hasattr(value, f.name)
        ]
    if is_namespace(value):
        attributes: dict[str, Any] = vars(value)
        return attributes.items()
    return None


def same_dict(value: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    """Entries in a dict of the type of `value`, where that type is recorded."""
    made: dict[Any, Any]
    if isinstance(value, defaultdict):
        made = defaultdict(value.default_factory)
    elif type(value) is OrderedDict:
        return OrderedDict(entries)
    elif type(value) is Counter:
        made = Counter()
    else:
        return entries
    dict.update(made, entries)
    return made


def classes_in(value: Any, depth: int = 0) -> dict[str, type]:
    """Classes of the enums and dataclasses in a value, by qualified name."""
    if isinstance(value, torch.Tensor) or depth > _DEPTH:
        return {}
    found = {}
    if isinstance(value, enum.Enum) or dataclasses.is_dataclass(value):
        found[type(value).__qualname__] = type(value)
    for _, child in children_of(value) or ():
        found |= classes_in(child, depth + 1)
    return found


def is_stateful(value: Any) -> bool:
    """Whether an object gives and takes its state itself; a class of such ones does not."""
    if isinstance(value, type):
        return False
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
