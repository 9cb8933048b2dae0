"""Hugging Face: a Trainer's callback that saves to a pool (docs/trainers.md)."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from hpstore.checkpoint import Checkpointer, LoadOptions, Preempted, SaveOptions, Tier
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.state.state_tree import PerRank
from hpstore.errors import CheckpointError, ConfigError, HpstoreError
from hpstore.runtime.closing import Closing
from hpstore.trainers.checkpoint_paths import PathLike
from hpstore.trainers.job_kinds import Parallelism, job_kind, kind_of_this_job, require_kind
from hpstore.trainers.optional_import import PoolLike, as_pool, missing
from hpstore.trainers.rank_messages import agreed
from hpstore.trainers.refused_states import refuse_states
from hpstore.trainers.resume_folder import trainer_rng, write_resume_folder
from hpstore.trainers.shard_loading import ShardLoading
from hpstore.trainers.sharded_parts import (
    inner_optimizer,
    is_unreadable,
    of_nearest,
    read_tree,
    read_without,
    verify_share,
    weights_of,
)

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise missing("transformers and accelerate", "huggingface", error) from error

_log = logging.getLogger(__name__)


class PoolTrainerCallback(TrainerCallback, Closing):
    """`Trainer(callbacks=[PoolTrainerCallback(pool, "runs/bert", keep_last=3)])` saves to a pool.

    Saves whenever the Trainer does; with `every`, also after every so many steps, so that the
    Trainer itself may have save_strategy="no". A save holds model, optimizer, scheduler, scaler,
    RNG states and the Trainer's state. The Trainer is kept for one copy; what went wrong is raised
    at the next save and at the end of training. To resume, also on another machine:

        trainer.train(resume_from_checkpoint=callback.resume_folder("/local/scratch"))

    In a job of several processes (torchrun with DDP or FSDP2) every one makes one, after its
    TrainingArguments, and calls the same methods, resume_folder() after the Trainer was made. What
    all have alike is saved once, shards by the ranks that hold them, every rank's RNG states with
    it; each rank resumes from a folder of its own. What fails on one rank is raised on all. FSDP1
    and DeepSpeed are refused.

    Parameters
    ----------
    pool
        A Pool, which stays the caller's, or the name or settings file of one.
    prefix
        Where in the pool the checkpoints are.
    keep_last, keep_every
        Which steps stay. Older ones go after a newer one is durable in full.
    every
        Save after every so many steps, too; None: only when the Trainer does.
    on_sigterm
        "save": after the step in which SIGTERM comes save, stop training and raise Preempted, a
        SystemExit. "finish": what a Checkpointer does.
    save_frozen
        False leaves out parameters that are not trained, as of the base model under PEFT's
        adapters: the model that resumes must have them already.
    tiers
        As of Checkpointer: a resume takes a step from the nearest pool that can read it.

    Raises
    ------
    ConfigError
        `every` is not a whole number, or this is one process of several without a group.
    """

    def __init__(
        self,
        pool: PoolLike,
        prefix: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        every: int | None = None,
        on_sigterm: str = "finish",
        save_frozen: bool = True,
        tiers: Iterable[Tier] = (),
    ) -> None:
        if every is not None and (type(every) is not int or every < 1):
            raise ConfigError("every must be a whole number of at least 1, or None")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            raise ConfigError(
                "this is one process of several, and their group is not made yet: make "
                "TrainingArguments before the PoolTrainerCallback"
            )
        self.pool, self._opened = as_pool(pool)
        self.every, self.save_frozen = every, save_frozen
        self.checkpoints = Checkpointer(
            self.pool,
            prefix,
            keep_last=keep_last,
            keep_every=keep_every,
            rng=False,
            save=SaveOptions(on_sigterm=on_sigterm),
            tiers=tiers,
        )
        self._ranks = Ranks(self.checkpoints.saver.options.commit_seconds)
        self._stopping: int | None = None  # the last step, after SIGTERM
        self._folder: str | None = None
        self._loading: ShardLoading | None = None  # of the folder, with FSDP2

    # --- what the Trainer calls ---------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what could not be saved before anything is trained."""
        self._require_kind(args, kwargs.get("model"))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what would not be saved, or is not loaded, as a whole."""
        self._require_kind(args, kwargs.get("model"))
        if args.world_size != self._ranks.world:
            raise CheckpointError(
                f"the Trainer has {args.world_size} processes, this PoolTrainerCallback was made "
                f"in a group of {self._ranks.world}: make it after TrainingArguments"
            )
        others = sorted(set(state.stateful_callbacks) - {"TrainerControl"})
        if self.every is not None and others:
            raise CheckpointError(
                f"with every=, the states of {others} would be saved as they were at the start: "
                'use the Trainer\'s own save_strategy="steps" instead'
            )
        if self._loading is not None:
            self._loading.require_done()
            self._end_loading()

    def _require_kind(self, args: Any, model: Any) -> None:
        if getattr(args, "deepspeed", None):
            job_kind("DEEPSPEED", None)
        kind = kind_of_this_job() or Parallelism.REPLICATED
        if model is not None:
            require_kind(model, kind)
        if getattr(args, "fsdp", None) and kind is Parallelism.REPLICATED:
            _log.warning(
                "TrainingArguments ask for FSDP, but accelerate trains with %s, as always on the "
                "CPU: saved is what it trains",
                kind.value,
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, after the Trainer did."""
        self._save(state, dataclasses.asdict(state), kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, if it is time by `every`, or the last step."""
        if self.checkpoints.reached_preemption(state.global_step):
            self._stopping = state.global_step
            control.should_training_stop = True
            control.should_save = self.every is None  # the states of other callbacks with it
        last = self._stopping is not None
        if self.every is not None and (last or state.global_step % self.every == 0):
            recorded = dataclasses.asdict(state)
            recorded["stateful_callbacks"]["TrainerControl"] = control.state()
            self._save(state, recorded, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait until everything is durable; raises what went wrong, and Preempted."""
        self.checkpoints.wait()
        self._drop_folder()
        if self._stopping is not None:
            raise Preempted(f"SIGTERM has come: step {self._stopping} is saved")

    def _save(self, state: Any, recorded: dict[str, Any], parts: dict[str, Any]) -> None:
        recorded["is_local_process_zero"] = recorded["is_world_process_zero"] = True  # as on rank 0
        optimizer = parts["optimizer"]
        scaler = getattr(optimizer, "scaler", None)
        saved = {
            "model": weights_of(parts["model"], frozen=self.save_frozen),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": parts["lr_scheduler"].state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "rng": trainer_rng() if self._ranks.world == 1 else PerRank(trainer_rng()),
            "trainer_state": json.dumps(recorded, indent=2, sort_keys=True),
        }
        refuse_states(saved, "checkpoint")
        self.checkpoints.save(state.global_step, saved, overwrite=True)

    # --- resuming -----------------------------------------------------------------------------

    def resume_folder(self, parent: PathLike, step: int | None = None) -> str | None:
        """A folder for resume_from_checkpoint with a step, by default the newest readable one.

        None when there is no checkpoint. Every byte is verified before it is written, below
        `parent`, where the state must fit; the folder is removed at the end of training. Each rank
        of a job gets a folder of its own, of the step that rank 0 can read.

        With FSDP2, call it after the Trainer was made: the folder then holds no weights and no
        moments, which go from the pool into each rank's shards when train() begins.

        Parameters
        ----------
        parent
            A local directory with room for the state.
        step
            The step to resume from.

        Returns
        -------
        str or None
            The folder.

        Raises
        ------
        CheckpointError
            There are checkpoints, and none can be read now.
        """
        self.checkpoints.wait()
        sharded = agreed(self._ranks, kind_of_this_job) is Parallelism.SHARDED
        loaded: dict[str, Any] | None = None
        if step is None:
            step, loaded = (self._newest_verified(), None) if sharded else self._newest()
        if step is None:
            return None
        if sharded:
            return agreed(self._ranks, lambda: self._written_for_shards(step, parent))
        return agreed(self._ranks, lambda: self._written(step, loaded, parent))

    def _newest(self) -> tuple[int | None, dict[str, Any] | None]:
        """The newest step that rank 0 can read, on all ranks; on rank 0 with what it holds."""
        found: list[tuple[int, dict[str, Any]] | None] = [None]

        def look() -> None:
            found[0] = self._readable()

        agreed(self._ranks, look if self._ranks.leads else lambda: None)
        step, loaded = found[0] or (None, None)
        said = self._ranks.broadcast(json.dumps(step).encode(), RankChannel.TRAINER)
        return json.loads(said), loaded

    def _readable(self) -> tuple[int, dict[str, Any]] | None:
        steps = self.checkpoints.steps()
        for step in reversed(steps):
            try:
                return step, read_tree(self.checkpoints, step, rank=self._ranks.rank)
            except HpstoreError as error:
                if not is_unreadable(error):
                    raise
                _log.warning("checkpoint step %d is passed over: %s", step, error)
        if steps:
            raise CheckpointError(f"none of the checkpoints {steps[-8:]} can be read now")
        return None

    def _newest_verified(self) -> int | None:
        """The newest step of which each rank has read a share."""
        mine = agreed(self._ranks, lambda: self.checkpoints.steps() if self._ranks.leads else [])
        steps = json.loads(self._ranks.broadcast(json.dumps(mine).encode(), RankChannel.TRAINER))
        for step in reversed(steps):
            votes = self._ranks.all_gather(self._damage(step).encode(), RankChannel.TRAINER)
            wrong = [f"rank {n}: {vote.decode()}" for n, vote in enumerate(votes) if vote]
            if not wrong:
                return int(step)
            _log.warning("checkpoint step %d is passed over: %s", step, "; ".join(wrong))
        if steps:
            raise CheckpointError(f"none of the checkpoints {steps[-8:]} can be read now")
        return None

    def _damage(self, step: int) -> str:
        """What is wrong with this rank's share of a step, "" for nothing."""
        try:
            verify_share(self.checkpoints, step, self._ranks.rank, self._ranks.world)
        except Exception as error:  # noqa: BLE001 (told to the other ranks)
            return f"{type(error).__name__}: {error}"
        return ""

    def _written(self, step: int, loaded: dict[str, Any] | None, parent: PathLike) -> str:
        """A folder with all that the Trainer looks for."""
        if loaded is None:
            loaded = read_tree(self.checkpoints, step, rank=self._ranks.rank)
        self._drop_folder()
        self._folder = write_resume_folder(
            parent,
            loaded,
            step,
            rank=self._ranks.rank,
            world=self._ranks.world,
            saved_by=self._saved_by(step),
        )
        if self._ranks.world > 1 and ShardLoading.known():
            self._loading = ShardLoading(self._folder, _refuse_shards, wanted=())
            self._loading.open()
        return self._folder

    def _written_for_shards(self, step: int, parent: PathLike) -> str:
        """A folder without weights and moments, and who answers for them."""
        small = read_without(self.checkpoints, step, self._ranks.rank, "model", "optimizer")
        self._drop_folder()
        self._folder = write_resume_folder(
            parent,
            small,
            step,
            rank=self._ranks.rank,
            world=self._ranks.world,
            saved_by=self._saved_by(step),
        )
        self._loading = ShardLoading(self._folder, partial(self._fill_shards, step))
        self._loading.open()
        return self._folder

    def _saved_by(self, step: int) -> int:
        """How many ranks have saved a step."""
        return of_nearest(self.checkpoints, step, lambda catalog: catalog.facts(step).world)

    def _fill_shards(self, step: int, target: Mapping[str, Any]) -> None:
        """Restore a model or an optimizer. Collective."""
        state: dict[str, Any] = {}
        if "model" in target:
            state["model"] = self._recorded_weights(step, target["model"])
        if "optimizer" in target:
            state["optimizer"] = inner_optimizer(target["optimizer"])
        self.checkpoints.restore(state, step, load=LoadOptions(include=tuple(state)))

    def _recorded_weights(self, step: int, model: Any) -> dict[str, Any]:
        """Weights to fill; with save_frozen=False frozen ones only where the step has them."""
        weights = weights_of(model, frozen=True)
        if self.save_frozen:
            return weights
        trained = weights_of(model, frozen=False).keys()
        saved = self.checkpoints.read(step)
        return {n: w for n, w in weights.items() if n in trained or f"model/{n}" in saved}

    def _drop_folder(self) -> None:
        self._end_loading()
        folder, self._folder = self._folder, None
        if folder is not None:
            try:
                shutil.rmtree(folder)
            except FileNotFoundError:
                _log.info("%s is gone already", folder)
            except OSError as error:  # it ends no training
                _log.warning("the folder of a resume stays: %s", error)

    def _end_loading(self) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.close()

    def close(self) -> None:
        """Wait; close the pool if it was opened here. Idempotent."""
        try:
            self.checkpoints.close()
        finally:
            self._ranks.close()
            try:
                self._drop_folder()
            finally:
                if self._opened:
                    self.pool.close()


def _refuse_shards(target: Mapping[str, Any]) -> None:
    """In the place of a fill: the folder is that of a job without shards."""
    raise CheckpointError(
        "this Trainer trains with FSDP2, but its resume_folder() was made before the Trainer, as "
        "for one without shards. Nothing is trained: call resume_folder() after Trainer(...)"
    )
