"""A verdict on one drive, in words: spec flags, then the score that was shown to find the most.

That is the plain sum of error counters, unless a trained model says that another is better.
It warns. It takes nothing out of a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from enum import StrEnum

import numpy as np

from hpstore.health.forecast.drive_histories import DriveHistory
from hpstore.health.forecast.forecast_model import MODEL, RULE, SUM, ForecastModel
from hpstore.health.forecast.rules import (
    SUM_ALARM,
    Evidence,
    evidence,
    plain_sum,
    rule_scores,
    spec_flags,
)
from hpstore.health.smart.counters import INDEX, RULE_COUNTERS

_SHOWN = 4


class Risk(StrEnum):
    """From the least to the worst; `UNKNOWN` is none of them."""

    UNKNOWN = "unknown"  # nothing that could be judged
    NONE = "no sign"
    WATCH = "watch"  # errors, but as many healthy drives have
    WARN = "warn"  # above what healthy drives have
    FAILING = "failing"  # by its own specification


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A drive on its last day. Scores are None where there is nothing to make them of.

    `judged_by`: the score that the risk comes from: "sum", "rule" or "model". `alarm`: it is above
    its threshold. `probability`: of a failure within the horizon of the model's card, calibrated on
    the training files. `healthy_share`: at most this share of healthy drives scores as high in the
    card's window.
    """

    serial: str
    family: str
    day: str
    risk: Risk
    reasons: tuple[str, ...]
    judged_by: str
    alarm: bool
    probability: float | None
    error_sum: float | None
    rule_score: float | None
    model_score: float | None
    model_threshold: float | None
    model_alarm: bool
    healthy_share: float | None
    refusal: str  # why the model says nothing

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class FailureForecaster:
    """Judges drives; immutable, so any thread may call it.

    `model` None: spec flags and the plain sum alone. `far`: the share of healthy drives that may
    be warned of in the model's window. Raises ForecastError when the model keeps no such threshold.
    """

    def __init__(self, model: ForecastModel | None = None, *, far: float = 0.01) -> None:
        self._model, self._far = model, far
        for part in model.parts if model is not None else ():
            for tail in part.tails.values():
                tail.threshold(far)

    def judge(self, history: DriveHistory, *, flags: Sequence[str] = ()) -> Forecast:
        """The verdict on the last day of a history; `flags` are spec flags in words."""
        known = (
            len(history.days) > 0
            and not np.isnan(history.values[-1, [*(INDEX[name] for name in RULE_COUNTERS)]]).all()
        )
        scores: dict[str, float] = {}
        if known:
            scores[RULE] = float(rule_scores(history.days, history.values)[-1])
            scores[SUM] = float(plain_sum(history.values)[-1])
        if not flags and len(history.days) and spec_flags(history.values)[-1]:
            flags = ("it is failing by its own specification",)
        refusal = self._refusal(history)
        part = self._model.part_of(history.serial) if self._model and not refusal else None
        if self._model is not None and part is not None:
            scores[MODEL] = _model_score(self._model, history)
        judged_by = self._model.judged_by if self._model and part else SUM
        score = scores.get(judged_by)
        threshold = part.tails[judged_by].threshold(self._far) if part else SUM_ALARM
        limit = part.tails[MODEL].threshold(self._far) if part else None
        alarm = score is not None and score > threshold
        chances = part.calibrations.get(judged_by) if part else None
        share = part.tails[judged_by].share_above(score) if part and score is not None else None
        return Forecast(
            serial=history.serial,
            family=history.family,
            day=date.fromordinal(int(history.days[-1])).isoformat() if len(history.days) else "",
            risk=_risk(bool(flags), alarm, scores.get(RULE)),
            reasons=(
                *flags,
                *_sentences(evidence(history.days, history.values), alarm, share, self._model),
            ),
            judged_by=judged_by,
            alarm=alarm,
            probability=(
                None
                if chances is None or score is None
                else float(chances.probability(np.array([score]))[0])
            ),
            error_sum=scores.get(SUM),
            rule_score=scores.get(RULE),
            model_score=scores.get(MODEL),
            model_threshold=limit,
            model_alarm=limit is not None and scores[MODEL] > limit,
            healthy_share=share,
            refusal=refusal,
        )

    def _refusal(self, history: DriveHistory) -> str:
        """Why the model says nothing of this drive; "" if it does."""
        if self._model is None:
            return "no model was given"
        return self._model.refusal(history) or ""


def _model_score(model: ForecastModel, history: DriveHistory) -> float:
    """The trees' score of the last day, which the model does not refuse."""
    mask = np.zeros(len(history.days), bool)
    mask[-1] = True
    return float(model.scores([history], [mask])[0][-1])


def _risk(flagged: bool, alarm: bool, rule: float | None) -> Risk:
    if flagged:
        return Risk.FAILING
    if alarm:
        return Risk.WARN
    if rule is None:
        return Risk.UNKNOWN
    return Risk.WATCH if rule > 0 else Risk.NONE


def _sentences(
    found: tuple[Evidence, ...], alarm: bool, share: float | None, model: ForecastModel | None
) -> list[str]:
    said = [part.sentence() for part in found[:_SHOWN]]
    if alarm and share is not None and model is not None:
        said.append(
            f"fewer than {100 * share:.2g} % of healthy drives look like this within "
            f"{model.card.window_days} days"
        )
    return said
