"""torchtitan: its CheckpointManager over a pool; steps are written by our StorageWriter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from hpstore.checkpoint import SafeLoadPlanner, StorageReader, StorageWriter
from hpstore.checkpoint.dcp.dcp_metadata import manifest_at
from hpstore.errors import ConfigError
from hpstore.interop import PoolFileSystem
from hpstore.trainers.optional_import import missing

try:
    from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager
    from torchtitan.tools.utils import GarbageCollection
except ModuleNotFoundError as error:
    raise missing("torchtitan", "torchtitan", error) from error

_SCHEME = "hpstore://"
# Any: torchtitan is skipped by mypy


class PoolCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's CheckpointManager whose steps are written by hpstore's StorageWriter.

    `checkpoint=PoolCheckpointManager.Config(enable=True, folder="hpstore://NAME/runs/x")` in a
    trainer's configuration, and its other fields, are torchtitan's. Steps, retention, and saving in
    the background are, too. A step is complete by one put; every byte is verified when it is read,
    and no code in a checkpoint runs.

    Steps that torchtitan's own manager saved below the same URL are loaded as it does. Pools stay
    open until the process ends.

    Raises
    ------
    ConfigError
        `folder` is no such URL, or there is no pool of this name.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's configuration of its manager; `folder` is a URL."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.enable and not self.folder.startswith(_SCHEME):
                raise ConfigError(
                    f"the folder {self.folder!r} is in no pool: write {_SCHEME}NAME/path, or take "
                    "torchtitan's own CheckpointManager"
                )

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a step. torchtitan calls this.

        Parameters
        ----------
        state_dict
            Tensors and values, some of which have a state_dict() themselves.
        checkpoint_id
            The URL of the step.
        async_mode
            DISABLED: durable on return. Else as of dcp.async_save, in a thread or a process.
        enable_garbage_collection
            Collect afterwards, as torchtitan's own does.
        to_hf
            Write Hugging Face's files, which torchtitan does to local folders alone.

        Returns
        -------
        None, Future or AsyncSaveResponse
            What torchtitan's own method returns.

        Raises
        ------
        CheckpointException
            A rank has failed. Nothing is visible, and steps before are untouched.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, to_hf=True)
        place = PoolFileSystem().resolved(checkpoint_id)
        writer: dict[str, Any] = {"storage_writer": StorageWriter(place.mount.pool, place.key)}
        if async_mode == AsyncMode.DISABLED:
            save(state_dict, **writer)
            found = None
        else:
            if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                writer["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
                writer["async_stager"] = self.stager
            found = async_save(state_dict, process_group=self.pg, **writer)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return found

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a step into `state_dict` and the model. torchtitan calls this.

        Parameters
        ----------
        state_dict
            What is filled.
        checkpoint_id
            The URL of the step, or another place that `initial_load_path` names: it is loaded as
            torchtitan does, unless a StorageWriter saved there.
        from_hf, from_quantized
            torchtitan's.

        Raises
        ------
        CheckpointException
            A rank cannot read it.
        """
        place = None
        if checkpoint_id.startswith(_SCHEME) and not from_hf:
            place = PoolFileSystem().resolved(checkpoint_id)
        if place is None or not place.mount.pool.exists(manifest_at(place.key)):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = StorageReader(place.mount.pool, place.key)
        load(state_dict, storage_reader=reader, planner=SafeLoadPlanner())
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
