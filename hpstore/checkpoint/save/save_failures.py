"""What becomes of a save that fails in the background: raised, borne with a warning, or tried again
from the same staged bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from hpstore.checkpoint.ranks.collectives import Ranks, require_alike
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.checkpoint.save.save_options import SaveOptions
from hpstore.errors import (
    BudgetExceeded,
    CheckpointMismatch,
    ConfigError,
    DeviceError,
    HpstoreError,
    LockTimeout,
    RedundancyError,
    ThreadsExhausted,
    VersionConflict,
)

_log = logging.getLogger(__name__)
MAX_ATTEMPTS = 10  # of one save, the first included
FIRST_WAIT_SECONDS = 0.5  # doubled with each attempt ...
LONGEST_WAIT_SECONDS = 30.0  # ... up to this

# what may pass: devices that are away, full or busy, and what this process lacks for a moment
_PASSING = (DeviceError, RedundancyError, LockTimeout, BudgetExceeded, ThreadsExhausted, OSError)
# what goes on without end until a user looks: another job saves here, an argument is wrong
_NEVER_BORNE = (VersionConflict, ConfigError, CheckpointMismatch)


class SaveFailures:
    """Of one checkpointer. The constructor is a call of all ranks; again() and ended() are called
    by the thread of a save, hurry() and borne by the trainer's.

    `last` is what went wrong in the last save; None once a save has committed.
    """

    def __init__(
        self,
        ranks: Ranks,
        options: SaveOptions,
        counters: dict[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_alike(ranks, "on_failure", options.on_failure, "some would stop without the others")
        self._ranks, self._counters, self._clock = ranks, counters, clock
        self._require_possible(options)
        self._hurry = threading.Event()  # a newer save waits
        self._newer_waits = False  # when the attempt that is under way was begun
        self._since: float | None = None  # of the first failure after which no save committed
        self.last: BaseException | None = None
        self.borne: BaseException | None = None  # the last one, unless wait() is to raise it

    def _require_possible(self, options: SaveOptions) -> None:
        if options.on_failure == "retry" and self._ranks.world > 1:
            raise ConfigError(
                f'on_failure="retry" with {self._ranks.world} ranks: a rank that tries again alone '
                'would keep the others waiting. Use "warn", which goes on to the next save, or '
                '"raise". Nothing was changed'
            )

    def begun(self, options: SaveOptions) -> None:
        """A save begins; nothing of one before is under way. Raises ConfigError for options that
        were replaced since and are not possible."""
        self._require_possible(options)
        self._hurry.clear()
        self._newer_waits, self.borne = False, None

    def hurry(self) -> None:
        """A newer save waits: the one under way ends with its next attempt."""
        self._hurry.set()

    def again(self, options: SaveOptions, job: SaveJob, error: Exception, attempts: int) -> bool:
        """Whether to try a save again, after `attempts`; waits before it returns True."""
        if not self._may_try(options, job, error, attempts):
            return False
        left = self._left_seconds(options)
        wait = min(left, LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** (attempts - 1))
        self._counters["saves_retried_total"] += 1
        _log.warning(
            "a save failed and is tried again in %.1f s, from the bytes that are staged (attempt "
            "%d of %d, for %.0f s more): %s",
            wait,
            attempts + 1,
            MAX_ATTEMPTS,
            left,
            error,
        )
        self._newer_waits = self._hurry.wait(wait)
        return True

    def _may_try(self, options: SaveOptions, job: SaveJob, error: Exception, attempts: int) -> bool:
        if options.on_failure != "retry" or not isinstance(error, _PASSING):
            return False
        if self._since is None:
            self._since = self._clock()
        if not job.repeatable:
            _log.warning("the save that failed cannot be tried again: %s", job.why_not_repeatable)
            return False
        late = attempts >= MAX_ATTEMPTS or self._left_seconds(options) <= 0
        return not late and not self._newer_waits

    def _left_seconds(self, options: SaveOptions) -> float:
        began = self._clock() if self._since is None else self._since
        return began + options.retry_seconds - self._clock()

    def ended(self, options: SaveOptions, error: BaseException | None) -> None:
        """A save is over. Logs and counts a failure, and decides whether the trainer bears it."""
        self.last = error
        if error is None:
            self._since = None
            return
        self._counters["saves_failed_total"] += 1
        if not self._bears(options, error):
            return
        self.borne = error
        _log.log(
            logging.WARNING if self._ranks.leads else logging.DEBUG,
            "a save failed, the training goes on (on_failure=%r, %d saves failed so far): %s",
            options.on_failure,
            self._counters["saves_failed_total"],
            error,
        )

    def _bears(self, options: SaveOptions, error: BaseException) -> bool:
        """The same on all ranks, which raise the same class: one that goes on alone would hang."""
        if not isinstance(error, HpstoreError | OSError) or isinstance(error, _NEVER_BORNE):
            return False
        if self._ranks.lost:
            return False
        if options.on_failure == "warn":
            return True
        superseded = self._newer_waits and self._left_seconds(options) > 0
        return options.on_failure == "retry" and superseded
