"""torchtitan's layout of a training state: the model's tensors at the top, the optimizer flattened.

Optimizers are flattened as torch does with `flatten_optimizer_state_dict`: `state.NAME.slot` and
`param_groups.NAME.option`, one entry a parameter (docs/decisions/0122).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpstore.checkpoint.restore.chosen_moments import is_optimizer
from hpstore.errors import CheckpointError, ConfigError

# Any below: nested values of a training state

LAYOUT = "torchtitan"
_MODEL = "model"
_BESIDE = ("optimizer", "lr_scheduler", "dataloader", "train_state")
_STATE, _GROUPS = "state.", "param_groups."


def require_layout(layout: str | None, kind: str) -> None:
    """Raise ConfigError for a layout that is not known, or of a format that torchtitan has not."""
    if layout is None:
        return
    if layout != LAYOUT:
        raise ConfigError(f"layout {layout!r} is not {LAYOUT!r}. Nothing was written")
    if kind != "dcp":
        raise ConfigError(f"layout {LAYOUT!r} is one of dcp, not of {kind}. Nothing was written")


def from_torchtitan(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a Checkpointer has it: `model`, and the optimizer by names of parameters.

    What is beside the model in a checkpoint of torchtitan's, and every other dict, stays where it
    is. Raises CheckpointError when the optimizer is not flattened, or when there is no model.
    """
    beside = {n: v for n, v in state.items() if n in _BESIDE or isinstance(v, Mapping)}
    model = {name: value for name, value in state.items() if name not in beside}
    if not model or _MODEL in beside:
        raise CheckpointError(
            f"it is no checkpoint in the layout of {LAYOUT}: the tensors of the model are not at "
            "its top. Nothing was written"
        )
    if isinstance(beside.get("optimizer"), Mapping):
        beside["optimizer"] = grouped_optimizer(beside["optimizer"])
    return {_MODEL: model, **beside}


def to_torchtitan(state: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of from_torchtitan(). Every optimizer at the top is flattened.

    Raises CheckpointError when there is no `model`, or an optimizer was saved without its model.
    """
    model = state.get(_MODEL)
    if not isinstance(model, Mapping):
        raise CheckpointError(
            f"the step has no {_MODEL!r} whose tensors would be at the top in the layout of "
            f"{LAYOUT}. Nothing was written"
        )
    beside = {name: value for name, value in state.items() if name != _MODEL}
    twice = sorted(model.keys() & beside.keys())
    if twice:
        raise CheckpointError(
            f"{twice[0]!r} of the model and {twice[0]!r} beside it have one name in the layout of "
            f"{LAYOUT}: export the parts apart, with keys. Nothing was written"
        )
    flat = {n: flat_optimizer(n, v) if is_optimizer(v) else v for n, v in beside.items()}
    return {**model, **flat}


def grouped_optimizer(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flattened state as a Checkpointer has it: moments by name, parameters with equal options
    in one group. Raises CheckpointError for other dicts."""
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(_GROUPS):
            name, _, option = key.removeprefix(_GROUPS).rpartition(".")
            options.setdefault(name, {})[option] = value
        elif not key.startswith(_STATE):
            raise _not_flat(key)
    state: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith(_STATE):
            name, slots = _owner(key.removeprefix(_STATE), options)
            _put(state.setdefault(name, {}), slots, value, key)
    groups: dict[object, dict[str, Any]] = {}
    for name, chosen in options.items():
        same = tuple(sorted((option, _comparable(value)) for option, value in chosen.items()))
        groups.setdefault(same, {**chosen, "params": []})["params"].append(name)
    if not groups:
        raise _not_flat("")
    return {"state": state, "param_groups": list(groups.values())}


def flat_optimizer(path: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of grouped_optimizer(). Raises CheckpointError for a state by numbers."""
    flat: dict[str, Any] = {}
    for name, slots in state["state"].items():
        _require_name(path, name)
        _flatten(f"{_STATE}{name}", slots, flat)
    for group in state["param_groups"]:
        for name in group["params"]:
            _require_name(path, name)
            for option, value in group.items():
                if option not in ("params", "param_names"):
                    flat[f"{_GROUPS}{name}.{option}"] = value
    return flat


def _owner(rest: str, options: Mapping[str, object]) -> tuple[str, list[str]]:
    """The parameter that `NAME.slot` is of, and the path of the slot: NAME may have dots, too."""
    parts = rest.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        if name in options:
            return name, parts[count:]
    raise _not_flat(f"{_STATE}{rest}")


def _put(slots: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        slots = slots.setdefault(part, {})
        if not isinstance(slots, dict):
            raise _not_flat(key)
    if path[-1] in slots:
        raise _not_flat(key)
    slots[path[-1]] = value


def _flatten(path: str, value: Any, flat: dict[str, Any]) -> None:
    if not isinstance(value, Mapping):
        flat[path] = value
        return
    for name, child in value.items():
        _flatten(f"{path}.{name}", child, flat)


def _comparable(value: Any) -> tuple[str, str]:
    """An option as text that is alike for equal values alone."""
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype}", repr(value.tolist())
    return type(value).__name__, repr(value)


def _require_name(path: str, name: object) -> None:
    if type(name) is not str:
        raise CheckpointError(
            f"optimizer {path!r} was saved without names of its parameters, as its model was not "
            f"in the state: it has no form in the layout of {LAYOUT}. Nothing was written"
        )


def _not_flat(key: str) -> CheckpointError:
    found = f"it holds {key[:80]!r}" if key else "it has no parameters"
    return CheckpointError(
        f"its optimizer is not flattened as in the layout of {LAYOUT}: {found}. Nothing was written"
    )
