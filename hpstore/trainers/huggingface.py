"""Hugging Face: a Trainer's callback and an Accelerator's states in a pool (docs/trainers.md)."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpstore.checkpoint import Checkpointer, Preempted, SaveOptions
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.state.state_tree import PerRank
from hpstore.checkpoint.state.training_state import rng_state, set_rng_state
from hpstore.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    IntegrityError,
    ObjectNotFound,
    RedundancyError,
)
from hpstore.loaders import DataLoader
from hpstore.runtime.closing import Closing
from hpstore.trainers.checkpoint_paths import PathLike, name_of, path_of
from hpstore.trainers.named_checkpoints import NamedCheckpoints, refuse_states
from hpstore.trainers.optional_import import PoolLike, as_pool, missing
from hpstore.trainers.rank_messages import agreed, of_bytes, to_bytes
from hpstore.trainers.resume_folder import trainer_rng, write_resume_folder

try:
    from accelerate import Accelerator
    from accelerate.utils import send_to_device
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise missing("transformers and accelerate", "huggingface") from error

_log = logging.getLogger(__name__)


class PoolTrainerCallback(TrainerCallback, Closing):
    """`Trainer(callbacks=[PoolTrainerCallback(pool, "runs/bert", keep_last=3)])` saves to a pool.

    Saves whenever the Trainer does; with `every`, also after every so many steps, so that the
    Trainer itself may have save_strategy="no". A save holds model, optimizer, scheduler, scaler,
    RNG states and the Trainer's state. The Trainer is kept for one copy; what went wrong is raised
    at the next save and at the end of training. To resume, also on another machine:

        trainer.train(resume_from_checkpoint=callback.resume_folder("/local/scratch"))

    keep_last, keep_every: which steps stay; older ones go after a newer one is durable in full.
    on_sigterm: "save": after the step in which SIGTERM comes save, stop training and raise
    Preempted, a SystemExit; "finish": what a Checkpointer does. save_frozen: False leaves out
    parameters that are not trained, as of the base model under PEFT's adapters: the model that
    resumes must have them already. pool: a Pool, which stays the
    caller's, or the name or settings file of one.

    In a data-parallel job (torchrun, DDP) every process makes one, after its TrainingArguments, and
    calls the same methods. What all have alike is saved once, every rank's RNG states with it; each
    rank resumes from a folder of its own. What fails on one rank is raised on all. FSDP and
    DeepSpeed are refused.
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
        )
        self._ranks = Ranks(self.checkpoints.saver.options.commit_seconds)
        self._stopping: int | None = None  # the last step, after SIGTERM
        self._folder: str | None = None

    # --- what the Trainer calls ---------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what would not be saved as a whole."""
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise CheckpointError(
                "PoolTrainerCallback saves one process or a data-parallel job (DDP), without FSDP "
                "and DeepSpeed; a Checkpointer saves shards, from the modules and optimizers "
                "themselves"
            )
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
            "model": self._weights(parts["model"]),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": parts["lr_scheduler"].state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "rng": trainer_rng() if self._ranks.world == 1 else PerRank(trainer_rng()),
            "trainer_state": json.dumps(recorded, indent=2, sort_keys=True),
        }
        refuse_states(saved, "checkpoint")
        self.checkpoints.save(state.global_step, saved, overwrite=True)

    def _weights(self, model: Any) -> dict[str, Any]:
        """The model's state, without what is not trained unless that is wanted."""
        named = model.named_parameters(remove_duplicate=False)
        out = () if self.save_frozen else {name for name, p in named if not p.requires_grad}
        return {name: value for name, value in model.state_dict().items() if name not in out}

    # --- resuming -----------------------------------------------------------------------------

    def resume_folder(self, parent: PathLike, step: int | None = None) -> str | None:
        """A folder for resume_from_checkpoint with a step, by default the newest readable one.

        None when there is no checkpoint. Every byte is verified before it is written, below
        `parent`, where the state must fit; the folder is removed at the end of training. Each rank
        of a job gets a folder of its own, of the step that rank 0 can read.
        """
        self.checkpoints.wait()
        loaded: dict[str, Any] | None = None
        if step is None:
            step, loaded = self._newest()
        if step is None:
            return None
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
                return step, self.checkpoints.read(step).tree()
            except (IntegrityError, RedundancyError, ObjectNotFound) as error:
                _log.warning("checkpoint step %d is passed over: %s", step, error)
        if steps:
            raise CheckpointError(f"none of the checkpoints {steps[-8:]} can be read now")
        return None

    def _written(self, step: int, loaded: dict[str, Any] | None, parent: PathLike) -> str:
        """A folder with all that the Trainer looks for."""
        saved = self.checkpoints.read(step)
        loaded = saved.tree() if loaded is None else loaded
        self._drop_folder()
        self._folder = write_resume_folder(
            parent,
            loaded,
            step,
            rank=self._ranks.rank,
            world=self._ranks.world,
            saved_by=saved.manifest.world,
        )
        return self._folder

    def _drop_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder)

    def close(self) -> None:
        """Wait; close the pool if it was opened here. Idempotent."""
        try:
            self.checkpoints.close()
        finally:
            self._drop_folder()
            if self._opened:
                self.pool.close()


class PoolAccelerate(Closing):
    """`with PoolAccelerate(accelerator, pool, "runs/x"):` save_state() and load_state() use a pool.

    It takes the place of both methods until close(), and nothing is written to the local disk:
    accelerate's hooks cannot keep the optimizers' bytes off it, and load_state() wants a folder
    that a lost machine took along. Hooks that were registered are called as before.

    save_state() returns once the state is copied; what went wrong is raised at the next call and
    by close(). keep_last (default: the ProjectConfiguration's total_limit): older states go only
    after a newer one is durable in full, where accelerate itself deletes first.

    root: output directories below it are named relative to it, so that a run may move.

    In a data-parallel job (DDP) every process makes one and calls the same methods. Rank 0 saves
    what all have alike, and every rank's RNG and data loader states with it; each loads for itself
    what rank 0 says. What fails on one rank is raised on all, or, when a rank is gone, after
    `commit_seconds`. FSDP, DeepSpeed and Megatron-LM are refused.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        pool: PoolLike,
        prefix: str,
        *,
        keep_last: int | None = None,
        root: PathLike | None = None,
        commit_seconds: float = 1800.0,
    ) -> None:
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise CheckpointError(
                f"PoolAccelerate saves one process or a data-parallel job (DDP), not {kind}; "
                "a Checkpointer saves shards, from the modules and optimizers themselves"
            )
        if keep_last is None:
            keep_last = accelerator.project_configuration.total_limit
        self.accelerator = accelerator
        self.root = None if root is None else os.path.realpath(root)
        self.pool, self._opened = as_pool(pool)
        self.checkpoints = NamedCheckpoints(self.pool, prefix, keep_last=keep_last)
        self._ranks = Ranks(commit_seconds, alone=accelerator.num_processes == 1)
        self._closed = False
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state

    def save_state(self, output_dir: PathLike | None = None, **unused: Any) -> Path:
        """Save everything prepared and registered under the name `output_dir`.

        With automatic_checkpoint_naming the name is made as accelerate makes it, and must be new.
        Returns the name as a path once staged. `safe_serialization` and other options for the
        format of files are of no consequence.
        """
        accelerator = self.accelerator
        automatic = accelerator.project_configuration.automatic_checkpoint_naming
        path = self._automatic() if automatic else output_dir
        if path is None:
            raise ConfigError("save_state() needs an output_dir, or automatic naming")
        name = name_of(path, self.root)
        if automatic:
            self._together(lambda: self._require_new(name))
        models = accelerator._models
        weights = [accelerator.get_state_dict(model, unwrap=False) for model in models]
        for hook in accelerator._save_model_state_pre_hook.values():
            hook(models, weights, os.fspath(path))
        state = {**self._state(), "models": [dict(w) for w in weights]}
        if self._ranks.world > 1:
            own = to_bytes({"rng": state["rng"], "dataloaders": state["dataloaders"]})
            state["ranks"] = list(map(of_bytes, self._ranks.all_gather(own, RankChannel.TRAINER)))
        self._together(lambda: self.checkpoints.save(name, state))
        accelerator.project_configuration.iteration += 1
        return Path(path)

    def _require_new(self, name: str) -> None:
        if name in self.checkpoints.names():
            raise CheckpointError(
                f"{name!r} is saved already; load_state() first, or set the project "
                "configuration's iteration to where to go on"
            )

    def _together(self, action: Callable[[], object]) -> None:
        """What rank 0 does for all; what went wrong is raised on all."""
        agreed(self._ranks, action if self._ranks.leads else lambda: None)

    def _automatic(self) -> str:
        at = self.accelerator.project_configuration
        return os.path.join(
            self.accelerator.project_dir or "", "checkpoints", f"checkpoint_{at.iteration}"
        )

    def _state(self) -> dict[str, Any]:
        accelerator = self.accelerator
        scaler = accelerator.scaler
        return {
            "optimizers": [o.state_dict() for o in accelerator._optimizers],
            "schedulers": [s.state_dict() for s in accelerator._schedulers],
            "dataloaders": [_loader_state(loader) for loader in accelerator._dataloaders],
            "custom": [thing.state_dict() for thing in accelerator._custom_objects],
            "scaler": None if scaler is None else scaler.state_dict(),
            "rng": rng_state(),
            "step": accelerator.step,
            "iteration": accelerator.project_configuration.iteration,
        }

    def load_state(self, input_dir: PathLike | None = None, **options: Any) -> None:
        """Load the state saved under the name `input_dir`; without one, the newest.

        Verified as a whole before anything is filled. Raises CheckpointError when there is none,
        CheckpointMismatch when other numbers of things were prepared.
        """
        known = self.latest() if input_dir is None else input_dir
        if known is None:
            raise CheckpointError(f"no state under {self.checkpoints.prefix!r} to load")
        self.wait()
        loaded = agreed(self._ranks, lambda: self.checkpoints.load(name_of(known, self.root)))
        accelerator = self.accelerator
        ranks = loaded.pop("ranks", [])
        newcomer = self._ranks.rank >= max(1, len(ranks))
        if ranks and not newcomer:
            loaded |= ranks[self._ranks.rank]
        models = list(accelerator._models)
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, os.fspath(known))
        takers = {
            "models": models,
            "optimizers": accelerator._optimizers,
            "schedulers": accelerator._schedulers,
            "dataloaders": accelerator._dataloaders,
            "custom": accelerator._custom_objects,
        }
        for kind, things in takers.items():
            if len(loaded[kind]) != len(things):
                raise CheckpointMismatch(
                    f"{len(loaded[kind])} {kind} were saved, {len(things)} are there to load"
                )
        for kind, things in takers.items():
            for thing, state in zip(things, loaded[kind], strict=True):
                if state is not None:
                    thing.load_state_dict(state)
        if loaded["scaler"] is not None and accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(loaded["scaler"])
        accelerator.step = loaded["step"]
        accelerator.project_configuration.iteration = loaded["iteration"] + 1
        if newcomer:
            _log.warning(
                "rank %d was not there when %s was saved: its RNG goes on as it is",
                self._ranks.rank,
                known,
            )
        else:
            set_rng_state(loaded["rng"])

    def latest(self) -> str | None:
        """The name, as a path, of the newest state, the same on all ranks; None when there is
        none."""
        found: list[str | None] = [None]

        def look() -> None:
            self.checkpoints.wait()
            found[0] = self.checkpoints.latest()

        self._together(look)
        said = self._ranks.broadcast(json.dumps(found[0]).encode(), RankChannel.TRAINER)
        name = json.loads(said)
        return None if name is None else path_of(name, self.root)

    def wait(self) -> None:
        """Wait until what was saved is durable, on all ranks; raises what went wrong."""
        self._together(self.checkpoints.wait)

    def close(self) -> None:
        """Wait, and give the accelerator its own methods back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for name in ("save_state", "load_state"):
            self.accelerator.__dict__.pop(name, None)
        try:
            self.checkpoints.close()
        finally:
            if self._opened:
                self.pool.close()


class PoolLoader(Closing):
    """`for batch in PoolLoader(accelerator, loader)`: a hpstore DataLoader under an Accelerator.

    accelerator.prepare(loader) gives a hpstore DataLoader back as it is: it shards, shuffles and
    resumes by itself. What is left is done here: batches go to the accelerator's device, and the
    accelerator is told of the last batch of an epoch, so that accumulate() steps there and
    gather_for_metrics() drops the rows that tail="pad" repeats. A loader whose batches are gathered
    keeps that default, for evaluation too: with tail="uneven" ranks differ in rows and steps.

    state_dict() and load_state_dict() are the loader's; save_state() of the accelerator, and of
    PoolAccelerate, keep it with the rest.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(self, accelerator: Accelerator, loader: DataLoader) -> None:
        self.accelerator, self.loader = accelerator, loader
        self.end_of_dataloader, self.remainder = False, -1  # read by accelerate's GradientState
        known = accelerator._dataloaders  # whose states it saves: this takes the loader's place
        known[:] = [one for one in known if one is not loader]
        accelerator.prepare_data_loader(self)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not made yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Batches of one epoch, as of the loader."""
        state = self.accelerator.gradient_state
        self.end_of_dataloader, self.remainder = False, self._remainder()
        state._add_dataloader(self)
        moved = self.accelerator.device_placement and self.loader.device is None
        try:
            for batch in self.loader:
                self.end_of_dataloader = not self.loader.standing()[1]
                yield send_to_device(batch, self.accelerator.device) if moved else batch
        finally:
            state._remove_dataloader(self)

    def _remainder(self) -> int:
        """Rows of the last global batch that are no repetition; 0 when all are, -1 when that is
        not known."""
        slices = self.loader.slices
        if slices is None:
            return -1
        if slices.drop_last or slices.tail != "pad":
            return 0
        _, position = self.loader.standing()
        return (slices.length - position) % slices.global_batch

    def close(self) -> None:
        """As DataLoader.close."""
        self.loader.close()


def _loader_state(loader: Any) -> Any:
    """State of a stateful data loader; None of another."""
    return loader.state_dict() if getattr(loader, "use_stateful_dataloader", False) else None
