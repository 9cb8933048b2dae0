"""How others save and load the same state, each in its best documented configuration.

Same durability: where a library does not fsync, its files and directories are fsynced here and that
counts as its durable time. A load ends with all values in tensors that the caller already owns. Two
steps are kept, as hpstore's retention does; what is deleted is deleted outside the measurement.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hpstore.benchmarks.checkpoint.checkpoint_state import State, flat, leaves

KEPT_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One save: how long the trainer stood still, and until when the bytes were durable."""

    blocked_seconds: float
    durable_seconds: float


def fsync_tree(path: Path) -> None:
    """Make everything under a path durable, and its name."""
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    for entry in (*found, path.parent):
        fd = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def copy_leaves(target: State, found: State) -> None:
    """Every value into the tensor that the caller owns. Raises RuntimeError when one is missing."""
    wanted, values = flat(target), flat(found)
    if wanted.keys() != values.keys():
        raise RuntimeError(f"{len(values)} tensors came back of {len(wanted)}")
    for name, tensor in wanted.items():
        tensor.copy_(values[name])


class SaverPeer:
    """One way to save. `loads`: the ways to load what it saved, the first is the usual one.

    Every process creates its own over the same directory.
    """

    name: ClassVar[str] = ""
    package: ClassVar[str] = "torch"
    syncs_itself: ClassVar[bool] = False
    configuration: ClassVar[str] = ""
    last_step: ClassVar[int] = 3  # the steady save: first, one that warms up, this one

    @classmethod
    def version(cls) -> str:
        """Of the package."""
        return importlib.metadata.version(cls.package)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def prepare(self, state: State) -> None:
        """What may be done once before training, not measured."""

    def path(self, step: int) -> Path:
        """Where a step is."""
        return self.directory / f"step-{step}"

    def write(self, state: State, step: int) -> Callable[[], object]:
        """Save; returns when the state may change. The result is called to make it durable."""
        raise NotImplementedError

    def save(self, state: State, step: int) -> Timing:
        """Save a step and keep the last two."""
        began = time.perf_counter()
        finish = self.write(state, step)
        blocked = time.perf_counter() - began
        finish()
        durable = time.perf_counter() - began
        self.forget(step - KEPT_STEPS)
        return Timing(blocked_seconds=blocked, durable_seconds=durable)

    def forget(self, step: int) -> None:
        """Delete a step and wait for the discards that follow, so that no other peer pays."""
        path = self.path(step)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        os.sync()

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        """Ways to fill a state from a step."""
        raise NotImplementedError

    def close(self) -> None:
        """Release memory and threads."""


class TorchSave(SaverPeer):
    """torch.save to a path; torch.load, read and mapped."""

    name = "torch.save"
    configuration = "torch.save(path) + fsync; torch.load with and without mmap=True"

    def write(self, state: State, step: int) -> Callable[[], object]:
        path = self.path(step)
        torch.save(state, path)
        return lambda: fsync_tree(path)

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        def load(target: State, step: int, *, mmap: bool) -> None:
            copy_leaves(target, torch.load(self.path(step), mmap=mmap, weights_only=True))

        return {
            "torch.load": lambda target, step: load(target, step, mmap=False),
            "torch.load mmap": lambda target, step: load(target, step, mmap=True),
        }


class Safetensors(SaverPeer):
    """safetensors.torch.save_file; tensors copied out of the mapped file."""

    name = package = "safetensors"
    configuration = "save_file + fsync; safe_open, get_tensor, copy_"

    def write(self, state: State, step: int) -> Callable[[], object]:
        from safetensors.torch import save_file

        path = self.path(step)
        save_file(flat(state), path)
        return lambda: fsync_tree(path)

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        from safetensors import safe_open

        def load(target: State, step: int) -> None:
            with safe_open(self.path(step), framework="pt") as file:
                for name, tensor in leaves(target):
                    tensor.copy_(file.get_tensor(name))

        return {"safe_open": load}


class DcpSave(SaverPeer):
    """torch.distributed.checkpoint, two writer threads."""

    name = "dcp"
    syncs_itself = True
    threads: ClassVar[int] = 2
    configuration = "dcp.save, FileSystemWriter(thread_count=2), which fsyncs"

    def _writer(self, step: int) -> FileSystemWriter:
        return FileSystemWriter(self.path(step), thread_count=self.threads, sync_files=True)

    def write(self, state: State, step: int) -> Callable[[], object]:
        dcp_save(state, storage_writer=self._writer(step), no_dist=True)
        # the names of a new directory: dcp syncs files, not the directories that hold them
        return lambda: fsync_tree(self.path(step))

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        def load(target: State, step: int) -> None:
            dcp_load(target, checkpoint_id=self.path(step), no_dist=True)

        return {"dcp.load": load}


class DcpOneThread(DcpSave):
    """The default of dcp.save."""

    name = "dcp.1thread"
    threads = 1
    configuration = "dcp.save, FileSystemWriter(thread_count=1), which fsyncs"


class DcpAsync(DcpSave):
    """dcp.async_save with one stager that is kept, so that its memory is reused."""

    name = "dcp.async"
    configuration = (
        "dcp.async_save in a thread, one DefaultStager kept (unpinned, unshared), thread_count=2"
    )
    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD

    def prepare(self, state: State) -> None:
        if not torch.distributed.is_initialized():
            store = HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        self._stager = self._new_stager()

    def _new_stager(self) -> DefaultStager:
        options = StagingOptions(
            use_pinned_memory=False,  # the others need a CUDA device
            use_shared_memory=self.kind is AsyncCheckpointerType.PROCESS,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        return DefaultStager(options)

    def _begin(  # Any: torch's metadata
        self, state: State, writer: FileSystemWriter, stager: DefaultStager
    ) -> Future[Any]:
        future = async_save(
            state, storage_writer=writer, async_stager=stager, async_checkpointer_type=self.kind
        )
        if not isinstance(future, Future):
            raise RuntimeError(f"dcp.async_save returned {type(future).__name__}")
        return future

    def write(self, state: State, step: int) -> Callable[[], object]:
        future = self._begin(state, self._writer(step), self._stager)

        def finish() -> None:
            future.result()
            fsync_tree(self.path(step))

        return finish

    def close(self) -> None:
        if hasattr(self, "_stager"):
            self._stager.close()
            torch.distributed.destroy_process_group()
