"""What a monitor shares with other processes of its node: learnt times, and an operator's pardons.

Files in the pool's run directory. What is wrong with them is counted and logged once; health goes
on without them, and a damaged file is left as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from hpstore.config import private_directory
from hpstore.errors import HpstoreError
from hpstore.health.detect.learnt_times import LearntTimes, load_learnt, save_learnt
from hpstore.health.detect.telemetry import CELLS, Telemetry
from hpstore.health.pardons import Pardons
from hpstore.runtime.clock import Clock
from hpstore.runtime.metrics import Metrics

_log = logging.getLogger(__name__)
_SAVE_SECONDS = 60.0
T = TypeVar("T")


class ProcessMemory:
    """Of one pool and process. Called by the thread that ticks, but for `pardon`."""

    def __init__(self, directory: Path, metrics: Metrics) -> None:
        self._directory, self._metrics = directory, metrics
        self._pardons = Pardons(directory)
        self._learnt: LearntTimes | None = None  # None: was not looked for
        self._sound = True  # the file may be replaced
        self._saved_seconds = 0.0
        self._told: set[str] = set()

    def begin(self, telemetry: Telemetry, now_seconds: float) -> None:
        """Load what was learnt, once."""
        if self._learnt is None:
            found = self._try("learnt times", lambda: load_learnt(self._directory, cells=CELLS))
            self._sound = found is not None
            self._learnt, self._saved_seconds = found or LearntTimes(), now_seconds
            self.pardoned()
            telemetry.remember(self._learnt)

    def pardoned(self) -> list[str]:
        """Devices that an operator has taken back since the last call."""
        return self._try("words of an operator", self._pardons.new) or []

    def pardon(self, device: str, clock: Clock) -> None:
        """Let other processes know that a device is taken back."""

        def give() -> None:
            private_directory(self._directory)
            self._pardons.give(device, clock)

        self._try("words of an operator", give)

    def save(
        self, telemetry: Telemetry, well: Collection[str], now_seconds: float, *, last: bool = False
    ) -> None:
        """Write what these devices took, each minute, and at the end."""
        due = last or now_seconds - self._saved_seconds >= _SAVE_SECONDS
        if self._learnt is None or not self._sound or not due:
            return
        self._saved_seconds = now_seconds
        newer = telemetry.learnt(self._learnt, well)
        if not newer.cells:
            return

        def write() -> None:
            private_directory(self._directory)
            save_learnt(self._directory, newer)

        self._try("learnt times", write)

    def _try(self, what: str, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except (HpstoreError, OSError) as error:
            self._metrics.count("health_memory_error_total")
            if what not in self._told:
                self._told.add(what)
                _log.warning("%s of pool health cannot be used: %s", what, error)
            return None
