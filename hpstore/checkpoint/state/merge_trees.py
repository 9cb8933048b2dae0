"""One tree of what all ranks recorded. Pure."""

from __future__ import annotations

import json
from typing import Any

from hpstore.checkpoint.state.scalars import TAG
from hpstore.checkpoint.state.state_tree import join

Json = Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py
GROUPS = "param_groups"
GROWN = ("Counter", "defaultdict")  # whose names are values, not a part of what a state is made of


class Merge:
    """Merges trees in the order of the ranks. Names of all are kept; where two ranks differ in a
    value, or in the class of an object, the first counts and `differing` has its path."""

    def __init__(self) -> None:
        self.differing: list[str] = []

    def trees(self, first: Json, second: Json, path: str = "") -> Json:
        """What two ranks recorded as one."""
        if isinstance(first, dict) and isinstance(second, dict):
            if first.get(TAG) == second.get(TAG):
                return self._dicts(first, second, path)
        elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
            return [
                self.trees(a, b, join(path, n))
                for n, (a, b) in enumerate(zip(first, second, strict=True))
            ]
        if first != second:
            self.differing.append(path)
        return first

    def _dicts(self, first: Json, second: Json, path: str) -> Json:
        kind = first.get(TAG)
        if kind in ("dict", "tuple") and _described(first) != _described(second):
            self.differing.append(path)
            return first
        if kind is None:
            merged = {
                name: self._child(name, child, second[name], path) if name in second else child
                for name, child in first.items()
            }
            return {**merged, **{n: c for n, c in second.items() if n not in first}}
        if kind == "ranks":
            return {TAG: kind, "v": {**second["v"], **first["v"]}}
        if kind == "tuple":
            return {**first, "v": self.trees(first["v"], second["v"], path)}
        if kind == "dict":
            return self._rows(first, second, path)
        if first != second:
            self.differing.append(path)
        return first

    def _rows(self, first: Json, second: Json, path: str) -> Json:
        """Of what counts or collects under names of its own (GROWN), names of the second are kept
        only with a tensor, or a part that each rank has for itself, under them."""
        mine, other = ({json.dumps(k): (k, v) for k, v in n["v"]} for n in (first, second))
        rows = [
            [key, self.trees(child, other[text][1], join(path, text)) if text in other else child]
            for text, (key, child) in mine.items()
        ]
        more = [[*row] for text, row in other.items() if text not in mine]
        if first.get("type") in GROWN:
            gone = [child for text, (_, child) in mine.items() if text not in other]
            if not all(_is_kept(child) for child in gone + [row[1] for row in more]):
                self.differing.append(path)
            more = [row for row in more if _is_kept(row[1])]
        return {**first, "v": rows + more}

    def _child(self, name: str, first: Json, second: Json, path: str) -> Json:
        if name == GROUPS and _are_groups(first) and _are_groups(second):
            return self._groups(first, second, join(path, name))
        return self.trees(first, second, join(path, name))

    def _groups(self, first: list[Json], second: list[Json], path: str) -> list[Json]:
        """An optimizer's groups: the stages of a pipeline have parameters of their own in them.

        Parameters of the second that the first lacks join the group with the same options, or make
        one of their own.
        """
        merged = [{**group, "params": list(group["params"])} for group in first]
        known = {name for group in first for name in group["params"]}
        for number, group in enumerate(second):
            more = [name for name in group["params"] if name not in known]
            options = {key: value for key, value in group.items() if key != "params"}
            like = [g for g in merged if {k: v for k, v in g.items() if k != "params"} == options]
            if not more:
                if not like:  # options differ for parameters that both have
                    self.differing.append(join(path, number))
            elif like:
                like[0]["params"] += more
            else:
                merged.append({**group, "params": more})
        return merged


def _described(node: Json) -> Json:
    """What a node of parts has beside them: its type, class, fields, length."""
    return {name: value for name, value in node.items() if name != "v"}


def _is_kept(node: Json) -> bool:
    """Whether a node holds what was written for it, or what each rank has for itself."""
    if isinstance(node, list):
        return any(map(_is_kept, node))
    if not isinstance(node, dict):
        return False
    if node.get(TAG) in ("tensor", "ndarray", "ranks"):
        return True
    return any(map(_is_kept, node.values()))


def _are_groups(node: Json) -> bool:
    """Whether these are groups of named parameters."""
    return isinstance(node, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in node
    )
