"""From scores to probabilities, and whether they hold: isotonic regression, reliability. Pure.

A probability is that of a failure within the horizon, of one drive on one day, among drives as the
training files hold them. It is fitted on drives that the judging part has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpstore.health.forecast.alarm_scores import Interval, interval_of
from hpstore.health.forecast.drive_histories import FloatArray
from hpstore.health.forecast.model_card import damaged

MAX_STEPS = 256
_GROUPS = 1024  # scores are pooled into so many before the regression
_EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # of the bins that a reliability curve has

# Any below: what JSON holds; every part is checked by its type
Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Steps that rise: from score `scores[i]` on, the probability is `probabilities[i]`."""

    scores: FloatArray  # (steps,), rising
    probabilities: FloatArray  # (steps,), never falling

    def probability(self, scores: FloatArray) -> FloatArray:
        """Probabilities of scores, same shape; below the first step that of the first."""
        at = np.searchsorted(self.scores, scores, side="right") - 1
        return np.asarray(self.probabilities[np.maximum(at, 0)])

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"scores": self.scores.tolist(), "probabilities": self.probabilities.tolist()}


def calibrate(
    scores: FloatArray, positive: NDArray[np.bool_], weights: FloatArray, *, pseudo_days: float
) -> Calibration:
    """Fit a probability that never falls with the score (isotonic regression).

    Parameters
    ----------
    scores, positive, weights : (rows,), at least one row
        A row is a drive and day; a weight is the number of days that it stands for.
    pseudo_days : days of the mean drive that are added to every step
        A step that few drives reach is so kept from 0 and 1.
    """
    order = np.argsort(scores, kind="stable")
    scores, weights = scores[order], weights[order]
    hits = weights * positive[order]
    base = float(hits.sum() / weights.sum())
    starts = _group_starts(scores, weights)
    days, hits = (np.add.reduceat(part, starts) for part in (weights, hits))
    blocks: list[list[float]] = []  # first score, days, positive days; rates rise
    for start, count, found in zip(scores[starts], days, hits, strict=True):
        blocks.append([float(start), float(count), float(found)])
        while len(blocks) > 1 and blocks[-2][2] * blocks[-1][1] >= blocks[-1][2] * blocks[-2][1]:
            _, more, higher = blocks.pop()
            blocks[-1][1] += more
            blocks[-1][2] += higher
    if len(blocks) > MAX_STEPS:
        kept = np.linspace(0, len(blocks) - 1, MAX_STEPS).astype(int)
        blocks = [blocks[i] for i in kept]
    found = [(hit + base * pseudo_days) / (count + pseudo_days) for _, count, hit in blocks]
    return Calibration(
        scores=np.array([block[0] for block in blocks]),
        probabilities=np.maximum.accumulate(np.array(found)),
    )


def _group_starts(scores: FloatArray, weights: FloatArray) -> NDArray[np.intp]:
    """Where groups of rows begin; equal scores are never parted. Scores are in order."""
    fresh = np.append(True, scores[1:] != scores[:-1])
    if int(fresh.sum()) > _GROUPS:
        share = np.floor(np.cumsum(weights) / weights.sum() * _GROUPS)
        fresh &= np.append(True, share[1:] != share[:-1])
    return np.flatnonzero(fresh)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Days on which about the same was predicted, and what came of them."""

    predicted: float  # mean
    observed: float  # share of the days with a failure within the horizon
    observed_interval: Interval  # by drawing drives
    drive_days: int
    drives: int
    failed_drives: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Predicted against observed on drives and days that nothing was learned from.

    `predicted_days` and `observed_days`: days before a failure, in all. A forecast that is neither
    too bold nor too shy has the same of both.
    """

    bins: tuple[ReliabilityBin, ...]
    predicted_days: float
    observed_days: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def reliability(
    drives: Sequence[tuple[FloatArray, NDArray[np.bool_]]],
    *,
    rng: np.random.Generator,
    resamples: int,
) -> Reliability:
    """The curve. A drive has two arrays, a row a day: predicted, and whether a failure followed.

    No drive: no bin.
    """
    bins = len(_EDGES) + 1
    days, hits, means = (np.zeros((len(drives), bins)) for _ in range(3))
    for row, (chances, came) in enumerate(drives):
        at = np.searchsorted(_EDGES, chances, side="right")
        days[row] = np.bincount(at, minlength=bins)
        hits[row] = np.bincount(at, weights=came, minlength=bins)
        means[row] = np.bincount(at, weights=chances, minlength=bins)
    drawn = np.full((resamples, bins), np.nan)  # NaN: no drive of this bin was drawn
    for number in range(resamples):
        chosen = rng.integers(0, max(len(days), 1), len(days))
        seen = days[chosen].sum(0)
        np.divide(hits[chosen].sum(0), seen, out=drawn[number], where=seen > 0)
    total = days.sum(0)
    known = [drawn[:, at][~np.isnan(drawn[:, at])].tolist() for at in range(bins)]
    return Reliability(
        bins=tuple(
            ReliabilityBin(
                predicted=float(means[:, at].sum() / total[at]),
                observed=float(hits[:, at].sum() / total[at]),
                observed_interval=interval_of(known[at]),
                drive_days=int(total[at]),
                drives=int((days[:, at] > 0).sum()),
                failed_drives=int((hits[:, at] > 0).sum()),
            )
            for at in np.flatnonzero(total)
        ),
        predicted_days=float(means.sum()),
        observed_days=int(hits.sum()),
    )


def calibration_from_dict(body: Json) -> Calibration:
    """Steps from JSON, every number checked. Raises ForecastError."""
    if not isinstance(body, dict) or set(body) != {"scores", "probabilities"}:
        raise damaged("a calibration lacks its steps")
    lists = body["scores"], body["probabilities"]
    if not all(isinstance(part, list) and set(map(type, part)) <= {int, float} for part in lists):
        raise damaged("the steps of a calibration are no numbers")
    if not 0 < len(lists[0]) == len(lists[1]) <= MAX_STEPS:
        raise damaged(f"a calibration must have 1 to {MAX_STEPS} steps")
    try:
        scores, found = (np.array(part, np.float64) for part in lists)
    except OverflowError as error:
        raise damaged("a step of a calibration is too large") from error
    if (np.diff(scores) <= 0).any() or (np.diff(found) < 0).any():
        raise damaged("the steps of a calibration do not rise")
    if found[0] < 0 or found[-1] > 1:
        raise damaged("a probability is not between 0 and 1")
    return Calibration(scores=scores, probabilities=found)
