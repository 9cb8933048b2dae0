"""From loaded values into the objects of a state: filled in place where that can be."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hpstore.checkpoint.state.plain_tensors import PLAIN_TYPES, is_freed
from hpstore.checkpoint.state.random_state import can_continue, continue_source, kind_of
from hpstore.checkpoint.state.state_tree import Absent, NamedValues, PerRank, Tree, field_names
from hpstore.checkpoint.state.typed_objects import children_of, is_stateful, same_dict
from hpstore.errors import CheckpointMismatch

_log = logging.getLogger(__name__)


def fill(target: Any, value: Tree, path: str) -> Any:
    """Put one loaded value into `target` in place where it can be; returns what takes its place.

    Tensors and arrays are copied into, objects with load_state_dict given their state, random
    generators go on from where the saved one stood, lists, sets and namespaces take the new
    content; everything else is replaced. Raises CheckpointMismatch.
    """
    if isinstance(value, Absent):
        if isinstance(target, PerRank):
            _log.warning("%r: this rank was not there when it was saved; left as it is", path)
            return target
        raise CheckpointMismatch(f"{path!r} was recorded by rank, and not for this one")
    if isinstance(target, torch.Tensor):
        return _fill_tensor(target, value, path)
    if is_stateful(target):
        try:
            target.load_state_dict(value)
        except Exception as error:
            error.add_note(
                f"raised by load_state_dict() of {path!r} in restore(): other parts of the state "
                "may be filled already. Restore again, or another step"
            )
            raise
        return target
    if isinstance(target, np.ndarray):
        check_leaf(path, target, value)
        if not np.shares_memory(target, value):  # the read may have filled it already
            target[...] = value
        return target
    if kind_of(target) is not None:
        check_source(path, target, value)
        continue_source(target, value)
        return target
    return _refilled(target, value)


def _refilled(target: Any, value: Any) -> Any:
    """A container that somebody may hold, with new content; or the value in its place."""
    kind = type(target)
    if kind is not type(value):
        return value
    if kind is set:
        target.clear()
        target.update(value)
    elif kind is list or kind is bytearray:
        target[:] = value
    elif kind is deque and target.maxlen == value.maxlen:
        target.clear()
        target.extend(value)
    else:
        return value
    return target


def remade(target: Any, parts: Sequence[tuple[Any, Any]], loaded: Any) -> Any:
    """A sequence or object with new parts: the same one where that can change, another tuple or
    frozen object otherwise."""
    if isinstance(target, (list, deque, dict)):
        for index, part in parts:
            target[index] = part
        return target
    if isinstance(target, tuple):
        made = list(target)
        for index, part in parts:
            made[index] = part
        if all(a is b for a, b in zip(target, made, strict=True)):
            return target
        make = getattr(type(target), "_make", None)
        if make:
            return make(made)
        return NamedValues.of(made, field_names(target)) if field_names(target) else tuple(made)
    parameters = getattr(type(target), "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        made = loaded if type(loaded) is type(target) else copy.copy(target)
        for name, part in parts:
            object.__setattr__(made, name, part)
        return made
    for name, part in parts:
        setattr(target, name, part)
    return target


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Loaded values, which are the caller's own, with each tensor replaced by `change(tensor)`.
    Containers come back as their type."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return same_dict(value, {name: map_tensors(v, change) for name, v in value.items()})
    if isinstance(value, torch.Size):
        return value
    parts = children_of(value)
    if parts is None:
        return value
    mapped = [(name, map_tensors(part, change)) for name, part in parts]
    if isinstance(value, (list, tuple, deque)):
        return remade(value, mapped, value)
    for name, part in mapped:
        object.__setattr__(value, name, part)
    return value


def check_source(path: str, target: Any, value: Any) -> None:
    """Raise CheckpointMismatch unless a random generator can go on from a saved one."""
    if not can_continue(target, value):
        raise CheckpointMismatch(
            f"{path!r}: {_source_name(value)} was saved, which a {_source_name(target)} cannot go "
            "on from. Nothing was changed."
        )


def _source_name(value: Any) -> str:
    kind = type(value)
    where = getattr(value, "device", None) or type(getattr(value, "bit_generator", None)).__name__
    return f"{kind.__module__}.{kind.__qualname__}" + ("" if where == "NoneType" else f" ({where})")


def _fill_tensor(target: torch.Tensor, value: Tree, path: str) -> torch.Tensor:
    check_leaf(path, target, value)
    try:
        if value is not target:  # the read may have filled it already
            with torch.no_grad():
                target.copy_(value)
    except RuntimeError as error:
        raise CheckpointMismatch(f"{path!r} cannot be filled in place: {error}") from error
    return target


def check_fields(path: str, target: tuple[Any, ...], value: Tree) -> None:
    """Raise CheckpointMismatch unless a namedtuple can take a loaded value: its fields, or as many
    values of a plain tuple, as they were saved before fields were recorded."""
    mine, saved = field_names(target), field_names(value)
    if not isinstance(value, tuple) or len(value) != len(mine) or saved not in ((), mine):
        found = saved or f"a {type(value).__name__}"
        raise CheckpointMismatch(
            f"{path!r}: {found} was saved, {type(target).__qualname__}{mine} is wanted"
        )


def check_leaf(path: str, target: torch.Tensor | np.ndarray[Any, Any], value: Tree) -> None:
    """Raise CheckpointMismatch unless a loaded value can be put into a tensor or array."""
    kind = torch.Tensor if isinstance(target, torch.Tensor) else np.ndarray
    if isinstance(target, torch.Tensor):
        require_shape(path, target)
    if not isinstance(value, kind) or value.shape != target.shape:
        found = tuple(value.shape) if isinstance(value, kind) else type(value).__name__
        raise CheckpointMismatch(
            f"{path!r}: {found} does not fit a {kind.__name__} of {tuple(target.shape)}"
        )
    wanted = target.dtype
    if isinstance(wanted, np.dtype):
        wanted = wanted.newbyteorder("=")
        if isinstance(target, np.ndarray) and not target.flags.writeable:
            raise CheckpointMismatch(
                f"{path!r} is a read-only array. Give its copy(). Nothing was changed."
            )
    else:
        require_memory(path, target)
    if value.dtype != wanted:
        raise CheckpointMismatch(f"{path!r}: {value.dtype} was saved, {wanted} is wanted")


def require_shape(path: str, target: torch.Tensor) -> None:
    """Raise CheckpointMismatch for a tensor that has none to compare with what was saved."""
    if is_lazy(target):
        raise CheckpointMismatch(
            f"{path!r} has no shape yet, its module is lazy: run the module once, then restore. "
            "Nothing was changed."
        )
    if target.is_nested:
        raise CheckpointMismatch(
            f"{path!r} is a nested tensor, which no checkpoint fills: give a tuple such as its "
            "unbind(). Nothing was changed."
        )


def require_memory(path: str, target: Any) -> None:
    """Raise CheckpointMismatch for a tensor that has no memory for all of its elements."""
    if any(size > 1 and not step for size, step in zip(target.shape, target.stride(), strict=True)):
        raise CheckpointMismatch(
            f"{path!r} is an expanded tensor: several of its elements are one place in memory. "
            "Give its clone(). Nothing was changed."
        )
    if type(target) in PLAIN_TYPES and is_freed(target):
        raise CheckpointMismatch(
            f"{path!r} is a tensor whose storage was freed: there is no memory to fill. Nothing "
            "was changed. Restore when whatever shards it has gathered it"
        )
    if _overlaps_itself(target):
        raise CheckpointMismatch(
            f"{path!r} has strides by which several of its elements are one place in memory. Give "
            "its clone(). Nothing was changed."
        )
    if target.device.type == "meta":
        raise CheckpointMismatch(
            f"{path!r} is on the meta device and has no memory to fill: call the module's "
            "to_empty(device=...) first. Nothing was changed."
        )


def _overlaps_itself(target: Any) -> bool:
    """Whether strides lead to one place in several ways, as those of windows do."""
    if not hasattr(target, "is_contiguous") or target.is_contiguous():
        return False
    reach, kept = 0, []
    for step, size in sorted(zip(map(abs, target.stride()), target.shape, strict=True)):
        if size > 1:
            kept.append(step > reach)
            reach += step * (size - 1)
    if all(kept) or not target.numel():
        return False
    # rare: strides that interleave without a clash are told by counting
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for step, size in zip(target.stride(), target.shape, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * step
    flat = places.reshape(-1).numpy()
    return bool(len(np.unique(flat)) < len(flat))


_ADDED = ("_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def _way_out(target: Mapping[Any, Any], value: Mapping[Any, Any]) -> str:
    """What to do about names that differ: often a wrapper has added to those of a state_dict()."""
    mine, saved = (
        {".".join(part for part in str(name).split(".") if part not in _ADDED) for name in names}
        for names in (target, value)
    )
    if mine != saved:
        return "Pass strict=False to load what fits."
    return (
        "They differ by what torch.compile, DDP or the like adds to a state_dict(): give the "
        "module itself to save() and restore(), whose names have none of it, or "
        'LoadOptions(rename=lambda name: name.replace("_orig_mod.", "")).'
    )


def check_names(
    target: Mapping[Any, Any], value: Mapping[Any, Any], path: str, *, strict: bool
) -> None:
    """Raise CheckpointMismatch when recorded and wanted names differ, unless not strict."""
    if not strict or target.keys() == value.keys():
        return
    untaken = [str(name) for name in value if name not in target]
    absent = [str(name) for name in target if name not in value]
    if untaken or absent:
        place = f"under {path!r}" if path else "at the top"
        raise CheckpointMismatch(
            f"state and checkpoint differ {place}: recorded but not taken {untaken[:8]}, wanted "
            f"but not recorded {absent[:8]}. Nothing was changed. {_way_out(target, value)}"
        )
