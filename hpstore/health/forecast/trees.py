"""Boosted trees as arrays: taken from scikit-learn, kept as JSON, evaluated here with numpy alone.

All trees of a booster lie back to back in flat arrays. A leaf has feature -1. The sum is made in
scikit-learn's order, in float64: the result is the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpstore.errors import ForecastError
from hpstore.health.forecast.drive_histories import FloatArray
from hpstore.health.forecast.model_card import damaged

MAX_NODES = 1 << 20
MAX_DEPTH = 64
_LEAF = -1
_ROWS = 8192  # at a time: what a step touches stays in the processor's cache
_FIELDS = ("roots", "feature", "threshold", "left", "right", "missing_left", "value")

# Any below: what JSON or scikit-learn hands over; every part is checked by its type
Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Booster:
    """Trees and where they start from. `score` is in log-odds."""

    baseline: float
    roots: NDArray[np.int32]  # (trees,)
    feature: NDArray[np.int32]  # (nodes,); -1 is a leaf
    threshold: FloatArray  # (nodes,); at most this goes left, +inf sends all but NaN there
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    missing_left: NDArray[np.bool_]  # where NaN goes
    value: FloatArray  # of leaves

    def score(self, rows: FloatArray) -> FloatArray:
        """Log-odds of every row. Shape (rows, features) to (rows,)."""
        out = np.full(len(rows), self.baseline)
        for start in range(0, len(rows), _ROWS):
            block = rows[start : start + _ROWS]
            missing = np.isnan(block)
            for root in self.roots:
                out[start : start + _ROWS] += self.value[self._leaves(block, missing, int(root))]
        return out

    def _leaves(
        self, block: FloatArray, missing: NDArray[np.bool_], root: int
    ) -> NDArray[np.int32]:
        nodes = np.full(len(block), root, np.int32)
        walking = np.arange(len(block))
        while len(walking):
            here = nodes[walking]
            feature = self.feature[here]
            inner = feature != _LEAF
            if not inner.all():
                walking, here, feature = walking[inner], here[inner], feature[inner]
            goes_left = np.where(
                missing[walking, feature],
                self.missing_left[here],
                block[walking, feature] <= self.threshold[here],
            )
            nodes[walking] = np.where(goes_left, self.left[here], self.right[here])
        return nodes

    def as_dict(self) -> dict[str, object]:
        """For JSON: lists of numbers; an infinite threshold is null."""
        return {
            "baseline": self.baseline,
            "roots": self.roots.tolist(),
            "feature": self.feature.tolist(),
            "threshold": [None if math.isinf(t) else t for t in self.threshold.tolist()],
            "left": self.left.tolist(),
            "right": self.right.tolist(),
            "missing_left": self.missing_left.astype(int).tolist(),
            "value": self.value.tolist(),
        }


def booster_from_sklearn(fitted: Json) -> Booster:
    """The trees of a fitted HistGradientBoostingClassifier of two classes and numeric features.

    Raises ForecastError when a split is categorical or there are more classes.
    """
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in _FIELDS}  # Any: several dtypes
    base = 0
    for trees in fitted._predictors:
        if len(trees) != 1:
            raise ForecastError("a model of more than two classes cannot be kept")
        nodes = trees[0].nodes
        if nodes["is_categorical"].any():
            raise ForecastError("a model with categorical splits cannot be kept")
        leaf = nodes["is_leaf"].astype(bool)
        columns["roots"].append(np.array([base]))
        columns["feature"].append(np.where(leaf, _LEAF, nodes["feature_idx"]))
        columns["threshold"].append(np.where(leaf, 0.0, nodes["num_threshold"]))
        columns["left"].append(np.where(leaf, 0, nodes["left"].astype(np.int64) + base))
        columns["right"].append(np.where(leaf, 0, nodes["right"].astype(np.int64) + base))
        columns["missing_left"].append(np.where(leaf, False, nodes["missing_go_to_left"] != 0))
        columns["value"].append(np.where(leaf, nodes["value"], 0.0))
        base += len(nodes)
    kinds = {"threshold": np.float64, "value": np.float64, "missing_left": np.bool_}
    arrays: dict[str, Any] = {
        name: np.concatenate(parts).astype(kinds.get(name, np.int32))
        for name, parts in columns.items()
    }
    return Booster(baseline=float(fitted._baseline_prediction.item()), **arrays)


def gains(fitted: Json, names: Sequence[str]) -> dict[str, float]:
    """Each feature's share of the gain of a fitted scikit-learn model, largest first."""
    total = np.zeros(len(names))
    for trees in fitted._predictors:
        nodes = trees[0].nodes
        inner = nodes["is_leaf"] == 0
        np.add.at(total, nodes["feature_idx"][inner], nodes["gain"][inner])
    whole = float(total.sum()) or 1.0
    order = np.argsort(-total, kind="stable")
    return {names[i]: float(total[i] / whole) for i in order if total[i] > 0}


def booster_from_dict(body: Json, features: int) -> Booster:
    """Trees from JSON, every number checked: a walk through them ends and stays inside.

    Raises ForecastError.
    """
    if not isinstance(body, Mapping) or set(body) != {"baseline", *_FIELDS}:
        raise damaged("its trees lack parts, or have others")
    lists = {name: body[name] for name in _FIELDS}
    if not all(isinstance(part, list) for part in lists.values()):
        raise damaged("its trees are not lists")
    count = len(lists["feature"])
    if not 0 < count <= MAX_NODES or not 0 < len(lists["roots"]) <= count:
        raise damaged(f"{count} nodes, {len(lists['roots'])} trees")
    if any(len(lists[name]) != count for name in _FIELDS[1:]):
        raise damaged("the lists of its trees have different lengths")
    limits = {
        "roots": (0, count - 1),
        "feature": (_LEAF, features - 1),
        "left": (0, count - 1),
        "right": (0, count - 1),
        "missing_left": (0, 1),
    }
    whole = {name: _whole(name, lists[name], *limits[name]) for name in limits}
    threshold = _floats("threshold", [math.inf if t is None else t for t in lists["threshold"]])
    value = _floats("value", lists["value"])
    baseline = _floats("baseline", [body["baseline"]])
    if not (np.isfinite(value).all() and np.isfinite(baseline).all()):
        raise damaged("a value is not finite")
    _check_walks(whole["roots"], whole["feature"], whole["left"], whole["right"])
    return Booster(
        baseline=float(baseline[0]),
        roots=whole["roots"],
        feature=whole["feature"],
        threshold=threshold,
        left=whole["left"],
        right=whole["right"],
        missing_left=whole["missing_left"].astype(bool),
        value=value,
    )


def _check_walks(
    roots: NDArray[np.int32],
    feature: NDArray[np.int32],
    left: NDArray[np.int32],
    right: NDArray[np.int32],
) -> None:
    """No walk is longer than MAX_DEPTH: none goes in a circle."""
    reached = np.unique(roots)
    for _ in range(MAX_DEPTH):
        reached = reached[feature[reached] != _LEAF]
        if not len(reached):
            return
        reached = np.unique(np.concatenate([left[reached], right[reached]]))
    raise damaged(f"a walk through its trees is longer than {MAX_DEPTH}, or does not end")


def _whole(name: str, items: list[Json], low: int, high: int) -> NDArray[np.int32]:
    if not set(map(type, items)) <= {int} or min(items) < low or max(items) > high:
        raise damaged(f"{name} holds something else than whole numbers from {low} to {high}")
    return np.array(items, np.int32)


def _floats(name: str, items: list[Json]) -> FloatArray:
    if not set(map(type, items)) <= {int, float}:
        raise damaged(f"{name} holds something else than numbers")
    try:
        found = np.array(items, np.float64)
    except (OverflowError, ValueError) as error:
        raise damaged(f"{name} holds a number that is too large") from error
    if np.isnan(found).any():
        raise damaged(f"{name} holds no number")
    return found
