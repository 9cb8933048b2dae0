"""Copies of committed steps into further pools, by threads of rank 0, and what came of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from hpstore.checkpoint.catalog.retain_steps import retain
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import SaveAttempt
from hpstore.checkpoint.tiers.copy_step import CopyReport, CopyStopped, copy_step
from hpstore.checkpoint.tiers.hidden_copies import hidden_copies
from hpstore.checkpoint.tiers.tier import Tier, is_due
from hpstore.errors import CheckpointError, HpstoreError, ThreadsExhausted, without_promise
from hpstore.runtime.clock import SystemClock
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
PAUSE_SECONDS = (0.5, 30.0)  # between tries of a copy that fails: the first, and the longest


class TierCopier:
    """One tier: at most one copy under way and one that waits; a newer step takes its place.

    Thread-safe. The thread lives while there is something to copy.
    """

    def __init__(self, source: StepCatalog, tier: Tier, counters: dict[str, int]) -> None:
        self.tier, self._counters = tier, counters
        self._source, self.catalog = source, StepCatalog(tier.pool, source.prefix)
        self._changed = threading.Condition()  # guards all below
        self._waiting: int | None = None
        self._running: int | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._last: CopyReport | None = None
        self._error: Exception | None = None  # of the last copy; None once one has succeeded

    @property
    def held(self) -> tuple[int, ...]:
        """Steps that the first pool must keep until they are copied."""
        with self._changed:
            return tuple(s for s in (self._running, self._waiting) if s is not None)

    @property
    def last(self) -> CopyReport | None:
        """The last one that was committed there by this process."""
        with self._changed:
            return self._last

    @property
    def error(self) -> Exception | None:
        """Why the last copy failed; None once one has succeeded."""
        with self._changed:
            return self._error

    def catch_up(self) -> None:
        """Copy what an earlier process has not: the newest due step after those that are there."""
        for step in sorted(hidden_copies(self._source, self.catalog), reverse=True):
            self.catalog.delete(step, force=True)
        self.catalog.collect_garbage()
        newest = max(self.catalog.all(), default=-1)
        due = [step for step in self._source.all() if step > newest and is_due(self.tier, step)]
        if due:
            self.enqueue(due[-1])

    def enqueue(self, step: int) -> None:
        """Copy a step soon."""
        if not is_due(self.tier, step):
            return
        with self._changed:
            if self._waiting is not None and self._waiting != step:
                if not self._counters["tier_copies_skipped_total"]:
                    _log.warning(
                        "step %d is not copied to %s: copies take longer than the steps between "
                        "them. Raise Tier(every=), or give it faster devices.",
                        self._waiting,
                        self.tier.name,
                    )
                self._counters["tier_copies_skipped_total"] += 1
            self._waiting = step
            self._start()

    def _start(self) -> None:
        """Have a thread for the step that waits; where there is none left, the next commit or
        wait() tries again. Called with the lock held."""
        if self._thread is not None or self._waiting is None:
            return
        thread = threading.Thread(target=self._run, name="hpstore-tier", daemon=True)
        try:
            self._thread = start_thread(thread)
        except ThreadsExhausted as error:
            self._error = error
            _log.warning("step %d is not copied to %s: %s", self._waiting, self.tier.name, error)

    def _run(self) -> None:
        while (step := self._take()) is not None:
            try:
                self._copy(step)
            except Exception as error:  # noqa: BLE001 (shown in status; a thread has no caller)
                self._failed(step, error)
        # nothing of this thread is used after _take() has said that there is nothing

    def _take(self) -> int | None:
        with self._changed:
            self._running = self._waiting
            self._waiting = None
            if self._running is None or self._stop.is_set():
                self._running = self._thread = None
            self._changed.notify_all()
            return self._running

    def _copy(self, step: int) -> None:
        """Until it has succeeded, a newer one waits, or its time is over."""
        until = time.monotonic() + self.tier.retry_seconds
        pause = PAUSE_SECONDS[0]
        while True:
            try:
                done = copy_step(
                    self._source,
                    step,
                    self.catalog,
                    rate_bytes_per_second=self.tier.rate_bytes_per_second,
                    stop=self._stop,
                )
                break
            except (HpstoreError, OSError) as error:
                if isinstance(error, CopyStopped) or not self._source_has(step):
                    raise
                with self._changed:
                    over = time.monotonic() + pause > until
                    if over or self._waiting is not None or self._stop.is_set():
                        raise
                _log.info("the copy of step %d is tried again in %.1f s: %s", step, pause, error)
            self._stop.wait(pause)
            pause = min(2 * pause, PAUSE_SECONDS[1])
        with self._changed:
            self._last, self._error = done, None
            self._counters["tier_copies_total"] += 1
            self._counters["tier_bytes_total"] += done.bytes
        if self.catalog.is_whole(step):
            now_ms = SystemClock().wall_ms()
            retain(self.catalog, step, self.tier.retention, now_ms=now_ms)

    def _source_has(self, step: int) -> bool:
        try:
            return step in self._source.all()
        except (HpstoreError, OSError):
            return True  # unclear: it is tried again

    def _failed(self, step: int, error: Exception) -> None:
        with self._changed:
            self._error = error
            if isinstance(error, CopyStopped):
                return
            self._counters["tier_copies_failed_total"] += 1
        unclear = getattr(error, "maybe_visible", False)
        _log.warning(
            "step %d %s %s, from %s: %s",
            step,
            "may be copied or not to" if unclear else "was not copied to",
            self.tier.name,
            self._source.pool.config.name,
            error,
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Until nothing is under way or waits; False when that takes longer, or no thread can be
        started for it."""
        with self._changed:
            self._start()
            over = self._changed.wait_for(lambda: self._thread is None, timeout)
            return over and self._waiting is None

    def end(self) -> None:
        """Give up what is under way, and what waits."""
        self._stop.set()
        thread = self._thread
        with self._changed:
            self._waiting = None
        if thread is not None:
            thread.join()
        self._stop = threading.Event()

    def end_others(self) -> None:
        """End copies of other processes: none of them commits after this (PROTOCOL 18). Raises
        CheckpointError when that cannot be done now."""
        listing = self.catalog.listing()
        for key in (*listing.attempts, *listing.condemned):
            attempt: SaveAttempt | None = None
            with suppress(HpstoreError, OSError, KeyError, ValueError):
                attempt = SaveAttempt.decode(self.tier.pool.get(key), where=key)
            self.catalog.end_attempt(key, attempt)
        listing = self.catalog.listing()
        if left := listing.attempts | listing.condemned:
            raise CheckpointError(
                f"copies to {self.tier.name} may be under way in another process, and could not be "
                f"ended now ({len(left)} notes). Nothing was hidden. Try again"
            )


def _require_kept(copier: TierCopier, step: int, kept: Collection[int]) -> None:
    """Raise CheckpointError for a later step that is protected there, or is there alone."""
    catalog, name = copier.catalog, copier.tier.name
    for protection, protected in catalog.protected().items():
        if protected > step:
            raise CheckpointError(
                f"step {protected} is protected as {protection!r} in {name}: unprotect it first, "
                "or force=True lets it go there. Nothing was hidden"
            )
    alone = [later for later in catalog.all() if later > step and later not in kept]
    if alone:
        raise CheckpointError(
            f"the later steps {alone[-8:]} are in {name} alone, and would be gone for good: "
            "force=True lets them go. Nothing was hidden"
        )


class TierCopies:
    """The further pools of a run, on rank 0: copies into them, and what a rollback does there."""

    def __init__(
        self, source: StepCatalog, tiers: Sequence[Tier], counters: dict[str, int]
    ) -> None:
        self._source, self._tiers, self._counters = source, tiers, counters
        names = ("tier_copies", "tier_copies_failed", "tier_copies_skipped", "tier_bytes")
        counters.update({f"{name}_total": 0 for name in names} if tiers else {})
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self.copiers = tuple(TierCopier(self._source, tier, self._counters) for tier in self._tiers)

    @property
    def catalogs(self) -> list[StepCatalog]:
        """Of the further pools, in their order."""
        return [copier.catalog for copier in self.copiers]

    def catch_up(self) -> None:
        """Copy what an earlier process has left, as far as the tiers can be reached."""
        for copier in self.copiers:
            if copier.tier.pool.read_only or not copier.tier.copies:
                continue  # also the pool of an evaluator
            try:
                copier.catch_up()
            except (HpstoreError, OSError) as error:
                _log.warning("%s cannot be looked at now: %s", copier.tier.name, error)

    def committed(self, step: int) -> None:
        """A step was committed in the first pool."""
        if self._pid != os.getpid():  # forked: the parent's threads copy what the parent saves
            self._begin()
        for copier in self.copiers:
            copier.enqueue(step)

    def held(self) -> Mapping[str, int]:
        """Steps that the first pool must keep until they are copied, by why."""
        if self._pid != os.getpid():
            return {}  # threads of the parent copy for it
        return {
            f"copy {number} to {copier.tier.name}": step
            for copier in self.copiers
            for number, step in enumerate(copier.held)
        }

    def wait(self, timeout: float | None = None) -> bool:
        """Until every step that is due is copied, or has failed; False when that takes longer, or
        no thread can be started for it."""
        if self._pid != os.getpid():
            return True
        until = None if timeout is None else time.monotonic() + timeout
        for copier in self.copiers:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not copier.wait(left):
                return False
        return True

    def bring(self, step: int) -> None:
        """Before a rollback to a step that a tier alone has: copy it into the first pool."""
        if not self.copiers or step in self._source.all():
            return
        for copier in self.copiers:
            if step in copier.catalog.all():
                copy_step(copier.catalog, step, self._source)
                return

    def go_back(self, step: int, *, force: bool) -> list[str]:
        """Before a rollback: later steps leave the tiers, whoever copies them. The first pool has
        what can be taken back. Returns the names of the tiers that had some. Raises
        CheckpointError, with the run as before; or what a tier raises in the middle, saying so."""
        if not force:
            kept = set(self._source.all()) if self.copiers else set()
            for copier in self.copiers:
                _require_kept(copier, step, kept)
        for copier in self.copiers:  # all, before a step of any goes: the last may refuse
            copier.end()
            copier.end_others()
        later = {c: [number for number in c.catalog.all() if number > step] for c in self.copiers}
        for copier, numbers in later.items():
            try:
                for number in reversed(numbers):
                    copier.catalog.delete(number, force=True)
            except HpstoreError as error:
                raise type(error)(
                    f"the later steps {numbers[-8:]} in {copier.tier.name} are deleted there in "
                    f"part: {without_promise(error)} In the first pool nothing was hidden. When "
                    "that is mended, call rollback() again"
                ) from error
        return [copier.tier.name for copier, numbers in later.items() if numbers]

    def close(self) -> None:
        """Give up what is under way: the next process of the run copies it."""
        if self._pid == os.getpid():
            for copier in self.copiers:
                copier.end()


class Tiers:
    """The further pools of a run: `ckpt.tiers`. Copies are made by rank 0, in the background.

    A save is acknowledged by the first pool; wait() waits for the others. What fails there fails
    no training: it is logged, counted in `ckpt.counters` and shown by report(). Thread-safe.
    """

    def __init__(self, copies: TierCopies) -> None:
        self._copies = copies

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every step that is due is copied, or has failed.

        Parameters
        ----------
        timeout
            Seconds. Default: without a limit.

        Returns
        -------
        bool
            False when it takes longer. True on ranks other than 0, which copy nothing.
        """
        return self._copies.wait(timeout)

    def report(self) -> list[dict[str, object]]:
        """Say how each tier is.

        Returns
        -------
        list of dict
            By tier: `tier`, `copied` (the last step that this process has copied, or None),
            `seconds` and `bytes` of that copy, `losses_tolerated` there, `under_way` (steps),
            `error` (why the last copy failed, or None).
        """
        found: list[dict[str, object]] = []
        for copier in self._copies.copiers:
            last, error = copier.last, copier.error
            found.append(
                {
                    "tier": copier.tier.name,
                    "copied": None if last is None else last.step,
                    "seconds": None if last is None else last.seconds,
                    "bytes": None if last is None else last.bytes,
                    "losses_tolerated": None if last is None else last.losses_tolerated,
                    "under_way": list(copier.held),
                    "error": None if error is None else str(error),
                }
            )
        return found
