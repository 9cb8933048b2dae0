"""Optimizers in a part of a step: their parameters follow the names of their model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpstore.checkpoint.restore.load_options import NameFilter
from hpstore.checkpoint.restore.name_patterns import Renames
from hpstore.checkpoint.restore.tree_branches import Branch, branches, moved
from hpstore.checkpoint.state.scalars import TAG
from hpstore.checkpoint.state.state_tree import join, tensor_names
from hpstore.checkpoint.state.tree_paths import children
from hpstore.errors import CheckpointMismatch, ConfigError

Json = Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py
_GROUPS = "param_groups"
_CANDIDATES = 16  # dicts that are looked at for all names of an optimizer


def is_optimizer(node: Json) -> bool:
    """Whether a recorded dict is the state of an optimizer."""
    if not isinstance(node, dict) or TAG in node:
        return False
    groups, state = node.get(_GROUPS), node.get("state")
    return (
        isinstance(state, dict)
        and state.get(TAG, "dict") == "dict"
        and isinstance(groups, list)
        and bool(groups)
        and all(map(_is_group, groups))
    )


def _is_group(node: Json) -> bool:
    params = node.get("params") if isinstance(node, dict) and TAG not in node else None
    return isinstance(params, list) and all(type(name) in (str, int) for name in params)


def _params(node: Json) -> list[Any]:
    return [name for group in node[_GROUPS] for name in group["params"]]


class Recorded:
    """Dicts of a tree by the names in them."""

    def __init__(self, root: Branch) -> None:
        self._found = [(path, branch.rows.keys() | set()) for path, branch in branches(root)]
        self._holders: dict[str, list[int]] = {}
        for number, (_, names) in enumerate(self._found):
            for name in names:
                some = self._holders.setdefault(name, [])
                if len(some) < _CANDIDATES:
                    some.append(number)

    def models_of(self, optimizer: Json) -> list[str]:
        """The paths of the dicts that have all of an optimizer's parameters: its model, and what
        has the same names, such as an average or a teacher."""
        names = _params(optimizer)
        if not names or type(names[0]) is not str:
            return []
        found = [self._found[number] for number in self._holders.get(names[0], ())]
        return [
            path
            for path, there in found
            if all(type(name) is str and name in there for name in names)
        ]

    def model_of(self, path: str, optimizer: Json, moves: Mapping[str, str | None]) -> str | None:
        """The model that an optimizer at `path` follows; None without one.

        A dict that is left out is none. Of others that would name the parameters differently, it
        is the one that is moved. Raises ConfigError when there are several such.
        """
        models = self.models_of(optimizer)
        found: dict[tuple[str | None, ...], str] = {}
        for model in models:
            found.setdefault(tuple(_new_names(optimizer, model, moves)), model)
        stays, gone = tuple(_params(optimizer)), (None,) * len(_params(optimizer))
        kept = {names: model for names, model in found.items() if names != gone} or found
        moved_ones = {names: model for names, model in kept.items() if names != stays} or kept
        if len(moved_ones) > 1:
            raise ConfigError(
                f"the parameters of optimizer {path!r} are named in {models[:4]}, which rename= "
                "moves differently: rename those that are not its model in a restore of their own, "
                "or leave them out. Nothing was changed."
            )
        return next(iter(moved_ones.values()), None)


@dataclass(slots=True, kw_only=True)
class RenamedOptimizer:
    """`node`: None when nothing of it is chosen. `names`, `items`: old to new."""

    path: str
    node: Json
    names: dict[str, str] = field(default_factory=dict)
    items: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def rename_optimizer(
    path: str,
    node: Json,
    model: str | None,
    moves: Mapping[str, str | None],
    renames: Renames,
    chosen: NameFilter,
) -> RenamedOptimizer:
    """An optimizer under the names of the state, with the parameters that are chosen.

    `moves`: of the names of its model, the path of which is `model`.
    """
    groups_name = renames.of(join(path, _GROUPS))
    if groups_name is None:
        left = [join(path, f"state/{name}") for name, _ in children(node["state"])]
        return RenamedOptimizer(path=path, node=None, left_out=[*left, join(path, _GROUPS)])
    at, slash, last = groups_name.rpartition("/")
    if last != _GROUPS or not slash:
        raise ConfigError(
            f"rename gave {groups_name!r} for {join(path, _GROUPS)!r}: an optimizer is renamed as "
            f"a whole, to NAME/{_GROUPS}. Nothing was changed."
        )
    found = RenamedOptimizer(path=at, node=None)
    _require_whole(node, at, chosen)
    called = _called(node, path, at, model, moves, chosen, found)
    with_groups = chosen.lets(groups_name)
    if with_groups:
        found.names[join(path, _GROUPS)] = groups_name
    else:
        found.left_out.append(groups_name)
    state = _state(node["state"], path, at, called, found)
    groups = _groups(node[_GROUPS], called, options=with_groups)
    has_state = bool(state["v"] if TAG in state else state)
    if has_state or any(group["params"] for group in groups) or with_groups:
        found.node = {**node, "state": state, _GROUPS: groups}
    return found


def _require_whole(node: Json, at: str, chosen: NameFilter) -> None:
    """Raise ConfigError when only a part is chosen of an optimizer whose parameters have no names:
    torch gives it all of a state, or nothing."""
    if all(type(name) is str for name in _params(node)):
        return
    names = [join(at, _GROUPS), *(join(at, f"state/{n}") for n in dict.fromkeys(_params(node)))]
    lets = [chosen.lets(name) for name in names]
    if any(lets) and not all(lets):
        raise ConfigError(
            f"optimizer {at!r} was saved without names of its parameters, as its model was not in "
            "the state: include= and exclude= choose all of it or nothing. Nothing was changed."
        )


def _called(
    node: Json,
    path: str,
    at: str,
    model: str | None,
    moves: Mapping[str, str | None],
    chosen: NameFilter,
    found: RenamedOptimizer,
) -> dict[str, str | None]:
    """New names of parameters, and of what else has a state, by the text of the old ones."""
    called: dict[str, str | None] = {}
    takers: dict[str, str] = {}
    state = [name for name, _ in children(node["state"])]
    for name in map(str, dict.fromkeys([*_params(node), *state])):
        old = name if model is None else join(model, name)
        moved_to = moves.get(old, old) if model is not None else old
        new = name if moved_to == old else _own_name(name, moved_to, model)
        if new is not None and not chosen.lets(join(at, f"state/{new}")):
            found.left_out.append(join(at, f"state/{new}"))
            new = None
        elif new is None:
            found.left_out.append(join(path, f"state/{name}"))
        else:
            found.names[join(path, f"state/{name}")] = join(at, f"state/{new}")
            other = takers.setdefault(new, name)
            if other != name:
                raise CheckpointMismatch(
                    f"{other!r} and {name!r} of optimizer {path!r} would both be {new!r}. "
                    "Nothing was changed."
                )
        called[name] = new
    return called


def _new_names(node: Json, model: str, moves: Mapping[str, str | None]) -> list[str | None]:
    """What a model would call an optimizer's parameters."""
    found = []
    for name in _params(node):
        old = join(model, name)
        new = moves.get(old, old)
        found.append(name if new == old else _own_name(name, new, model))
    return found


def _own_name(name: str, moved_to: str | None, model: str | None) -> str | None:
    """What a model calls a parameter of a new path."""
    if moved_to is None:
        return None
    return moved_to.removeprefix(f"{model}/") if "/" in name else moved_to.rpartition("/")[2]


def _state(
    state: Json, path: str, at: str, called: Mapping[str, str | None], found: RenamedOptimizer
) -> Json:
    """The moments that are chosen; notes what their tensors are called."""
    rows = []
    keys = list(state) if TAG not in state else [row[0] for row in state["v"]]
    for key, (name, slots) in zip(keys, children(state), strict=True):
        new = called[str(name)]
        if new is None:
            continue
        old_path, new_path = join(path, f"state/{name}"), join(at, f"state/{new}")
        node = moved(slots, old_path, new_path)
        found.items.update(zip(tensor_names(slots), tensor_names(node), strict=True))
        rows.append((new if new != str(name) else key, node))
    if TAG in state:
        return {**state, "v": [[key, node] for key, node in rows]}
    return dict(rows)


def _groups(groups: Json, called: Mapping[str, str | None], *, options: bool) -> list[Json]:
    """Groups of the chosen parameters. Those without names are chosen whole or not at all, and keep
    their numbers: torch finds them by their place alone."""
    kept = []
    for group in groups:
        params = group["params"]
        if any(type(name) is not str for name in params):
            kept += [group] if options else []
            continue
        some = [called[name] for name in params if called[name] is not None]
        if some or (options and not params):
            kept.append({**(group if options else {}), "params": some})
    return kept
