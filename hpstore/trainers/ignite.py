"""PyTorch Ignite: a save handler that keeps in a pool what `Checkpoint` saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpstore.checkpoint import Tier
from hpstore.errors import CheckpointError, ConfigError
from hpstore.runtime.closing import Closing
from hpstore.trainers.named_checkpoints import NamedCheckpoints
from hpstore.trainers.optional_import import PoolLike, as_pool, missing
from hpstore.trainers.tier_names import tiers_here

try:
    import ignite.distributed as idist
    from ignite.handlers.checkpoint import BaseSaveHandler
except ModuleNotFoundError as error:
    raise missing("pytorch-ignite", "ignite", error) from error


class PoolSaveHandler(BaseSaveHandler, Closing):  # type: ignore[misc]  # ignite is skipped by mypy
    """`Checkpoint(to_save, save_handler=PoolSaveHandler(pool, "runs/x"), n_saved=2)`.

    A call returns once the state is copied; it becomes durable in the background. What went wrong
    is raised by the next call, by wait() and by close(). Ignite asks for the removal of an old file
    before it saves the new one: here that waits until the new one is durable with its full parity,
    so that n_saved=1 leaves no moment without a checkpoint. After a crash it is as if either had
    not happened.

    In a distributed job each process makes one; the one of rank `save_on_rank` saves, as with
    ignite's DiskSaver, and every process may load. For one thread.

    Parameters
    ----------
    pool
        A Pool, which stays the caller's, or the name or settings file of one.
    prefix
        Where in the pool. File names are ignite's; one saving job per prefix at a time.
    save_on_rank
        As of ignite's Checkpoint, which has an argument of this name, too.
    allow_pickle
        Save and load objects of any type; loading runs code that their writer chose.
    tiers
        Further pools that get copies, and from which what this pool has not got is loaded. A Tier's
        `every` and `keep_every` count saves.

    Raises
    ------
    ConfigError, InvalidKey
        An argument is wrong.
    """

    def __init__(
        self,
        pool: PoolLike,
        prefix: str,
        *,
        save_on_rank: int = 0,
        allow_pickle: bool = False,
        tiers: Iterable[Tier] = (),
    ) -> None:
        if type(save_on_rank) is not int or save_on_rank < 0:
            raise ConfigError(f"save_on_rank is {save_on_rank!r}, not the number of a rank")
        self.pool, self._opened = as_pool(pool)
        self.save_on_rank = save_on_rank
        self.checkpoints = NamedCheckpoints(
            self.pool,
            prefix,
            allow_pickle=allow_pickle,
            tiers=tiers_here(tiers, saves=self._saves()),
        )
        self._leaving: list[str] = []  # until the save is durable that takes their place

    def __call__(
        self,
        checkpoint: Mapping[str, Any],
        filename: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint under a name, in place of what had it. Ignite calls this.

        Parameters
        ----------
        checkpoint
            Nested state, of any types that a Checkpointer takes. It may change after the return.
        filename
            Its name.
        metadata
            Ignite's; not kept.

        Raises
        ------
        CheckpointError
            An entry cannot be saved, and the message names it; or what went wrong in the background
            before. Nothing is removed.
        """
        if not self._saves():
            return
        self.checkpoints.save(filename, checkpoint)
        leaving, self._leaving = self._leaving, []
        for name in leaving:  # in the background after this save; not when it fails
            if name != filename:
                self.checkpoints.remove(name)

    def remove(self, filename: str) -> None:
        """Remove a checkpoint when the next save is durable, and not before. Ignite calls this.

        Parameters
        ----------
        filename
            Its name; one that is not there is passed over.
        """
        if self._saves():
            self._leaving.append(filename)

    def load(self, filename: str | None = None) -> dict[str, Any]:
        """A checkpoint for `Checkpoint.load_objects(to_load, checkpoint=...)`.

        Parameters
        ----------
        filename
            Its name; the newest that can be read unless given.

        Returns
        -------
        dict
            The state, every byte verified, tensors on the CPU; the caller owns it.

        Raises
        ------
        CheckpointError
            There is none of this name, or none at all.
        IntegrityError, RedundancyError
            It cannot be read.
        """
        name = self.latest() if filename is None else filename
        if name is None:
            raise CheckpointError(
                f"there is no checkpoint under {self.checkpoints.prefix!r}: ask latest() first"
            )
        return self.checkpoints.load(name)

    def latest(self) -> str | None:
        """The name saved last among those that can be read; None on the first start."""
        return self.checkpoints.latest()

    def wait(self) -> None:
        """Wait until what was saved is durable; raises what went wrong."""
        self.checkpoints.wait()

    def close(self) -> None:
        """Wait; close the pool if it was opened here. Idempotent."""
        try:
            self.checkpoints.close()
        finally:
            if self._opened:
                self.pool.close()

    def _saves(self) -> bool:
        return bool(idist.get_rank() == self.save_on_rank)
