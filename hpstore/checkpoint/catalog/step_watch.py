"""New committed steps, one after the other, for a process beside the training: an evaluator.

A listing costs as many directories as the run has steps, on every device. So between listings, one
a minute, only the key of the step that is expected next is looked at: trainers save at even steps.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.watch_cursor import Commit, WatchCursor, cursor_key
from hpstore.checkpoint.format.checkpoint_manifest import MAX_STEP, checked_step, manifest_key
from hpstore.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    FormatTooNew,
    IntegrityError,
    LockTimeout,
    ObjectNotFound,
    RedundancyError,
)

_log = logging.getLogger(__name__)
LISTING_SECONDS = 60.0  # between two listings of a run that saves at even steps
_HOLD = "watch-"
_PASSING = (DeviceError, RedundancyError, LockTimeout)  # trouble that may be over at the next look


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """How steps are watched; checked when it is made.

    `after`: the last step that was done. `cursor`: where the pool keeps that, by name. `hold`: the
    name under which a step is protected while it is out.
    """

    after: int | None = None
    cursor: str | None = None
    hold: str | None = None
    poll_seconds: float = 10.0
    timeout: float | None = None

    def check(self, catalog: StepCatalog) -> None:
        """Raise ConfigError for what cannot be done."""
        if self.after is not None:
            checked_step(self.after)
            if self.cursor is not None:
                raise ConfigError(
                    f"after={self.after} and cursor={self.cursor!r} both say where to begin: "
                    "leave one of them out"
                )
        for name, seconds in (("poll_seconds", self.poll_seconds), ("timeout", self.timeout)):
            if seconds is None:
                continue
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not number or not seconds >= 0 or math.isinf(seconds):
                raise ConfigError(f"{name}={seconds!r} is not a number of seconds")
        if self.poll_seconds <= 0:
            raise ConfigError("poll_seconds must be above 0")
        if self.cursor is not None:
            cursor_key(catalog.prefix, self.cursor)
        if self.hold is not None:
            catalog.protection_key(held_as(self.hold))
        if catalog.pool.read_only and (self.cursor is not None or self.hold is not None):
            raise ConfigError(
                "cursor= and hold= write into the pool, which was opened read-only: keep the last "
                "step yourself and give it as after=, or open the pool for writing"
            )


class StepWatch:
    """Which commits of a run are new. Looks when it is asked to. One thread at a time.

    `clock`: seconds, monotonic. Where the pool's devices do not answer, methods raise.
    """

    def __init__(
        self,
        catalog: StepCatalog,
        clock: Callable[[], float],
        *,
        after: int | None = None,
        done: Commit | None = None,
    ) -> None:
        self._catalog, self._pool, self._clock = catalog, catalog.pool, clock
        self._after, self._start = after, done  # where to begin; used by the first listing
        self._begun = False
        self._known: dict[int, str] = {}  # commits that are done or passed over, by step
        self._written: dict[int, tuple[int, str]] = {}  # when and by which session these were made
        self._made = (0, "")  # the same of what next() has returned
        self._waiting: list[Commit] = []  # in the order of their commits
        self._listed: tuple[int, ...] = ()  # steps of the last listing
        self._listed_at = -math.inf

    def next(self) -> Commit | None:
        """The first commit that is new and can be read; None when there is none now."""
        if not self._waiting and self._is_due():
            self._list()
        while self._waiting:
            commit = self._waiting[0]
            if self._is_news(commit):
                return commit
            self._done(self._waiting.pop(0))
        return None

    def done(self, commit: Commit) -> None:
        """What next() has returned was handed out: it is not new any more."""
        self._waiting = [other for other in self._waiting if other != commit]
        self._written[commit.step] = self._made
        self._done(commit)

    def _done(self, commit: Commit) -> None:
        self._known[commit.step] = commit.version

    def _is_due(self) -> bool:
        """Whether to list now. Where no even distance is known there is little to list."""
        if self._clock() - self._listed_at >= LISTING_SECONDS or len(self._listed) < 2:
            return True
        before, last = self._listed[-2:]
        expected = last + (last - before)
        return expected <= MAX_STEP and self._pool.exists(
            manifest_key(self._catalog.prefix, expected)
        )

    def _list(self) -> None:
        """What is committed now that is not known. Those that wait and are gone are reported."""
        began = self._clock()
        steps = self._catalog.listing().steps
        found = self._catalog.manifests
        commits = [Commit(step=step, version=found[step]) for step in steps if step in found]
        if not self._begun:
            self._begin(commits)
        self._known = {step: v for step, v in self._known.items() if step in steps}
        new = [c for c in commits if self._known.get(c.step) != c.version]
        self._waiting = sorted(new, key=lambda c: (c.version, c.step))
        self._listed, self._listed_at = steps, began

    def _begin(self, commits: list[Commit]) -> None:
        """Take for known what was done before: all that was committed until then, or, where that
        step is gone, all up to it."""
        self._begun = True
        last = self._start
        if last is None and self._after is not None:
            last = next((c for c in commits if c.step == self._after), None)
        for commit in commits:
            if last is not None:
                is_old = commit.version <= last.version
            else:
                is_old = self._after is not None and commit.step <= self._after
            if is_old:
                self._done(commit)

    def _is_news(self, commit: Commit) -> bool:
        """Whether a commit is there to be read, and was not handed out under another version: a
        commit that is put back is the same."""
        try:
            facts = self._catalog.facts(commit.step)
            version = self._pool.stat(self._key(commit)).version
        except ObjectNotFound:
            _log.warning(
                "step %d under %r was removed before it was looked at: it is passed over",
                commit.step,
                self._catalog.prefix,
            )
            return False
        except (IntegrityError, FormatTooNew) as error:
            _log.warning("step %d is passed over: %s", commit.step, error)
            return False
        if version != commit.version:
            return False  # it was saved again since: the next listing has that
        self._made = (facts.created_ms, facts.session)
        return self._written.get(commit.step) != self._made

    def _key(self, commit: Commit) -> str:
        return manifest_key(self._catalog.prefix, commit.step)


def held_as(name: str) -> str:
    """The name of the protection that a hold puts: none that people give, which it would move."""
    return f"{_HOLD}{name}"


def is_hold(protection: str) -> bool:
    """Whether a protection of this name is one that a hold has put."""
    return protection.startswith(_HOLD)


class WatchLoop:
    """Hands new steps out, waits for more, and keeps the cursor and the hold. One thread at a time.

    Trouble with devices is logged once and waited out; a timeout in the middle of it raises it.
    """

    def __init__(
        self,
        catalog: StepCatalog,
        options: WatchOptions,
        stop: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._catalog, self._options, self._stop, self._clock = catalog, options, stop, clock
        self._cursor: WatchCursor | None = None
        self._watch: StepWatch | None = None
        self._trouble: Exception | None = None

    def steps(self) -> Iterator[int]:
        """New committed steps, until the event is set or none has come for the timeout."""
        since = self._clock()
        while not self._stop.is_set():
            commit = self._look()
            if commit is not None:
                yield from self._out(commit)
                since = self._clock()
            elif not self._wait(since):
                return

    def _look(self) -> Commit | None:
        """The next commit, held where that was asked for; None where there is none, or trouble."""
        try:
            watch = self._begun()
            while (commit := watch.next()) is not None and not self._hold(commit):
                watch.done(commit)
        except _PASSING as error:
            if self._trouble is None:
                _log.warning(
                    "steps under %r cannot be looked for now: %s", self._catalog.prefix, error
                )
            self._trouble = error
            return None
        self._trouble = None
        if commit is not None:
            watch.done(commit)
        return commit

    def _begun(self) -> StepWatch:
        if self._watch is None:
            options, catalog = self._options, self._catalog
            if options.cursor is not None:
                self._cursor = WatchCursor(catalog.pool, catalog.prefix, options.cursor)
            done = None if self._cursor is None else self._cursor.done
            self._watch = StepWatch(catalog, self._clock, after=options.after, done=done)
        return self._watch

    def _out(self, commit: Commit) -> Iterator[int]:
        """Hand a step out; when the caller comes back it is done."""
        try:
            yield commit.step
        finally:
            self._release()
        if self._cursor is None:
            return
        try:
            self._cursor.move(commit)
        except _PASSING as error:
            _log.warning(
                "that step %d is done is not noted: %s. The next one will say so.",
                commit.step,
                error,
            )

    def _wait(self, since: float) -> bool:
        """Until the next look; False when it is over."""
        left = math.inf
        if self._options.timeout is not None:
            left = since + self._options.timeout - self._clock()
        if left > 0:
            self._stop.wait(min(self._options.poll_seconds, left))
            return True
        if self._trouble is not None:
            raise self._trouble
        return False

    def _hold(self, commit: Commit) -> bool:
        """Protect a step, if that was asked for. False when its removal was quicker."""
        name = self._options.hold
        if name is None:
            return True
        try:
            self._catalog.protect(commit.step, held_as(name))
            self._catalog.facts(commit.step)
        except (CheckpointError, ObjectNotFound):
            _log.warning(
                "step %d under %r was removed before it could be held: it is passed over",
                commit.step,
                self._catalog.prefix,
            )
            self._release()
            return False
        return True

    def _release(self) -> None:
        """Let retention have the step again. Where that fails the name goes with the next step."""
        if self._options.hold is None:
            return
        with suppress(CheckpointError):  # it is not held
            try:
                self._catalog.unprotect(held_as(self._options.hold))
            except _PASSING as error:
                _log.warning("%r still protects a step: %s", self._options.hold, error)
