"""Looks at the pool again and again beside a soak, as a process that opens it read-only."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import hpstore
from hpstore.errors import HpstoreError
from hpstore.runtime.closing import Closing
from tests.fault.soak.node import PARITY

PAUSE_SECONDS = 1.0
CLOSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The pool at one moment. `states`: of devices by URL."""

    began: float
    whole: bool  # every object has its full stripe, and two more devices may be lost
    text: str
    states: Mapping[str, str]


class Watcher(Closing):
    """A thread of its own. `newest` is None until the first look has ended."""

    def __init__(self, toml: Path) -> None:
        self._toml, self._stop = toml, threading.Event()
        self.newest: Look | None = None
        self.errors: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="soak-watcher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            began = time.monotonic()
            try:
                self.newest = self._look(began)
            except HpstoreError as error:
                self.errors[f"{type(error).__name__}: {error}"] += 1

    def _look(self, began: float) -> Look:
        with hpstore.open(self._toml, read_only=True) as pool:
            found = pool.status()
        return Look(
            began=began,
            whole=(found.losses_tolerated, found.degraded, found.unreadable) == (PARITY, 0, 0),
            text=f"{found.degraded} degraded, {found.unreadable} unreadable, "
            f"{found.losses_tolerated} may be lost",
            states={device.url: device.state for device in found.devices},
        )

    def close(self) -> None:
        """Idempotent."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
