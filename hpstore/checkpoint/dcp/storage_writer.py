"""torch.distributed.checkpoint saves into the pool.

    dcp.save(sd, storage_writer=StorageWriter(pool, "runs/gpt/step-100"))

Under the path lie one manifest and, by rank, segments whose names carry a nonce: saving the same
path again never touches committed bytes. The manifest's put is the commit.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import hpstore
from hpstore.checkpoint.catalog.dead_saves import end_save, taken_for_dead
from hpstore.checkpoint.catalog.segment_safety import require_safe
from hpstore.checkpoint.catalog.writer_fence import Heartbeat, NoteWatch, SaveAttempt, attempt_lives
from hpstore.checkpoint.dcp.dcp_metadata import (
    Stored,
    is_path,
    make_manifest,
    manifest_at,
    require_all,
)
from hpstore.checkpoint.format.checkpoint_manifest import Manifest, segment_name
from hpstore.checkpoint.format.items import Box, Item, whole
from hpstore.checkpoint.format.pack import Segment, digests_of
from hpstore.checkpoint.format.segment_plan import Chunk, place
from hpstore.checkpoint.save.arena import Arena
from hpstore.checkpoint.save.host_copy import Copier
from hpstore.checkpoint.state.plain_tensors import require_savable
from hpstore.codec.galois import Bytes
from hpstore.errors import (
    CheckpointError,
    HpstoreError,
    ObjectNotFound,
    VersionConflict,
    without_promise,
)
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.format.keys import check_key
from hpstore.pool.pool import Pool
from hpstore.runtime.threads import WorkerThreads
from hpstore.units import GIB

SLICE_BYTES = GIB  # of the staging buffer, where tensors are not already in one block
DENSE = 0.9  # of a block must be wanted for it to be written as it lies
MARKER = b"An hpstore checkpoint. Read it with hpstore.checkpoint.StorageReader.\n"

# Any: torch gives paths, keywords and planner data without types

_log = logging.getLogger(__name__)


class StorageWriter(TorchStorageWriter):
    """Saves under a path of a pool. For dcp.save and dcp.async_save, threads and processes.

    Pickles as the pool's configuration and the path. Durable when dcp.save returns, or when the
    future of dcp.async_save is done.

    Parameters
    ----------
    pool
        A Pool, which stays the caller's, or what hpstore.open takes.
    path
        Key prefix of the checkpoint. dcp.save(checkpoint_id=) replaces it.
    overwrite
        Replace a checkpoint at the path, by the put of the manifest. Else it is a RuntimeError.

    Raises
    ------
    InvalidKey
        `path` is no key.
    CheckpointError
        It is pickled with a pool on memory devices, which another process does not see.
    """

    def __init__(
        self, pool: Pool | str | os.PathLike[str], path: str, *, overwrite: bool = True
    ) -> None:
        self._pool = pool if isinstance(pool, Pool) else hpstore.open(pool)
        self.path, self.overwrite = check_key(str(path)), overwrite
        self.save_id = secrets.token_hex(8)
        self._watch = NoteWatch()
        self._forget()

    def _forget(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._rank: int | None = None
        self._own_manifest = False
        self._arena, self._copier = Arena(), Copier()
        self._heartbeat: Heartbeat | None = None

    def __getstate__(self) -> dict[str, object]:
        if any(device.startswith("memory:") for device in self._pool.config.devices):
            raise CheckpointError(
                "a pool on memory devices cannot be used from another process: nothing of it is "
                "there. Use AsyncCheckpointerType.THREAD."
            )
        return {
            "pool": self._pool,
            "path": self.path,
            "overwrite": self.overwrite,
            "save_id": self.save_id,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._pool, self.path = state["pool"], state["path"]
        self.overwrite, self.save_id = state["overwrite"], state["save_id"]
        self._watch = NoteWatch()
        self._forget()

    # --- torch's protocol, in the order of its calls ------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = check_key(os.fspath(checkpoint_id))
        self.save_id = secrets.token_hex(8)

    def storage_meta(self) -> StorageMeta | None:
        """The path and `save_id`. torch gives it to the planner before set_up_storage_writer()
        makes the nonce, so the nonce cannot be the id."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str:
        """The path."""
        return self.path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._end_attempt()
        self._nonce = secrets.token_hex(8)  # of this save and rank; nothing travels in the plan
        self._rank = kwargs.get("rank")
        self._own_manifest = not kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self.overwrite and self._pool.exists(self._manifest_key()):
            raise RuntimeError(f"Checkpoint already exists at {self.path!r} and overwrite=False")
        if self._own_manifest and self._pool.exists(manifest_at(self.path)):
            raise CheckpointError(
                f"{self.path!r} holds a checkpoint that all ranks saved together, which a load "
                "would find first: save with use_collectives=False to another path"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Durable before the future is set, but not committed."""
        future: Future[list[WriteResult]] = Future()
        own: list[str] = []
        self._begin_attempt()
        try:
            tensors = [i for i in plan.items if i.type is not WriteItemType.BYTE_IO]
            blobs = [i for i in plan.items if i.type is WriteItemType.BYTE_IO]
            results = self._write_tensors(tensors, planner, own)
            results += self._write_blobs(blobs, planner, own)
        except BaseException:
            for key in own:
                self._remove(key)
            self._end_attempt()
            raise
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: check that the results are what was planned and safe, then put the manifest."""
        found = require_all(metadata, results)
        manifest = make_manifest(metadata, found, session=self.save_id)
        for segment in manifest.objects:
            require_safe(self._pool, segment.key, version=segment.version)
        metadata.storage_meta = self.storage_meta()
        key = self._manifest_key()
        before = self._before(key)
        version = before[0] if before is not None else None
        try:
            self._pool.put(
                key,
                manifest.encode(),
                if_absent=before is None,
                if_version=version,
                progress=lambda _: self._require_noted(manifest),
            )
        except VersionConflict:
            self._require_noted(manifest)  # then that is why
            raise
        try:
            self._pool.put(f"{self.path}/.metadata", MARKER)  # for those who look for this file
        except HpstoreError as error:
            raise type(error)(
                f"the checkpoint {self.path} is committed and can be loaded; what torch looks for "
                f"beside it could not be put: {without_promise(error)} Save it again"
            ) from error
        finally:
            self._clean_up(manifest, before[1] if before is not None else None)
            self._end_attempt()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_path(checkpoint_id)

    # --- writing ------------------------------------------------------------------------------

    def _write_tensors(
        self, items: Sequence[WriteItem], planner: SavePlanner, own: list[str]
    ) -> list[WriteResult]:
        chunks = [_chunk(item, planner) for item in items]
        indices = [item.index for item in items]
        block = _one_block(chunks)
        if block is not None:
            memory, placed = block
            return self._put(memory, placed, indices, 0, own)
        results = []
        done = 0
        for part, piece in enumerate(place(chunks, SLICE_BYTES) if chunks else []):
            self._arena.reserve(piece.size)
            self._copier.run(zip(self._arena.targets(piece), piece.tensors, strict=True))
            memory = self._arena.view(piece.size)
            count = len(piece.items)
            results += self._put(memory, piece.items, indices[done : done + count], part, own)
            done += count
        return results

    def _write_blobs(
        self, items: Sequence[WriteItem], planner: SavePlanner, own: list[str]
    ) -> list[WriteResult]:
        """Payloads that the planner has serialised; opaque bytes to us."""
        if not items:
            return []
        blobs = [_payload(planner.resolve_data(item)) for item in items]
        placed, at = [], 0
        for item, blob in zip(items, blobs, strict=True):
            shape = (len(blob),)
            placed.append(
                Item(
                    name=item.index.fqn,
                    dtype="uint8",
                    shape=shape,
                    box=whole(shape),
                    offset=at,
                    length=len(blob),
                )
            )
            at += len(blob)
        memory = np.frombuffer(b"".join(blobs) or b"\0", np.uint8)
        return self._put(memory, placed, [item.index for item in items], 9999, own)

    def _put(
        self,
        memory: Bytes,
        items: Sequence[Item],
        indices: Sequence[Any],
        part: int,
        own: list[str],
    ) -> list[WriteResult]:
        """One segment, hashed while it is written."""
        key = f"{self.path}/{segment_name(self._nonce, self._rank or 0, part)}"
        own.append(key)
        with WorkerThreads(1, "hpstore-hash") as hashing:
            hashes = hashing.submit(digests_of, memory, items)
            info = self._pool.put(key, memory.data)
            digests = hashes.result()
        segment = Segment(key=key, size=info.size, version=info.version)
        return [
            WriteResult(
                index=index,
                size_in_bytes=item.length,
                storage_data=Stored(segment=segment, item=replace(item, digest=digest)),
            )
            for index, item, digest in zip(indices, items, digests, strict=True)
        ]

    # --- committing ---------------------------------------------------------------------------

    def _manifest_key(self) -> str:
        return manifest_at(self.path, (self._rank or 0) if self._own_manifest else None)

    def _begin_attempt(self) -> None:
        """PROTOCOL 18: this rank is writing. The coordinator removes all notes after the commit;
        torch tells the other ranks nothing of it, so theirs end when they find them gone."""
        self._end_attempt()
        key = f"{self.path}/attempts/{self._nonce}"
        beating = Heartbeat(
            self._pool,
            self.path,
            0,
            self._nonce,
            "",
            (),
            key=key,
            manifest=self._manifest_key(),
            replaces=True,
        )
        self._heartbeat = beating
        weakref.finalize(self, beating.fade)

    def _end_attempt(self) -> None:
        beating, self._heartbeat = self._heartbeat, None
        if beating is not None:
            beating.stop()

    def _before(self, key: str) -> tuple[str, Manifest | None] | None:
        """Version and content of the manifest that is there."""
        try:
            version = self._pool.stat(key).version
        except ObjectNotFound:
            return None
        try:
            return version, Manifest.decode(self._pool.get(key), where=key)
        except HpstoreError:
            return version, None  # damaged: it is replaced, its segments are swept as orphans

    def _require_noted(self, manifest: Manifest) -> None:
        """PROTOCOL 18: as SaveJob has it, for the notes of all ranks: theirs end after this."""
        start = f"{self.path}/attempts/"
        noted = {note.removeprefix(start) for note in self._pool.list(start, certain=True)}
        if {_nonce_of(segment.key) for segment in manifest.objects} - noted:
            raise taken_for_dead()

    def _clean_up(self, manifest: Manifest, before: Manifest | None) -> None:
        """After the commit: the replaced checkpoint's segments, notes, and what dead saves left."""
        mine = {_nonce_of(segment.key) for segment in manifest.objects}
        try:
            self._remove_dead_notes(mine)
            # certain, and after the notes went: segments of a manifest that is not listed, or comes
            # now, would look like garbage
            keys = self._pool.list(f"{self.path}/", certain=True)
            named = {key for found in self._manifests(keys) for key in found.segment_keys}
        except (HpstoreError, OSError) as error:
            self._pool.metrics.count("cleanup_postponed_total")
            _log.warning(
                "what is left of earlier saves under %r stays for now: %s", self.path, error
            )
            return
        living = {
            key.rpartition("/")[2]
            for key in keys
            if key.startswith((f"{self.path}/attempts/", f"{self.path}/condemned/"))
        }
        old = before.segment_keys if before is not None else set()
        for key in keys:
            is_segment = key.startswith(f"{self.path}/segment-") and key not in named
            if is_segment and (key in old or _nonce_of(key) not in living):
                self._remove(key)

    def _manifests(self, keys: Sequence[str]) -> list[Manifest]:
        """Of all ranks. Raises for one that cannot be read: it may name anything."""
        return [
            Manifest.decode(self._pool.get(key), where=key)
            for key in keys
            if key == f"{self.path}/manifest" or key.startswith(f"{self.path}/manifest-r")
        ]

    def _remove_dead_notes(self, mine: set[str]) -> None:
        """The notes of this save go, dead saves are ended; notes that stay protect segments."""
        marks = self._pool.list(f"{self.path}/condemned/", certain=True)
        for key in [*self._pool.list(f"{self.path}/attempts/", certain=True), *marks]:
            if key.rpartition("/")[2] in mine:
                self._remove(key)
                continue
            try:
                manifest = self._manifest_of_dead(key, condemned=key in marks)
                if manifest is not None:
                    end_save(self._pool, key, manifest=manifest, replaces=True)
            except (HpstoreError, OSError) as error:
                _log.info("the note %s is left to a later save: %s", key, error)

    def _manifest_of_dead(self, key: str, *, condemned: bool) -> str | None:
        """What a save by its note or mark would commit with; None while it may be alive."""
        try:
            attempt = SaveAttempt.decode(self._pool.get(key), where=key)
            unchanged = self._watch.unchanged_seconds(key, self._pool.stat(key).version)
        except (HpstoreError, OSError):
            return self._manifest_key() if condemned else None
        if not condemned and attempt_lives(attempt, unchanged):
            return None
        return attempt.manifest or self._manifest_key()

    def _remove(self, key: str) -> None:
        try:
            self._pool.delete(key)
        except (HpstoreError, OSError):
            return  # the next save to this path sweeps it


def _chunk(item: WriteItem, planner: SavePlanner) -> Chunk:
    """What a write item stands for: the tensor that the planner gives, at its chunk's place."""
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor) or item.tensor_data is None:
        raise CheckpointError(f"the planner gave no tensor for {item.index.fqn!r}")
    tensor = tensor.detach()
    require_savable(tensor, repr(item.index.fqn))
    sizes = tuple(item.tensor_data.chunk.sizes)
    if tuple(tensor.shape) != sizes:
        raise CheckpointError(
            f"{item.index.fqn!r}: the planner gave {tuple(tensor.shape)} for a chunk of {sizes}"
        )
    return Chunk(
        name=item.index.fqn,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(item.tensor_data.size),
        box=Box(offsets=tuple(item.tensor_data.chunk.offsets), sizes=sizes),
        tensor=tensor,
    )


def _payload(data: object) -> bytes:
    if not isinstance(data, io.BytesIO):
        raise CheckpointError(f"the planner gave {type(data).__name__} where bytes were planned")
    return data.getvalue()


def _one_block(chunks: Sequence[Chunk]) -> tuple[Bytes, list[Item]] | None:
    """The memory that all tensors lie in and their places there, when they fill most of it.

    So a state staged by our Stager is written from where it is.
    """
    tensors = [c.tensor for c in chunks if c.tensor.numel()]
    if not tensors or any(t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
        return None
    storage = tensors[0].untyped_storage()
    base = storage.data_ptr()
    if any(t.untyped_storage().data_ptr() != base or t.is_conj() or t.is_neg() for t in tensors):
        return None
    first = min(t.data_ptr() for t in tensors) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    end = max(t.data_ptr() + t.nbytes for t in tensors)
    if first < base or sum(t.nbytes for t in tensors) < DENSE * (end - first):
        return None
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    memory: Bytes = flat.numpy()[first - base : end - base]
    items = [
        Item(
            name=c.name,
            dtype=c.dtype,
            shape=c.shape,
            box=c.box,
            offset=c.tensor.data_ptr() - first if c.nbytes else 0,
            length=c.nbytes,
        )
        for c in chunks
    ]
    return memory, items


def _nonce_of(key: str) -> str:
    return key.rpartition("/segment-")[2].split("-")[0]
