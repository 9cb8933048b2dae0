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
    alarmed.
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
    healthy: int
    false_alarms: int

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
    detected, alarms = int((peaks > threshold).sum()), int((healthy > threshold).sum())
    drawn = [_draw(peaks, healthy, threshold, far, rng) for _ in range(resamples)]
    precision = [d / (d + a) for d, a in drawn if d + a]
    return AlarmOutcome(
        threshold=threshold,
        fdr=_share(detected, len(peaks)),
        fdr_interval=_interval([_share(d, len(peaks)) for d, _ in drawn]),
        far=_share(alarms, len(healthy)),
        far_interval=_interval([_share(a, len(healthy)) for _, a in drawn]),
        precision=detected / (detected + alarms) if detected + alarms else None,
        precision_interval=_interval(precision) if precision else None,
        precision_rescaled=(
            detected / (detected + alarms / healthy_share) if detected + alarms else None
        ),
        lead_days=_lead(failed, threshold),
        failed=len(peaks),
        detected=detected,
        earlier=sum(drive.earlier_peak > threshold for drive in failed),
        healthy=len(healthy),
        false_alarms=alarms,
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
    return difference(*(np.arange(n) for n in counts)), _interval(drawn)


def _draw(
    peaks: FloatArray,
    healthy: FloatArray,
    threshold: float,
    far: float | None,
    rng: np.random.Generator,
) -> tuple[int, int]:
    """Detected and false alarms of drives drawn with replacement."""
    failed = peaks[rng.integers(0, max(len(peaks), 1), len(peaks))]
    lived = healthy[rng.integers(0, max(len(healthy), 1), len(healthy))]
    if far is not None:
        threshold = threshold_at(lived, far)
    return int((failed > threshold).sum()), int((lived > threshold).sum())


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


def _interval(drawn: Sequence[float]) -> Interval:
    if not drawn:
        return Interval(low=0.0, high=1.0)
    low, high = np.quantile(drawn, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return Interval(low=float(low), high=float(high))
