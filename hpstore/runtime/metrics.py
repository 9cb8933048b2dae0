"""Counters of one pool. Names are `noun_verb_unit`."""

from __future__ import annotations

import threading
from collections import defaultdict

from hpstore.runtime.threads import refused_total


class Metrics:
    """Counters by name. Thread-safe."""

    def __init__(self) -> None:
        self._counters: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()  # guards _counters

    def count(self, name: str, by: int = 1) -> int:
        """Add to a counter; returns its new value."""
        with self._lock:
            self._counters[name] += by
            return self._counters[name]

    def value(self, name: str) -> int:
        """A counter's value."""
        with self._lock:
            return self._counters.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """All counters, and `threads_refused_total` of this process if there were any."""
        with self._lock:
            found: dict[str, float] = dict(self._counters)
        if refused := refused_total():
            found["threads_refused_total"] = refused
        return found
