"""Models and optimizers by names that do not depend on how they are wrapped.

Names are those of torch.distributed.checkpoint.state_dict: no `module.`, no `_orig_mod.`, optimizer
state by parameter name. RNG states are collected and set here, too.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from hpstore.checkpoint.state.fill_objects import (
    check_fields,
    check_leaf,
    check_names,
    check_source,
    fill,
    remade,
    require_memory,
)
from hpstore.checkpoint.state.held_objects import (
    grows,
    holds_objects,
    is_alike,
    is_object,
    is_sequence,
    named_parts,
    require_like,
)
from hpstore.checkpoint.state.module_state import load_module, loads_its_own_way, module_state
from hpstore.checkpoint.state.optimizers import check_optimizer, load_optimizer, saved_optimizer
from hpstore.checkpoint.state.plain_tensors import PLAIN_TYPES
from hpstore.checkpoint.state.plain_values import JSON_TYPES, holds_leaves, is_leaf, is_plain
from hpstore.checkpoint.state.random_state import kind_of
from hpstore.checkpoint.state.state_tree import Absent, PerRank, field_names, join, require_depth
from hpstore.checkpoint.state.targets import RNG_KEY, Destinations, Names, State
from hpstore.checkpoint.state.typed_objects import (
    children_of,
    is_namespace,
    is_stateful,
    same_dict,
    warn_of_class,
)
from hpstore.errors import CheckpointError, CheckpointMismatch, ConfigError

# Any below: a training state holds whatever its owner puts there


_log = logging.getLogger(__name__)
_NOTHING = object()  # where a name is not there


def require_state(state: object) -> None:
    """Raise ConfigError for what is not a state at all."""
    if not isinstance(state, Mapping) or not set(map(type, state)) <= {str}:
        raise ConfigError(
            f"a state is a dict with str names, such as {{'model': model}}, not a "
            f"{type(state).__name__}. Nothing was changed."
        )


def collect(state: State, *, rng: bool) -> dict[str, Any]:
    """Plain nested values of a state: modules and optimizers by name, Stateful by state_dict()."""
    require_state(state)
    if rng and RNG_KEY in state:
        raise CheckpointError(f"the name {RNG_KEY!r} is taken by the RNG states")
    names = Names(state)
    found = {
        name: value if type(value) in PLAIN_TYPES else _collect_value(name, value, names)
        for name, value in state.items()
    }
    if rng:
        found[RNG_KEY] = PerRank(rng_state())
    return found


def _collect_value(path: str, value: Any, names: Names, depth: int = 0) -> Any:
    if type(value) in (tuple, list) and is_plain(value):  # spared a look at each of millions
        return value
    if isinstance(value, torch.Tensor):
        return value
    require_depth(path, depth)
    if isinstance(value, torch.nn.Module):
        return module_state(value)
    if isinstance(value, Optimizer):
        return saved_optimizer(value, names.of(value), path)
    if isinstance(value, PerRank):
        return PerRank(_collect_value(path, value.value, names, depth + 1))
    if is_stateful(value):
        try:
            return value.state_dict()
        except Exception as error:
            error.add_note(f"raised by state_dict() of {path!r} in save(). Nothing was written")
            raise
    if isinstance(value, dict):
        if is_plain(value.values()):
            return value
        entries = {
            k: v if type(v) in PLAIN_TYPES else _collect_value(join(path, k), v, names, depth + 1)
            for k, v in value.items()
        }
        warn_of_class(type(value), path)
        return same_dict(value, entries)
    if type(value) in (list, tuple, deque):
        parts = [_collect_value(join(path, i), v, names, depth + 1) for i, v in enumerate(value)]
        return deque(parts, value.maxlen) if isinstance(value, deque) else type(value)(parts)
    return value


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
    if target is _NOTHING or (is_leaf(target) and is_leaf(loaded)):
        return
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
    elif kind_of(target) is not None:
        check_source(path, target, loaded)
    elif not is_stateful(target):  # such a one knows itself what it takes
        _check_parts(path, target, loaded, names, strict=strict)


def _check_parts(path: str, target: Any, loaded: Any, names: Names, *, strict: bool) -> None:
    """As _check_value, of what is in a container or object."""
    if isinstance(target, dict) and isinstance(loaded, Mapping):
        if not grows(target):
            check_names(target, loaded, path, strict=strict)
        if holds_leaves(target) and holds_leaves(loaded):
            return
        for name, value in loaded.items():
            mine = target.get(name, _NOTHING)
            if mine is _NOTHING or (type(value) in JSON_TYPES and type(mine) in JSON_TYPES):
                continue  # of which there may be very many
            _check_value(join(path, name), mine, value, names, strict=strict)
    else:
        if isinstance(target, tuple) and field_names(target):
            check_fields(path, target, loaded)
        if strict:
            require_like(path, target, loaded)
        if is_namespace(target) and type(target) is type(loaded):
            check_names(vars(target), vars(loaded), path, strict=strict)
        for name, mine, value in _pairs(target, loaded) or ():
            _check_value(join(path, name), mine, value, names, strict=strict)


def _pairs(target: Any, loaded: Any) -> list[tuple[Any, Any, Any]] | None:
    """Names, wanted and loaded values of what is in both; None for what is replaced as a whole.

    What holds objects is never replaced: of one that is not alike, which strict=True has refused,
    the parts of the same names are filled.
    """
    if is_alike(target, loaded):
        if not is_sequence(target):
            mine, saved = dict(children_of(target) or ()), dict(children_of(loaded) or ())
            return [
                (n, mine.get(n, _NOTHING), v)
                for n, v in saved.items()
                if n in mine or not is_namespace(target)
            ]
        if type(target) is type(loaded) and is_plain(target) and is_plain(loaded):
            return None
        return [(n, a, b) for n, (a, b) in enumerate(zip(target, loaded, strict=True))]
    if not holds_objects(target):
        return None
    saved = named_parts(loaded)
    return [(n, a, saved[str(n)]) for n, a in children_of(target) or () if str(n) in saved]


def _check_model(path: str, model: torch.nn.Module, loaded: Any, *, strict: bool) -> None:
    if not isinstance(loaded, Mapping):
        raise CheckpointMismatch(f"{path!r}: what was saved is not the state of a module")
    mine = module_state(model)
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
    if not in_place or any(map(loads_its_own_way, model.modules())):
        load_module(name, model, loaded, strict=strict)


def _apply_value(path: str, target: Any, loaded: Any, names: Names, *, strict: bool) -> Any:
    """Give what was loaded to what is there; returns what takes its place in the state."""
    if target is _NOTHING or (is_leaf(target) and is_leaf(loaded)):
        return loaded
    if isinstance(target, Optimizer):
        load_optimizer(path, target, names.of(target), loaded, strict=strict)
        return target
    if isinstance(target, torch.nn.Module):
        load_module(path, target, loaded, strict=strict)
        return target
    if isinstance(target, PerRank) and not isinstance(loaded, Absent):
        target.value = _apply_value(path, target.value, loaded, names, strict=strict)
        return target
    if is_object(target) or isinstance(target, (torch.Tensor, np.ndarray)):
        return fill(target, loaded, path)
    if isinstance(target, dict) and isinstance(loaded, Mapping):
        _apply_dict(path, target, loaded, names, strict=strict)
        return target
    pairs = _pairs(target, loaded)
    if pairs is None:
        return fill(target, loaded, path)
    parts = [
        (name, _apply_value(join(path, name), mine, value, names, strict=strict))
        for name, mine, value in pairs
    ]
    return remade(target, parts, loaded)


def _apply_dict(
    path: str, target: dict[Any, Any], loaded: Mapping[Any, Any], names: Names, *, strict: bool
) -> None:
    if grows(target):
        for name in target.keys() - loaded.keys():
            del target[name]
    else:
        check_names(target, loaded, path, strict=strict)
    if (
        type(target) is dict
        and target.keys() == loaded.keys()
        and (holds_leaves(target) and holds_leaves(loaded))
    ):
        target.update(loaded)
        return
    for name, value in loaded.items():
        mine = target.get(name, _NOTHING)
        if type(value) in JSON_TYPES and type(mine) in JSON_TYPES:  # there may be very many
            target[name] = value
        elif mine is not _NOTHING:
            where = join(path, name)
            target[name] = _apply_value(where, mine, value, names, strict=strict)
        elif grows(target):
            target[name] = value
    if type(target) is OrderedDict is type(loaded) and target.keys() == loaded.keys():
        for name in loaded:  # its order is a part of what it is equal to
            target.move_to_end(name)


def rng_state() -> dict[str, Any]:
    """RNG states of Python, torch, CUDA when it is in use, and numpy's legacy generator."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy.random" in sys.modules:
        numpy_random = sys.modules["numpy.random"]
        found["numpy"] = numpy_random.get_state(legacy=False)
    return found


def _set_cuda_states(states: Sequence[torch.Tensor]) -> None:
    """Of as many devices as are visible: to another one torch would set none, now or later."""
    count = torch.cuda.device_count()
    torch.cuda.set_rng_state_all(states[:count])
    if len(states) > count:
        _log.warning(
            "the RNG states of %d GPUs were saved, and %d are visible: those of the others are "
            "left out",
            len(states),
            count,
        )


def set_rng_state(states: Mapping[str, Any]) -> None:
    """Inverse of rng_state()."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        _set_cuda_states(states["cuda"])
    if "numpy" in states and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].set_state(states["numpy"])
