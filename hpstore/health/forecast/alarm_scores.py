"""From scores of drives to alarms: thresholds, FDR at FAR, lead days, precision, intervals. Pure.

Everything is counted by drive, never by row. FDR: share of failed drives with an alarm 1 to
`horizon` days before the failure. FAR: share of healthy drives with an alarm on any day looked at.
An alarm is a score *above* the threshold. Intervals: drives drawn again with replacement, 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from hpstore.health.forecast.drive_histories import FloatArray

NEVER = -math.inf  # peak of a drive that no score was made for
_LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedDrive:
    """Scores of one failed drive. `days_ahead`: (n,), n to 1 days before its failure."""

    days_ahead: FloatArray
    scores: FloatArray  # (n,)
    earlier_peak: float = NEVER  # over the days looked at before the horizon

    @property
    def peak(self) -> float:
        """The largest score in the horizon; NEVER when there is none."""
        return float(self.scores.max()) if len(self.scores) else NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From `low` to `high`, 95 %."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """Days from the first alarm in the horizon to the failure."""

    quartile_1: float
    median: float
    quartile_3: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmOutcome:
    """Of one score at one threshold.

    `precision_rescaled`: as if all healthy drives had been in the files. None where nothing was
    alarmed. The strict figures count an alarm before the horizon as false: such a drive is no hit,
    even if it is also alarmed within the horizon.
    """

    threshold: float
    fdr: float
    fdr_interval: Interval
    far: float
    far_interval: Interval
    precision: float | None
    precision_interval: Interval | None
    precision_rescaled: float | None
    lead_days: Lead | None
    failed: int
    detected: int
    earlier: int  # failed drives with an alarm before the horizon
    earlier_hits: int  # of the detected ones, those with such an alarm
    healthy: int
    false_alarms: int
    fdr_strict: float
    fdr_strict_interval: Interval
    false_alarms_strict: int  # false_alarms, and failed drives with an alarm before the horizon
    precision_strict: float | None  # rescaled, as above

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def threshold_at(peaks: FloatArray, far: float) -> float:
    """The smallest score of `peaks` that at most a share `far` of them is above. Pure.

    -inf when there is no peak.
    """
    if not len(peaks):
        return NEVER
    allowed = min(math.floor(far * len(peaks) + 1e-9), len(peaks) - 1)
    return float(np.partition(peaks, len(peaks) - 1 - allowed)[len(peaks) - 1 - allowed])


def outcome(
    failed: Sequence[FailedDrive],
    healthy: FloatArray,
    threshold: float,
    *,
    rng: np.random.Generator,
    resamples: int,
    healthy_share: float,
    far: float | None = None,
) -> AlarmOutcome:
    """What alarms above `threshold` find and disturb.

    With `far` the threshold is found anew in every resample, so that the interval holds what comes
    of choosing it. `healthy_share`: of all healthy drives, how many the files hold.
    """
    peaks = np.array([drive.peak for drive in failed])
    before = np.array([drive.earlier_peak for drive in failed])
    hits, alarms = peaks > threshold, int((healthy > threshold).sum())
    detected, earlier = int(hits.sum()), int((before > threshold).sum())
    strict = int((hits & (before <= threshold)).sum())
    drawn = [_draw(peaks, before, healthy, threshold, far, rng) for _ in range(resamples)]
    precision = [d / (d + a) for d, a, _ in drawn if d + a]
    return AlarmOutcome(
        threshold=threshold,
        fdr=_share(detected, len(peaks)),
        fdr_interval=interval_of([_share(d, len(peaks)) for d, _, _ in drawn]),
        far=_share(alarms, len(healthy)),
        far_interval=interval_of([_share(a, len(healthy)) for _, a, _ in drawn]),
        precision=_precision(detected, alarms),
        precision_interval=interval_of(precision) if precision else None,
        precision_rescaled=_precision(detected, alarms / healthy_share),
        lead_days=_lead(failed, threshold),
        failed=len(peaks),
        detected=detected,
        earlier=earlier,
        earlier_hits=detected - strict,
        healthy=len(healthy),
        false_alarms=alarms,
        fdr_strict=_share(strict, len(peaks)),
        fdr_strict_interval=interval_of([_share(s, len(peaks)) for _, _, s in drawn]),
        false_alarms_strict=alarms + earlier,
        precision_strict=_precision(strict, alarms / healthy_share + earlier),
    )


def gain(
    ours: tuple[FloatArray, FloatArray],
    theirs: tuple[FloatArray, FloatArray],
    far: float,
    *,
    rng: np.random.Generator,
    resamples: int,
) -> tuple[float, Interval]:
    """FDR of one score less FDR of another at the same FAR, with the same drives drawn for both.

    Each is (peaks of failed drives, peaks of healthy drives), in the same order of drives.
    """

    def difference(failed: NDArray[np.int64], healthy: NDArray[np.int64]) -> float:
        rates = []
        for failed_peaks, healthy_peaks in (ours, theirs):
            threshold = threshold_at(healthy_peaks[healthy], far)
            rates.append(_share(int((failed_peaks[failed] > threshold).sum()), len(failed)))
        return rates[0] - rates[1]

    counts = len(ours[0]), len(ours[1])
    drawn = [difference(*(rng.integers(0, max(n, 1), n) for n in counts)) for _ in range(resamples)]
    return difference(*(np.arange(n) for n in counts)), interval_of(drawn)


def paired_difference(
    ours: NDArray[np.bool_],
    theirs: NDArray[np.bool_],
    *,
    rng: np.random.Generator,
    resamples: int,
) -> tuple[float, Interval]:
    """Share of drives alarmed by one score less that by another, the same drives drawn for both.

    The thresholds are not moved. (0, 0 to 1) where there is no drive.
    """
    if not len(ours):
        return 0.0, interval_of([])
    found = ours.astype(np.float64) - theirs
    drawn = [float(found[rng.integers(0, len(found), len(found))].mean()) for _ in range(resamples)]
    return float(found.mean()), interval_of(drawn)


def _draw(
    peaks: FloatArray,
    before: FloatArray,
    healthy: FloatArray,
    threshold: float,
    far: float | None,
    rng: np.random.Generator,
) -> tuple[int, int, int]:
    """Detected, false alarms, and strictly detected, of drives drawn with replacement."""
    chosen = rng.integers(0, max(len(peaks), 1), len(peaks))
    lived = healthy[rng.integers(0, max(len(healthy), 1), len(healthy))]
    if far is not None:
        threshold = threshold_at(lived, far)
    hits = peaks[chosen] > threshold
    strict = hits & (before[chosen] <= threshold)
    return int(hits.sum()), int((lived > threshold).sum()), int(strict.sum())


def _lead(failed: Sequence[FailedDrive], threshold: float) -> Lead | None:
    leads = [
        float(drive.days_ahead[drive.scores > threshold].max())
        for drive in failed
        if drive.peak > threshold
    ]
    if not leads:
        return None
    first, middle, third = np.quantile(leads, (0.25, 0.5, 0.75))
    return Lead(quartile_1=float(first), median=float(middle), quartile_3=float(third))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _precision(hits: int, alarms: float) -> float | None:
    return hits / (hits + alarms) if hits + alarms else None


def interval_of(drawn: Sequence[float]) -> Interval:
    """The middle 95 % of drawn figures; 0 to 1 where there is none."""
    if not drawn:
        return Interval(low=0.0, high=1.0)
    low, high = np.quantile(drawn, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return Interval(low=float(low), high=float(high))
