"""Counters and log-scale histograms of one pool. Names are `noun_verb_unit`."""

from __future__ import annotations

import math
import threading
from collections import defaultdict


class Histogram:
    """Latency in buckets of a quarter power of two; not thread-safe by itself."""

    def __init__(self) -> None:
        self.counts: defaultdict[int, int] = defaultdict(int)
        self.total = 0
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[math.floor(4 * math.log2(max(seconds, 1e-9)))] += 1
        self.total += 1
        self.sum_seconds += seconds

    def quantile(self, share: float) -> float:
        """Upper edge of the bucket that holds the quantile; 0 when empty."""
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= share * self.total:
                return float(2 ** ((bucket + 1) / 4))
        return 0.0


class Metrics:
    """Counters and histograms by name. Thread-safe."""

    def __init__(self) -> None:
        self._counters: defaultdict[str, int] = defaultdict(int)
        self._histograms: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._lock = threading.Lock()  # guards both maps

    def count(self, name: str, by: int = 1) -> int:
        """Add to a counter; returns its new value."""
        with self._lock:
            self._counters[name] += by
            return self._counters[name]

    def observe(self, name: str, seconds: float) -> None:
        """Add one latency."""
        with self._lock:
            self._histograms[name].add(seconds)

    def value(self, name: str) -> int:
        """A counter's value."""
        with self._lock:
            return self._counters.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """All counters, and p50/p99/count of all histograms."""
        with self._lock:
            out: dict[str, float] = dict(self._counters)
            for name, histogram in self._histograms.items():
                out[f"{name}_count"] = histogram.total
                out[f"{name}_p50"] = histogram.quantile(0.5)
                out[f"{name}_p99"] = histogram.quantile(0.99)
            return out


__all__ = ["Histogram", "Metrics"]
