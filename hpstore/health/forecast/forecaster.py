"""A verdict on one drive, in words: spec flags, then the trained model or the rule score.

It warns. It takes nothing out of a pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from enum import StrEnum

import numpy as np

from hpstore.health.forecast.drive_histories import DriveHistory
from hpstore.health.forecast.forecast_model import MODEL, RULE, ForecastModel
from hpstore.health.forecast.rules import ALARM_SCORE, Evidence, evidence, rule_scores, spec_flags
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

    `healthy_share`: at most this share of healthy drives scores as high in the card's window.
    """

    serial: str
    family: str
    day: str
    risk: Risk
    reasons: tuple[str, ...]
    rule_score: float | None
    rule_alarm: bool
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

    `model` None: spec flags and the rule score alone. `far`: the share of healthy drives that may
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
        found = evidence(history.days, history.values)
        rule = float(rule_scores(history.days, history.values)[-1]) if known else None
        if not flags and len(history.days) and spec_flags(history.values)[-1]:
            flags = ("it is failing by its own specification",)
        score, threshold, share, refusal = self._model_score(history)
        rule_alarm = rule is not None and rule > self._rule_threshold(history.serial)
        model_alarm = score is not None and threshold is not None and score > threshold
        return Forecast(
            serial=history.serial,
            family=history.family,
            day=date.fromordinal(int(history.days[-1])).isoformat() if len(history.days) else "",
            risk=_risk(bool(flags), model_alarm if score is not None else rule_alarm, rule),
            reasons=(*flags, *_sentences(found, model_alarm, share, self._model)),
            rule_score=rule,
            rule_alarm=rule_alarm,
            model_score=score,
            model_threshold=threshold,
            model_alarm=model_alarm,
            healthy_share=share,
            refusal=refusal,
        )

    def _rule_threshold(self, serial: str) -> float:
        if self._model is None:
            return ALARM_SCORE
        return self._model.part_of(serial).tails[RULE].threshold(self._far)

    def _model_score(
        self, history: DriveHistory
    ) -> tuple[float | None, float | None, float | None, str]:
        """Score, threshold, share of healthy drives as high, or why there is none."""
        if self._model is None:
            return None, None, None, "no model was given"
        refusal = self._model.refusal(history)
        if refusal is not None:
            return None, None, None, refusal
        mask = np.zeros(len(history.days), bool)
        mask[-1] = True
        score = float(self._model.scores([history], [mask])[0][-1])
        tail = self._model.part_of(history.serial).tails[MODEL]
        return score, tail.threshold(self._far), tail.share_above(score), ""


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
