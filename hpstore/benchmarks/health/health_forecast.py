"""Forecasts of failures on drive-stats files that the user has: found before they fail, by score.

Learned on the first two thirds of the days, judged on the others, drives apart (docs/health.md).
The files are no part of hpstore; without them this is not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpstore.errors import ForecastError
from hpstore.health.forecast.drive_histories import load_histories
from hpstore.health.forecast.drive_stats import BadRows
from hpstore.health.forecast.evaluate_model import LEAK_FDR, ForecastEvaluation, evaluate
from hpstore.health.forecast.forecast_model import MODEL, RULE, SUM
from hpstore.health.forecast.labels import split_day
from hpstore.health.forecast.train_model import train
from hpstore.units import GIB

FAR = 0.01
NOT_RUN = "not run: needs --drive-stats FILE, which is no part of hpstore (docs/health.md)"
_SALT = "memory"  # as `hpstore health` has it
# Any: JSON
Found = dict[str, Any]


def forecast_case(files: Sequence[Path]) -> Found:
    """FDR at FAR <= 1 % of model and rule score, against the plain sum of SMART counters."""
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
    """The model above the sum, the rule not below it; far above both is a leak."""
    fdr = {name: found.scores[name].at_far.fdr for name in (MODEL, RULE, SUM)}
    rows: Found = {
        "failed_drives": found.failed_drives,
        "healthy_drives": found.healthy_drives,
        "after": found.after,
        "until": found.until,
        "far": found.far,
    }
    for name, value in fdr.items():
        result = found.scores[name]
        interval = result.over_sum_interval
        row: Found = {
            "fdr": round(value, 4),
            "over_sum": round(result.over_sum, 4),
            "over_sum_95": [round(interval.low, 3), round(interval.high, 3)],
        }
        if name == MODEL:
            row |= {
                "bar": f"> the sum, and <= {LEAK_FDR} (a leak)",
                "met": fdr[SUM] < value <= LEAK_FDR,
            }
        elif name == RULE:
            row |= {"bar": ">= the sum", "met": fdr[SUM] <= value <= LEAK_FDR}
        rows[name] = row
    return rows
