"""The committed steps of a Checkpointer: list, verify, protect and delete them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence

from hpstore.checkpoint.catalog.hidden_steps import Rollback
from hpstore.checkpoint.catalog.removed_steps import reading_step
from hpstore.checkpoint.catalog.retain_steps import decisions_now, remove_steps
from hpstore.checkpoint.catalog.retention import Retention, StepDecision
from hpstore.checkpoint.catalog.rollback import (
    may_take_back,
    now_milliseconds,
    remove_expired,
    rollbacks,
    take_back,
)
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.step_watch import WatchLoop, WatchOptions
from hpstore.checkpoint.catalog.writer_fence import manifests_of
from hpstore.checkpoint.diff.step_diff import StepDiff, diff_steps
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.restore.tensor_stream import ByteProgress
from hpstore.checkpoint.restore.verify_step import VerifyReport, verify_step
from hpstore.checkpoint.save.saver import Saver
from hpstore.checkpoint.tiers.nearest_step import listed_steps, nearest, newest_valid
from hpstore.errors import HpstoreError, without_promise
from hpstore.runtime.clock import SystemClock


class Steps:
    """The committed steps of one run: `ckpt.steps`. `ckpt.steps()` is `ckpt.steps.list()`.

    Nothing here is collective. Beside a save of this process every call shows what it has
    committed, and what retention has deleted after that. With tiers a step is there when any pool
    has it; it is read from the nearest one, and protected and deleted in all that have it.
    """

    def __init__(self, catalog: StepCatalog, saver: Saver, retention: Retention) -> None:
        self._catalog, self._saver, self._settled = catalog, saver, saver.let_tidy
        self._retention = retention

    def __call__(self) -> list[int]:
        """Return the committed steps, ascending; the same as list()."""
        self._settled()
        return sorted({each.step for each in listed_steps(self.catalogs)})

    @property
    def catalogs(self) -> list[StepCatalog]:
        """Of all pools of the run: the one that is saved into, then the tiers."""
        return [self._catalog, *self._saver.tiers.catalogs]

    def _having(self, step: int) -> list[StepCatalog]:
        """Those that have a step, the further pools first; the first pool where none has it. Raises
        where a pool cannot be listed: what is done to a step must not leave one of its copies out.
        """
        catalogs = self.catalogs
        if len(catalogs) == 1:
            return catalogs
        return [each for each in reversed(catalogs) if step in each.all()] or catalogs[:1]

    def catalog_of(self, step: int) -> StepCatalog:
        """Find the nearest pool that has a step; the first one where none has it.

        Parameters
        ----------
        step
            A committed step.

        Returns
        -------
        StepCatalog
            Of that pool.
        """
        return self.catalogs_of(step)[0]

    def catalogs_of(self, step: int) -> Sequence[StepCatalog]:
        """Find the pools that have a step, the nearest first; the first one where none has it.

        Parameters
        ----------
        step
            A committed step.

        Returns
        -------
        sequence of StepCatalog
            Of these pools; never empty.
        """
        return nearest(self.catalogs, step)

    def latest(self) -> int | None:
        """Return the newest step whose manifest and segments can be read; None without one.

        Damaged steps are passed over; the log says why. A save that a trainer which has ended has
        left to its writer process on this host is waited for, at most SaveOptions(drain_seconds=).
        """
        self._catalog.left.wait()
        return newest_valid(self.catalogs)

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a step.

        Parameters
        ----------
        step
            A committed step.

        Returns
        -------
        Manifest
            What the step holds, where.

        Raises
        ------
        CheckpointError
            There is no such step.
        IntegrityError
            The manifest is damaged.
        """
        return self.catalog_of(step).manifest(step)

    def verify(self, step: int, *, progress: ByteProgress | None = None) -> VerifyReport:
        """Read every byte of a step and compare every item with its hash.

        Parameters
        ----------
        step
            A committed step.
        progress
            Called now and then with the bytes of items done and in all, by this thread.

        Returns
        -------
        VerifyReport
            `ok`, or the names of what is damaged.

        Raises
        ------
        CheckpointError
            There is no such step, or it was removed meanwhile.
        IntegrityError
            The manifest is damaged.
        """
        catalog = self.catalog_of(step)
        manifest = catalog.manifest(step)
        with reading_step(catalog, manifest):
            return verify_step(catalog.pool, manifest, progress)

    def diff(
        self,
        before: int,
        after: int,
        *,
        keys: Collection[str] | None = None,
        norms: bool = False,
        progress: ByteProgress | None = None,
    ) -> StepDiff:
        """Compare two steps: which tensors and values were added, removed or changed.

        By the hashes of their items; bytes are read where a tensor was sharded in another way, and
        for `norms`. Memory is bounded, however large the steps are.

        Parameters
        ----------
        before, after
            Committed steps.
        keys
            Only these names, and what is under them.
        norms
            Read the tensors that differ, and measure how far apart they are.
        progress
            Called now and then with the bytes read and in all, by this thread.

        Returns
        -------
        StepDiff
            What differs, sorted by name; `same` where nothing does.

        Raises
        ------
        CheckpointError
            There is no such step, or one was removed meanwhile, or neither holds anything under
            `keys`.
        IntegrityError, RedundancyError
            Bytes cannot be read.
        """
        return diff_steps(
            self._catalog,
            self._catalog.manifest(before),
            self._catalog.manifest(after),
            keys=keys,
            norms=norms,
            progress=progress,
        )

    def delete(self, step: int, *, force: bool = False, tiers: bool = True) -> None:
        """Delete a step: its manifest first, then the segments that it alone names. With tiers, in
        the further pools first.

        Parameters
        ----------
        step
            A committed step.
        force
            Delete a protected step, too.
        tiers
            False: in the first pool alone, as retention does; what tiers hold goes by theirs.

        Raises
        ------
        CheckpointError
            The step is protected, in any of the pools, or there is none. Nothing was deleted.
        HpstoreError
            A pool failed; the message names those of the tiers that have let the step go before.
            Call it again.
        """
        self._settled()
        having = self._having(step) if tiers else [self._catalog]
        for catalog in having if not force else ():
            catalog.require_unprotected(step)
        gone: list[str] = []
        for catalog in having:
            name = catalog.pool.config.name
            try:
                catalog.delete(step, force=force)
            except HpstoreError as error:
                if not gone:
                    raise
                error.args = (
                    f"step {step} is deleted in {' and '.join(gone)}, not in {name}: "
                    f"{without_promise(error)} When that is mended, delete it again",
                )
                raise
            gone.append(name)

    def retain(self, *, dry_run: bool = False) -> list[StepDecision]:
        """Apply the Checkpointer's keep_last, keep_every, keep_best and keep_for now.

        As after each save, without waiting for the next one: what has become too old since the
        last goes. While the newest step is not whole, all stay.

        Parameters
        ----------
        dry_run
            Only report: nothing is deleted.

        Returns
        -------
        list of StepDecision
            Of each committed step, ascending, whether it stays and why.

        Raises
        ------
        HpstoreError
            Steps cannot be listed now, or some could not be deleted: the rest of those that go are
            deleted, and a later call goes on.
        """
        self._settled()
        now_ms = SystemClock().wall_ms()
        there = manifests_of(self._catalog.pool, self._catalog.prefix)
        decisions = decisions_now(self._catalog, self._retention, now_ms=now_ms)
        if not dry_run:
            going = [found.step for found in decisions if not found.stays]
            remove_steps(self._catalog, going, there)
        return decisions

    def protect(self, step: int, name: str) -> None:
        """Keep a step under a name, whatever retention decides. Durable on return.

        Parameters
        ----------
        step
            A committed step.
        name
            Not empty, without a slash. A name keeps one step: the one it kept before is as any
            other then.

        Raises
        ------
        CheckpointError
            There is no such step.
        ConfigError
            `name` cannot be used.
        """
        for catalog in self._having(step):
            catalog.protect(step, name)

    def unprotect(self, name: str) -> None:
        """Let retention have a protected step again.

        Parameters
        ----------
        name
            As given to protect().

        Raises
        ------
        CheckpointError
            Nothing is protected by this name.
        """
        having = [catalog for catalog in self.catalogs if name in catalog.protected()]
        for catalog in having or [self._catalog]:
            catalog.unprotect(name)

    def protected(self) -> dict[str, int]:
        """Return the protected steps by name."""
        found: dict[str, int] = {}
        for catalog in reversed(self.catalogs):
            found |= catalog.protected()
        return found

    def watch(
        self,
        *,
        after: int | None = None,
        cursor: str | None = None,
        hold: str | None = None,
        poll_seconds: float = 10.0,
        timeout: float | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[int]:
        """Yield each committed step once, those that are there and those to come, in the order of
        their commits.

        For another process than the training, such as an evaluator. It never disturbs a save, and
        goes on when the training is started again, goes back or saves a step again: that is a new
        commit. A step that is removed before its turn, or is damaged, is passed over; the log says
        so. Trouble with devices is logged and waited out. Used by one thread at a time.

        Parameters
        ----------
        after
            The last step that was done: what was committed later follows. Where that step is gone,
            those with greater numbers. Default: all that are there.
        cursor
            Keep in the pool what is done, under this name, and go on from there after a restart. A
            step is done when the next one is asked for: one that an evaluator died in comes
            again. Of two processes with one cursor the older ends with CheckpointError.
        hold
            Protect each step while it is out, as "watch-" and this name, so that retention leaves
            it alone. One name for each evaluator.
        poll_seconds
            Between two looks while nothing is new.
        timeout
            End when so many seconds have brought no new step. Default: never.
        stop
            End when this event is set, at once when it waits.

        Yields
        ------
        int
            A step, to be given to restore() or read().

        Raises
        ------
        ConfigError
            An argument is wrong, or the pool is read-only and `cursor` or `hold` was given.
        CheckpointError
            Another process has begun to watch with this cursor.
        HpstoreError
            The pool could not be read for all of the timeout.
        """
        options = WatchOptions(
            after=after, cursor=cursor, hold=hold, poll_seconds=poll_seconds, timeout=timeout
        )
        options.check(self._catalog)
        event = threading.Event() if stop is None else stop
        return WatchLoop(self._catalog, options, event, time.monotonic).steps()

    def collect_garbage(self) -> int:
        """Remove segments that no manifest and no save under way names; return how many.

        A Checkpointer does so when it is made.
        """
        self._settled()
        remove_expired(self._catalog, now_milliseconds())
        return self._catalog.collect_garbage()

    def rollbacks(self) -> Sequence[Rollback]:
        """Return the rollbacks of which something is kept, the first one first. A record that is
        damaged is passed over; the log says so."""
        return rollbacks(self._catalog)

    def undo_rollback(self, name: str | None = None) -> Rollback:
        """Take a rollback back: what it has hidden is committed again. In force on return.

        Called by one process alone, which saves here from then on: stop a training before. After a
        crash in the middle, or an error of devices, call it again.

        Parameters
        ----------
        name
            Of a rollback, as rollback() returned it. Default: the last one.

        Returns
        -------
        Rollback
            `hidden`: the steps that are back. What could not be read is missing; the log says so.

        Raises
        ------
        CheckpointError
            There is none whose steps are still kept, the run has committed steps since, a save is
            under way, or devices are missing that hidden steps need. Nothing was changed.
        HpstoreError
            Devices failed in the middle: some of the steps are back, as the message says. The
            others are still kept.
        """
        self._saver.wait()
        chosen = may_take_back(self._catalog, name)
        session = self._saver.go_back()
        done = take_back(self._catalog, chosen.name, session=session)
        self._saver.went_back()
        self._saver.tiers.catch_up()
        return done

    def list(self) -> list[int]:
        """Return the committed steps, ascending. Whether they can be read is verify()'s to find."""
        return self()
