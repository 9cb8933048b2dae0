"""Numbers of a drive's history for a model: levels, rises over days, peaks, plain scores. Pure.

A feature is named after its counter and what is taken of it: "smart_5:level", "smart_5:rise_14",
"smart_197:peak"; "rule:score" and "sum:score" are those of rules.py. Never the serial number, the
date, the model, the capacity or the age. Every feature of a day is made from that day and days
before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpstore.errors import ForecastError
from hpstore.health.forecast.counter_series import increases, rises
from hpstore.health.forecast.drive_histories import FloatArray, IntArray
from hpstore.health.forecast.rules import plain_sum, rule_scores
from hpstore.health.smart.counters import INDEX, RULE_COUNTERS

WINDOWS = (7, 14, 30)
MIN_SAMPLES = 7  # daily rows before a model says anything
MODEL_COUNTERS = (*RULE_COUNTERS, "smart_188")
_RULE, _SUM = "rule:score", "sum:score"


def compute(days: IntArray, values: FloatArray, names: Sequence[str]) -> FloatArray:
    """Features `names` of every row of a history.

    Parameters
    ----------
    days : (rows,), rising
    values : (rows, len(COUNTERS)), as in DriveHistory

    Returns
    -------
    (rows, len(names)) float64; NaN where a counter has no value on that day.

    Raises
    ------
    ForecastError
        A name is not known.
    """
    out = np.empty((len(days), len(names)))
    increased = increases(values)
    risen: dict[int, FloatArray] = {}
    for column, name in enumerate(names):
        if name in (_RULE, _SUM):
            found = rule_scores(days, values) if name == _RULE else plain_sum(values)
            out[:, column] = np.log1p(found)
            continue
        index, what, window = parse_name(name)
        level = values[:, index]
        if what == "rise":
            if window not in risen:
                risen[window] = rises(days, increased, window)
            found = risen[window][:, index]
        else:
            found = np.fmax.accumulate(level) if what == "peak" else level
        out[:, column] = np.where(np.isnan(level), np.nan, np.log1p(found))
    return out


def parse_name(name: str) -> tuple[int, str, int]:
    """The counter's index, what is taken of it, over how many days. Raises ForecastError.

    (-1, "score", 0) for a score of rules.py.
    """
    if name in (_RULE, _SUM):
        return -1, "score", 0
    counter, _, what = name.partition(":")
    kind, _, days = what.partition("_")
    window = int(days) if days.isascii() and days.isdecimal() and len(days) <= 3 else 0
    good = window > 0 if kind == "rise" else kind in ("level", "peak") and not days
    if counter not in INDEX or not good:
        raise ForecastError(
            f"no feature is called {name[:80]!r}: the model is damaged or of a newer hpstore; "
            "no drive was judged"
        )
    return INDEX[counter], kind, window


def feature_names(counters: Sequence[str]) -> list[str]:
    """The features that a model is trained on, of the counters that its files have. Pure.

    More of any of them never lowers a score.
    """
    names = [f"{c}:{what}" for c in counters for what in ("level", *(f"rise_{w}" for w in WINDOWS))]
    return [*names, _RULE, _SUM]
