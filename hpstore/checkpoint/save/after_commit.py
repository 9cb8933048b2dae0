"""What rank 0 does after a commit: older steps go, when the new one is whole (PROTOCOL 19)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from hpstore.checkpoint.catalog.fence_record import fence_session
from hpstore.checkpoint.catalog.retain_steps import retain
from hpstore.checkpoint.catalog.retention import Retention
from hpstore.checkpoint.catalog.retention_hint import note_expiring
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.save.save_handle import SaveReport
from hpstore.checkpoint.tiers.tier_copies import TierCopies
from hpstore.runtime.clock import SystemClock
from hpstore.units import MIB

_log = logging.getLogger(__name__)
LEFT_SECONDS = 60.0  # steps of small saves that retention does not keep stay at most so long ...
LEFT_BYTES = 64 * MIB  # ... or until they are so large


class AfterCommits:
    """Removes what retention does not keep, or keeps it until a newer step is whole.

    To list the run and to delete takes longer than a save of a megabyte does. So it is done once
    for all saves of a minute, unless they are large, and in flush(). Failing at any of this does
    not fail a save. Thread-safe.
    """

    def __init__(
        self,
        steps: StepCatalog,
        retention: Retention,
        session: str,
        counters: dict[str, int],
        clock: Callable[[], float] = time.monotonic,
        wall_ms: Callable[[], int] | None = None,
        expire: Callable[[], object] = lambda: None,
        tiers: TierCopies | None = None,
    ) -> None:
        self._steps, self._retention, self._counters = steps, retention, counters
        self._session, self._clock = session, clock
        self._wall_ms = wall_ms or SystemClock().wall_ms
        self._expire = expire  # removes hidden steps whose time is over
        self._tiers = tiers or TierCopies(steps, (), {})  # what they copy stays until then
        self._newest: SaveReport | None = None  # of those that were not seen to yet
        self._bytes = 0  # of all of them
        self._last: float | None = None  # when retention ran
        self._lock = threading.Lock()  # guards all of the above
        self._pid = os.getpid()

    def committed(self, report: SaveReport) -> None:
        """A step was committed; it is seen to now or later."""
        if self._retention.keep_last is None:
            return
        self._after_fork()
        with self._lock:
            if self._newest is not None and report.step < self._newest.step:
                self._flush()  # a run that went back: each is held against its own earlier steps
            self._newest, self._bytes = report, self._bytes + report.bytes
            now = self._clock()
            early = self._last is not None and now - self._last < LEFT_SECONDS
            if not early or self._bytes >= LEFT_BYTES:
                self._flush()

    def flush(self) -> None:
        """See to what was left. Not once another session saves here: what stays is its to say."""
        self._after_fork()
        with self._lock:
            if self._newest is not None:
                self._flush()

    def forget(self) -> None:
        """The run has gone back: what was committed last decides nothing any more."""
        self._after_fork()
        with self._lock:
            self._newest, self._bytes = None, 0

    def _after_fork(self) -> None:
        """Start anew in a forked child: the parent handles what is left, and one of its threads may
        have held the lock."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()
            self._newest, self._bytes = None, 0

    def _flush(self) -> None:
        """What is left stays for the next look when this is interrupted, or when it is unclear who
        saves here."""
        report, steps, self._last = self._newest, self._steps, self._clock()
        session = fence_session(steps.pool, steps.prefix)
        if session is None:
            return
        if report is not None and session == self._session:
            self._see_to(report)
        self._newest, self._bytes = None, 0

    def _see_to(self, report: SaveReport) -> None:
        steps = self._steps
        if report.spare_columns >= steps.pool.parity and steps.is_whole(report.step):
            held = self._tiers.held()
            retain(
                steps,
                report.step,
                self._retention,
                now_ms=self._wall_ms(),
                held=held,
                session=self._session,
            )
            note_expiring(steps, report.step, self._retention)
            self._expire()
            return
        if not self._counters["retentions_postponed_total"]:
            _log.warning(
                "older steps under %r are kept: step %d, or what it refers to, survives fewer "
                "than %d lost devices. Bring devices back, or rebuild the pool; until then saves "
                "take up space.",
                steps.prefix,
                report.step,
                steps.pool.parity,
            )
        self._counters["retentions_postponed_total"] += 1
