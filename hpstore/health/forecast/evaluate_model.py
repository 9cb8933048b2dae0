"""Evaluation: by drive, after the days that training knew, each drive by a part that never saw it.

Two figures for each score. *at_far*: the threshold is moved until at most that share of the
healthy drives at hand is alarmed; it compares scores with one another. *fitted*: the threshold that
training set, on other drives and earlier days; it is what a user gets, and its false alarm rate is
what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    threshold_at,
)
from hpstore.health.forecast.drive_histories import DriveHistory, FloatArray, Gathered
from hpstore.health.forecast.forecast_model import MODEL, RULE, SCORES, SUM, ForecastModel
from hpstore.health.forecast.labels import BoolArray, Labels, day_text, labels
from hpstore.health.forecast.rules import plain_sum, rule_scores, spec_flags

FLAGS = "flags"
LEAK_FDR = 0.7  # above it a figure is a leak until proven otherwise
_BATCH_DRIVES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """What one score does. `over_sum`: FDR at FAR less that of the plain sum, same drives."""

    at_far: AlarmOutcome
    fitted: AlarmOutcome
    over_sum: float
    over_sum_interval: Interval

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
    scores: Mapping[str, ScoreResult]
    flags: AlarmOutcome
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
    margins, plain = _judge(model, tested, far)
    failed, healthy = len(plain[SUM].failed), len(plain[SUM].healthy)
    if not failed or not healthy:
        raise ForecastError(
            f"after {model.card.known_until} there are {failed} failed and {healthy} healthy "
            f"drives whose outcome {horizon} days on is known: too few to evaluate on"
        )
    rng = np.random.default_rng(seed)
    share = healthy_share * gathered.healthy_share
    return ForecastEvaluation(
        far=far,
        horizon_days=horizon,
        after=model.card.known_until,
        until=day_text(until),
        healthy_drives=healthy,
        failed_drives=failed,
        no_signal=sum(not (drive.scores > 0).any() for drive in plain[RULE].failed),
        failed_too_early=early,
        not_looked_at=unseen,
        refused=refused,
        scores={name: _result(plain, margins, name, far, rng, resamples, share) for name in SCORES},
        flags=outcome(
            plain[FLAGS].failed,
            np.array(plain[FLAGS].healthy),
            0.5,
            rng=rng,
            resamples=resamples,
            healthy_share=share,
        ),
        healthy_share=share,
        seed=seed,
    )


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
) -> tuple[dict[str, _Peaks], dict[str, _Peaks]]:
    """Scores less the fitted thresholds, and scores as they are, by drive."""
    margins = {name: _Peaks() for name in SCORES}
    plain = {name: _Peaks() for name in (*SCORES, FLAGS)}
    for start in range(0, len(tested), _BATCH_DRIVES):
        batch = tested[start : start + _BATCH_DRIVES]
        masks: list[BoolArray] = [found.positive | found.negative for _, found in batch]
        trees = model.scores([history for history, _ in batch], masks)
        for (history, found), score in zip(batch, trees, strict=True):
            ahead = (history.failed_day or 0) - history.days.astype(np.float64)
            tails = model.part_of(history.serial).tails
            scores = {
                MODEL: score,
                RULE: rule_scores(history.days, history.values),
                SUM: plain_sum(history.values),
            }
            for name, values in scores.items():
                plain[name].add(ahead, values, found)
                margins[name].add(ahead, values - tails[name].threshold(far), found)
            plain[FLAGS].add(ahead, spec_flags(history.values), found)
    return margins, plain


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
    )
