"""What a cache counts: who was ready when asked, what was fetched for nothing, who waited."""

from __future__ import annotations

import os
import threading
from collections import defaultdict


class CacheTally:
    """Counters by name, of one cache in one process. Thread-safe."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()  # guards _numbers
        self._pid = os.getpid()

    def renew(self) -> None:
        """In a forked child: the parent's lock may be held for ever."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()

    def add(self, **amounts: float) -> None:
        """Add to counters."""
        with self._lock:
            for name, amount in amounts.items():
                self._numbers[name] += amount

    def first(self, name: str) -> bool:
        """Add one; whether it is the first, which is logged."""
        with self._lock:
            self._numbers[name] += 1
            return self._numbers[name] == 1

    def value(self, name: str) -> float:
        """A counter's value."""
        with self._lock:
            return self._numbers.get(name, 0.0)

    def snapshot(self) -> dict[str, float]:
        """All counters."""
        with self._lock:
            return dict(self._numbers)


def shares(numbers: dict[str, float]) -> dict[str, float]:
    """Ratios that say whether a cache is of use; 0 where nothing happened.

    hit_ratio: requests that found their bytes in memory or on the disk. coverage: of what was not
    there for another reason, how much prefetching brought in time. accuracy: prefetched bytes that
    were asked for. timeliness: prefetched blocks that were there when asked for.
    """

    def of(part: float, whole: float) -> float:
        return part / whole if whole else 0.0

    def n(name: str) -> float:
        return numbers.get(name, 0.0)

    hits = n("memory_hit_total") + n("disk_hit_total")
    used = n("prefetch_used_total")
    return {
        "hit_ratio": of(hits, hits + n("late_total") + n("miss_total")),
        "coverage": of(used, used + n("miss_total")),
        "accuracy": of(n("prefetch_used_bytes") + n("prefetch_late_bytes"), n("prefetch_bytes")),
        "timeliness": of(used, used + n("prefetch_late_total")),
    }
