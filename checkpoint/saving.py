"""One save from the staged arena to the committed manifest (PROTOCOL 18, 19)."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpstore.checkpoint.arena import Item
from hpstore.checkpoint.manifest import (
    Manifest,
    Segment,
    attempt_key,
    manifest_key,
    segment_key,
)
from hpstore.checkpoint.retention import Attempt, here
from hpstore.checksum import digest128
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError, HpstoreError, ObjectNotFound, VersionConflict
from hpstore.objects.info import ObjectInfo
from hpstore.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """A committed save. Durable on at least m + 1 devices; `losses_tolerated` further losses."""

    step: int
    key: str  # of the manifest
    bytes: int
    staged_seconds: float  # the trainer's stall
    durable_seconds: float  # from the call of save() to the commit
    losses_tolerated: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class SaveHandle:
    """A save on its way. `staged_seconds` is how long save() kept the trainer."""

    def __init__(self, step: int, staged_seconds: float, future: Future[SaveReport]) -> None:
        self.step, self.staged_seconds = step, staged_seconds
        self.delivered = False  # its error was raised to somebody
        self._future = future

    def done(self) -> bool:
        """Whether it is committed or has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for the commit. Raises what went wrong, TimeoutError when it takes longer."""
        try:
            return self._future.result(timeout)
        finally:
            self.delivered = self._future.done()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSave:
    """What a background save needs; `memory` belongs to it until it is over."""

    step: int
    items: tuple[Item, ...]
    tree: Any  # Any: JSON made by checkpoint/tree.py
    memory: Bytes
    began: float
    staged_seconds: float
    overwrite: bool


def run_save(pool: Pool, prefix: str, staged: StagedSave) -> SaveReport:
    """Write the segment, check it, publish the manifest last: that put is the commit.

    A crash before it leaves the previous step current, a crash after it this one, never a mixture.
    Raises CheckpointError; then nothing of this save is visible and its files are removed.
    """
    nonce = secrets.token_hex(8)
    host, boot, namespace = here()
    attempt = Attempt(
        step=staged.step, nonce=nonce, host=host, boot=boot, pid=os.getpid(), namespace=namespace,
        started_ms=time.time_ns() // 1_000_000,
    )  # fmt: skip
    note, segment = attempt_key(prefix, staged.step, nonce), segment_key(prefix, staged.step, nonce)
    pool.put(note, attempt.encode())
    try:
        written, digests, tolerated = _write_segment(pool, staged, segment)
    except BaseException:
        _remove_quietly(pool, segment)
        _remove_quietly(pool, note)
        raise
    try:
        # from here on the manifest may become visible even if its put fails: the segment is left
        # to garbage collection, which asks the manifests
        report = _commit(pool, prefix, staged, written, digests)
    finally:
        _remove_quietly(pool, note)
    return replace(report, losses_tolerated=min(tolerated, report.losses_tolerated))


def _write_segment(
    pool: Pool, staged: StagedSave, segment: str
) -> tuple[ObjectInfo, tuple[str, ...], int]:
    """Put the segment and make it safe; its info, the items' hashes, the losses it survives."""
    digests = item_digests(staged.memory, staged.items)
    written = pool.put(segment, staged.memory.data)
    if written.size != len(staged.memory):
        raise CheckpointError(f"segment {segment} has {written.size} bytes")
    return written, digests, require_safe(pool, segment)


def _commit(
    pool: Pool, prefix: str, staged: StagedSave, written: ObjectInfo, digests: tuple[str, ...]
) -> SaveReport:
    """Publish the manifest."""
    key = manifest_key(prefix, staged.step)
    manifest = Manifest(
        step=staged.step,
        created_ms=int(written.created * 1000),
        segments=(Segment(key=written.key, size=written.size, version=written.version),),
        items=staged.items,
        digests=digests,
        tree=staged.tree,
    )
    before = _existing(pool, key) if staged.overwrite else None
    try:
        info = pool.put(
            key, manifest.encode(), if_absent=before is None, if_version=before
        )  # fmt: skip
    except VersionConflict as error:
        raise VersionConflict(
            f"step {staged.step} under {prefix!r} is committed already and was not touched; "
            "save(overwrite=True) replaces it",
            key=key,
        ) from error
    return SaveReport(
        step=staged.step,
        key=key,
        bytes=written.size,
        staged_seconds=staged.staged_seconds,
        durable_seconds=time.perf_counter() - staged.began,
        losses_tolerated=info.losses_tolerated,
    )


def _existing(pool: Pool, key: str) -> str | None:
    try:
        return pool.stat(key).version
    except ObjectNotFound:
        return None


def require_safe(pool: Pool, key: str) -> int:
    """PROTOCOL 19: a segment must be readable with one more loss, else it is repaired first.

    Returns the losses it tolerates. Raises CheckpointError.
    """
    info = pool.stat(key)
    if info.losses_tolerated < 1:
        pool.settle(key)
        info = pool.stat(key)
    if info.losses_tolerated < 1:
        raise CheckpointError(
            f"segment {key} would not survive one more lost device; the step is not committed and "
            "the one before it is still current"
        )
    return info.losses_tolerated


def item_digests(memory: Bytes, items: tuple[Item, ...]) -> tuple[str, ...]:
    """xxh3-128 of every item's bytes; shared places are hashed once."""
    known: dict[tuple[int, int], str] = {}
    for item in items:
        place = (item.offset, item.length)
        if place not in known:
            known[place] = digest128(memory[item.offset : item.offset + item.length].data).hex()
    return tuple(known[item.offset, item.length] for item in items)


def _remove_quietly(pool: Pool, key: str) -> None:
    """Best effort; garbage collection finds what is left."""
    try:
        pool.delete(key)
    except (HpstoreError, OSError):
        return


def guarded(action: Callable[[], SaveReport], future: Future[SaveReport]) -> None:
    """Run a save on its thread, its outcome into the future."""
    try:
        future.set_result(action())
    except BaseException as error:  # noqa: BLE001 (raised again by result, save, wait, close)
        future.set_exception(error)


__all__ = ["SaveHandle", "SaveReport", "StagedSave", "guarded", "item_digests", "require_safe",
           "run_save"]  # fmt: skip
