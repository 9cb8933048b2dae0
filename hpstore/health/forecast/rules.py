"""What is said of a drive without a model: spec flags, the plain sum, the rule score. Pure.

Alarms come from the plain sum: no other score was shown to find more (docs/decisions/0133).

The rule score is the sum, over a few counters, of the root of the rise in 14 days plus a quarter of
the root of the level: errors that are being made weigh more than old ones. Pending sectors and
those that offline tests could not read are mostly the same ones: the larger counts. A drive that
never had an error has 0. How it was chosen: docs/decisions/0017.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpstore.health.forecast.counter_series import begins, held_values, increases
from hpstore.health.forecast.drive_histories import FloatArray, IntArray, has_flag
from hpstore.health.smart.counters import COUNTERS, INDEX, RULE_COUNTERS

WINDOW_DAYS = 14
LEVEL_WEIGHT = 0.25
SUM_ALARM = 22.0  # above it, 1 % of the healthy drives of the sample get in 90 days
_RULE = [INDEX[name] for name in RULE_COUNTERS]
_SUM = [INDEX[name] for name in RULE_COUNTERS]
_PENDING, _OFFLINE = RULE_COUNTERS.index("smart_197"), RULE_COUNTERS.index("smart_198")
_SPARE = INDEX["nvme_available_spare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One counter's part in a rule score."""

    counter: str
    words: str
    level: float
    rise: float
    score: float

    def sentence(self) -> str:
        """For people."""
        if self.counter == "nvme_available_spare":
            return f"{self.words} fell by {self.rise:.0f} to {self.level:.0f} in {WINDOW_DAYS} days"
        if self.rise > 0:
            return f"{self.words} rose by {self.rise:.0f} to {self.level:.0f} in {WINDOW_DAYS} days"
        return f"{self.words} stand at {self.level:.0f}, unchanged for {WINDOW_DAYS} days"


def plain_sum(values: FloatArray) -> FloatArray:
    """The yardstick: raw 5 + 187 + 197 + 198, and media errors of NVMe; without a value, 0.

    Shape (rows, counters) to (rows,). What alarms come from where nothing better was shown.
    """
    return np.asarray(np.nansum(values[:, _SUM], axis=1))


def spec_flags(values: FloatArray) -> FloatArray:
    """1 where the drive fails by its own specification. Shape (rows, counters) to (rows,)."""
    return has_flag(values).astype(np.float64)


def rule_scores(days: IntArray, values: FloatArray) -> FloatArray:
    """The rule score of every row of a history. Shape (rows,), (rows, counters) to (rows,)."""
    return np.asarray(_parts(days, values).sum(axis=1))


def evidence(days: IntArray, values: FloatArray) -> tuple[Evidence, ...]:
    """What the last row's score is made of, the largest part first."""
    if not len(days):
        return ()
    parts = _parts(days, values)[-1]
    risen = _risen(days, values)[-1]
    levels = held_values(values)[-1]
    found = [
        Evidence(
            counter=COUNTERS[index].name,
            words=COUNTERS[index].words,
            level=float(levels[index]),
            rise=float(risen[column]),
            score=float(parts[column]),
        )
        for column, index in enumerate([*_RULE, _SPARE])
        if parts[column] > 0
    ]
    return tuple(sorted(found, key=lambda part: -part.score))


def _risen(days: IntArray, values: FloatArray) -> FloatArray:
    """Rises over the window, the last column the fall of spare blocks; of a history that is
    shorter, since its first row: a rule may speak early, it is explained."""
    watched = np.concatenate([values[:, _RULE], -values[:, [_SPARE]]], axis=1)
    increased = increases(watched)
    at = begins(days, WINDOW_DAYS)
    return np.asarray(increased - increased[np.maximum(at, 0)])


def _parts(days: IntArray, values: FloatArray) -> FloatArray:
    parts = np.sqrt(_risen(days, values))
    parts[:, :-1] += LEVEL_WEIGHT * np.sqrt(np.nan_to_num(held_values(values[:, _RULE])))
    pending, offline = parts[:, _PENDING], parts[:, _OFFLINE]
    parts[:, _PENDING] = np.where(pending >= offline, pending, 0.0)
    parts[:, _OFFLINE] = np.where(pending >= offline, 0.0, offline)
    return parts
