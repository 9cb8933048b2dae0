"""More peers: other libraries, and other ways to use torch. Each in its best configuration that we
know; none is a dependency. One that is not installed, or fails here, is reported with the reason.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from hpstore.benchmarks.checkpoint.checkpoint_peers import (
    DcpAsync,
    SaverPeer,
    TorchSave,
    copy_leaves,
    fsync_tree,
)
from hpstore.benchmarks.checkpoint.checkpoint_state import State, flat, leaves

# Any below: these libraries are optional, so their types are not here


def empty_like(state: State) -> State:
    """The same names and shapes, other memory."""
    return {
        name: torch.empty_like(value) if isinstance(value, torch.Tensor) else empty_like(value)
        for name, value in state.items()
    }


class TorchSaveThread(TorchSave):
    """What people write by hand: a copy into buffers that are kept, torch.save in a thread."""

    name = "torch.save-thread"
    configuration = "copy into kept buffers, torch.save(path) + fsync in a thread; torch.load"

    def prepare(self, state: State) -> None:
        self._kept = empty_like(state)
        for tensor in flat(self._kept).values():
            tensor.zero_()
        self._threads = ThreadPoolExecutor(1, "torch-save")

    def write(self, state: State, step: int) -> Callable[[], object]:
        copy_leaves(self._kept, state)
        done = self._threads.submit(lambda: super(TorchSaveThread, self).write(self._kept, step)())
        return done.result

    def close(self) -> None:
        if hasattr(self, "_threads"):
            self._threads.shutdown()


class DcpProcess(DcpAsync):
    """dcp.async_save in a process, which is started before the first save."""

    name = "dcp.process"
    configuration = (
        "dcp.async_save in a process, one DefaultStager kept (shared memory), thread_count=2"
    )
    kind = AsyncCheckpointerType.PROCESS

    def prepare(self, state: State) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        super().prepare(state)
        first, starter = self.directory / "starts-the-process", self._new_stager()
        self._begin({"x": torch.zeros(1)}, FileSystemWriter(first), starter).result()
        starter.close()
        shutil.rmtree(first)


class Torchsnapshot(SaverPeer):
    """Snapshot.async_take, restored in place."""

    name = package = "torchsnapshot"
    configuration = "Snapshot.async_take + fsync; Snapshot.restore into the tensors"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        import torchsnapshot

        self._library: Any = torchsnapshot

    def write(self, state: State, step: int) -> Callable[[], object]:
        app_state = {"state": self._library.StateDict(**state)}
        pending = self._library.Snapshot.async_take(str(self.path(step)), app_state)

        def finish() -> None:
            pending.wait()
            fsync_tree(self.path(step))

        return finish

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        def load(target: State, step: int) -> None:
            found = self._library.StateDict(**target)
            self._library.Snapshot(str(self.path(step))).restore({"state": found})

        return {"restore": load}


def as_numpy(tensor: torch.Tensor) -> Any:
    """The same memory as an array; bf16 as ml_dtypes has it, which these libraries come with."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


class Tensorstore(SaverPeer):
    """One zarr3 array a tensor, one chunk an array; read into the tensors."""

    name = package = "tensorstore"
    syncs_itself = True
    configuration = (
        "zarr3, an array a tensor, one chunk each, not compressed, 8 files at once, file_io_sync; "
        "blocked until the source is copied; read straight into the tensors"
    )
    _context: ClassVar[dict[str, Any]] = {"file_io_concurrency": {"limit": 8}}

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        import ml_dtypes  # noqa: F401 (its dtypes are registered now, not in a measured load)
        import tensorstore

        self._library: Any = tensorstore

    def _opened(self, state: State, step: int, **how: Any) -> Iterator[tuple[Any, Any]]:
        """Futures of stores, and the arrays that belong to them."""
        context = self._library.Context(self._context)
        for number, tensor in enumerate(flat(state).values()):
            array = as_numpy(tensor)
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": f"{self.path(step)}/{number}"},
            }
            if how:
                how |= {"dtype": array.dtype, "shape": array.shape}
            yield self._library.open(spec, open=True, context=context, **how), array

    def write(self, state: State, step: int) -> Callable[[], object]:
        stores = list(self._opened(state, step, create=True))
        written = [store.result().write(array) for store, array in stores]
        for one in written:
            one.copy.result()

        def finish() -> None:
            for one in written:
                one.commit.result()

        return finish

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        def load(target: State, step: int) -> None:
            memory = self._library.array
            reads = [
                memory(array, copy=False, write=True).write(store.result())
                for store, array in list(self._opened(target, step))
            ]
            for read in reads:
                read.result()

        return {"read into": load}


class Orbax(SaverPeer):
    """AsyncCheckpointer over numpy arrays that share the tensors' memory."""

    name = "orbax"
    package = "orbax-checkpoint"
    syncs_itself = True
    configuration = (
        "AsyncCheckpointer(PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)); "
        "PyTreeRestore to numpy, copied into the tensors"
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import orbax.checkpoint

        self._library: Any = orbax.checkpoint

    def _checkpointer(self) -> Any:
        if not hasattr(self, "_open"):
            handler = self._library.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
            self._open = self._library.AsyncCheckpointer(handler)
        return self._open

    def prepare(self, state: State) -> None:
        self._checkpointer()

    def write(self, state: State, step: int) -> Callable[[], object]:
        tree = {name: as_numpy(tensor) for name, tensor in leaves(state)}
        saver = self._checkpointer()
        saver.save(self.path(step), args=self._library.args.PyTreeSave(tree))

        def finish() -> None:
            saver.wait_until_finished()
            fsync_tree(self.path(step))  # cheap: what it has not synced, if anything

        return finish

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        saver = self._checkpointer()

        def load(target: State, step: int) -> None:
            found = saver.restore(self.path(step), args=self._library.args.PyTreeRestore())
            for name, tensor in leaves(target):
                array = found[name]
                if tensor.dtype == torch.bfloat16:
                    tensor.view(torch.int16).copy_(torch.from_numpy(array.view("int16")))
                else:
                    tensor.copy_(torch.from_numpy(array))

        return {"restore": load}

    def close(self) -> None:
        if hasattr(self, "_open"):
            self._open.close()
            del self._open


class TorchCheckpointing(SaverPeer):
    """Meta's torch_checkpointing: CheckpointManager, asynchronous, staging made beforehand."""

    name = package = "torch_checkpointing"
    configuration = (
        "CheckpointManager, async save from shared memory, prewarm_staging, 2 threads, "
        "use_direct_io=False (True fails at unaligned ends) + fsync; load(into=) with mmap"
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        import torch_checkpointing.storage.filesystem

        self._library: Any = torch_checkpointing

    def _manager(self, *, saves: bool) -> Any:
        if not hasattr(self, "_open"):
            library = self._library
            make = library.CheckpointManager.Config
            config = make.with_async_save() if saves else make.with_sync_save()
            storage = library.storage.filesystem.LocalFileSystemStorageConfig
            config.storage_config = storage(use_direct_io=False)
            config.save.writer_config.file_write_max_threads = 2
            self._open = config.build()
        return self._open

    def prepare(self, state: State) -> None:
        manager, first = self._manager(saves=True), self.directory / "starts-the-process"
        manager.save(str(first), {"x": torch.zeros(1)}).result()
        shutil.rmtree(first)
        manager.prewarm_staging(state)
        with manager.lock():
            pass

    def write(self, state: State, step: int) -> Callable[[], object]:
        manager = self._manager(saves=True)
        written = manager.save(str(self.path(step)), state)
        with manager.lock():  # what it tells a trainer to take around its update
            pass

        def finish() -> None:
            written.result()
            fsync_tree(self.path(step))

        return finish

    @property
    def loads(self) -> dict[str, Callable[[State, int], None]]:
        manager = self._manager(saves=False)

        def load(target: State, step: int) -> None:
            manager.load(str(self.path(step)), into=target, strict=True)

        return {"load into": load}

    def close(self) -> None:
        if hasattr(self, "_open"):
            self._open.close()
            del self._open


LIBRARY_PEERS: tuple[type[SaverPeer], ...] = (
    TorchSaveThread,
    DcpProcess,
    Torchsnapshot,
    Tensorstore,
    Orbax,
    TorchCheckpointing,
)
