"""Which score a model judges by, and what scores mean as probabilities; from training days alone.

For the choice, every drive is judged by the part of its own fold, which has not seen it. For the
probabilities of a part, the drives of all other folds are judged by helpers that have seen neither
them nor the part's own fold, as for its thresholds. A score is used in place of the plain sum of
SMART counters only if it finds more failures at the same false alarm rate, with a 95 % interval, by
drawing drives, that is above 0. Else the sum is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from hpstore.health.forecast.alarm_scores import NEVER, Interval, gain, threshold_at
from hpstore.health.forecast.calibration import Calibration, calibrate
from hpstore.health.forecast.drive_histories import DriveHistory, FloatArray
from hpstore.health.forecast.features import MIN_SAMPLES, compute
from hpstore.health.forecast.forecast_model import MODEL, RULE, SCORES, SUM, ForecastModel
from hpstore.health.forecast.labels import BoolArray, fold_of, inner_fold_of, labels, thinned
from hpstore.health.forecast.rules import plain_sum, rule_scores

CHOICE_FAR = 0.01
_RESAMPLES = 1000
_COLD_STRIDE = 30  # days without an error are alike: so many stand for one
_BATCH_DRIVES = 256

Judge = Callable[[FloatArray], FloatArray]  # log-odds of rows of features


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreComparison:
    """A score on drives of the training days that its judge has not seen, at CHOICE_FAR."""

    fdr: float
    over_sum: float
    over_sum_interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreChoice:
    """What a model judges by, why, and its calibrations by fold and score."""

    judged_by: str
    compared: Mapping[str, ScoreComparison]
    calibrations: tuple[Mapping[str, Calibration], ...]

    def as_dict(self) -> dict[str, object]:
        """For the card."""
        compared = {name: asdict(found) for name, found in self.compared.items()}
        return {"far": CHOICE_FAR, "judged_by": self.judged_by, "compared": compared}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """One drive's days that are looked at. Arrays are (rows,)."""

    fold: int
    inner: int
    failed: bool
    features: FloatArray  # (rows, features)
    positive: BoolArray
    weights: FloatArray
    scores: Mapping[str, FloatArray]

    def peak(self, name: str) -> float:
        """The largest score before the failure, or of all days of a drive that lived."""
        found = self.scores[name][self.positive if self.failed else slice(None)]
        return float(np.fmax.reduce(found, initial=NEVER))


def choose_score(
    model: ForecastModel,
    histories: Sequence[DriveHistory],
    *,
    helpers: Sequence[Sequence[Judge]],
    until: int,
    healthy_share: float,
    seed: int,
) -> ScoreChoice:
    """Compare the scores of a model on what it was trained with, each drive by a part apart.

    Nothing after day `until` is looked at. `helpers`: by fold, then by inner fold. `healthy_share`:
    of the healthy drives of the files, how many are in `histories`. The same arguments give the
    same choice.
    """
    drives = list(_judge(model, histories, len(helpers[0]), until, healthy_share))
    failed = [drive for drive in drives if drive.failed and drive.positive.any()]
    healthy = [drive for drive in drives if not drive.failed]
    peaks = {
        name: tuple(np.array([d.peak(name) for d in group]) for group in (failed, healthy))
        for name in SCORES
    }
    rng = np.random.default_rng(seed)
    compared = {}
    for name, (sick, lived) in peaks.items():
        over, interval = gain(
            (sick, lived), (peaks[SUM][0], peaks[SUM][1]), CHOICE_FAR, rng=rng, resamples=_RESAMPLES
        )
        found = sick > threshold_at(lived, CHOICE_FAR)
        compared[name] = ScoreComparison(
            fdr=float(found.mean()) if len(found) else 0.0,
            over_sum=over,
            over_sum_interval=interval,
        )
    return ScoreChoice(
        judged_by=better_than_sum(compared),
        compared=compared,
        calibrations=tuple(
            _calibrations(
                [drive for drive in drives if drive.fold != fold],
                judges,
                model.rule_weight,
                model.card.horizon_days,
            )
            for fold, judges in enumerate(helpers)
        ),
    )


def better_than_sum(compared: Mapping[str, ScoreComparison]) -> str:
    """The score whose gain is the largest of those shown to be above 0; else the sum. Pure."""
    shown = [name for name in (RULE, MODEL) if compared[name].over_sum_interval.low > 0]
    return max(shown, key=lambda name: compared[name].over_sum, default=SUM)


def _judge(
    model: ForecastModel,
    histories: Sequence[DriveHistory],
    inner_folds: int,
    until: int,
    healthy_share: float,
) -> Iterator[_Judged]:
    horizon = model.card.horizon_days
    for start in range(0, len(histories), _BATCH_DRIVES):
        batch = histories[start : start + _BATCH_DRIVES]
        marked = [_marked(history, horizon, until, model.salt) for history in batch]
        masks: list[BoolArray] = [weights > 0 for _, _, weights in marked]
        trees = model.scores(batch, masks)
        for history, mask, score, found in zip(batch, masks, trees, marked, strict=True):
            failed, positive, weights = found
            if not mask.any():
                continue
            yield _Judged(
                fold=fold_of(model.salt, history.serial, len(model.parts)),
                inner=inner_fold_of(model.salt, history.serial, inner_folds),
                failed=failed,
                features=compute(history.days, history.values, model.features)[mask],
                positive=positive[mask],
                weights=weights[mask] if failed else weights[mask] / healthy_share,
                scores={
                    MODEL: score[mask],
                    RULE: rule_scores(history.days, history.values)[mask],
                    SUM: plain_sum(history.values)[mask],
                },
            )


def _marked(
    history: DriveHistory, horizon: int, until: int, salt: str
) -> tuple[bool, BoolArray, FloatArray]:
    """Whether it fails, which days are before that, and how many days each stands for."""
    found = labels(history, horizon=horizon, until=until)
    hot = rule_scores(history.days, history.values) > 0
    cold = thinned(history, found.negative & ~hot, stride=_COLD_STRIDE, salt=salt)
    weights = np.where(found.positive | (found.negative & hot), 1.0, 0.0)
    weights[cold] = _COLD_STRIDE
    weights[: MIN_SAMPLES - 1] = 0.0
    return found.failed, found.positive, weights


def _calibrations(
    drives: Sequence[_Judged], judges: Sequence[Judge], rule_weight: float, horizon: int
) -> dict[str, Calibration]:
    """Of the drives of all other folds; `judges` by inner fold."""
    positive = np.concatenate([drive.positive for drive in drives])
    weights = np.concatenate([drive.weights for drive in drives])
    scores = {
        name: np.concatenate([drive.scores[name] for drive in drives]) for name in (RULE, SUM)
    }
    features = np.concatenate([drive.features for drive in drives])
    inner = np.repeat([drive.inner for drive in drives], [len(d.positive) for d in drives])
    scores[MODEL] = np.concatenate([drive.scores[MODEL] for drive in drives])  # NaN: no score
    for number, judge in enumerate(judges):
        own: NDArray[np.bool_] = (inner == number) & ~np.isnan(scores[MODEL])
        if own.any():
            plain = rule_weight * np.log1p(scores[RULE][own])
            scores[MODEL][own] = judge(features[own]) + plain
    out = {}
    for name in SCORES:
        known: NDArray[np.bool_] = ~np.isnan(scores[name])
        if known.any():
            out[name] = calibrate(
                scores[name][known], positive[known], weights[known], pseudo_days=float(horizon)
            )
    return out
