"""What a score does in each drive family, at thresholds fitted in training. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpstore.health.forecast.alarm_scores import Interval

_Z95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedDrive:
    """One drive of an evaluation: how it ended, and whether each of two scores alarmed in time."""

    family: str
    failed: bool
    no_sign: bool  # no error counter above 0 in the horizon
    alarmed: bool
    alarmed_by_sum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyResult:
    """Drives of one family. FDR and FAR are None where there was no such drive."""

    failed: int
    no_signal: int
    detected: int
    fdr: float | None
    fdr_interval: Interval  # Wilson's, 95 %: drawing drives shows nothing where all are alike
    sum_detected: int
    healthy: int
    false_alarms: int
    far: float | None
    far_interval: Interval
    sum_false_alarms: int


def by_family(drives: Sequence[JudgedDrive]) -> dict[str, FamilyResult]:
    """Results by family, in the order of names."""
    found = {}
    for name in sorted({drive.family for drive in drives}):
        failed = [d for d in drives if d.family == name and d.failed]
        healthy = [d for d in drives if d.family == name and not d.failed]
        hits, alarms = (sum(d.alarmed for d in group) for group in (failed, healthy))
        found[name] = FamilyResult(
            failed=len(failed),
            no_signal=sum(d.no_sign for d in failed),
            detected=hits,
            fdr=hits / len(failed) if failed else None,
            fdr_interval=wilson(hits, len(failed)),
            sum_detected=sum(d.alarmed_by_sum for d in failed),
            healthy=len(healthy),
            false_alarms=alarms,
            far=alarms / len(healthy) if healthy else None,
            far_interval=wilson(alarms, len(healthy)),
            sum_false_alarms=sum(d.alarmed_by_sum for d in healthy),
        )
    return found


def wilson(part: int, whole: int) -> Interval:
    """The 95 % interval of a share (Wilson's score); 0 to 1 of nothing."""
    if not whole:
        return Interval(low=0.0, high=1.0)
    share, square = part / whole, _Z95**2
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    half = _Z95 * math.sqrt(share * (1 - share) / whole + square / (4 * whole**2))
    half /= 1 + square / whole
    return Interval(low=max(0.0, middle - half), high=min(1.0, middle + half))
