"""Evaluation: by drive, after the days that training knew, each drive by a part that never saw it.

Two figures for each score. *at_far*: the threshold is moved until at most that share of the
healthy drives at hand is alarmed; it compares scores with one another. *fitted*: the threshold that
training set, on other drives and earlier days; it is what a user gets, and its false alarm rate is
what it is. Families and the reliability curve are those of the fitted threshold and of the score
that the model judges by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date

import numpy as np

from hpstore.errors import ForecastError, ForecastRefused
from hpstore.health.forecast.alarm_scores import (
    NEVER,
    AlarmOutcome,
    FailedDrive,
    Interval,
    gain,
    outcome,
    paired_difference,
    threshold_at,
)
from hpstore.health.forecast.calibration import Reliability, reliability
from hpstore.health.forecast.drive_histories import DriveHistory, FloatArray, Gathered
from hpstore.health.forecast.family_results import FamilyResult, JudgedDrive, by_family
from hpstore.health.forecast.forecast_model import MODEL, RULE, SCORES, SUM, ForecastModel
from hpstore.health.forecast.labels import BoolArray, Labels, day_text, labels
from hpstore.health.forecast.rules import plain_sum, rule_scores, spec_flags

FLAGS = "flags"
LEAK_FDR = 0.7  # above it a figure is a leak until proven otherwise
_BATCH_DRIVES = 512
Chances = list[tuple[FloatArray, BoolArray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """What one score does, and how it differs from the plain sum on the same drives.

    `over_sum`: FDR, less that of the sum, both at FAR. `over_sum_fitted`: the same at the
    thresholds of the training. `far_over_sum_fitted`: the difference of false alarm rates there.
    """

    at_far: AlarmOutcome
    fitted: AlarmOutcome
    over_sum: float
    over_sum_interval: Interval
    over_sum_fitted: float
    over_sum_fitted_interval: Interval
    far_over_sum_fitted: float
    far_over_sum_fitted_interval: Interval

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastEvaluation:
    """All scores on the same drives. Days are dates as text."""

    far: float
    horizon_days: int
    after: str  # the first day looked at is the next one
    until: str
    healthy_drives: int
    failed_drives: int
    no_signal: int  # failed drives whose rule score is 0 in the whole horizon
    failed_too_early: int  # within the horizon of the first day: their sign may lie before it
    not_looked_at: int  # drives without a day whose outcome is known
    refused: Mapping[str, int]  # drives by family
    judged_by: str  # the score that the model's alarms come from
    scores: Mapping[str, ScoreResult]
    flags: AlarmOutcome
    families: Mapping[str, FamilyResult]
    reliability: Reliability | None  # None: a model of version 1 has no probabilities
    healthy_share: float
    seed: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class _Peaks:
    """What one score gave each drive."""

    def __init__(self) -> None:
        self.failed: list[FailedDrive] = []
        self.healthy: list[float] = []

    def alarmed(self) -> tuple[BoolArray, BoolArray]:
        """Failed and healthy drives with a score above 0, of scores less their thresholds."""
        failed = np.array([drive.peak for drive in self.failed])
        return failed > 0, np.array(self.healthy) > 0

    def add(self, days: FloatArray, scores: FloatArray, found: Labels) -> None:
        """One drive. `days`: how far ahead the failure is. NaN is no score."""
        known = ~np.isnan(scores)
        if found.failed:
            used = found.positive & known
            before = scores[found.negative & known]
            self.failed.append(
                FailedDrive(
                    days_ahead=days[used],
                    scores=scores[used],
                    earlier_peak=float(before.max()) if len(before) else NEVER,
                )
            )
        else:
            used = found.negative & known
            self.healthy.append(float(scores[used].max()) if used.any() else NEVER)


def evaluate(
    model: ForecastModel,
    gathered: Gathered,
    *,
    far: float,
    resamples: int = 1000,
    healthy_share: float = 1.0,
    seed: int = 0,
) -> ForecastEvaluation:
    """Judge the drives of `gathered` on the days after those that the model knows.

    `healthy_share`: how many of all healthy drives the files held, for the rescaled precision. The
    same arguments give the same figures.

    Raises
    ------
    ForecastError
        No day, no failure or no healthy drive to look at; or the model has no threshold for `far`.
    ForecastRefused
        None of the families is in the model's card.
    """
    since, horizon = date.fromisoformat(model.card.known_until).toordinal(), model.card.horizon_days
    judged, refused = _covered(model, gathered.histories)
    until = _last_day(judged, model.card.known_until, since)
    tested, early, unseen = _with_outcome(judged, since, until, horizon)
    margins, plain, chances = _judge(model, tested, far)
    failed, healthy = len(plain[SUM].failed), len(plain[SUM].healthy)
    _require_both(failed, healthy, model.card.known_until, horizon)
    rng = np.random.default_rng(seed)
    share = healthy_share * gathered.healthy_share
    return ForecastEvaluation(
        far=far,
        horizon_days=horizon,
        after=model.card.known_until,
        until=day_text(until),
        healthy_drives=healthy,
        failed_drives=failed,
        no_signal=sum(_no_sign(drive) for drive in plain[RULE].failed),
        failed_too_early=early,
        not_looked_at=unseen,
        refused=refused,
        judged_by=model.judged_by,
        scores={name: _result(plain, margins, name, far, rng, resamples, share) for name in SCORES},
        flags=outcome(
            plain[FLAGS].failed,
            np.array(plain[FLAGS].healthy),
            0.5,
            rng=rng,
            resamples=resamples,
            healthy_share=share,
        ),
        families=_families(tested, plain, margins, model.judged_by),
        reliability=(
            reliability(chances, rng=rng, resamples=resamples)
            if all(model.judged_by in part.calibrations for part in model.parts)
            else None
        ),
        healthy_share=share,
        seed=seed,
    )


def _require_both(failed: int, healthy: int, known_until: str, horizon: int) -> None:
    if not failed or not healthy:
        raise ForecastError(
            f"after {known_until} there are {failed} failed and {healthy} healthy "
            f"drives whose outcome {horizon} days on is known: too few to evaluate on"
        )


def _no_sign(drive: FailedDrive) -> bool:
    return not (drive.scores > 0).any()


def _families(
    tested: Sequence[tuple[DriveHistory, Labels]],
    plain: Mapping[str, _Peaks],
    margins: Mapping[str, _Peaks],
    judged_by: str,
) -> dict[str, FamilyResult]:
    """What each family's drives were given, in the order in which they were judged."""
    ours, sums = (_alarms_in_turn(margins[name]) for name in (judged_by, SUM))
    failed = iter(plain[RULE].failed)
    return by_family(
        [
            JudgedDrive(
                family=history.family,
                failed=found.failed,
                no_sign=found.failed and _no_sign(next(failed)),
                alarmed=next(ours[found.failed]),
                alarmed_by_sum=next(sums[found.failed]),
            )
            for history, found in tested
        ]
    )


def _alarms_in_turn(margins: _Peaks) -> dict[bool, Iterator[bool]]:
    """Whether drives were alarmed, one after the other; failed ones under True."""
    failed, healthy = margins.alarmed()
    return {True: iter(failed.tolist()), False: iter(healthy.tolist())}


def _last_day(judged: Sequence[DriveHistory], known_until: str, since: int) -> int:
    """The last day of the files. Raises ForecastError when the model knows it."""
    until = max((int(h.days[-1]) for h in judged if len(h.days)), default=0)
    if until <= since:
        raise ForecastError(
            f"the model knows everything until {known_until}, and the files end "
            f"{day_text(until) if until else 'before'}: nothing to evaluate on. Give later "
            "files, or train with an earlier --until"
        )
    return until


def _with_outcome(
    judged: Sequence[DriveHistory], since: int, until: int, horizon: int
) -> tuple[list[tuple[DriveHistory, Labels]], int, int]:
    """Drives whose outcome is known; how many failed too early for that, how many are unseen."""
    tested: list[tuple[DriveHistory, Labels]] = []
    early = unseen = 0
    for history in judged:
        found = labels(history, horizon=horizon, until=until, since=since)
        if history.failed_day is not None and history.failed_day <= since + horizon:
            early += history.failed_day > since
        elif found.failed or found.negative.any():
            tested.append((history, found))
        else:
            unseen += 1
    return tested, early, unseen


def _covered(
    model: ForecastModel, histories: tuple[DriveHistory, ...]
) -> tuple[list[DriveHistory], dict[str, int]]:
    judged = [h for h in histories if h.family in model.card.families]
    refused = Counter(h.family for h in histories if h.family not in model.card.families)
    if not judged:
        names = (sorted(found)[:8] for found in (refused, model.card.families))
        held, known = (", ".join(found) for found in names)
        raise ForecastRefused(
            f"the files hold {held or 'no drive'}; the model's card covers {known}: no drive was "
            "judged. Train on your own files (--family names the family of those without a model "
            "column)"
        )
    return judged, dict(sorted(refused.items()))


def _judge(
    model: ForecastModel, tested: list[tuple[DriveHistory, Labels]], far: float
) -> tuple[dict[str, _Peaks], dict[str, _Peaks], Chances]:
    """Scores less the fitted thresholds, and scores as they are, by drive.

    Last, by drive, probabilities of the days whose outcome is known, by the score that the model
    judges by, and which of the days are before a failure.
    """
    margins = {name: _Peaks() for name in SCORES}
    plain = {name: _Peaks() for name in (*SCORES, FLAGS)}
    chances: Chances = []
    for start in range(0, len(tested), _BATCH_DRIVES):
        batch = tested[start : start + _BATCH_DRIVES]
        masks: list[BoolArray] = [found.positive | found.negative for _, found in batch]
        trees = model.scores([history for history, _ in batch], masks)
        for (history, found), score, mask in zip(batch, trees, masks, strict=True):
            ahead = (history.failed_day or 0) - history.days.astype(np.float64)
            part = model.part_of(history.serial)
            scores = {
                MODEL: score,
                RULE: rule_scores(history.days, history.values),
                SUM: plain_sum(history.values),
            }
            for name, values in scores.items():
                plain[name].add(ahead, values, found)
                margins[name].add(ahead, values - part.tails[name].threshold(far), found)
            plain[FLAGS].add(ahead, spec_flags(history.values), found)
            if (made := part.calibrations.get(model.judged_by)) is not None:
                judged = scores[model.judged_by]
                known = mask & ~np.isnan(judged)
                chances.append((made.probability(judged[known]), found.positive[known]))
    return margins, plain, chances


def _result(
    plain: Mapping[str, _Peaks],
    margins: Mapping[str, _Peaks],
    name: str,
    far: float,
    rng: np.random.Generator,
    resamples: int,
    share: float,
) -> ScoreResult:
    healthy = np.array(plain[name].healthy)
    peaks = {
        n: (np.array([d.peak for d in plain[n].failed]), np.array(plain[n].healthy))
        for n in (name, SUM)
    }
    over, interval = gain(peaks[name], peaks[SUM], far, rng=rng, resamples=resamples)
    ends = zip(margins[name].alarmed(), margins[SUM].alarmed(), strict=True)
    found, alarms = (
        paired_difference(ours, sums, rng=rng, resamples=resamples) for ours, sums in ends
    )
    return ScoreResult(
        at_far=outcome(
            plain[name].failed,
            healthy,
            threshold_at(healthy, far),
            rng=rng,
            resamples=resamples,
            healthy_share=share,
            far=far,
        ),
        fitted=outcome(
            margins[name].failed,
            np.array(margins[name].healthy),
            0.0,
            rng=rng,
            resamples=resamples,
            healthy_share=share,
        ),
        over_sum=over,
        over_sum_interval=interval,
        over_sum_fitted=found[0],
        over_sum_fitted_interval=found[1],
        far_over_sum_fitted=alarms[0],
        far_over_sum_fitted_interval=alarms[1],
    )
