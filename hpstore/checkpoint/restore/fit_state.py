"""What of a recorded tree fits a state, for a restore that loads what fits. Pure.

A tensor whose shape differs stays as it is in the state, and with it the moments of a parameter: an
optimizer never gets moments of values that its parameter did not get.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch.optim import LBFGS

from hpstore.checkpoint.state.fill_objects import require_shape
from hpstore.checkpoint.state.plain_values import is_plain
from hpstore.checkpoint.state.scalars import TAG
from hpstore.checkpoint.state.state_tree import join
from hpstore.checkpoint.state.targets import Destinations
from hpstore.checkpoint.state.tree_paths import children, leaves

Json = Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py
_GONE = object()
_TENSORS = ("tensor", "ndarray")


def misfits(
    names: Iterable[str], shapes: Mapping[str, tuple[int, ...]], filled: Destinations
) -> dict[str, str]:
    """Names of recorded tensors whose shapes differ from those in the state, with both shapes."""
    found = {}
    for name in names:
        wanted, saved = filled.shape(name), shapes.get(name)
        if wanted is None or saved is None:
            continue
        if name in filled.places:
            require_shape(name, filled.places[name])
        if saved != wanted:
            found[name] = f"{saved} was saved, {wanted} is wanted"
    return found


Moments = dict[tuple[str, str], str]  # by optimizer and parameter: why they are not loaded


def unfollowed(
    names: Collection[str],
    skipped: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    filled: Destinations,
    tree: Json,
) -> Moments:
    """Moments whose parameter does not get the recorded values that they belong to.

    `names`: recorded tensors that are chosen, those in `skipped` included. `shapes`: what is known
    of all recorded ones, chosen or not. `tree`: what was recorded.
    """
    below = {join(path, f"state/{name}"): (path, name) for path, name in filled.parameters}
    found = {}
    for name in skipped:
        above, _, slot = name.rpartition("/")
        if above in below:
            found[below[above]] = f"{slot!r} has another shape"
    owners = filled.owners()
    loaded = set(names) - set(skipped)
    models = {model for model, name in owners.values() if name in loaded}
    for key, (model, name) in owners.items():
        differs = name in shapes and filled.shape(name) not in (None, shapes[name])
        left_alone = model in models and name in filled.places and name not in loaded
        if name in skipped or left_alone or differs:
            found[key] = "its parameter was not loaded"
    return found | _of_one_history(found, filled, tree)


def _of_one_history(found: Moments, filled: Destinations, tree: Json) -> Moments:
    """What LBFGS keeps is one flat vector over all its parameters, under the first: without one of
    them, or with another, it belongs to none, and the next step would fail or mix them up."""
    histories = {path for path, kind in filled.optimizers.items() if isinstance(kind, LBFGS)}
    if not histories:
        return {}
    recorded, wanted = recorded_parameters(tree, filled), filled.updated()
    paths = {path for path, _ in found if path in histories}
    paths |= {path for path in histories if recorded.get(path, wanted[path]) != wanted[path]}
    why = "LBFGS has one history of all its parameters, of which some were not loaded"
    return {key: why for key in filled.parameters if key[0] in paths and key not in found}


def untransformed(
    names: Collection[str],
    saved: Mapping[str, tuple[int, ...]],
    made: Mapping[str, tuple[int, ...]],
    filled: Destinations,
) -> Moments:
    """Moments that stayed as they were saved while their parameter was transformed. `made`: the
    shapes of what was transformed."""
    found: Moments = {}
    if not made:
        return found
    slots: dict[str, list[str]] = {}
    for name in names:
        slots.setdefault(name.rpartition("/")[0], []).append(name)
    for key, called in filled.names().items():
        turned_names = [name for name in called if name in made]
        if not turned_names:
            continue
        name = turned_names[0]  # all of them get the same
        below = [n for n in slots.get(join(key[0], f"state/{key[1]}"), []) if saved[n]]
        turned = made[name] != saved[name]
        if any(slot not in made or (turned and made[slot] == saved[name]) for slot in below):
            found[key] = "its parameter was transformed, and they were not"
    return found


class Trim:
    """Takes names out of a tree, as leaves of dicts and as parameters of optimizers.

    In lists, tuples and objects a tensor cannot be left out: it is in `kept`, and the state's own
    takes its place. `left` has the paths of all that was left out.
    """

    def __init__(self, skipped: Collection[str], moments: Collection[tuple[str, str]]) -> None:
        self._skipped = skipped
        self._moments: dict[str, set[str]] = {}
        for optimizer, name in moments:
            self._moments.setdefault(optimizer, set()).add(name)
        self.kept: set[str] = set()
        self.left: list[str] = []

    def tree(self, node: Json) -> Json:
        """The tree without these names."""
        if not self._skipped and not self._moments:
            return node
        found = self._node(node, "")
        return {} if found is _GONE else found

    def _node(self, node: Json, path: str) -> Json:
        if isinstance(node, list):
            return node if is_plain(node) else self._parts(node, path)
        if not isinstance(node, dict):
            return node
        kind = node.get(TAG)
        if kind is None:
            if path in self._moments:
                return self._optimizer(node, path)
            kept = {name: self._entry(child, join(path, name)) for name, child in node.items()}
            left = {name: child for name, child in kept.items() if child is not _GONE}
            return left if left or not node else _GONE
        if kind == "dict":
            return self._rows(node, path)
        if kind == "tuple":
            return {**node, "v": self._node(node["v"], path)}
        if kind == "ranks":
            inner = {r: self._inside(child, f"{path}@{r}") for r, child in node["v"].items()}
            return {**node, "v": inner}
        return node

    def _entry(self, node: Json, path: str) -> Json:
        """What stands under a name, which may go."""
        if isinstance(node, dict) and node.get(TAG) in _TENSORS:
            if node["item"] not in self._skipped:
                return node
            self.left.append(path)
            return _GONE
        return self._node(node, path)

    def _inside(self, node: Json, path: str) -> Json:
        """What stands in a list or an object, where something must stand."""
        if isinstance(node, dict) and node.get(TAG) in _TENSORS:
            if node["item"] in self._skipped:
                self.kept.add(node["item"])
            return node
        found = self._node(node, path)
        return {} if found is _GONE else found

    def _parts(self, node: list[Json], path: str) -> list[Json]:
        return [self._inside(child, join(path, n)) for n, child in enumerate(node)]

    def _rows(self, node: dict[str, Json], path: str) -> Json:
        named = list(zip(node["v"], children(node), strict=True))
        if node.get("type") not in (None, "OrderedDict"):
            rows = [[row[0], self._inside(c, join(path, name))] for row, (name, c) in named]
            return {**node, "v": rows}
        rows = [[row[0], self._entry(c, join(path, name))] for row, (name, c) in named]
        left = [row for row in rows if row[1] is not _GONE]
        return {**node, "v": left} if left or not rows else _GONE

    def _optimizer(self, node: dict[str, Json], path: str) -> Json:
        """A recorded optimizer without some parameters, as if it had not updated them."""
        gone = self._moments[path]
        state, groups = node.get("state"), node.get("param_groups")
        if not isinstance(state, dict) or not isinstance(groups, list):
            return node  # not an optimizer's: that is for the check to say
        named = {str(name) for name, _ in children(state)}
        for group in groups:  # those without moments are left out, too
            params = group.get("params") if isinstance(group, dict) else None
            named.update(map(str, params if isinstance(params, list) else ()))
        self.left += [join(path, f"state/{name}") for name in sorted(named & gone)]
        if TAG in state:
            rows = zip(state["v"], children(state), strict=True)
            own = {**state, "v": [row for row, (n, _) in rows if str(n) not in gone]}
        else:
            own = {name: slots for name, slots in state.items() if name not in gone}
        return {**node, "state": own, "param_groups": groups_without(groups, gone)}


def groups_without(groups: list[Json], gone: Collection[str]) -> list[Json]:
    """Recorded groups without some parameters; one that had no others goes with them. A
    number, which counts by its place, becomes None there."""
    kept = []
    for group in groups:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list) or not params:
            kept.append(group)
        elif any(type(name) is int for name in params):
            kept.append({**group, "params": [None if str(n) in gone else n for n in params]})
        elif some := [name for name in params if type(name) is not str or name not in gone]:
            kept.append({**group, "params": some})
    return kept


def recorded_parameters(tree: Json, filled: Destinations) -> dict[str, set[str]]:
    """Names of the parameters in the recorded groups of the state's optimizers, by path."""
    found: dict[str, set[str]] = {}
    for leaf in leaves(tree):
        path, _, last = leaf.path.rpartition("/param_groups/")
        if path in filled.optimizers and last.endswith("/params") and isinstance(leaf.node, list):
            found.setdefault(path, set()).update(map(str, leaf.node))
    return found
