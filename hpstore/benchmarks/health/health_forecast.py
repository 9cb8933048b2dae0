"""Forecasts of failures on drive-stats files that the user has: found before they fail, by score.

Learned on the first two thirds of the days, judged on the others, drives apart (docs/health.md).
The files are no part of hpstore; without them this is not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpstore.errors import ForecastError
from hpstore.health.forecast.calibration import Reliability
from hpstore.health.forecast.drive_histories import load_histories
from hpstore.health.forecast.drive_stats import BadRows
from hpstore.health.forecast.evaluate_model import LEAK_FDR, ForecastEvaluation, evaluate
from hpstore.health.forecast.forecast_model import MODEL, RULE, SUM
from hpstore.health.forecast.labels import split_day
from hpstore.health.forecast.train_model import train
from hpstore.units import GIB

FAR = 0.01
MOST_OFF = 2.0  # of predicted days before a failure
NOT_RUN = "not run: needs --drive-stats FILE, which is no part of hpstore (docs/health.md)"
_SALT = "memory"  # as `hpstore health` has it
# Any: JSON
Found = dict[str, Any]


def forecast_case(files: Sequence[Path]) -> Found:
    """FDR of model, rule score and plain sum at a FAR of 1 %, and whether probabilities hold."""
    if not files:
        return {"skipped": NOT_RUN}
    bad, paths = BadRows(), [str(path) for path in files]
    gathered = load_histories(paths, bad=bad, salt=_SALT, memory_bytes=GIB)
    first = min(int(history.days[0]) for history in gathered.histories)
    last = max(int(history.days[-1]) for history in gathered.histories)
    until = split_day(first, last, "")
    try:
        model = train(gathered, until=until, files=[path.name for path in files])
        found = evaluate(model, gathered, far=FAR)
    except ForecastError as error:  # no scikit-learn, too few failures
        return {"skipped": f"not run: {error}"}
    return {"bad_rows": bad.count, **forecast_verdicts(found)}


def forecast_verdicts(found: ForecastEvaluation) -> Found:
    """The score that alarms come from: not below the sum, at thresholds from training alone.

    Far above it is a leak. The other scores have figures and no bar: they are not used.
    """
    rows: Found = {
        "failed_drives": found.failed_drives,
        "healthy_drives": found.healthy_drives,
        "after": found.after,
        "until": found.until,
        "far": found.far,
        "alarms_from": found.judged_by,
        "without_a_sign": round(found.no_signal / found.failed_drives, 4),
    }
    least = found.scores[SUM].fitted.fdr
    for name in (MODEL, RULE, SUM):
        result = found.scores[name]
        interval = result.over_sum_fitted_interval
        row: Found = {
            "fdr": round(result.fitted.fdr, 4),
            "far": round(result.fitted.far, 4),
            "fdr_strict": round(result.fitted.fdr_strict, 4),
            "hits_alarmed_earlier": result.fitted.earlier_hits,
            "over_sum": round(result.over_sum_fitted, 4),
            "over_sum_95": [round(interval.low, 3), round(interval.high, 3)],
        }
        if name == found.judged_by:
            row |= {
                "bar": f">= the sum, and <= {LEAK_FDR} (a leak)",
                "met": least <= result.fitted.fdr <= LEAK_FDR,
            }
        rows[name] = row
    if found.reliability is not None:
        rows["probabilities"] = _probabilities(found.reliability)
    return rows


def _probabilities(found: Reliability) -> Found:
    """Days before a failure: predicted to seen."""
    ratio = found.predicted_days / found.observed_days if found.observed_days else 0.0
    return {
        "predicted_to_observed": round(ratio, 3),
        "bar": f"{1 / MOST_OFF:g} to {MOST_OFF:g}",
        "met": 1 / MOST_OFF <= ratio <= MOST_OFF,
    }
