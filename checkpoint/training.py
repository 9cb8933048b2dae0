"""Models and optimizers by names that do not depend on how they are wrapped.

Names are those of torch.distributed.checkpoint.state_dict: no `module.`, no `_orig_mod.`, optimizer
state by parameter name. RNG states are collected and set here, too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from hpstore.checkpoint.tree import MAX_DEPTH, check_names, fill, join
from hpstore.errors import CheckpointError, CheckpointMismatch

# Any: a training state holds whatever its owner puts there
State = Mapping[str, Any]
RNG_KEY = "__rng__"


def models_in(state: State) -> list[torch.nn.Module]:
    """Modules at the top of a state, which own the optimizers' parameters."""
    return [value for value in state.values() if isinstance(value, torch.nn.Module)]


def owner_of(optimizer: Optimizer, state: State) -> torch.nn.Module | None:
    """The module in the state whose parameters an optimizer updates; None when it is not there."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in models_in(state):
        if wanted <= {id(p) for p in model.parameters()}:
            return model
    return None


def collect(state: State, *, rng: bool) -> dict[str, Any]:
    """Plain nested values of a state: modules and optimizers by name, Stateful by state_dict()."""
    if not isinstance(state, Mapping) or not all(type(name) is str for name in state):
        raise CheckpointError("a state is a dict with str names, such as {'model': model}")
    if RNG_KEY in state:
        raise CheckpointError(f"the name {RNG_KEY!r} is taken by the RNG states")
    found = {name: _collect_value(name, value, state) for name, value in state.items()}
    if rng:
        found[RNG_KEY] = rng_state()
    return found


def _collect_value(path: str, value: Any, state: State, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise CheckpointError(f"state {path[:80]!r}... is nested deeper than {MAX_DEPTH}")
    if isinstance(value, torch.nn.Module):
        return dict(get_model_state_dict(value))
    if isinstance(value, Optimizer):
        owner = owner_of(value, state)
        if owner is None:
            return value.state_dict()
        return dict(get_optimizer_state_dict(owner, value))
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    if isinstance(value, dict):
        return {k: _collect_value(join(path, k), v, state, depth + 1) for k, v in value.items()}
    if type(value) is list:
        return [_collect_value(join(path, i), v, state, depth + 1) for i, v in enumerate(value)]
    return value


def apply(state: State, loaded: dict[str, Any], *, strict: bool, rng: bool) -> None:
    """Hand loaded values to the objects of a state. Raises CheckpointMismatch.

    Everything is checked for names first, so that a mismatch there changes nothing.
    """
    states = loaded.pop(RNG_KEY, None)
    check_names(state, loaded, "", strict=strict)
    for name, value in state.items():
        if name in loaded and isinstance(value, torch.nn.Module) and strict:
            check_names(get_model_state_dict(value), loaded[name], name, strict=True)
    for name, value in state.items():  # modules first: optimizers refer to their parameters
        if name in loaded and isinstance(value, torch.nn.Module):
            _apply_model(name, value, loaded[name], strict=strict)
    for name, value in state.items():
        if name in loaded and not isinstance(value, torch.nn.Module):
            replaced = _apply_value(name, value, loaded[name], state, strict=strict)
            if replaced is not value:
                _replace(state, name, replaced)
    if rng and states is not None:
        set_rng_state(states)


def _replace(state: State, name: str, value: Any) -> None:
    if not isinstance(state, dict):
        raise CheckpointMismatch(f"{name!r} is a plain value in a state that cannot be changed")
    state[name] = value


def _apply_model(
    name: str, model: torch.nn.Module, loaded: dict[str, Any], *, strict: bool
) -> None:  # fmt: skip
    try:
        set_model_state_dict(model, loaded, options=StateDictOptions(strict=strict))
    except RuntimeError as error:
        raise CheckpointMismatch(f"model {name!r}: {error}") from error


def _apply_value(path: str, target: Any, loaded: Any, state: State, *, strict: bool) -> Any:
    if isinstance(target, Optimizer):
        owner = owner_of(target, state)
        try:
            if owner is None:
                target.load_state_dict(loaded)
            else:
                set_optimizer_state_dict(
                    owner, target, loaded, options=StateDictOptions(strict=strict)
                )
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointMismatch(f"optimizer {path!r}: {error}") from error
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


__all__ = ["RNG_KEY", "apply", "collect", "rng_state", "set_rng_state"]
