"""torch.distributed.checkpoint's metadata as a manifest of ours, and back. JSON, never pickle."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from hpstore.checkpoint.catalog.not_found_hint import use_ours
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import Item, by_name, require_cover
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.state.scalars import dtype_named
from hpstore.checkpoint.state.state_tree import CollectedTensors, Decoding, decode_tree, encode_tree
from hpstore.errors import CheckpointError, HpstoreError, IntegrityError
from hpstore.format.keys import check_key
from hpstore.format.untrusted_bytes import MALFORMED, brief

# Any: planner data and torch's union of metadata types
TREE = {"$": "dcp"}  # such a manifest has no tree of ours: the Checkpointer passes it over
VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch 2.6 has none


def manifest_at(path: str, rank: int | None = None) -> str:
    """Key of the manifest under a path; with `rank` of the rank's own (use_collectives=False)."""
    return f"{path}/manifest" if rank is None else f"{path}/manifest-r{rank:05d}"


def is_path(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint id can be a path in a pool."""
    try:
        check_key(os.fspath(checkpoint_id))
    except HpstoreError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where one write item is; travels to the coordinator, so it is small."""

    segment: Segment
    item: Item


def require_all(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> list[WriteResult]:
    """The results, by item once. Raises CheckpointError unless they are exactly what was planned.

    Stock writers publish what came back; an item lost in a thread is then found on restore.
    """
    found: dict[MetadataIndex, WriteResult] = {}
    for part in results:
        for result in part:
            found.setdefault(result.index, result)
    planned = set()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            planned |= {MetadataIndex(name, chunk.offsets) for chunk in entry.chunks}
        else:
            planned.add(MetadataIndex(name))
    lost, extra = planned - found.keys(), found.keys() - planned
    if lost or extra:
        raise CheckpointError(
            f"the save is not committed: {len(lost)} planned items were not written"
            + (f" (such as {next(iter(lost)).fqn!r})" if lost else "")
            + f", {len(extra)} were written that nobody planned. The checkpoint that was there "
            "before, if any, is unchanged."
        )
    tensors = [r.storage_data.item for r in found.values() if r.index.offset is not None]
    require_cover(tensors, by_name(tensors))
    return list(found.values())


def make_manifest(metadata: Metadata, results: Sequence[WriteResult], *, session: str) -> Manifest:
    """What the coordinator publishes. Sets `storage_data` and `version` of torch's metadata, and
    its dtypes to those of the tensors that were written (under plan caching they may be stale)."""
    segments: list[Segment] = []
    items: list[Item] = []
    for result in results:
        stored: Stored = result.storage_data
        if stored.segment not in segments:
            segments.append(stored.segment)
        items.append(replace(stored.item, segment=segments.index(stored.segment)))
        entry = metadata.state_dict_metadata[result.index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            entry.properties.dtype = dtype_named(stored.item.dtype)
    metadata.storage_data = {
        result.index: item for result, item in zip(results, items, strict=True)
    }
    metadata.version = VERSION
    names = [
        [name, "t" if isinstance(entry, TensorStorageMetadata) else "b"]
        for name, entry in metadata.state_dict_metadata.items()
    ]
    nothing = CollectedTensors()
    planner = encode_tree(metadata.planner_data, "planner_data", nothing)
    if nothing.tensors:
        raise CheckpointError("the planner's data hold tensors; hpstore records plain values only")
    recorded = {"names": names, "planner_data": planner, "torch": torch.__version__}
    return Manifest(
        step=0,
        created_ms=max(0, time.time_ns() // 1_000_000),
        segments=tuple(segments),
        items=tuple(items),
        tree=TREE,
        session=session,
        extra={"dcp": {**recorded, "version": VERSION}},
    )


def torch_metadata(manifest: Manifest, *, where: str, load_id: str) -> Metadata:
    """Inverse of make_manifest; `version` is None where none was recorded, as in torch's older
    checkpoints. Raises IntegrityError, CheckpointError."""
    recorded = manifest.extra.get("dcp")
    if recorded is None:
        raise CheckpointError(
            f"{where!r} was saved by a Checkpointer: {use_ours(where.rpartition('/')[0])}"
        )
    items = by_name(manifest.items)
    entries: dict[str, Any] = {}  # Any: torch's union of metadata types
    storage: dict[MetadataIndex, Item] = {}
    try:
        for name, kind in recorded["names"]:
            if kind == "b":
                entries[name] = BytesStorageMetadata()
                storage[MetadataIndex(name)] = items[name][0]
                continue
            entries[name] = _tensor_entry(items[name])
            storage.update({MetadataIndex(name, i.box.offsets): i for i in items[name]})
        planner = decode_tree(recorded["planner_data"], Decoding(tensor=_no_tensor))
        version = recorded.get("version")
    except MALFORMED as error:
        raise IntegrityError(f"{where}: manifest is malformed: {brief(error)}") from error
    metadata = Metadata(
        state_dict_metadata=entries,
        planner_data=planner,
        storage_data=storage,
        storage_meta=StorageMeta(
            checkpoint_id=where, save_id=manifest.session or None, load_id=load_id
        ),
    )
    metadata.version = None if version is None else str(version)
    return metadata


def _tensor_entry(items: Sequence[Item]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_named(items[0].dtype)),
        size=torch.Size(items[0].shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(i.box.offsets), sizes=torch.Size(i.box.sizes))
            for i in items
        ],
    )


def _no_tensor(name: str) -> torch.Tensor:
    raise IntegrityError(f"planner data refer to a tensor {name!r}")
