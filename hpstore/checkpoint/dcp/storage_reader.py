"""torch.distributed.checkpoint loads from the pool, and a planner that runs no code on the way.

dcp.load(sd, storage_reader=StorageReader(pool, "runs/gpt/step-100"))
"""

from __future__ import annotations

import io
import os
import secrets
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

import hpstore
from hpstore.checkpoint.catalog.not_found_hint import nothing_at
from hpstore.checkpoint.dcp.dcp_metadata import is_path, manifest_at, torch_metadata
from hpstore.checkpoint.format.backed_bytes import Backed
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import Box, Item
from hpstore.checkpoint.format.segment_plan import Chunk
from hpstore.checkpoint.ranks.forked_child import calm_torch
from hpstore.checkpoint.restore.read_items import RangeRead, bytes_read, reads_for, run_reads
from hpstore.errors import CheckpointError, ObjectNotFound
from hpstore.format.keys import check_key
from hpstore.format.untrusted_bytes import brief
from hpstore.pool.pool import Pool

# Any: torch gives paths, keywords and planner data without types


class StorageReader(TorchStorageReader):
    """Loads what StorageWriter saved. For dcp.load.

    It reads the ranges that the plan asks for, verified and repaired from parity, straight into
    the planner's tensors where they are contiguous on the host.

    Parameters
    ----------
    pool
        A Pool, which stays the caller's, or what hpstore.open takes.
    path
        Key prefix of the checkpoint. dcp.load(checkpoint_id=) replaces it.

    Raises
    ------
    InvalidKey
        `path` is no key.
    """

    def __init__(self, pool: Pool | str | os.PathLike[str], path: str) -> None:
        calm_torch()
        self._pool = pool if isinstance(pool, Pool) else hpstore.open(pool)
        self.path = check_key(str(path))
        self.load_id = secrets.token_hex(8)
        self._manifest: Manifest | None = None
        self._index: dict[Any, Item] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = check_key(os.fspath(checkpoint_id))
        self.load_id = secrets.token_hex(8)
        self._manifest = None

    @property
    def checkpoint_id(self) -> str:
        """The path."""
        return self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        key = manifest_at(self.path, kwargs.get("rank"))
        try:
            data = self._pool.get(key)
        except ObjectNotFound as error:
            raise CheckpointError(nothing_at(self._pool, self.path)) from error
        manifest = Manifest.decode(data, where=key)
        self._manifest = manifest
        return torch_metadata(manifest, where=self.path, load_id=self.load_id)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._index = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all of the plan. Everything is verified before the planner is told of it."""
        if self._manifest is None:
            raise CheckpointError("read_data() before read_metadata()")
        backed = Backed(self._pool, self._manifest.segments)
        reads: list[RangeRead] = []
        blobs: list[tuple[ReadItem, bytearray]] = []
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        for request in plan.items:
            item = self._index[request.storage_index]
            if request.type is LoadItemType.BYTE_IO:
                backed.require(item.name, [item])
                blob = bytearray(item.length)
                blobs.append((request, blob))
                reads += bytes_read(item, blob)
            else:
                target = planner.resolve_tensor(request).detach()
                tensors.append((request, target))
                reads += _tensor_reads(request, item, target)
        run_reads(self._pool, self._manifest.segments, reads)
        for request, target in tensors:
            planner.commit_tensor(request, target)
        for request, blob in blobs:
            planner.load_bytes(request, io.BytesIO(blob))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_path(checkpoint_id)


class SafeLoadPlanner(DefaultLoadPlanner):
    """The default planner, but values that are no tensors are loaded with weights_only=True:
    no code in a checkpoint runs."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = checked_bytes(value, read_item.storage_index.fqn)
        plain = io.BytesIO()
        torch.save(checked, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def checked_bytes(value: io.BytesIO, name: str) -> Any:
    """A value other than a tensor, as torch.save stored it. Raises CheckpointError for data that
    only pickle can read, and for malformed data."""
    try:
        return torch.load(value, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # whatever torch's readers raise
        raise CheckpointError(
            f"{name!r} cannot be loaded without running code, or is damaged: {brief(error)}. "
            "Nothing was changed."
        ) from error


def _tensor_reads(request: ReadItem, item: Item, target: torch.Tensor) -> list[RangeRead]:
    if tuple(target.shape) != tuple(request.lengths):
        raise CheckpointError(
            f"{request.storage_index.fqn!r}: the plan asks for {tuple(request.lengths)}, its "
            f"tensor is {tuple(target.shape)}"
        )
    start = [a + b for a, b in zip(item.box.offsets, request.storage_offsets, strict=True)]
    box = Box(offsets=tuple(start), sizes=tuple(request.lengths))
    if not box.count:
        return []
    dtype = str(target.dtype).removeprefix("torch.")
    wanted = Chunk(name=item.name, dtype=dtype, shape=item.shape, box=box, tensor=target)
    return reads_for(wanted, [item])
