"""Models as JSON: the same to the last bit as scikit-learn, and hostile ones refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits

from hpstore.errors import ForecastError, FormatTooNew
from hpstore.health.forecast.features import compute
from hpstore.health.forecast.forecast_model import ForecastModel, _digest, model_from_json
from hpstore.health.forecast.labels import fold_of
from hpstore.health.forecast.train_model import TrainOptions, train
from hpstore.health.forecast.trees import booster_from_dict, booster_from_sklearn
from tests.integration.fleets import FIRST, fleet, histories

FLEET = fleet(90, 90)
UNTIL = FIRST.toordinal() + 60
OPTIONS = TrainOptions(folds=2, inner_folds=2, trees=8, min_failures=3, min_leaf_rows=5)


@pytest.fixture(scope="module")
def model() -> ForecastModel:
    return train(histories(FLEET), until=UNTIL, files=["a.csv"], options=OPTIONS)


def test_trees_from_json_score_as_scikit_learn_to_the_last_bit() -> None:
    """Missing values in training and in judging, infinities, depth; through JSON text."""
    rng = np.random.default_rng(0)
    rows = np.exp(rng.normal(0, 3, (1000, 6)))
    rows[rng.random(rows.shape) < 0.2] = np.nan
    target = np.nan_to_num(rows[:, 0]) + np.isnan(rows[:, 1]) * 5 + rng.normal(0, 1, 1000) > 3
    for settings in ({"max_leaf_nodes": 31}, {"max_leaf_nodes": 2}, {"monotonic_cst": [1] * 6}):
        with threadpool_limits(1):
            fitted = HistGradientBoostingClassifier(max_iter=15, **settings).fit(rows, target)
        made = booster_from_sklearn(fitted)
        back = booster_from_dict(json.loads(json.dumps(made.as_dict(), allow_nan=False)), 6)
        asked = np.concatenate(
            [rows, rng.normal(0, 9, (9000, 6)), np.full((1, 6), np.nan), np.full((1, 6), np.inf)]
        )
        expected = fitted.decision_function(asked)
        assert (made.score(asked) == expected).all()
        assert (back.score(asked) == expected).all()


def test_a_model_judges_the_same_after_a_trip_through_json(model: ForecastModel) -> None:
    """Scores, thresholds, card."""
    back = model_from_json(model.to_json())
    every = histories(FLEET).histories
    masks = [np.ones(len(h.days), bool) for h in every]
    for ours, theirs in zip(model.scores(every, masks), back.scores(every, masks), strict=True):
        assert np.array_equal(ours, theirs, equal_nan=True)
    assert back.card.as_dict() == json.loads(json.dumps(model.card.as_dict())) | {
        "files": ("a.csv",),
        "limits": model.card.limits,
    }
    assert back.to_json() == model.to_json()


def test_a_score_is_that_of_the_drives_own_part_and_the_rules_term(model: ForecastModel) -> None:
    """Nothing is said of the first six days, of rows outside the mask, of rows without counters."""
    history = histories(FLEET).histories[0]
    values = history.values.copy()
    values[10] = np.nan
    changed = replace(history, values=values)
    mask = np.ones(len(history.days), bool)
    mask[12] = False
    found = model.scores([changed], [mask])[0]
    assert np.flatnonzero(np.isnan(found)).tolist() == [0, 1, 2, 3, 4, 5, 10, 12]
    rows = compute(changed.days, changed.values, model.features)
    expected = model.part_of(history.serial).booster.score(rows[20:])
    rule = rows[20:, model.features.index("rule:score")]
    assert found[20:].tolist() == (model.rule_weight * rule + expected).tolist()


Break = Callable[[dict[str, Any]], object]
HOSTILE: dict[str, Break] = {
    "left beyond the end": lambda b: b["parts"][0]["booster"]["left"].__setitem__(0, 10**6),
    "a walk in a circle": lambda b: b["parts"][0]["booster"]["left"].__setitem__(0, 0),
    "feature beyond the row": lambda b: b["parts"][0]["booster"]["feature"].__setitem__(0, 999),
    "negative index": lambda b: b["parts"][0]["booster"]["right"].__setitem__(0, -3),
    "float index": lambda b: b["parts"][0]["booster"]["roots"].__setitem__(0, 0.0),
    "bool index": lambda b: b["parts"][0]["booster"]["roots"].__setitem__(0, False),
    "text for a value": lambda b: b["parts"][0]["booster"]["value"].__setitem__(0, "1"),
    "a number of 400 digits": lambda b: b["parts"][0]["booster"]["value"].__setitem__(0, 10**400),
    "lists of two lengths": lambda b: b["parts"][0]["booster"]["value"].pop(),
    "no trees": lambda b: b["parts"][0]["booster"].update(roots=[]),
    "no parts": lambda b: b.update(parts=[]),
    "parts missing": lambda b: b.pop("salt"),
    "a feature of no counter": lambda b: b["features"].__setitem__(0, "serial:level"),
    "a feature that is code": lambda b: b["features"].__setitem__(0, "__import__('os')"),
    "a counter of no drive": lambda b: b["counters"].__setitem__(0, "smart_999"),
    "rising peaks": lambda b: b["parts"][0]["tails"]["rule"].update(peaks=[1.0, 2.0], windows=9),
    "no peaks": lambda b: b["parts"][0]["tails"]["rule"].update(peaks=[]),
    "a score too many": lambda b: b["parts"][0]["tails"].update(more={}),
    "a horizon of text": lambda b: b["card"].update(horizon_days="14"),
    "families in a list": lambda b: b["card"].update(families=["ST4000DM000"]),
    "a rule weight of infinity": lambda b: b.update(rule_weight=1e308),
    "another format": lambda b: b.update(format="pickle"),
    "no version": lambda b: b.update(version="1"),
    "not a table": lambda b: b.update(parts={}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_models_are_refused_before_use(model: ForecastModel, name: str) -> None:
    """With a digest that fits, so that it is the check of the part itself that refuses."""
    body = json.loads(model.to_json())
    body.pop("digest")
    HOSTILE[name](body)
    with pytest.raises(ForecastError, match=r"No drive was judged|no drive was judged"):
        model_from_json(json.dumps({**body, "digest": _digest(body)}))


def test_texts_that_are_no_models_are_refused(model: ForecastModel) -> None:
    """Cut short, one digit changed, infinity, depth, bytes, a newer format."""
    text = model.to_json()
    flipped = text.replace('"version": 2', '"version": 2, "x": 1')
    for hostile in (
        text[:-40],
        flipped,
        text.replace('"windows":', '"windows": 1, "w":', 1),
        text.replace('"baseline": ', '"baseline": Infinity, "b": ', 1),
        "[" * 100_000,
        b"\x80\x04\x95",
        b"\xff\xfe",
        "",
        "null",
        "[]",
    ):
        with pytest.raises(ForecastError, match="damaged or not one of ours"):
            model_from_json(hostile)
    with pytest.raises(FormatTooNew, match="upgrade"):
        model_from_json(text.replace('"version": 2', '"version": 3'))


def test_a_drive_has_no_part_in_what_judges_it(model: ForecastModel) -> None:
    """A drive of fold 0 becomes another one altogether: trees and thresholds of part 0 stay the
    same to the last bit, those of part 1 do not."""
    number = next(
        i
        for i, d in enumerate(FLEET)
        if not d.failed and len(d.counts) > 60 and fold_of(model.salt, d.serial, 2) == 0
    )
    changed = list(FLEET)
    counts = FLEET[number].counts.copy()
    counts[20:] += np.arange(len(counts) - 20)[:, None] * 50
    for failed in (False, True):
        length = len(counts) if not failed else 55
        changed[number] = replace(FLEET[number], counts=counts[:length], failed=failed)
        other = train(histories(changed), until=UNTIL, files=["a.csv"], options=OPTIONS)
        parts = [[json.dumps(p) for p in json.loads(m.to_json())["parts"]] for m in (model, other)]
        assert parts[0][0] == parts[1][0]
        assert parts[0][1] != parts[1][1]


def test_nothing_after_the_last_known_day_is_learned(model: ForecastModel) -> None:
    """Everything after `until` is turned upside down, failures become lives: the same model."""
    known = UNTIL - FIRST.toordinal() + 1
    changed = []
    for drive in FLEET:
        counts = drive.counts.copy()
        counts[known:] = 9999
        late = drive.failed and len(counts) > known
        changed.append(replace(drive, counts=counts, failed=drive.failed and not late))
    other = train(histories(changed), until=UNTIL, files=["a.csv"], options=OPTIONS)
    assert other.to_json() == model.to_json()


def test_the_same_files_and_seed_give_the_same_model(model: ForecastModel) -> None:
    """Byte by byte; another seed gives another."""
    again, other = (
        train(histories(FLEET), until=UNTIL, files=["a.csv"], options=options)
        for options in (OPTIONS, replace(OPTIONS, seed=1))
    )
    assert again.to_json() == model.to_json()
    assert other.to_json() != model.to_json()
