"""Accelerate: states in a pool, and a pool's DataLoader under it (docs/trainers.md)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpstore.checkpoint import Tier
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.state.training_state import rng_state, set_rng_state
from hpstore.errors import CheckpointError, CheckpointMismatch, ConfigError
from hpstore.loaders import DataLoader
from hpstore.runtime.closing import Closing
from hpstore.trainers.checkpoint_paths import PathLike, name_of, path_of
from hpstore.trainers.job_kinds import Parallelism, job_kind
from hpstore.trainers.named_checkpoints import NamedCheckpoints
from hpstore.trainers.optional_import import PoolLike, as_pool, missing
from hpstore.trainers.rank_messages import agreed, of_bytes, to_bytes
from hpstore.trainers.sharded_parts import inner_optimizer, weights_of
from hpstore.trainers.tier_names import tiers_here

try:
    from accelerate import Accelerator
    from accelerate.utils import send_to_device
except ModuleNotFoundError as error:
    raise missing("accelerate", "huggingface", error) from error

_log = logging.getLogger(__name__)


class PoolAccelerate(Closing):
    """`with PoolAccelerate(accelerator, pool, "runs/x"):` save_state() and load_state() use a pool.

    It takes the place of both methods until close(), and nothing is written to the local disk:
    accelerate's hooks cannot keep the optimizers' bytes off it, and load_state() wants a folder
    that a lost machine took along. Hooks that were registered are called as before.

    save_state() returns once the state is copied; what went wrong is raised at the next call and
    by close().

    In a job of several processes (DDP or FSDP2) every one makes one and calls the same methods.
    Rank 0 saves what all have alike, with FSDP2 each rank its shards, and every rank's RNG and data
    loader states with it; each loads for itself what rank 0 says. What fails on one rank is raised
    on all, or, when a rank is gone, after `commit_seconds`. FSDP1, DeepSpeed and Megatron-LM are
    refused.

    Parameters
    ----------
    accelerator
        Its save_state() and load_state() are replaced until close().
    pool
        A Pool, which stays the caller's, or the name or settings file of one.
    prefix
        Where in the pool the states are.
    keep_last
        How many states stay, by default the ProjectConfiguration's total_limit. Older ones go only
        after a newer one is durable in full, where accelerate itself deletes first.
    root
        Output directories below it are named relative to it, so that a run may move.
    commit_seconds
        How long a rank waits for the others.
    tiers
        Further pools that get copies of states, and from which one is loaded that the pool has not
        got: `Tier(pool=cold, keep_last=20)`. A Tier's `every` and `keep_every` count saves.

    Raises
    ------
    CheckpointError
        This kind of job is refused.
    ConfigError
        `keep_last` is not a whole number of at least 1.
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
        tiers: Iterable[Tier] = (),
    ) -> None:
        kind = job_kind(accelerator.distributed_type, accelerator.state.__dict__.get("fsdp_plugin"))
        self._sharded = kind is Parallelism.SHARDED
        if keep_last is None:
            keep_last = accelerator.project_configuration.total_limit
        self.accelerator = accelerator
        self.root = None if root is None else os.path.realpath(root)
        self.pool, self._opened = as_pool(pool)
        self._ranks = Ranks(commit_seconds, alone=accelerator.num_processes == 1)
        self.checkpoints = NamedCheckpoints(
            self.pool,
            prefix,
            keep_last=keep_last,
            ranks=self._ranks if self._sharded else None,
            commit_seconds=commit_seconds,
            tiers=tiers_here(tiers, saves=accelerator.is_main_process or self._sharded),
        )
        self._closed = False
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state

    def save_state(self, output_dir: PathLike | None = None, **unused: Any) -> Path:
        """Save everything prepared and registered under the name `output_dir`.

        Parameters
        ----------
        output_dir
            With automatic_checkpoint_naming it is left out: the name is made as accelerate makes
            it, and must be new.
        **unused
            `safe_serialization` and other options for the format of files have no effect.

        Returns
        -------
        pathlib.Path
            The name as a path, once the state is staged.

        Raises
        ------
        ConfigError
            There is no name.
        CheckpointError
            Gradients are being accumulated, or the automatic name is taken.
        """
        accelerator = self.accelerator
        agreed(self._ranks, self._require_whole_steps)
        automatic = accelerator.project_configuration.automatic_checkpoint_naming
        path = self._automatic() if automatic else output_dir
        if path is None:
            raise ConfigError("save_state() needs an output_dir, or automatic naming")
        name = name_of(path, self.root)
        if automatic:
            self._together(lambda: self._require_new(name))
        models = accelerator._models
        weights = list(map(self._weights, models))
        for hook in accelerator._save_model_state_pre_hook.values():
            hook(models, weights, os.fspath(path))
        state = {**self._state(), "models": [dict(w) for w in weights]}
        if self._ranks.world > 1:
            own = to_bytes({"rng": state["rng"], "dataloaders": state["dataloaders"]})
            state["ranks"] = list(map(of_bytes, self._ranks.all_gather(own, RankChannel.TRAINER)))
            state |= state["ranks"][0]  # the same on all
        if self._sharded:
            self.checkpoints.save(name, state)
        else:
            self._together(lambda: self.checkpoints.save(name, state))
        accelerator.project_configuration.iteration += 1
        return Path(path)

    def _weights(self, model: Any) -> Any:
        if self._sharded:
            return weights_of(model, frozen=True)
        return self.accelerator.get_state_dict(model, unwrap=False)

    def _require_whole_steps(self) -> None:
        """Raise CheckpointError where gradients are being accumulated: they are in no state."""
        steps = self.accelerator.gradient_accumulation_steps
        if steps > 1 and not self.accelerator.sync_gradients:
            raise CheckpointError(
                f"save_state() after micro-batch {self.accelerator.step} of an accumulation over "
                f"{steps}: the gradients of these micro-batches would be lost at a resume. Nothing "
                "was saved; write `if accelerator.sync_gradients:` before save_state()"
            )

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

        Verified as a whole before anything is filled; with FSDP2 names and shapes before, bytes as
        they are filled.

        Parameters
        ----------
        input_dir
            As save_state() was given it, or has returned it.
        **options
            Options for the format of files have no effect.

        Raises
        ------
        CheckpointError
            There is no state to load.
        CheckpointMismatch
            Other numbers of models, optimizers or the like were prepared.
        """
        known = self.latest() if input_dir is None else input_dir
        if known is None:
            raise CheckpointError(f"no state under {self.checkpoints.prefix!r} to load")
        self.wait()
        accelerator = self.accelerator
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
        loaded = self._loaded(name_of(known, self.root), takers)
        ranks = loaded.pop("ranks", [])
        newcomer = self._ranks.rank >= max(1, len(ranks))
        if ranks and not newcomer:
            loaded |= ranks[self._ranks.rank]
        for kind, things in takers.items():
            for thing, state in zip(things, loaded.get(kind, [None] * len(things)), strict=True):
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

    def _loaded(self, name: str, takers: Mapping[str, list[Any]]) -> dict[str, Any]:
        """What is saved under a name; with FSDP2 without models and optimizers, which are filled in
        place."""

        def check(loaded: dict[str, Any]) -> None:
            for kind, saved in loaded.items():
                if kind in takers and len(saved) != len(takers[kind]):
                    raise CheckpointMismatch(
                        f"{len(saved)} {kind} were saved, {len(takers[kind])} are there to load"
                    )

        if not self._sharded:
            loaded = agreed(self._ranks, lambda: self.checkpoints.load(name))
            check(loaded)
            return loaded
        into = {
            "models": [weights_of(model, frozen=True) for model in takers["models"]],
            "optimizers": list(map(inner_optimizer, takers["optimizers"])),
        }
        return self.checkpoints.load_into(name, into, check=check)

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
        agreed(self._ranks, self.checkpoints.wait)

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
            self._ranks.close()
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

    Parameters
    ----------
    accelerator
        This loader is registered with it, in the place of `loader`.
    loader
        A hpstore DataLoader, which close() closes.

    Raises
    ------
    ConfigError
        The accelerator has split_batches=True and several processes.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(self, accelerator: Accelerator, loader: DataLoader) -> None:
        if accelerator.split_batches and accelerator.num_processes > 1:
            raise ConfigError(
                "with split_batches=True accelerate counts the rows of all ranks in batch_size, a "
                "hpstore DataLoader those of one: leave out split_batches=, and make the loader "
                f"with batch_size=<rows of all> // {accelerator.num_processes}"
            )
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
