"""The saves of one Checkpointer: stage, hand over to a background thread, wait."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch

from hpstore.checkpoint.catalog.retention import Retention
from hpstore.checkpoint.catalog.rollback import now_milliseconds, remove_expired
from hpstore.checkpoint.catalog.run_index import take_over
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import Manifest, checked_step
from hpstore.checkpoint.format.pack import known_items
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks, require_alike
from hpstore.checkpoint.ranks.stop_step import Preemption
from hpstore.checkpoint.restore.read_items import Warm
from hpstore.checkpoint.restore.tensor_stream import ByteProgress, counting
from hpstore.checkpoint.save.accelerator import CudaStaging
from hpstore.checkpoint.save.after_commit import AfterCommits
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.save.drain_at_exit import Draining
from hpstore.checkpoint.save.job_options import Earlier, JobOptions
from hpstore.checkpoint.save.prewrite_saves import SpaceMaker
from hpstore.checkpoint.save.process_job import AnyJob, Writing
from hpstore.checkpoint.save.rank_plan import Planner, Prepared, sizes_of_all
from hpstore.checkpoint.save.save_failures import SaveFailures
from hpstore.checkpoint.save.save_handle import SaveHandle, SaveReport, guarded
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.checkpoint.save.save_metrics import recorded_metrics, requiring
from hpstore.checkpoint.save.save_options import SaveOptions, checked_choice, save_rate
from hpstore.checkpoint.save.save_underway import Underway
from hpstore.checkpoint.save.save_warnings import SAVE_COUNTERS, note_differing, warn_of_stall
from hpstore.checkpoint.save.stage import STAGING, SaveStage
from hpstore.checkpoint.state.targets import State
from hpstore.checkpoint.tiers.tier import Tier
from hpstore.checkpoint.tiers.tier_copies import TierCopies
from hpstore.errors import CheckpointError
from hpstore.runtime.collector_pause import collector_paused
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)


class Saver:
    """Makes the saves of a Checkpointer: `ckpt.saver`. For trainers and benchmarks, which steer how
    a save is staged, and for the Checkpointer, which calls the rest.

    `options` may be replaced between saves (dataclasses.replace); what the constructor has used
    stays as it was: staging, memory, prewrite, the seconds, on_sigterm, accelerator. `alone`: these
    ranks are this process alone, whatever job it is in.
    """

    _saved_at: float | None
    underway: Underway | None

    def __init__(
        self,
        catalog: StepCatalog,
        ranks: Ranks,
        options: SaveOptions,
        retention: Retention,
        *,
        rng: bool,
        allow_pickle: bool,
        alone: bool,
        tiers: Sequence[Tier] = (),
    ) -> None:
        self.options = options
        self._catalog, self._ranks, self._alone = catalog, ranks, alone
        self._preemption: Preemption | None = None  # this and the next: see get_ready()
        self._draining: Draining | None = None
        require_alike(ranks, "on_sigterm", options.on_sigterm, "some would stop without the others")
        accelerator = options.accelerator
        if accelerator is None and torch.cuda.is_available():
            accelerator = CudaStaging()
        self._stage = SaveStage(options.staging, accelerator, shared=options.background != "thread")
        self._writing = Writing(catalog=catalog, ranks=ranks)
        self._planner = Planner(ranks, options.memory_bytes, rng=rng, allow_pickle=allow_pickle)
        self.session, self._fenced = secrets.token_hex(8), False
        self._earlier, self._told_of_later = Earlier(), False
        self.underway = self._saved_at = None
        self.counters = dict.fromkeys(SAVE_COUNTERS, 0)
        self._failures = SaveFailures(ranks, options, self.counters)
        self.tiers = TierCopies(catalog, tiers, self.counters)
        after = (catalog, retention, self.session, self.counters)
        self._after = AfterCommits(*after, expire=self._expire, tiers=self.tiers)
        pool, catalog.left.patience_seconds = catalog.pool, options.drain_seconds
        self._space = SpaceMaker(pool, catalog, retention.keep_last or 0, options.pace)
        self._prewrites = options.prewrite and retention.keep_last is not None

    def get_ready(self, example: State | None) -> None:
        """Take signals, start the writer, and see to what the first save need not wait for: memory,
        what others left, files. Collective. After an error, release() gives all back."""
        options, catalog, arena = self.options, self._catalog, self._stage.arena
        if options.on_sigterm == "save":
            self.expect_preemption()
        self._writing = Writing.of(catalog, self._ranks, arena, options.background)
        self._draining = None if catalog.pool.read_only else Draining(self, options.drain_seconds)
        sizes: list[int] = []
        if example is not None:
            prepared = self._planner.prepare(0, example)
            arena.reserve(prepared.largest_bytes)
            sizes = sizes_of_all(self._ranks, prepared)
        if not catalog.pool.read_only and self._ranks.leads:
            self.tiers.catch_up()  # first: it goes by rollbacks that may expire
            self._expire()
            catalog.collect_garbage()
            if self._prewrites:
                self._space.start([] if options.compression else sizes)

    def save(
        self,
        step: int,
        state: State,
        *,
        overwrite: bool,
        metrics: Mapping[str, float] | None,
        progress: ByteProgress | None,
    ) -> SaveHandle:
        """Checkpointer.save(). One call at a time."""
        if self._catalog.pool.read_only:
            where = f"the pool of {self._catalog.prefix!r}"
            raise CheckpointError(f"{where} was opened read-only: nothing can be saved into it")
        began = time.perf_counter()
        if not self._may_begin():
            self.counters["saves_skipped_total"] += 1
            _log.warning("the save of step %s is skipped: one is still under way", step)
            return SaveHandle.of_skipped(step)
        waited = time.perf_counter() - began
        with self._space.held(), collector_paused():
            return self._save(step, state, overwrite, metrics, progress, began, waited)

    def _save(
        self,
        step: int,
        state: State,
        overwrite: bool,
        metrics: Mapping[str, float] | None,
        progress: ByteProgress | None,
        began: float,
        waited: float,
    ) -> SaveHandle:
        """Stage, and begin to write."""
        require = requiring(metrics, None if overwrite else self._catalog.require_new)
        prepared = self._planner.prepare(step, state, require)
        options = self._job_options(
            checked_step(step), prepared, overwrite, metrics, began, progress
        )
        job = self._writing.job(options, self._earlier, reuse=self.options.reuse)
        future: Future[SaveReport] = Future()
        staged: Future[float] = Future()
        tidied: Future[None] = Future()
        thread = threading.Thread(
            target=self._run,
            args=(job, prepared, future, staged, tidied),
            name="hpstore-save",
            daemon=True,  # Draining waits for it at the end, with a limit
        )
        try:
            start_thread(thread)  # first: beside copies it was seen to wait 7 ms for a core
            late = self._stage.begin(
                prepared, state, self.counters, lambda p: self._write_part(job, p)
            )
            seconds = time.perf_counter() - began
            warn_of_stall(self.counters, self.options.max_stall_seconds, seconds, waited)
            handle = SaveHandle(step, seconds, future, late_seconds=late)
            self.underway = Underway(handle=handle, thread=thread, tidied=tidied)
            staged.set_result(seconds)
        except BaseException as error:  # ThreadsExhausted, too
            if staged.done():
                raise
            self.underway = None
            staged.set_exception(error)
            in_pool = job.begun and not job.noted  # while the trainer waited for the first slices
            told, voted = error, False
            try:
                self._give_up(job, error)
            except Exception as outcome:  # noqa: BLE001 (what the other ranks have, too)
                # Ctrl-C stays what it is: it is never borne, so the others stop as well
                told, voted = (outcome if isinstance(error, Exception) else error), True
            if in_pool or (voted and self._ranks.world > 1):
                self._failures.give_up(self.options, told)
                self._failures.ended(self.options, told)
            if self._failures.borne is not told:
                if told is not error:
                    raise told from error
                raise
            self._space.release()
            future.set_exception(told)
            handle = SaveHandle(step, time.perf_counter() - began, future)
        return handle

    def _may_begin(self) -> bool:
        """Wait for the save under way, or say that this one is not to be; raises for "error"."""
        busy = self.underway is not None and self.underway.busy
        on_busy = self.options.on_busy
        if on_busy != "wait" and not self._stopping:
            votes = self._ranks.all_gather(b"1" if busy else b"0", RankChannel.TRAINER)
            if b"1" in votes:
                if on_busy == "skip":
                    return False
                raise CheckpointError(
                    'a save is still under way (on_busy="error"); the newest committed step is '
                    "still current"
                )
        self._failures.hurry()
        self.wait()
        self._failures.begun()
        return True

    def _job_options(
        self,
        step: int,
        prepared: Prepared,
        overwrite: bool,
        metrics: Mapping[str, float] | None,
        began: float,
        progress: ByteProgress | None,
    ) -> JobOptions:
        extra = recorded_metrics(metrics)
        options = self.options
        if options.lineage:
            extra["lineage"] = json.loads(json.dumps(options.lineage))
        interval = began - self._saved_at if self._saved_at is not None else None
        self._saved_at = began
        return JobOptions(
            step=step,
            tree=prepared.tree,
            names=prepared.names,
            slices=len(prepared.slices),
            within=prepared.within,
            session=self.session,
            overwrite=overwrite,
            extra=extra,
            codec=options.compression or "",
            began=began,
            progress=counting(progress, prepared.total_bytes) if progress else None,
            min_losses_tolerated=options.min_losses_tolerated,
            rate_bytes_per_second=None
            if self._stopping
            else save_rate(options.pace, prepared.total_bytes, interval),
        )

    def _begin_job(self, job: AnyJob) -> None:
        """Take the fence on the first save, then note the attempt."""
        job.begin(fence=not self._fenced)
        self._fenced = True

    def _give_up(self, job: AnyJob, error: BaseException) -> None:
        """What staging raised is told to the other ranks, which would wait for this one."""
        self._earlier = Earlier()
        if job.begun and not job.noted:
            return  # begin() failed, on all ranks
        job.fail(error)
        if not job.begun:
            self._begin_job(job)
        job.commit()

    def _write_part(self, job: AnyJob, part: int) -> None:
        """One slice of several, written while the trainer waits."""
        if part == 0:
            self._begin_job(job)
        self._stage.write(job, part)

    def _run(
        self,
        job: AnyJob,
        prepared: Prepared,
        future: Future[SaveReport],
        staged: Future[float],
        tidied: Future[None],
    ) -> None:
        """The background of one save, as soon as all is staged; nothing when that fails."""
        if staged.exception() is not None:
            return
        committed: list[SaveReport] = []
        attempts: list[AnyJob] = [job]

        def finish() -> SaveReport:
            while True:
                try:
                    report = self._finish(attempts[-1], prepared)
                except Exception as error:
                    last, count = attempts[-1], len(attempts)
                    again = self._failures.again(self.options, last, error, count)
                    if not again or not isinstance(last, SaveJob):
                        raise
                    attempts.append(last.again())
                else:
                    committed.append(report)
                    self._catalog.committed(report.step)
                    if self._ranks.leads:
                        self.tiers.committed(report.step)
                    return report.with_stall(staged.result())

        def tidy() -> None:
            """What the handle does not wait for: older steps go when the newer has no debt."""
            try:
                with contextlib.ExitStack() as stack:
                    stack.callback(attempts[-1].close)
                    self._stage.release_tensors()
                if attempts[-1].replaced:
                    self._catalog.remove_unnamed(attempts[-1].replaced)
                if committed and self._ranks.leads:
                    if not self._told_of_later:
                        self._told_of_later = True
                        self._catalog.warn_of_later(committed[0].step)
                    self._after.committed(committed[0])
            finally:
                self._space.release()

        guarded(finish, future, lambda error: self._failures.ended(self.options, error))
        guarded(tidy, tidied)

    def _finish(self, job: AnyJob, prepared: Prepared) -> SaveReport:
        """One attempt: write the last slice, commit."""
        last = len(prepared.slices) - 1
        if not last:
            self._stage.write(job, last, lambda: self._begin_job(job))
        elif last > 0:
            self._stage.write(job, last)
        else:
            self._begin_job(job)
        self._earlier = Earlier()
        report = job.commit()
        note_differing(self.counters, [*prepared.differing, *job.differing])
        self._earlier = Earlier(
            step=report.step, known=job.next_known if self.options.reuse else {}
        )
        return report

    def stage_by(self, staging: str, gate: CopyGate) -> None:
        """Stage the saves from now on in another way.

        For a trainer that knows when it computes nothing: deferred copies on the host pass `gate`.
        Copies from a GPU run on their side stream and do not wait for it.

        Parameters
        ----------
        staging
            As SaveOptions.staging.
        gate
            What deferred copies on the host wait at.

        Raises
        ------
        ConfigError
            There is no such way of staging.
        """
        self._stage.mode, self._stage.gate = checked_choice("staging", staging, STAGING), gate

    def finish_staging(self) -> None:
        """Make the copies that staging="overlap" has deferred, now."""
        self._stage.finish()

    def forget_interval(self) -> None:
        """Pace the next save as if it were the first: the time since the last one means nothing."""
        self._saved_at = None

    def wait_prewritten(self, seconds: float | None = None) -> bool:
        """Wait until the files that `prewrite` writes in the background are there.

        No trainer has to: saves that come sooner go first, and write into new blocks.

        Parameters
        ----------
        seconds
            How long to wait at most. Default: without a limit.

        Returns
        -------
        bool
            False when it takes longer.
        """
        return self._space.wait(seconds)

    def expect_preemption(self, *, required: bool = True) -> None:
        """Take SIGTERM as a notice from now on, as with on_sigterm="save". Collective.

        Parameters
        ----------
        required
            Raise on another thread than the main one, which alone can handle signals. Otherwise
            this process learns there of its peers' signals only.

        Raises
        ------
        CheckpointError
            The pool is read-only, or this process cannot do it.
        """
        if self._catalog.pool.read_only:
            raise CheckpointError(
                f'on_sigterm="save": the pool of {self._catalog.prefix!r} was opened read-only'
            )
        if self._preemption is None:
            self._preemption = Preemption(
                self._ranks, self.options.drain_seconds, alone=self._alone, required=required
            )

    def reached_preemption(self, step: int) -> bool:
        """Checkpointer.reached_preemption()."""
        return self._preemption is not None and self._preemption.at(step)

    @property
    def _stopping(self) -> bool:
        """The next save is the last: it is neither skipped nor gentle."""
        return self._preemption is not None and self._preemption.reached

    def wait(self) -> None:
        """Checkpointer.wait()."""
        underway = self.underway
        if underway is not None and underway.wait():
            if self.underway is underway:
                self.underway = None
            underway.raise_errors(self._failures.borne)

    @property
    def last_failure(self) -> BaseException | None:
        """What went wrong in the last save; None once one has committed. With on_failure="warn"
        nothing else raises it but that save's handle."""
        return self._failures.last

    def wait_at_most(self, seconds: float) -> bool:
        """Wait for the save under way, raising nothing.

        Parameters
        ----------
        seconds
            How long to wait.

        Returns
        -------
        bool
            False when it takes longer.
        """
        underway = self.underway
        return underway is None or underway.wait(seconds)

    def let_tidy(self) -> None:
        """Wait for what comes after a commit that is done, so that callers see its end."""
        underway = self.underway
        if underway is not None and underway.handle.done():
            underway.wait()
        self._after.flush()

    def resting(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is prewritten inside: a restore comes first."""
        return self._space.resting()

    def memory(self) -> Warm | None:
        """The staging memory, where a restore may look for segments; None when it may not."""
        return self._stage.warm if self.options.warm else None

    def refer_to(self, manifest: Manifest, tier: str) -> None:
        """A step was restored: the next save may refer to what it holds, unless in a `tier`."""
        if self.options.reuse and not tier:
            known = known_items(manifest.segments, manifest.items)
            self._earlier = Earlier(step=manifest.step, known=known)

    def go_back(self) -> str:
        """Become the session that saves here, which is returned, for a rollback: on rank 0, no save
        being under way. The next save takes the fence again if it is the first.
        """
        take_over(self._catalog, self.session)
        return self.session

    def _expire(self) -> None:
        remove_expired(self._catalog, now_milliseconds())

    def went_back(self) -> None:
        """Steps are hidden, or back: nothing that this process remembers of them counts."""
        self._after.forget()
        self._earlier, self._told_of_later = Earlier(), False

    def flush(self) -> None:
        """Wait for copies, remove what retention has postponed. It can be called again."""
        self.tiers.wait()
        self._after.flush()

    def release(self) -> None:
        """Give threads, memory, groups and handlers back; the last save was waited for."""
        if self._draining is not None:
            self._draining.forget()
        self.tiers.close()
        self._space.close()
        self._writing.close()
        self._stage.close()
        self._ranks.close()
        if self._preemption is not None:
            self._preemption.close()
