"""Rules of other systems for slow devices, in a few lines each, and ours, behind one face.

Perseus needs a daily regression over a node's throughput, IASO counts of time-outs: both want more
than service times, so they are not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median
from typing import Protocol

from hpstore.health import HealthState, SlowDetector, Traits
from hpstore.health.detect.peer_group import quantile


class DetectionRule(Protocol):
    """Says each tick which devices are slow, and which should sit out."""

    def tick(self, now_seconds: float, means: Mapping[str, float]) -> tuple[set[str], set[str]]:
        """Suspects, and of them those that should sit out."""


class HpstoreDetector:
    """The detector as the pool uses it."""

    def __init__(self, traits: Mapping[str, Traits]) -> None:
        self.detector = SlowDetector(traits=traits)

    def tick(self, now_seconds: float, means: Mapping[str, float]) -> tuple[set[str], set[str]]:
        found = self.detector.tick(now_seconds, means)
        out = {v.device for v in found if v.state is not HealthState.SUSPECT}
        return {v.device for v in found}, out


class FiveInARow:
    """Twice what the device took in its first minute, five ticks in a row (Comcast's Bynar)."""

    def __init__(self, traits: Mapping[str, Traits]) -> None:
        self._first: defaultdict[str, list[float]] = defaultdict(list)
        self._run: defaultdict[str, int] = defaultdict(int)

    def tick(self, now_seconds: float, means: Mapping[str, float]) -> tuple[set[str], set[str]]:
        for device, value in means.items():
            first = self._first[device]
            if len(first) < 30:
                first.append(value)
                continue
            slow = value > 2 * median(first)
            self._run[device] = self._run[device] + 1 if slow else 0
        found = {device for device, run in self._run.items() if run >= 5}
        return found, found


class Hadoop:
    """One tick above 3 x the median and above 3 scaled deviations (HDFS's OutlierDetector)."""

    def __init__(self, traits: Mapping[str, Traits]) -> None:
        pass

    def tick(self, now_seconds: float, means: Mapping[str, float]) -> tuple[set[str], set[str]]:
        middle = median(means.values())
        deviation = median(abs(value - middle) for value in means.values())
        limit = max(3 * middle, middle + 3 * 1.4826 * deviation)
        found = {device for device, value in means.items() if value > limit}
        return found, found


class Autosit:
    """OpenZFS: the worst device beyond Q3 + 50 max(IQR, Q1/4), 1 to 5 points, out above 20."""

    def __init__(self, traits: Mapping[str, Traits]) -> None:
        self._score: defaultdict[str, float] = defaultdict(float)
        self._points = 0.0

    def tick(self, now_seconds: float, means: Mapping[str, float]) -> tuple[set[str], set[str]]:
        worst = max(means, key=lambda device: means[device])
        ordered = sorted(means.values())
        low, high = quantile(ordered, 0.25), quantile(ordered, 0.75)
        limit = high + 50 * max(high - low, low / 4)
        if means[worst] > limit:
            gain = min(max((means[worst] - limit) / max(high - low, low / 8), 1.0), 5.0)
            self._score[worst] += gain
            self._points += gain
        while self._points >= len(means):
            self._points -= len(means)
            for device in self._score:
                self._score[device] = max(0.0, self._score[device] - 2)
        found = {device for device, score in self._score.items() if score > 20}
        return found, found


RULES: dict[str, Callable[[Mapping[str, Traits]], DetectionRule]] = {
    "hpstore": HpstoreDetector,
    "five in a row": FiveInARow,
    "hadoop": Hadoop,
    "zfs autosit": Autosit,
}
