"""Lightning: a CheckpointIO that keeps checkpoints in a pool (docs/trainers.md)."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hpstore.checkpoint import Tier
from hpstore.checkpoint.state.fill_objects import map_tensors
from hpstore.errors import CheckpointError, ConfigError
from hpstore.pool.pool import Pool
from hpstore.trainers.checkpoint_paths import PathLike, name_of, path_of
from hpstore.trainers.named_checkpoints import NamedCheckpoints
from hpstore.trainers.optional_import import PoolLike, UnopenedPool, as_pool, missing
from hpstore.trainers.tier_names import UnopenedTier, close_all, leads_job, opened_tiers, tiers_here

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.io import CheckpointIO
except ModuleNotFoundError as error:
    raise missing("lightning", "lightning", error) from error


_MARKER = "A marker"


def _file_hint(path: str | None) -> str:
    """What to do with a file that is at a checkpoint's path and is no marker, for an error."""
    try:
        with open(path or "", "rb") as file:
            if file.read(len(_MARKER)) == _MARKER.encode():
                return ""
    except OSError:
        return ""
    return (
        ". The file at that path was not saved to the pool: "
        "io.save_checkpoint(torch.load(path), path) takes it in"
    )


def place(value: Any, map_location: object) -> Any:
    """Loaded values with tensors where torch.load's `map_location` wants them."""
    if map_location is None:
        return value
    return map_tensors(value, lambda tensor: _place_tensor(tensor, map_location))


def _place_tensor(tensor: torch.Tensor, map_location: object) -> torch.Tensor:
    if isinstance(map_location, (str, torch.device)):
        return tensor.to(map_location)
    if isinstance(map_location, Mapping):
        return tensor.to(map_location.get("cpu", "cpu"))
    if callable(map_location):
        storage = map_location(tensor.untyped_storage(), "cpu")
        return tensor if storage is None else tensor.to(storage.device)
    raise ConfigError(f"map_location of {type(map_location).__name__} is not understood")


class PoolCheckpointIO(CheckpointIO):
    """`Trainer(plugins=[PoolCheckpointIO(pool, "runs/gpt")])`: checkpoints go to a pool.

    Saving returns once the state is copied; encoding, writing and the commit go on in the
    background. What went wrong is raised at the next save, load or teardown. A checkpoint that
    Lightning removes goes only after the one saved before is durable.

    Lightning knows checkpoints by path and looks for them on disk (version counters, "last",
    warnings): a marker of one line stands there for each. The pool alone is the truth: after the
    disk is lost, `trainer.fit(ckpt_path=io.latest())` and every path still work.

    Parameters
    ----------
    pool
        A Pool, which stays the caller's, or the name or settings file of one, opened at the first
        use and closed by close(). Errors of opening it are raised there.
    prefix
        Key prefix of the checkpoints. One saving process per prefix.
    root
        Paths below it are named relative to it, so that a run may move; others by their absolute
        path.
    allow_pickle
        Save and load objects of any other type as pickles, which run code when they are loaded: for
        a pool that you trust, and for hyper-parameters that are neither plain values nor enums,
        dataclasses or paths.
    files
        torch.save writes each checkpoint to its path, too, in the place of the marker, while the
        trainer waits: for code that opens the path itself (load_from_checkpoint, torch.load).
    tiers
        Further pools that get copies, and from which what the pool has not got is loaded. A Tier's
        `every` and `keep_every` count saves.
    """

    def __init__(
        self,
        pool: PoolLike,
        prefix: str,
        *,
        root: PathLike | None = None,
        allow_pickle: bool = False,
        files: bool = False,
        tiers: Iterable[Tier] = (),
    ) -> None:
        self._tiers: Sequence[Tier | UnopenedTier] = tuple(tiers)
        self._tier_pools: list[Pool] = []  # opened here
        self._pool, self.prefix, self._allow_pickle = pool, prefix, allow_pickle
        self.files = files
        self.root = None if root is None else os.path.realpath(root)
        self._named: NamedCheckpoints | None = None
        self._opened = False

    @property
    def checkpoints(self) -> NamedCheckpoints:
        """The checkpoints by name; opens the pool at the first use."""
        if self._named is None:
            self._pool, self._opened = as_pool(self._pool)
            tiers, self._tier_pools = opened_tiers(self._tiers)
            try:
                self._named = NamedCheckpoints(
                    self._pool,
                    self.prefix,
                    allow_pickle=self._allow_pickle,
                    tiers=tiers_here(tiers, saves=leads_job()),
                )
            except BaseException:
                close_all(self._tier_pools)
                raise
        return self._named

    # --- what Lightning calls -----------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: object = None
    ) -> None:
        """Save; returns once staged. Raises CheckpointError naming an entry it cannot hold, and
        TypeError for storage_options, as every CheckpointIO that has no use for them."""
        if storage_options is not None:
            raise TypeError("PoolCheckpointIO takes no storage_options. Nothing was saved.")
        marker = self._marker(path)
        made = marker is not None and not os.path.isfile(marker)
        self.checkpoints.save(
            name_of(path, self.root),
            checkpoint,
            durable=None if self.files else lambda: self._mark(marker),
        )
        if self.files:
            self._write(marker, checkpoint)
        elif made:  # now already, as Lightning asks for it before the next save
            self._mark(marker)

    def load_checkpoint(
        self, path: PathLike, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load and verify. Tensors come on the CPU unless `map_location` says otherwise.

        Reading runs no code from a checkpoint unless allow_pickle was given, so `weights_only`
        changes nothing.
        """
        path = os.fspath(path)
        if "://" not in path and os.path.islink(path):  # save_last="link"
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        name, marker = name_of(path, self.root), self._marker(path)
        loaded = self.checkpoints.load(name, missing=lambda: _file_hint(marker))
        placed: dict[str, Any] = place(loaded, map_location)
        return placed

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint, after the save under way is durable; not when that failed."""
        marker = self._marker(path)
        if marker is not None and os.path.islink(marker):
            os.unlink(marker)
            return
        self.checkpoints.remove(name_of(path, self.root), removed=lambda: self._unmark(marker))

    def teardown(self) -> None:
        """Wait until everything saved is durable; raises what went wrong. Usable afterwards."""
        if self._named is not None:
            self._named.wait()

    # --- beyond Lightning ---------------------------------------------------------------------

    def latest(self) -> str | None:
        """The path of the newest checkpoint, for `trainer.fit(ckpt_path=...)`; None at first."""
        name = self.checkpoints.latest()
        return None if name is None else path_of(name, self.root)

    def file(self, path: PathLike) -> BinaryIO:
        """Load a checkpoint as a file in memory, as torch.save writes it.

        It is for what takes open files where it takes paths, such as
        `Model.load_from_checkpoint(io.file(path))`. Takes memory for the checkpoint twice.

        Parameters
        ----------
        path
            As the checkpoint was saved, or a link to it that Lightning made.

        Returns
        -------
        BinaryIO
            The whole file, verified, positioned at its start. It is the caller's.

        Raises
        ------
        CheckpointError
            There is no such checkpoint; the message names the newest. What went wrong in the save
            before is raised, too.
        IntegrityError, RedundancyError
            It is damaged, or cannot be read now.
        """
        written = io.BytesIO()
        torch.save(self.load_checkpoint(path), written)
        written.seek(0)
        return written

    def __getstate__(self) -> dict[str, Any]:
        """For strategies that spawn, and for a Trainer that is pickled with its model: what is
        unpickled opens a pool of its own when it is first used, and close() closes that."""
        pool = self._pool
        if isinstance(pool, Pool):
            pool = UnopenedPool(config=pool.config, read_only=pool.read_only)
        tiers = [t if isinstance(t, UnopenedTier) else UnopenedTier.of(t) for t in self._tiers]
        unopened = {"_named": None, "_opened": False, "_tiers": tiers, "_tier_pools": []}
        return {**self.__dict__, "_pool": pool, **unopened}

    def close(self) -> None:
        """Wait, and close the pool if it was opened here. Idempotent."""
        named = self._named
        if named is None:
            return
        try:
            named.close()  # what is told of a save that ends now looks for it here
        finally:
            self._named = None
            close_all(self._tier_pools)
            if self._opened:
                named.pool.close()
                self._pool, self._opened = os.fspath(named.pool.config.path), False

    # --- markers ------------------------------------------------------------------------------

    def _marker(self, path: PathLike) -> str | None:
        text = os.fspath(path)
        return None if "://" in text else os.path.abspath(text)

    def _mark(self, marker: str | None) -> None:
        """Write or touch the marker of a path. It holds no data."""
        if marker is not None:
            self._make_way(marker)
            pool = self.checkpoints.pool.config.name
            Path(marker).write_text(
                f"{_MARKER}: the checkpoint is in hpstore's pool {pool!r} under {self.prefix!r}.\n",
                encoding="utf-8",
            )

    def _write(self, marker: str | None, checkpoint: dict[str, Any]) -> None:
        """The checkpoint itself in the place of the marker; whole, as it is renamed there."""
        if marker is not None:
            self._make_way(marker)
            with open(f"{marker}.part", "wb") as file:
                torch.save(checkpoint, file)
            os.replace(file.name, marker)

    def _make_way(self, marker: str) -> None:
        os.makedirs(os.path.dirname(marker), exist_ok=True)
        if os.path.islink(marker):  # of save_last="link": its target is not ours to overwrite
            os.unlink(marker)

    def _unmark(self, marker: str | None) -> None:
        if marker is not None and os.path.lexists(marker):
            os.unlink(marker)


IGNORING = ("ModelParallelStrategy", "DeepSpeedStrategy")
"""Strategies of Lightning that save and load on their own and ask no CheckpointIO."""


class RequireUsedIO(Callback):
    """Refuses a run whose strategy would ignore its PoolCheckpointIO without a word.

    Every Trainer of a process that has imported PoolCheckpointIO gets one by an entry point
    (lightning_guard.py). Raises CheckpointError on all ranks, before anything is trained.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy  # Any: strategies differ in what they have
        plugin = strategy._checkpoint_io
        while plugin is not None and not isinstance(plugin, PoolCheckpointIO):
            plugin = getattr(plugin, "checkpoint_io", None)  # AsyncCheckpointIO and the like
        kinds = {kind.__name__ for kind in type(strategy).__mro__}
        sharded = "FSDPStrategy" in kinds and getattr(strategy, "_state_dict_type", "") == "sharded"
        if plugin is not None and (sharded or not kinds.isdisjoint(IGNORING)):
            raise CheckpointError(
                f"{type(strategy).__name__} does not ask PoolCheckpointIO: its checkpoints would "
                "go to the local disk, and none to the pool. Nothing was trained. Use DDPStrategy, "
                "or no PoolCheckpointIO and torch.distributed.checkpoint with hpstore's "
                "StorageWriter, or the Checkpointer, in a callback of yours (docs/trainers.md)."
            )
