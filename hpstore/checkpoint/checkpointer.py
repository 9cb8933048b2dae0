"""Save and restore training states in a pool."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch

from hpstore.checkpoint.catalog.hidden_steps import Rollback
from hpstore.checkpoint.catalog.retention import Best, Retention
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.ranks.collectives import Ranks
from hpstore.checkpoint.restore.collective_restore import restore_together
from hpstore.checkpoint.restore.fill_state import RestoreReport
from hpstore.checkpoint.restore.load_options import LoadOptions, checked_load, model_alone
from hpstore.checkpoint.restore.restore_plan import RestoreOptions
from hpstore.checkpoint.restore.saved_step import SavedStep
from hpstore.checkpoint.restore.tensor_stream import ByteProgress
from hpstore.checkpoint.restore.verify_step import VerifyReport
from hpstore.checkpoint.save.collective_rollback import ROLLBACK_SECONDS, roll_back
from hpstore.checkpoint.save.save_handle import SaveHandle
from hpstore.checkpoint.save.save_options import SaveOptions, checked_choice, checked_options
from hpstore.checkpoint.save.save_policies import SavePolicy
from hpstore.checkpoint.save.save_schedule import SaveSchedule
from hpstore.checkpoint.save.save_underway import OneCaller
from hpstore.checkpoint.save.saver import Saver
from hpstore.checkpoint.state.state_tree import PerRank
from hpstore.checkpoint.state.targets import State
from hpstore.checkpoint.state.training_state import require_state
from hpstore.checkpoint.steps import Steps
from hpstore.checkpoint.tiers.tier import Tier, checked_tiers
from hpstore.checkpoint.tiers.tier_copies import Tiers
from hpstore.errors import CheckpointError
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing
from hpstore.runtime.collector_pause import collector_paused
from hpstore.runtime.one_process import OneProcess

ALONE = "alone"  # as a group: this process saves for itself
_CLOSE_SECONDS = 60.0  # close() waits so long for a call of another thread


class Checkpointer(Closing, OneProcess):
    """Checkpoints of one training run under a key prefix. See docs/checkpoints.md.

    save() stops the trainer for one copy into a reused arena (as large as the state of this rank);
    encoding, writing and the commit go on in the background. Call it from one thread. `steps` is
    what is committed, `saver` what trainers steer, `counters` what happened.

    With torch.distributed in use the constructor, save(), restore() and close() are collective:
    every rank of `group` calls them, each with its part of the state. What several ranks hold is
    written by one of them.

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
        Besides, the best steps by a metric of save(metrics=) stay: "min:loss", "max:acc", or a
        Best for several of them.
    keep_for
        Besides, steps younger than this stay: seconds, or text such as "12h" or "7d".
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
        How saves are staged, written and committed. Default: SaveOptions().
    when
        When should_save() is true, such as `EverySteps(1000) | EveryInterval("30min")`.
    tiers
        Further pools, nearest first, which get copies of steps in the background and which steps
        are restored from where this one has not got them: `Tier(pool=cold, every=10)`.

    Raises
    ------
    ConfigError
        An argument is wrong. It is a ValueError.
    CheckpointError
        The ranks differ in what they ask for.
    """

    last_restore: RestoreReport | None = None

    def __init__(
        self,
        pool: Pool,
        prefix: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: Best | str | None = None,
        keep_for: float | str | None = None,
        rng: bool = True,
        group: Any = None,  # Any: torch's process groups have no public type
        allow_pickle: bool = False,
        example: State | None = None,
        save: SaveOptions | None = None,
        when: SavePolicy | None = None,
        tiers: Iterable[Tier] = (),
    ) -> None:
        options = checked_options(pool, save)
        retention = Retention.of(keep_last, keep_every, keep_best, keep_for)
        alone = isinstance(group, str) and checked_choice("group", group, (ALONE,)) == ALONE
        self._catalog, self._turn, self._closed = StepCatalog(pool, prefix), OneCaller(), False
        self.pool, self.prefix, self.rng, self.allow_pickle = pool, prefix, rng, allow_pickle
        with ExitStack() as undone:
            self._ranks = Ranks(options.commit_seconds, None if alone else group, alone=alone)
            undone.push(self._ranks)
            self._schedule = SaveSchedule(when, self._ranks)
            self.saver = Saver(
                self._catalog,
                self._ranks,
                options,
                retention,
                rng=rng,
                allow_pickle=allow_pickle,
                alone=alone,
                tiers=checked_tiers(pool, tiers),
            )
            undone.callback(self.saver.release)
            self.tiers, self.counters = Tiers(self.saver.tiers), self.saver.counters
            self.steps = Steps(self._catalog, self.saver, retention)
            self.saver.get_ready(example)
            undone.pop_all()

    def per_rank(self, value: Any) -> PerRank:
        """Wrap a value that every rank keeps for itself (loader state, local statistics).

        Parameters
        ----------
        value
            Anything that a state may hold.

        Returns
        -------
        PerRank
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
        """Save `state` as "`step` steps are completed"; return once it is staged.

        After the return the tensors may change (with staging="overlap": parameters and moments by
        their optimizer's step alone). A save still being written is waited for first (on_busy);
        what went wrong in it is raised here, at wait() or close(). Nothing is durable until the
        handle's result().

        Parameters
        ----------
        step
            Completed steps.
        state
            A dict of modules, optimizers, objects with state_dict/load_state_dict, tensors, numpy
            arrays, numbers, strings, nested dicts and lists.
        overwrite
            Replace the step if it is committed already.
        metrics
            Numbers for keep_best, by name.
        progress
            Called with bytes written by this rank and in all, in the background.

        Returns
        -------
        SaveHandle
            Its result() waits for the commit.

        Raises
        ------
        CheckpointError
            An entry, which the message names, cannot be saved.
        VersionConflict
            The step is known to be committed. One that another job has committed since fails in
            result().
        """
        self._usable()
        with self._turn.calling("save()"):
            handle = self.saver.save(
                step, state, overwrite=overwrite, metrics=metrics, progress=progress
            )
        if not handle.skipped:
            self._schedule.saved(handle.step)
        return handle

    def should_save(self, step: int) -> bool:
        """Find whether to save now, by the policy `when`. Collective; call it after each step.

        Costs a comparison where steps alone decide, else a message of rank 0, whose clock and
        functions decide. A step that is asked about again gets the same answer, False once saved.

        Parameters
        ----------
        step
            Completed steps.

        Returns
        -------
        bool
            The same on all ranks.

        Raises
        ------
        ConfigError
            The Checkpointer was made without `when`.
        CheckpointError
            The ranks ask about different steps, or the policy failed on rank 0.
        """
        self._usable()
        return self._schedule.due(step)

    def before_update(self) -> None:
        """Announce a change of tensors by anything but the step of an optimizer in the state.

        Needed with staging="overlap" alone: for `.data`, a CUDA graph, a kernel of your own.
        """
        self.saver.finish_staging()

    def reached_preemption(self, step: int) -> bool:
        """With on_sigterm="save": find whether the ranks must save and stop now.

        Call it on every rank after each step. It costs nothing until a signal has come.

        Parameters
        ----------
        step
            Completed steps.

        Returns
        -------
        bool
            True on all ranks from the step on that they agreed on after one of them got SIGTERM.
        """
        return self.saver.reached_preemption(step)

    def wait(self) -> None:
        """Wait for the save that is under way; raise what went wrong, unless its handle has.

        Interrupted (Ctrl-C), it can be called again: the save goes on in the background.
        """
        self.saver.wait()

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
        self.saver.flush()  # interrupted, close() can be called again
        self._closed = True
        self.saver.release()

    def _usable(self) -> None:
        if self._closed:
            raise CheckpointError("the checkpointer is closed")

    @collector_paused()
    def restore(
        self,
        state: State,
        step: int | None = None,
        *,
        strict: bool = True,
        load: LoadOptions | None = None,
        progress: ByteProgress | None = None,
    ) -> int | None:
        """Fill `state` from a step, by default the newest valid one. Collective.

        The manifest is the template: a freshly built optimizer gets its moments. Names, shapes and
        dtypes are compared first, then tensors are filled in place, each verified. Another number
        of ranks, or another mesh, may have saved it.

        Parameters
        ----------
        state, step
            As given to save(). Default: the newest that can be read; damaged ones are logged.
        strict
            A recorded name that nothing takes, a wanted one that was not recorded, another shape
            are errors. False loads what fits; `last_restore` lists the rest, one line is logged.
        load
            What of the step is loaded, under which names. Default: all of it.
        progress
            Called with stored bytes read by this rank and in all, by threads that read, one at a
            time; begins again for each step that is tried. TerminalBar shows it.

        Returns
        -------
        int
            The step; None without one.

        Raises
        ------
        CheckpointMismatch, ConfigError
            State and checkpoint do not fit together; `load` cannot be done. Nothing was changed.
        CheckpointError, IntegrityError, RedundancyError
            Nothing can be read now. The state may be partly filled: restore another step into it.
        """
        self._usable()
        require_state(state)
        how = RestoreOptions(
            strict=strict,
            rng=self.rng,
            rank=self._ranks.rank,
            allow_pickle=self.allow_pickle,
            warm=self.saver.memory(),
            load=checked_load(load),
            progress=progress,
        )
        self.wait()
        with self._turn.calling("restore()"), self.saver.resting():
            catalogs = self.saver.tiers.catalogs
            found = restore_together(self._ranks, self._catalog, state, step, how, catalogs)
        if found is None:
            return None
        manifest, self.last_restore = found
        self.saver.refer_to(manifest, self.last_restore.tier)
        return self._schedule.restored(manifest.step)

    def load_model(
        self,
        model: torch.nn.Module,
        step: int | None = None,
        *,
        name: str = "model",
        strict: bool = True,
        load: LoadOptions | None = None,
    ) -> RestoreReport:
        """Fill a model alone, as for inference: nothing else of the step is read. Collective.

        Parameters
        ----------
        model, step, strict
            As for restore().
        name
            What the model is called in the state of the save.
        load
            What of the model is loaded, under which names.

        Returns
        -------
        RestoreReport
            The step, and all names that were loaded or not. Raises as restore(), and
            CheckpointError where there is no checkpoint.
        """
        state, options = model_alone(model, name, load)
        if self.restore(state, step, strict=strict, load=options) is None:
            raise CheckpointError(f"there is no checkpoint under {self.prefix!r}")
        return cast(RestoreReport, self.last_restore)

    def rollback(
        self, step: int, *, grace_seconds: float = ROLLBACK_SECONDS, force: bool = False
    ) -> Rollback:
        """Go back to a step: later ones are hidden, as if they were deleted. Collective.

        In force on return; restore() then takes `step`. A process that still saves the old line
        fails at its next commit. Until the grace period is over, `steps.undo_rollback()` takes it
        back; then a collection of garbage removes what is hidden. After a crash in the middle the
        run ends at `step` or a later one: call it again.

        Parameters
        ----------
        step
            A committed step that can be read.
        grace_seconds
            How long hidden steps are kept. Default: a week.
        force
            Hide protected steps, too; undo_rollback() protects them again.

        Returns
        -------
        Rollback
            `hidden`: which steps, none where there is no later one. CheckpointError is raised where
            there is no such step, a later one is protected or cannot be read, the pool is
            read-only, or a save of another process is under way.
        """
        self._usable()
        self.wait()
        with self._turn.calling("rollback()"):
            return roll_back(self._ranks, self._catalog, self.saver, step, grace_seconds, force)

    @collector_paused()
    def read(self, step: int) -> SavedStep:
        """Open a committed step without a state to fill. Not collective.

        Parameters
        ----------
        step
            A committed step.

        Returns
        -------
        SavedStep
            Its tensors are read when they are indexed: `ckpt.read(7)["w"][2:4]`; `.tensors(keys)`
            reads whole ones, `.tree()` all of the step.

        Raises
        ------
        CheckpointError, IntegrityError
            There is no such step; its manifest is damaged.
        """
        catalog = self.steps.catalog_of(step)
        return SavedStep(
            catalog,
            catalog.manifest(step),
            rank=self._ranks.rank,
            allow_pickle=self.allow_pickle,
            warm=self.saver.memory(),
        )

    @collector_paused()
    def load(
        self,
        step: int,
        keys: Collection[str] | None = None,
        *,
        map_location: str | torch.device | None = None,
        load: LoadOptions | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read tensors of a step by name: `read(step).tensors(keys)`. Not collective.

        Parameters
        ----------
        step
            A committed step.
        keys
            Names, or prefixes of names at a slash. Default: all tensors.
        map_location
            The device that the tensors are made on. Default: the host.
        load
            Under which names, in which dtype, and which of them; `keys` are of the new names.

        Returns
        -------
        dict
            Tensors by name, in memory that the caller owns.

        Raises
        ------
        CheckpointError, ConfigError
            There is no such step, or it holds nothing under one of `keys`; `load` cannot be done.
        IntegrityError, RedundancyError
            Bytes cannot be read.
        """
        return self.read(step).tensors(keys, map_location=map_location, load=load)

    def latest_valid(self) -> int | None:
        """Return the newest step that can be read: `steps.latest()`."""
        return self.steps.latest()

    def watch(
        self,
        after: int | None = None,
        *,
        poll_seconds: float = 10.0,
        timeout: float | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[int]:
        """Yield each committed step once, those to come too; see Steps.watch."""
        return self.steps.watch(after=after, poll_seconds=poll_seconds, timeout=timeout, stop=stop)

    def verify(self, step: int, *, progress: ByteProgress | None = None) -> VerifyReport:
        """Compare every item of a step with its hash; see Steps.verify."""
        return self.steps.verify(step, progress=progress)

    def delete(self, step: int, *, force: bool = False) -> None:
        """Delete a step; see Steps.delete."""
        self.steps.delete(step, force=force)
