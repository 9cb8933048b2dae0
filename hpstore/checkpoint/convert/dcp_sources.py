"""A DCP checkpoint, entry by entry: torch's files on a disk or in a pool, or a StorageWriter's."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Protocol

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpstore.checkpoint.convert.dcp_directories import METADATA
from hpstore.checkpoint.convert.metadata_pickle import (
    DcpEntries,
    DcpTensor,
    StoredBytes,
    checked_paths,
    nested,
    read_metadata_pickle,
)
from hpstore.checkpoint.convert.torch_files import require_bounded, require_bounded_state
from hpstore.checkpoint.dcp.dcp_metadata import manifest_at, torch_metadata
from hpstore.checkpoint.dcp.storage_reader import checked_bytes
from hpstore.checkpoint.format.backed_bytes import Backed
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import by_name
from hpstore.checkpoint.restore.fresh_memory import fresh
from hpstore.checkpoint.restore.read_items import bytes_read, run_reads
from hpstore.checkpoint.restore.tensor_stream import TensorStream
from hpstore.checkpoint.state.scalars import dtype_named
from hpstore.errors import CheckpointError, IntegrityError, MalformedFile
from hpstore.format.untrusted_bytes import parsing
from hpstore.interop.filesystem import PoolFileSystem
from hpstore.pool.pool import Pool

# Any: values of a training state

SCHEME = "hpstore://"


class DcpSource(Protocol):
    """Entries by flattened name. Each call reads what it gives; nothing is kept."""

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the save."""

    @property
    def paths(self) -> Mapping[str, tuple[str | int, ...]]:
        """Where names belong in nested dicts; those that are not here are at the top."""

    def like(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """A tensor's dtype and shape; None for another value."""

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, in memory of its own."""

    def value(self, name: str) -> Any:
        """A value that is no tensor."""


def open_dcp(place: str | os.PathLike[str]) -> DcpSource:
    """The checkpoint at a folder or a URL. Raises CheckpointError where there is none."""
    where = os.fspath(place)
    if not where.startswith(SCHEME):
        return DcpFiles(where, lambda name: open(os.path.join(where, name), "rb"))
    files = PoolFileSystem()
    at = files.resolved(where)
    if at.mount.pool.exists(manifest_at(at.key)):
        return DcpManifest(at.mount.pool, at.key)
    return DcpFiles(where, lambda name: files.open(f"{where.rstrip('/')}/{name}", "rb"))


def read_plain_dcp(place: str | os.PathLike[str]) -> dict[str, Any]:
    """All of the checkpoint at a folder or a URL, nested as it was saved, in memory.

    No code of a checkpoint runs. Raises CheckpointError for values that only pickle can read.
    """
    source = open_dcp(place)

    def leaf(name: str) -> Any:
        return source.value(name) if source.like(name) is None else source.tensor(name)

    return nested(source.names, source.paths, leaf)


class DcpFiles:
    """What torch's FileSystemWriter or FsspecWriter wrote.

    Memory: an entry as it is stored, and as a tensor. No code of a checkpoint runs: .metadata is
    not unpickled, and entries are loaded with weights_only=True.
    """

    def __init__(self, where: str, opened: Callable[[str], BinaryIO]) -> None:
        self._where, self._opened = where, opened
        try:
            with opened(METADATA) as file:
                data = file.read()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(
                f"{where} is no DCP checkpoint: it has no {METADATA}. Nothing was written"
            ) from error
        self._entries: DcpEntries = read_metadata_pickle(data, f"{where}/{METADATA}")
        self.names, self.paths = self._entries.names, self._entries.paths

    def like(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """See DcpSource."""
        found = self._entries.tensors.get(name)
        return None if found is None else (found.dtype, found.shape)

    def tensor(self, name: str) -> torch.Tensor:
        """See DcpSource. Raises IntegrityError for bytes that are another tensor."""
        facts: DcpTensor = self._entries.tensors[name]
        if len(facts.parts) == 1:
            return self._checked(name, facts, self._stored(name, facts.parts[0][1]), facts.shape)
        whole = fresh(facts.shape, facts.dtype, None)
        for box, place in facts.parts:
            part = self._checked(name, facts, self._stored(name, place), box.sizes)
            target = whole
            for axis, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                target = target.narrow(axis, at, size)
            target.copy_(part)
        return whole

    def value(self, name: str) -> Any:
        """See DcpSource."""
        return self._stored(name, self._entries.values[name])

    def _checked(
        self, name: str, facts: DcpTensor, found: Any, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        if not isinstance(found, torch.Tensor) or (found.dtype, tuple(found.shape)) != (
            facts.dtype,
            sizes,
        ):
            raise IntegrityError(f"{self._where}: {name!r} is not what its {METADATA} says")
        return found.detach()

    def _stored(self, name: str, place: StoredBytes) -> Any:
        """What torch.save wrote at a place."""
        try:
            with self._opened(place.file) as file:
                size = file.seek(0, io.SEEK_END)
                if place.offset + place.length > size:
                    raise MalformedFile(
                        f"{self._where}: {place.file} has {size} bytes, and {name!r} ends at "
                        f"{place.offset + place.length}"
                    )
                file.seek(place.offset)
                data = io.BytesIO(file.read(place.length))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self._where}: {place.file} is not there, which {name!r} is in"
            ) from error
        return _loaded(data, f"{self._where}: {name!r}", name)


class DcpManifest:
    """What a StorageWriter saved: each item's hash is compared."""

    def __init__(self, pool: Pool, key: str) -> None:
        self._pool = pool
        where = manifest_at(key)
        self._manifest = Manifest.decode(pool.get(where), where=where)
        metadata = torch_metadata(self._manifest, where=key, load_id="")
        self.names = tuple(metadata.state_dict_metadata)
        with parsing(where):
            self.paths = checked_paths(metadata.planner_data)
        self._items = by_name(self._manifest.items)
        self._tensors = {
            name: None
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._stream = TensorStream(pool, self._manifest, list(self._tensors), None)

    def like(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """See DcpSource."""
        if name not in self._tensors:
            return None
        item = self._items[name][0]
        return dtype_named(item.dtype), item.shape

    def tensor(self, name: str) -> torch.Tensor:
        """See DcpSource."""
        return self._stream.take(name)

    def value(self, name: str) -> Any:
        """See DcpSource."""
        item = self._items[name][0]
        backed = Backed(self._pool, self._manifest.segments)
        backed.require(name, [item])
        blob = bytearray(item.length)
        run_reads(self._pool, self._manifest.segments, bytes_read(item, blob))
        return _loaded(io.BytesIO(blob), repr(name), name)


def _loaded(data: io.BytesIO, where: str, name: str) -> Any:
    """What torch.save wrote of an entry, of as many bytes as it may be of."""
    require_bounded(data, where)
    found = checked_bytes(data, name)
    require_bounded_state(found, data.getbuffer().nbytes, where)
    return found
