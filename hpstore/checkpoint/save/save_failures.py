"""What becomes of a save that fails in the background: raised, borne with a warning, or tried again
from the same staged bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks, require_alike
from hpstore.checkpoint.save.process_job import AnyJob
from hpstore.checkpoint.save.save_options import SaveOptions
from hpstore.errors import (
    BudgetExceeded,
    CheckpointError,
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

    Several ranks decide together: after a save has failed each calls again() or give_up(), in
    which they exchange a message, and all do the same.

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
        self._hurry = threading.Event()  # a newer save waits
        self._newer_waits = False  # when the attempt that is under way was begun
        self._heard = _Heard()  # of the failure before
        self._since: float | None = None  # of the first failure after which no save committed
        self.last: BaseException | None = None
        self.borne: BaseException | None = None  # the last one, unless wait() is to raise it

    def begun(self) -> None:
        """A save begins; nothing of one before is under way."""
        self._hurry.clear()
        self._newer_waits, self.borne, self._heard = False, None, _Heard()

    def hurry(self) -> None:
        """A newer save waits: the one under way ends with its next attempt."""
        self._hurry.set()

    def again(self, options: SaveOptions, job: AnyJob, error: Exception, attempts: int) -> bool:
        """Whether to try a save again, after `attempts`; waits before it returns True. Collective:
        the same on all ranks."""
        if not self._agree(options, error, self._may_try(options, job, error, attempts)):
            return False
        left = max(0.0, self._left_seconds(options))
        longest = LONGEST_WAIT_SECONDS
        if self._ranks.world > 1:  # one that hurries waits for the others in a message
            longest = min(longest, options.commit_seconds / 4)
        wait = min(left, longest, FIRST_WAIT_SECONDS * 2 ** (attempts - 1))
        self._counters["saves_retried_total"] += 1
        _log.log(
            logging.WARNING if self._ranks.leads else logging.DEBUG,
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

    def give_up(self, options: SaveOptions, error: BaseException) -> None:
        """A save has failed which this rank cannot try again, as it was not all staged. Collective:
        its peers are in again(), or here."""
        if self._ranks.world > 1:
            self._agree(options, error, may_try=False)

    def _may_try(self, options: SaveOptions, job: AnyJob, error: Exception, attempts: int) -> bool:
        """What this rank is for."""
        cause = job.cause_of(error)
        if options.on_failure != "retry" or not isinstance(cause, (*_PASSING, type(None))):
            return False
        if self._since is None:
            self._since = self._clock()
        if why_not := job.why_not_repeatable:
            _log.warning("the save that failed cannot be tried again: %s", why_not)
            return False
        return attempts < MAX_ATTEMPTS and self._left_seconds(options) > 0

    def _agree(self, options: SaveOptions, error: BaseException, may_try: bool) -> bool:
        """Whether all ranks try again. What each says of its failure is kept for ended()."""
        in_time = self._left_seconds(options) > 0
        mine = (may_try, self._newer_waits, in_time, _is_bearable(error))
        self._heard = _Heard()
        if self._ranks.lost:
            return False
        try:
            votes = self._ranks.numbers(tuple(map(int, mine)), RankChannel.SAVER)
        except CheckpointError as lost:  # the save's own error says more
            _log.info("the ranks did not agree on what follows: %s", lost)
            return False
        tries, newer, times, bearable = zip(*votes, strict=True)
        self._heard = _Heard(superseded=any(newer) and all(times), bearable=all(bearable))
        return all(tries) and not any(newer)

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
        """The same on all ranks: one that goes on alone would hang."""
        if self._ranks.lost or not _is_bearable(error):
            return False
        if self._ranks.world > 1 and not self._heard.bearable:
            return False
        if options.on_failure == "warn":
            return True
        return options.on_failure == "retry" and self._heard.superseded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """What all ranks said of a failure. `superseded`: a newer save waits, and it is not too late
    to try. `bearable`: it is on all of them."""

    superseded: bool = False
    bearable: bool = False


def _is_bearable(error: BaseException) -> bool:
    """Whether a training may go on after it."""
    return isinstance(error, HpstoreError | OSError) and not isinstance(error, _NEVER_BORNE)
