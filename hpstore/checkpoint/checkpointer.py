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
from hpstore.checkpoint.checkpointer_options import VerifyReport, require_options
from hpstore.checkpoint.format.checkpoint_manifest import checked_step
from hpstore.checkpoint.format.pack import known_items
from hpstore.checkpoint.format.segment_codecs import checked_codec
from hpstore.checkpoint.load_step import Loading
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.ranks.stop_step import Preemption, checked_on_sigterm, require_alike
from hpstore.checkpoint.restore.collective_restore import restore_together
from hpstore.checkpoint.restore.fill_state import RestoreOptions, RestoreReport
from hpstore.checkpoint.restore.read_items import Warm
from hpstore.checkpoint.restore.tensor_stream import ByteProgress, counting
from hpstore.checkpoint.save.accelerator import Accelerator, CudaStaging
from hpstore.checkpoint.save.after_commit import AfterCommits
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.checkpoint.save.drain_at_exit import Draining
from hpstore.checkpoint.save.group_copies import collector_paused
from hpstore.checkpoint.save.prewrite_saves import SpaceMaker
from hpstore.checkpoint.save.rank_plan import Planner, Prepared, sizes_of_all
from hpstore.checkpoint.save.save_handle import SaveHandle, SaveReport, guarded
from hpstore.checkpoint.save.save_job import Earlier, SaveJob, SaveOptions
from hpstore.checkpoint.save.save_underway import OneCaller, Underway, checked_on_busy
from hpstore.checkpoint.save.stage import SaveStage, checked_staging
from hpstore.checkpoint.save.write_rate import checked_background, pace
from hpstore.checkpoint.state.state_tree import PerRank
from hpstore.checkpoint.state.targets import State
from hpstore.checkpoint.state.training_state import require_state
from hpstore.errors import CheckpointError
from hpstore.pool.pool import Pool
from hpstore.units import parse_bytes

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 60.0  # close() waits so long for a call of another thread


class Checkpointer(Loading):
    """Checkpoints of one training run under a key prefix. See docs/checkpoints.md.

    save() stops the trainer for one copy into a reused arena (as large as the state of this rank);
    encoding, writing and the commit go on in the background. Call it from one thread.

    With torch.distributed in use the constructor, save(), restore() and close() are collective:
    every rank of `group` (default: all) calls them, each with its own part of the state. Shards of
    DTensors are written by the ranks that hold them, what several hold by one of them. With
    `alone` nothing is collective: this process saves for itself.

    keep_last, keep_every, keep_best: which steps stay (None keeps all); older ones go after a newer
    one is committed without debt, those of small saves once a minute and at close(). rng: save and
    restore the RNG states of Python, numpy, torch and CUDA, by rank. on_busy: what save() does
    while the save before it is under way. staging: "copy", or "overlap": parameters and moments of
    the state's optimizers are copied during the next forward and backward. staging_bytes: memory
    for staging on this node, shared by its ranks (default: 60 % of what is available); a larger
    state is staged in slices, blocking. background: "fast", or "gentle": written at a rate that
    leaves the step its cores. compression: "lz4", "zstd" or "shuffle-lz4". reuse: what the step
    before holds unchanged is referenced, not written again. warm: restore from the arena while it
    still holds the step, hashes compared. example: a state like those to come, whose arena is made
    now. prepare: with keep_last, files for the first saves to overwrite are written in the
    background before they come, of the size of `example` or of the newest step
    (docs/checkpoints.md). on_sigterm: "finish" the save under way, within `drain_seconds`, and end,
    or "save": all ranks stop after one step, within these seconds (reached_preemption()).
    min_losses_tolerated: further lost devices that a save must survive, else it is refused
    (default: by the pool's settings). accelerator: what copies from devices, for tests and for
    other back ends (default: CUDA when there is one).
    """

    last_restore: RestoreReport | None
    _underway: Underway | None
    _saved_at: float | None
    _preemption: Preemption | None

    def __init__(
        self,
        pool: Pool,
        prefix: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: Best | str | None = None,
        rng: bool = True,
        staging: str = "copy",
        staging_bytes: int | str | None = None,
        on_busy: str = "wait",
        max_stall_seconds: float | None = None,
        background: str = "fast",
        compression: str | None = None,
        reuse: bool = True,
        warm: bool = True,
        allow_pickle: bool = False,
        example: State | None = None,
        prepare: bool = True,
        lineage: Mapping[str, Any] | None = None,
        commit_seconds: float = 1800.0,
        drain_seconds: float = 60.0,
        on_sigterm: str = "finish",
        group: Any = None,
        alone: bool = False,
        min_losses_tolerated: int | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        require_options(pool, commit_seconds=commit_seconds, drain_seconds=drain_seconds)
        best = Best(metric=keep_best) if isinstance(keep_best, str) else keep_best
        self.retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=best)
        self._steps, self.compression = Steps(pool, prefix), checked_codec(compression)
        self.pool, self.prefix, self.rng, self.allow_pickle = pool, prefix, rng, allow_pickle
        self.on_busy, self.max_stall_seconds = checked_on_busy(on_busy), max_stall_seconds
        self.min_losses_tolerated = min_losses_tolerated
        self.background = checked_background(background)
        self.reuse, self.warm, self.lineage = reuse, warm, dict(lineage or {})
        self._ranks = Ranks(commit_seconds, group, alone=alone)
        self._preemption, self._drain_seconds, self._alone = None, drain_seconds, alone
        if require_alike(self._ranks, checked_on_sigterm(on_sigterm)) == "save":
            self.expect_preemption()
        if accelerator is None and torch.cuda.is_available():
            accelerator = CudaStaging()
        self._stage = SaveStage(checked_staging(staging), accelerator)
        budget = None if staging_bytes is None else parse_bytes(staging_bytes)
        self._planner = Planner(self._ranks, budget, rng=rng, allow_pickle=allow_pickle)
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
        self._draining = Draining(self, drain_seconds) if not pool.read_only else None
        self._space = SpaceMaker(pool, self._steps, keep_last or 0, self.background)
        self._make_ready(example, prepare=prepare and keep_last is not None)

    def _make_ready(self, example: State | None, *, prepare: bool) -> None:
        """What the first save need not wait for: memory, what others left, files."""
        sizes: list[int] = []
        if example is not None:
            prepared = self._planner.prepare(0, example)
            self._stage.arena.reserve(prepared.largest_bytes)
            sizes = sizes_of_all(self._ranks, prepared)
        if not self.pool.read_only and self._ranks.leads:
            self.collect_garbage()
            if prepare:
                self._space.start([] if self.compression else sizes)

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
        if self.on_busy != "wait" and not self._stopping:
            votes = self._ranks.all_gather(b"1" if busy else b"0", RankChannel.TRAINER)
            if b"1" in votes:
                if self.on_busy == "skip":
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
    ) -> SaveOptions:  # fmt: skip
        extra: dict[str, Any] = {}
        if metrics:
            extra["metrics"] = {str(name): float(value) for name, value in metrics.items()}
        if self.lineage:
            extra["lineage"] = json.loads(json.dumps(self.lineage))
        interval = began - self._saved_at if self._saved_at is not None else None
        self._saved_at = began
        return SaveOptions(
            step=step, tree=prepared.tree, names=prepared.names, within=prepared.within,
            session=self._session, overwrite=overwrite, extra=extra, codec=self.compression,
            began=began, progress=counting(progress, prepared.total_bytes) if progress else None,
            min_losses_tolerated=self.min_losses_tolerated,
            rate_bytes_per_second=None if self._stopping
            else pace(self.background, prepared.total_bytes, interval),
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
            self._earlier = Earlier(step=report.step, known=job.next_known if self.reuse else {})
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
        if self.max_stall_seconds is not None and staged > self.max_stall_seconds:
            self.counters["stalls_over_limit_total"] += 1
            _log.warning(
                "save() kept the trainer %.3f s (limit %.3f), %.3f s of it waiting for the save "
                "before", staged, self.max_stall_seconds, waited,
            )  # fmt: skip

    def stage_by(self, staging: str, gate: CopyGate) -> None:
        """How the saves from now on are staged, for a trainer that knows when it computes nothing:
        deferred copies on the host pass `gate`. Copies from a GPU run on their side stream and do
        not wait for it."""
        self._stage.mode, self._stage.gate = checked_staging(staging), gate

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
                self._ranks, self._drain_seconds, alone=self._alone, required=required
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
        """Wait until what `prepare` writes in the background is there; False when it takes longer.

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
        if self.reuse:
            known = known_items(manifest.segments, manifest.items)
            self._earlier = Earlier(step=manifest.step, known=known)
        return manifest.step

    @property
    def _memory(self) -> Warm | None:
        return self._stage.warm if self.warm else None


__all__ = ["Best", "Checkpointer", "VerifyReport"]
