"""Save and restore training states in a pool."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from hpstore.checkpoint.catalog.retention import Best, Retention
from hpstore.checkpoint.catalog.steps import Steps
from hpstore.checkpoint.checkpointer_options import VerifyReport, checked_options
from hpstore.checkpoint.format.checkpoint_manifest import checked_step
from hpstore.checkpoint.format.pack import known_items
from hpstore.checkpoint.load_step import Loading
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.ranks.stop_step import Preemption, require_alike
from hpstore.checkpoint.restore.collective_restore import restore_together
from hpstore.checkpoint.restore.fill_state import RestoreOptions, RestoreReport
from hpstore.checkpoint.restore.read_items import Warm
from hpstore.checkpoint.restore.tensor_stream import ByteProgress, counting
from hpstore.checkpoint.save.accelerator import CudaStaging
from hpstore.checkpoint.save.after_commit import AfterCommits
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.save.drain_at_exit import Draining
from hpstore.checkpoint.save.group_copies import collector_paused
from hpstore.checkpoint.save.prewrite_saves import SpaceMaker
from hpstore.checkpoint.save.rank_plan import Planner, Prepared, sizes_of_all
from hpstore.checkpoint.save.save_handle import SaveHandle, SaveReport, guarded
from hpstore.checkpoint.save.save_job import Earlier, JobOptions, SaveJob
from hpstore.checkpoint.save.save_options import SaveOptions, checked_choice
from hpstore.checkpoint.save.save_underway import OneCaller, Underway
from hpstore.checkpoint.save.stage import SaveStage
from hpstore.checkpoint.save.write_rate import save_rate
from hpstore.checkpoint.state.state_tree import PerRank
from hpstore.checkpoint.state.targets import State
from hpstore.checkpoint.state.training_state import require_state
from hpstore.errors import CheckpointError
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)
ALONE = "alone"  # as a group: this process saves for itself
_CLOSE_SECONDS = 60.0  # close() waits so long for a call of another thread


class Checkpointer(Loading):
    """Checkpoints of one training run under a key prefix. See docs/checkpoints.md.

    save() stops the trainer for one copy into a reused arena (as large as the state of this rank);
    encoding, writing and the commit go on in the background. Call it from one thread.

    With torch.distributed in use the constructor, save(), restore() and close() are collective:
    every rank of `group` calls them, each with its own part of the state. Shards of DTensors are
    written by the ranks that hold them, what several hold by one of them.

    Parameters
    ----------
    pool
        An open pool. It stays the caller's.
    prefix
        Key prefix of the run.
    keep_last
        How many of the last steps stay; None keeps all. An older one is deleted after a newer one
        is committed and whole, those of small saves once a minute and at close().
    keep_every
        Besides, every step that is a multiple of this stays.
    keep_best
        Besides, the best steps by a metric of save(metrics=) stay.
    rng
        Save and restore the states of the random generators of Python, numpy, torch and CUDA, by
        rank.
    group
        The process group whose ranks save together. Default: all ranks. "alone": nothing is
        collective, this process saves for itself.
    allow_pickle
        Save and restore objects of any type as pickles. Restore such steps from trusted pools only.
    example
        A state like those to come: memory for staging it is allocated now.
    save
        How saves are staged, written and committed. `options` holds it; what is put there by
        dataclasses.replace() counts from the next save or restore, but for staging, memory,
        prewrite, the seconds, on_sigterm and accelerator, which the constructor has used.

    Raises
    ------
    ConfigError
        An argument is wrong. It is a ValueError.
    CheckpointError
        The ranks differ in what they ask for.
    """

    last_restore: RestoreReport | None
    _underway: Underway | None
    _saved_at: float | None

    def __init__(
        self,
        pool: Pool,
        prefix: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: Best | str | None = None,
        rng: bool = True,
        group: Any = None,  # Any: torch's process groups have no public type
        allow_pickle: bool = False,
        example: State | None = None,
        save: SaveOptions | None = None,
    ) -> None:
        self.options = save = checked_options(pool, save)
        best = Best(metric=keep_best) if isinstance(keep_best, str) else keep_best
        self.retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=best)
        self._steps = Steps(pool, prefix)
        self.pool, self.prefix, self.rng, self.allow_pickle = pool, prefix, rng, allow_pickle
        self._alone = isinstance(group, str) and checked_choice("group", group, (ALONE,)) == ALONE
        self._ranks = Ranks(save.commit_seconds, None if self._alone else group, alone=self._alone)
        self._preemption: Preemption | None = None
        if require_alike(self._ranks, save.on_sigterm) == "save":
            self.expect_preemption()
        accelerator = save.accelerator
        if accelerator is None and torch.cuda.is_available():
            accelerator = CudaStaging()
        self._stage = SaveStage(save.staging, accelerator)
        self._planner = Planner(
            self._ranks, save.memory_bytes, rng=rng, allow_pickle=allow_pickle
        )  # fmt: skip
        self._session, self._fenced = secrets.token_hex(8), False
        self._earlier = Earlier()
        self._turn = OneCaller()
        self._closed = self._told_of_later = False
        self._underway = self._saved_at = self.last_restore = None
        self.counters = {"saves_skipped_total": 0, "stalls_over_limit_total": 0,
                         "overlap_without_optimizer_total": 0, "sliced_saves_total": 0,
                         "saves_with_differing_values_total": 0,
                         "retentions_postponed_total": 0}  # fmt: skip
        self._after = AfterCommits(self._steps, self.retention, self._session, self.counters)
        self._draining = Draining(self, save.drain_seconds) if not pool.read_only else None
        self._space = SpaceMaker(pool, self._steps, keep_last or 0, save.pace)
        self._make_ready(example, prewrite=save.prewrite and keep_last is not None)

    def _make_ready(self, example: State | None, *, prewrite: bool) -> None:
        """What the first save need not wait for: memory, what others left, files."""
        sizes: list[int] = []
        if example is not None:
            prepared = self._planner.prepare(0, example)
            self._stage.arena.reserve(prepared.largest_bytes)
            sizes = sizes_of_all(self._ranks, prepared)
        if not self.pool.read_only and self._ranks.leads:
            self.collect_garbage()
            if prewrite:
                self._space.start([] if self.options.compression else sizes)

    # --- saving -----------------------------------------------------------------------------

    def per_rank(self, value: Any) -> PerRank:
        """Wrap a value that every rank keeps for itself (loader state, local statistics).

        On restore its `.value` is filled from what this rank recorded.
        """
        return PerRank(value)

    def save(
        self,
        step: int,
        state: State,
        *,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
        progress: ByteProgress | None = None,
    ) -> SaveHandle:
        """Save `state` as "`step` steps are completed"; returns once it is staged.

        `state`: a dict of modules, optimizers, objects with state_dict/load_state_dict, tensors,
        numpy arrays, numbers, strings, nested dicts and lists. After the return the tensors may
        change (with staging="overlap": parameters and moments by their optimizer's step alone). A
        save still being written is waited for first (on_busy); what went wrong in it is raised
        here, at wait() or close(). Nothing is durable until the handle's result(). `metrics`:
        numbers for keep_best. `progress(done, total)`: bytes written by this rank, in background.

        Raises CheckpointError naming the entry that cannot be saved, VersionConflict for a step
        known to be committed; one that another job has committed since fails in result().
        """
        self._usable()
        if self.pool.read_only:
            raise CheckpointError(
                f"the pool of {self.prefix!r} was opened read-only: nothing can be saved into it"
            )
        began = time.perf_counter()
        with self._turn.calling("save()"):
            if not self._may_begin():
                self.counters["saves_skipped_total"] += 1
                _log.warning("the save of step %s is skipped: one is still under way", step)
                return SaveHandle.of_skipped(step)
            waited = time.perf_counter() - began
            with self._space.held():
                return self._save(step, state, overwrite, metrics, progress, began, waited)

    def _save(
        self, step: int, state: State, overwrite: bool, metrics: Mapping[str, float] | None,
        progress: ByteProgress | None, began: float, waited: float,
    ) -> SaveHandle:  # fmt: skip
        """Stage, and begin to write."""
        with collector_paused():
            require = None if overwrite else self._steps.require_new
            prepared = self._planner.prepare(step, state, require)
        options = self._options(checked_step(step), prepared, overwrite, metrics, began, progress)
        job = SaveJob(self._steps, self._ranks, options, self._earlier)
        future: Future[SaveReport] = Future()
        staged: Future[float] = Future()
        tidied: Future[None] = Future()
        thread = threading.Thread(
            target=self._run, args=(job, prepared, future, staged, tidied), name="hpstore-save",
            daemon=True,  # Draining waits for it at the end, with a limit
        )  # fmt: skip
        try:
            thread.start()  # first: beside copies it was seen to wait 7 ms for a core
            late = self._stage.begin(
                prepared, state, self.counters, lambda p: self._write_part(job, p)
            )  # fmt: skip
            seconds = time.perf_counter() - began
            self._warn_of_stall(seconds, waited)
            handle = SaveHandle(step, seconds, future, late_seconds=late)
            self._underway = Underway(handle=handle, thread=thread, tidied=tidied)
            staged.set_result(seconds)
        except BaseException as error:  # RuntimeError of start() too: there are no more threads
            if not staged.done():
                self._underway = None
                staged.set_exception(error)
                self._give_up(job, error)
            raise
        return handle

    def _may_begin(self) -> bool:
        """Wait for the save under way, or say that this one is not to be; raises for "error"."""
        busy = self._underway is not None and self._underway.busy
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
        self.wait()
        return True

    def _options(
        self, step: int, prepared: Prepared, overwrite: bool,
        metrics: Mapping[str, float] | None, began: float, progress: ByteProgress | None,
    ) -> JobOptions:  # fmt: skip
        extra: dict[str, Any] = {}
        if metrics:
            extra["metrics"] = {str(name): float(value) for name, value in metrics.items()}
        options = self.options
        if options.lineage:
            extra["lineage"] = json.loads(json.dumps(options.lineage))
        interval = began - self._saved_at if self._saved_at is not None else None
        self._saved_at = began
        return JobOptions(
            step=step, tree=prepared.tree, names=prepared.names, within=prepared.within,
            session=self._session, overwrite=overwrite, extra=extra,
            codec=options.compression or "", began=began,
            progress=counting(progress, prepared.total_bytes) if progress else None,
            min_losses_tolerated=options.min_losses_tolerated,
            rate_bytes_per_second=None if self._stopping
            else save_rate(options.pace, prepared.total_bytes, interval),
        )  # fmt: skip

    def _begin_job(self, job: SaveJob) -> None:
        """Take the fence on the first save, then note the attempt."""
        job.begin(fence=not self._fenced)
        self._fenced = True

    def _give_up(self, job: SaveJob, error: BaseException) -> None:
        """What staging raised is told to the other ranks, which would wait for this one."""
        self._earlier = Earlier()
        if job.begun and not job.noted:
            return  # begin() failed, on all ranks
        job.fail(error)
        if not job.begun:
            self._begin_job(job)
        job.commit()

    def _write_part(self, job: SaveJob, part: int) -> None:
        """One slice of several, written while the trainer waits."""
        if part == 0:
            self._begin_job(job)
        self._stage.write(job, part)

    def _run(
        self, job: SaveJob, prepared: Prepared, future: Future[SaveReport], staged: Future[float],
        tidied: Future[None],
    ) -> None:  # fmt: skip
        """The background of one save, as soon as all is staged; nothing when that fails."""
        if staged.exception() is not None:
            return
        committed: list[SaveReport] = []

        def finish() -> SaveReport:
            last = len(prepared.slices) - 1
            if not last:
                self._stage.write(job, last, lambda: self._begin_job(job))
            elif last > 0:
                self._stage.write(job, last)
            else:
                self._begin_job(job)
            self._earlier = Earlier()
            report = job.commit()
            self._note_differing([*prepared.differing, *job.differing])
            self._earlier = Earlier(
                step=report.step, known=job.next_known if self.options.reuse else {}
            )
            committed.append(report)
            self._steps.committed(report.step)
            return report.with_stall(staged.result())

        def tidy() -> None:
            """What the handle does not wait for: older steps go when the newer has no debt."""
            try:
                with contextlib.ExitStack() as stack:
                    stack.callback(job.close)
                    self._stage.release_tensors()
                if job.replaced:
                    self._steps.remove_unnamed(job.replaced)
                if committed and self._ranks.leads:
                    if not self._told_of_later:
                        self._told_of_later = True
                        self._steps.warn_of_later(committed[0].step)
                    self._after.committed(committed[0])
            finally:
                self._space.release()

        guarded(finish, future)
        guarded(tidy, tidied)

    def forget_interval(self) -> None:
        """The time since the save before says nothing of the next one's: "gentle" then takes its
        own pace, as for a first save."""
        self._saved_at = None

    def _note_differing(self, paths: Sequence[str]) -> None:
        """Ranks that record different values under one name: counted, logged once."""
        if paths and not self.counters["saves_with_differing_values_total"]:
            _log.warning(
                "ranks differ in %d values, such as %r: the first rank's are recorded. Wrap in "
                "per_rank() what every rank has for itself.", len(paths), paths[0],
            )  # fmt: skip
        self.counters["saves_with_differing_values_total"] += bool(paths)

    def _warn_of_stall(self, staged: float, waited: float) -> None:
        limit = self.options.max_stall_seconds
        if limit is not None and staged > limit:
            self.counters["stalls_over_limit_total"] += 1
            _log.warning(
                "save() kept the trainer %.3f s (limit %.3f), %.3f s of it waiting for the save "
                "before", staged, limit, waited,
            )  # fmt: skip

    def stage_by(self, staging: str, gate: CopyGate) -> None:
        """How the saves from now on are staged, for a trainer that knows when it computes nothing:
        deferred copies on the host pass `gate`. Copies from a GPU run on their side stream and do
        not wait for it."""
        self._stage.mode, self._stage.gate = staging, gate

    def before_update(self) -> None:
        """With staging="overlap": call it before tensors are changed by anything but the step of
        an optimizer in the state (`.data`, a CUDA graph, a kernel of your own)."""
        self._stage.finish()

    # --- preemption -------------------------------------------------------------------------

    def expect_preemption(self, *, required: bool = True) -> None:
        """From now on SIGTERM is a notice, as with on_sigterm="save". Collective. On another thread
        than the main one, which alone can handle signals, it raises; or, if it is not `required`,
        this process learns of its peers' signals only."""
        if self.pool.read_only:
            raise CheckpointError(
                f'on_sigterm="save": the pool of {self.prefix!r} was opened read-only'
            )
        if self._preemption is None:
            self._preemption = Preemption(
                self._ranks, self.options.drain_seconds, alone=self._alone, required=required
            )

    def reached_preemption(self, step: int) -> bool:
        """With on_sigterm="save": whether the ranks, `step` steps being completed, are to save and
        stop, since one of them has got SIGTERM. Call it on every rank after each step; from the
        agreed step on it is True on all. It costs nothing until a signal has come."""
        return self._preemption is not None and self._preemption.at(step)

    @property
    def _stopping(self) -> bool:
        """The next save is the last: it is neither skipped nor gentle."""
        return self._preemption is not None and self._preemption.reached

    def wait(self) -> None:
        """Wait for the save that is under way; raises what went wrong, unless its handle has.

        Interrupted (Ctrl-C), it can be called again: the save goes on in the background.
        """
        underway = self._underway
        if underway is not None and underway.wait():
            if self._underway is underway:
                self._underway = None
            underway.raise_errors()

    def _let_tidy(self) -> None:
        """Wait for what comes after a commit that is done, so that callers see its end."""
        underway = self._underway
        if underway is not None and underway.handle.done():
            underway.wait()
        self._after.flush()

    def wait_at_most(self, seconds: float) -> bool:
        """Wait for the save under way, raising nothing; False when it takes longer."""
        underway = self._underway
        return underway is None or underway.wait(seconds)

    def close(self) -> None:
        """Wait for the last save and release the arena. Idempotent."""
        with self._turn.calling("close()", patience_seconds=_CLOSE_SECONDS):
            if self._closed:
                return
            try:
                self.wait()
            except KeyboardInterrupt:
                raise  # not closed: the save goes on, and close() can be called again
            except BaseException:
                self._release()
                raise
            self._release()

    def _release(self) -> None:
        self._after.flush()  # interrupted, close() can be called again
        self._closed = True
        if self._draining is not None:
            self._draining.forget()
        self._space.close()
        self._stage.close()
        if self._preemption is not None:
            self._preemption.close()

    def wait_prepared(self, seconds: float | None = None) -> bool:
        """Wait until what `prewrite` writes in the background is there; False when it takes longer.

        Nobody has to: saves that come sooner go first, and write into new blocks.
        """
        return self._space.wait(seconds)

    def _usable(self) -> None:
        if self._closed:
            raise CheckpointError("the checkpointer is closed")

    # --- restoring --------------------------------------------------------------------------

    @collector_paused()
    def restore(self, state: State, step: int | None = None, *, strict: bool = True) -> int | None:
        """Fill `state` from a step, by default the newest valid one; returns the step.

        None when there is no checkpoint. The manifest is the template: a freshly built optimizer
        gets its moments. With `strict`, a recorded key that nobody takes, or a wanted one that was
        not recorded, is a CheckpointMismatch; without, `last_restore` lists them. Names, shapes and
        dtypes are compared first, then tensors are filled in place, each verified. Without a
        `step`, a damaged checkpoint is passed over (logged) for the one before it. After an error
        that is no CheckpointMismatch the state may be partly filled: restore another step into it.

        The checkpoint may have been written by another number of ranks and another mesh.
        """
        self._usable()
        require_state(state)
        self.wait()
        how = RestoreOptions(
            strict=strict, rng=self.rng, rank=self._ranks.rank, allow_pickle=self.allow_pickle,
            warm=self._memory,
        )  # fmt: skip
        with self._turn.calling("restore()"), self._space.resting():
            found = restore_together(self._ranks, self._steps, state, step, how)
        if found is None:
            return None
        manifest, self.last_restore = found
        if self.options.reuse:
            known = known_items(manifest.segments, manifest.items)
            self._earlier = Earlier(step=manifest.step, known=known)
        return manifest.step

    @property
    def _memory(self) -> Warm | None:
        return self._stage.warm if self.options.warm else None


__all__ = ["Best", "Checkpointer", "VerifyReport"]
