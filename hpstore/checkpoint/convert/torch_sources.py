"""A torch.save file, tensor by tensor: mapped from a disk, or by ranges of an object in a pool."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from hpstore.checkpoint.convert.dcp_sources import SCHEME
from hpstore.checkpoint.convert.torch_files import (
    packed_members,
    read_torch_file,
    require_bounded,
    require_bounded_state,
    tensors_in,
)
from hpstore.checkpoint.restore.fresh_memory import fresh
from hpstore.errors import CheckpointError, HpstoreError, MalformedFile
from hpstore.format.untrusted_bytes import brief
from hpstore.interop.filesystem import PoolFileSystem

# Any: values of a training state


class TorchSource(AbstractContextManager["TorchSource"]):
    """What torch.save wrote. `state` has every value, and every tensor's shape.

    No code of the file runs: it is loaded with weights_only=True. Memory: of a file on a disk, what
    the system keeps of the map; of an object in a pool, one tensor. For one thread.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self._where = os.fspath(place)
        self._file: BinaryIO | None = None
        if self._where.startswith(SCHEME):
            self._file = PoolFileSystem().open(self._where, "rb")
            try:
                self.state = self._lazily(self._file)
            except BaseException:
                self._file.close()
                raise
        else:
            self.state = read_torch_file(Path(self._where), allow_pickle=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def tensor(self, found: torch.Tensor) -> torch.Tensor:
        """A tensor of `state`, with its values, contiguous where it was read from a pool."""
        if self._file is None or found.device.type != "meta":
            return found.detach()
        if not found.numel():
            return torch.empty(found.shape, dtype=found.dtype, device="cpu")
        flat = fresh((_spanned(found),), found.dtype, None)
        self._file.seek(_offset(found) + int(found.storage_offset()) * found.element_size())
        target = flat.view(torch.uint8).numpy().data
        while target:
            count = self._file.readinto(target)  # type: ignore[attr-defined]  # of a ReadStream
            if not count:
                raise MalformedFile(f"{self._where} ends within a tensor")
            target = target[count:]
        return flat.as_strided(found.shape, found.stride()).contiguous()

    def _lazily(self, file: BinaryIO) -> Any:
        """The state with tensors on the meta device, which know where their bytes are."""
        require_bounded(file, self._where)
        if packed := packed_members(file):
            raise MalformedFile(
                f"{self._where}: {packed[0]!r} is compressed, which torch writes nothing"
            )
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            self.state = torch.load(file, map_location="meta", weights_only=True)
        except (HpstoreError, OSError, MemoryError):
            raise
        except Exception as error:  # torch's and pickle's own, of many classes
            raise MalformedFile(
                f"{self._where} holds objects that only pickle can read, which runs code that its "
                f"writer chose, or is malformed: {brief(error)}. Nothing was written"
            ) from error
        require_bounded_state(self.state, size, self._where)
        for found in tensors_in(self.state):
            self._require_inside(found, size)
        return self.state

    def _require_inside(self, found: torch.Tensor, size: int) -> None:
        """Raise unless a tensor is one whose bytes can be read."""
        if found.layout != torch.strided or found.is_quantized:
            raise CheckpointError(
                f"{self._where} holds a sparse or quantized tensor, of which DCP knows nothing. "
                "Nothing was written"
            )
        storage = found.untyped_storage().nbytes()
        end = (int(found.storage_offset()) + _spanned(found)) * found.element_size()
        if found.numel() and (_offset(found) + storage > size or end > storage):
            raise MalformedFile(f"{self._where} says that a tensor lies behind its end")


def _spanned(found: torch.Tensor) -> int:
    """Elements of its storage from a tensor's first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(found.shape, found.stride(), strict=True))


def _offset(found: torch.Tensor) -> int:
    """Where a tensor's storage begins in its file."""
    offset = getattr(found.untyped_storage(), "_checkpoint_offset", None)
    if offset is None:
        raise CheckpointError(
            f"torch {torch.__version__} does not say where a tensor lies in a file: copy the "
            "object to a disk first, or take a newer torch"
        )
    return int(offset)
