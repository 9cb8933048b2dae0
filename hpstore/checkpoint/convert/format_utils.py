"""torch.distributed.checkpoint.format_utils with URLs of pools, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hpstore.checkpoint.convert import dcp_directories
from hpstore.checkpoint.convert.atomic_files import published
from hpstore.checkpoint.convert.dcp_objects import write_dcp_objects
from hpstore.checkpoint.convert.dcp_sources import SCHEME, DcpSource, open_dcp
from hpstore.checkpoint.convert.metadata_pickle import nested
from hpstore.checkpoint.convert.torch_files import tensors_in, write_torch_stream
from hpstore.checkpoint.convert.torch_sources import TorchSource
from hpstore.errors import CheckpointError
from hpstore.interop.filesystem import PoolFileSystem

# Any: values of a training state


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]
) -> None:
    """Write a DCP checkpoint as one torch.save file, as torch's function of this name does.

    One entry at a time is in memory; a file for a pool waits in the file system's spool, on disk
    above 64 MiB. Durable on return. Before that, and after an error, the target is what it was.
    No code in the checkpoint runs: .metadata is not unpickled, values are read as by
    torch.load(weights_only=True), which torch.serialization.safe_globals() widens.

    Parameters
    ----------
    dcp_checkpoint_dir
        A folder, or "hpstore://NAME/path": what dcp.save(checkpoint_id=URL) or a StorageWriter of
        this pool and path saved. Any number of ranks may have saved it.
    torch_save_path
        A file, or "hpstore://NAME/key". One that is there is replaced.

    Raises
    ------
    CheckpointError
        There is no DCP checkpoint, or a value in it needs code to be read.
    IntegrityError
        Its bytes are not what its .metadata says (MalformedFile: that is no such file).
    ConfigError
        There is no pool of this name, or the target's folder is not there.
    """
    source = open_dcp(dcp_checkpoint_dir)
    state, real = _placeholders(source)
    target = os.fspath(torch_save_path)
    if target.startswith(SCHEME):
        with PoolFileSystem().open(target, "w+b") as out:
            write_torch_stream(out, state, real)
        return
    path = Path(target).absolute()
    with (
        published(path, directory=False, force=True, ours=lambda name: True) as part,
        part.open("w+b") as out,
    ):
        write_torch_stream(out, state, real)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Write a torch.save file as a DCP checkpoint, as torch's function of this name does.

    One tensor at a time is in memory. Durable on return; before that the target is what it was.
    The result is torch's own format: dcp.load(state, checkpoint_id=dcp_checkpoint_dir) reads it,
    also by URL. The file is loaded with weights_only=True, so no code in it runs.

    Parameters
    ----------
    torch_save_path
        A file, or "hpstore://NAME/key": a dict. Its keys become text, as always in DCP.
    dcp_checkpoint_dir
        A folder or "hpstore://NAME/path". A DCP checkpoint that is there is replaced; a folder with
        other files, or a path where a StorageWriter or Checkpointer saved, is refused.

    Raises
    ------
    MalformedFile
        It is no torch.save file, or only pickle can read it.
    CheckpointError
        It holds no dict, or tensors that DCP does not know.
    ConfigError
        The target is refused, or there is no pool of this name.
    VersionConflict
        Another process has replaced the target meanwhile; its checkpoint is there.
    """
    with TorchSource(torch_save_path) as source:
        if not isinstance(source.state, Mapping):
            raise CheckpointError(
                f"{os.fspath(torch_save_path)} holds a {type(source.state).__name__}: DCP saves "
                "dicts. Nothing was written"
            )
        target = os.fspath(dcp_checkpoint_dir)
        if target.startswith(SCHEME):
            write_dcp_objects(target, source.state, source.tensor)
            return
        path = Path(target).absolute()
        ours = dcp_directories.is_ours
        with published(path, directory=True, force=True, ours=ours) as part:
            dcp_directories.write_dcp(part, source.state, source.tensor)


def _placeholders(source: DcpSource) -> tuple[dict[str, Any], Callable[[int], torch.Tensor]]:
    """The state with untouched memory in the place of tensors, and what gives the n-th tensor."""
    names: dict[int, str] = {}

    def leaf(name: str) -> Any:
        like = source.like(name)
        if like is None:
            return _unshared(source.value(name))
        made = torch.empty(like[1], dtype=like[0], device="cpu")
        names[id(made)] = name
        return made

    state = nested(source.names, source.paths, leaf)
    tensors = list(tensors_in(state))

    def real(number: int) -> torch.Tensor:
        found = tensors[number]
        name = names.get(id(found))
        return found if name is None else source.tensor(name)

    return state, real


def _unshared(value: Any) -> Any:
    """A value whose tensors, of tuples and such, each have memory of their own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().contiguous()
    if isinstance(value, dict):
        return {name: _unshared(child) for name, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unshared(child) for child in value)
    return value
