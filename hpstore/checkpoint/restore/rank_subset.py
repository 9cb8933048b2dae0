"""What one rank takes of a checkpoint that ranks with other names wrote, such as pipeline stages.

A recorded name that this rank's modules and optimizers lack is left out of its tree, not read and
not loaded. It is an error only when no rank takes it; the ranks compare what they left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from hpstore.checkpoint.state.held_objects import grows
from hpstore.checkpoint.state.module_state import module_state
from hpstore.checkpoint.state.optimizers import Parameters, local_part
from hpstore.checkpoint.state.scalars import TAG
from hpstore.checkpoint.state.state_tree import join
from hpstore.checkpoint.state.targets import RNG_KEY, Names, State
from hpstore.checkpoint.state.tree_paths import children
from hpstore.checkpoint.state.typed_objects import is_namespace

Json = Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py


def pruned(tree: Json, state: State) -> tuple[Json, list[str]]:
    """The tree without what `state` has no place for, and the paths that were left out."""
    left: list[str] = []
    if not _is_plain(tree):
        return tree, left
    names = Names(state)
    kept = {}
    for name, node in tree.items():
        if name in state:
            kept[name] = _value(name, node, state[name], names, left)
        elif name == RNG_KEY:
            kept[name] = node
        else:
            left.append(name)
    return kept, left


def _value(path: str, node: Json, target: Any, names: Names, left: list[str]) -> Json:
    if isinstance(node, dict) and node.get(TAG) == "dict":
        return _rows(path, node, target, names, left)
    if isinstance(node, dict) and node.get(TAG) == "tuple":
        return {**node, "v": _value(path, node["v"], target, names, left)}
    if isinstance(node, list) and isinstance(target, (list, tuple)) and len(node) == len(target):
        pairs = enumerate(zip(node, target, strict=True))
        return [_value(join(path, n), child, own, names, left) for n, (child, own) in pairs]
    if not _is_plain(node):
        return node
    if isinstance(target, torch.nn.Module):
        return _only(path, node, module_state(target), left)
    if isinstance(target, Optimizer):
        mine = names.of(target)
        return node if mine is None else _optimizer(path, node, target, mine, left)
    if isinstance(target, dict):
        return {
            name: _value(join(path, name), child, target[name], names, left)
            for name, child in _only(path, node, target, left).items()
        }
    return node


def _rows(path: str, node: Json, target: Any, names: Names, left: list[str]) -> Json:
    """As _value, of what is recorded as rows: an OrderedDict, a dict with keys of any type, or a
    namespace."""
    alike = is_namespace(target) and node.get("type") == type(target).__name__
    wanted = vars(target) if alike else target
    if not isinstance(wanted, dict) or grows(wanted):
        return node
    kept = []
    for row, (name, child) in zip(node["v"], children(node), strict=True):
        if name in wanted:
            kept.append([row[0], _value(join(path, name), child, wanted[name], names, left)])
        else:
            left.append(join(path, name))
    return {**node, "v": kept}


def _only(path: str, node: Json, wanted: Mapping[Any, Any], left: list[str]) -> dict[str, Json]:
    left += [join(path, name) for name in node if name not in wanted]
    return {name: child for name, child in node.items() if name in wanted}


def _optimizer(
    path: str, node: Json, optimizer: Optimizer, names: Parameters, left: list[str]
) -> Json:
    """State and groups of this rank's parameters."""
    own_groups = local_part(optimizer).param_groups
    mine = {names[p] for group in own_groups for p in group["params"]}
    state, groups = node.get("state"), node.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return node  # not an optimizer's: that is for the check to say
    kept = []
    for group in groups:
        params = group.get("params", []) if isinstance(group, dict) else []
        left += [join(path, name) for name in params if name not in mine]
        some = [name for name in params if name in mine]
        if some or not params:
            kept.append({**group, "params": some} if isinstance(group, dict) else group)
    named = {
        name for group in groups if isinstance(group, dict) for name in group.get("params", [])
    }
    own = {name: slots for name, slots in state.items() if name in mine or name not in named}
    return {**node, "state": own, "param_groups": kept}


def _is_plain(node: Json) -> bool:
    return isinstance(node, dict) and TAG not in node
