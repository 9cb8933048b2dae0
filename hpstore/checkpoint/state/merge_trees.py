"""One tree of what all ranks recorded. Pure."""

from __future__ import annotations

import json
from typing import Any

from hpstore.checkpoint.state.scalars import TAG
from hpstore.checkpoint.state.state_tree import join

Json = Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py
GROUPS = "param_groups"


class Merge:
    """Merges trees in the order of the ranks. Names of all are kept; where two ranks differ in a
    value, the first counts and `differing` has its path."""

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
        if kind in ("dict", "tuple") and first.get("type") != second.get("type"):
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
            mine, other = ({json.dumps(k): (k, v) for k, v in n["v"]} for n in (first, second))
            rows = [
                [
                    key,
                    self.trees(child, other[text][1], join(path, text)) if text in other else child,
                ]
                for text, (key, child) in mine.items()
            ]
            return {**first, "v": rows + [[*r] for t, r in other.items() if t not in mine]}
        if first != second:
            self.differing.append(path)
        return first

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


def _are_groups(node: Json) -> bool:
    """Whether these are groups of named parameters."""
    return isinstance(node, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in node
    )
