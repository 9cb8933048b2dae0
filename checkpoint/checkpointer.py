"""Save and restore training states in a pool."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hpstore.buffers import aligned_array
from hpstore.checkpoint.arena import Arena, Item, plan_items
from hpstore.checkpoint.manifest import Listing, Manifest, checked_step, manifest_key, sort_out
from hpstore.checkpoint.retention import Attempt, attempt_lives, orphans, steps_to_drop
from hpstore.checkpoint.saving import (
    SaveHandle,
    SaveReport,
    StagedSave,
    guarded,
    item_digests,
    run_save,
)
from hpstore.checkpoint.training import apply, collect
from hpstore.checkpoint.tree import Collected, decode_tree, dtype_named, encode_tree
from hpstore.closing import Closing
from hpstore.codec.galois import Bytes
from hpstore.errors import (
    CheckpointError,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    RedundancyError,
)
from hpstore.keys import check_key
from hpstore.pool import Pool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of verifying one step."""

    step: int
    items: int
    bytes: int
    damaged: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every item has the bytes that were saved."""
        return not self.damaged

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}


class Checkpointer(Closing):
    """Checkpoints of one training run under a key prefix. For one process.

    save() stops the trainer for one copy into a reused arena (as large as the state); encoding,
    writing and the commit go on in the background, one save at a time. Call it from one thread.

    keep_last, keep_every: which steps stay (None keeps all); older ones go after a newer one is
    committed without debt. rng: save and restore the RNG states of Python, numpy, torch and CUDA.
    """

    def __init__(
        self,
        pool: Pool,
        prefix: str,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        rng: bool = True,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise CheckpointError(f"{name} must be a whole number of at least 1, or None")
        if keep_every is not None and keep_last is None:
            raise CheckpointError("keep_every says what stays beyond keep_last: set that, too")
        self.pool, self.prefix, self.rng = pool, check_key(prefix), rng
        self.keep_last, self.keep_every = keep_last, keep_every
        self._arena = Arena()
        self._flying: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        if not pool.read_only:
            self.collect_garbage()

    # --- saving -----------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], *, overwrite: bool = False) -> SaveHandle:
        """Save `state` as "`step` steps are completed"; returns once it is staged.

        `state`: a dict of modules, optimizers, objects with state_dict/load_state_dict, tensors,
        numpy arrays, numbers, strings, nested dicts and lists. After the return the tensors may
        change. A save that is still being written is waited for first; what went wrong in it is
        raised here, at wait() or at close(). Nothing is durable until the handle's result().

        Raises CheckpointError naming the entry that cannot be saved.
        """
        self._usable()
        step = checked_step(step)  # before anything is staged
        self.wait()
        began = time.perf_counter()
        found = Collected()
        tree = encode_tree(collect(state, rng=self.rng), "", found)
        items, size = plan_items(found.tensors)
        self._arena.reserve(size)
        self._arena.stage(found.tensors, items)
        staged_seconds = time.perf_counter() - began
        staged = StagedSave(
            step=step,
            items=tuple(items),
            tree=tree,
            memory=self._arena.view(size),
            began=began,
            staged_seconds=staged_seconds,
            overwrite=overwrite,
        )
        future: Future[SaveReport] = Future()
        self._flying = SaveHandle(step, staged_seconds, future)
        self._thread = threading.Thread(
            target=guarded, args=(lambda: self._finish(staged), future), name="hpstore-save"
        )
        self._thread.start()
        return self._flying

    def _finish(self, staged: StagedSave) -> SaveReport:
        report = run_save(self.pool, self.prefix, staged)
        if report.losses_tolerated >= self.pool.parity:  # no debt: older steps may go
            self._retain(report.step)
        return report

    def wait(self) -> None:
        """Wait for the save that is under way; raises what went wrong, unless its handle has."""
        flying, self._flying = self._flying, None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if flying is not None and not flying.delivered:
            flying.result()

    def close(self) -> None:
        """Wait for the last save and release the arena. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._arena = Arena()

    def _usable(self) -> None:
        if self._closed:
            raise CheckpointError("the checkpointer is closed")

    # --- finding ----------------------------------------------------------------------------

    def _listing(self) -> Listing:
        return sort_out(self.prefix, self.pool.list(f"{self.prefix}/"))

    def steps(self) -> list[int]:
        """Committed steps, ascending. Whether they can be read is verify()'s to say."""
        return list(self._listing().steps)

    def manifest(self, step: int) -> Manifest:
        """A step's manifest. Raises CheckpointError when there is none, IntegrityError."""
        key = manifest_key(self.prefix, step)
        try:
            return Manifest.decode(self.pool.get(key), where=key)
        except ObjectNotFound as error:
            known = self.steps()[-8:]
            raise CheckpointError(
                f"no checkpoint of step {step} under {self.prefix!r}; the newest are {known}"
            ) from error

    def latest_valid(self) -> int | None:
        """The newest step whose manifest and segments can be read; None when there is none.

        Walks back past damaged ones, and logs why each was passed over.
        """
        for step in reversed(self.steps()):
            try:
                for segment in self.manifest(step).segments:
                    self.pool.stat(segment.key)
            except (IntegrityError, RedundancyError, CheckpointError, ObjectNotFound) as error:
                _log.warning("checkpoint step %d is passed over: %s", step, error)
            else:
                return step
        return None

    def verify(self, step: int) -> VerifyReport:
        """Read every byte of a step and compare every item with its hash."""
        manifest = self.manifest(step)
        memory = self._read_segment(manifest, aligned_array(manifest.segments[0].size))
        wrong = damaged_items(manifest, memory)
        return VerifyReport(
            step=step, items=len(manifest.items), bytes=manifest.total_bytes, damaged=wrong
        )

    # --- restoring --------------------------------------------------------------------------

    def restore(
        self, state: Mapping[str, Any], step: int | None = None, *, strict: bool = True
    ) -> int | None:
        """Fill `state` from a step, by default the newest valid one; returns the step.

        None when there is no checkpoint. The manifest is the template: a freshly built optimizer
        gets its moments. With `strict`, a recorded key that nobody takes, or a wanted one that was
        not recorded, is a CheckpointMismatch. Every item is verified before anything is filled;
        without a `step`, a damaged checkpoint is passed over (logged) for the one before it.
        """
        self._usable()
        self.wait()
        wanted = [step] if step is not None else list(reversed(self.steps()))
        for candidate in wanted:
            try:
                loaded = self._load_tree(candidate)
            except (IntegrityError, RedundancyError, ObjectNotFound) as error:
                if step is not None:
                    raise
                _log.warning("checkpoint step %d is passed over: %s", candidate, error)
                continue
            apply(state, loaded, strict=strict, rng=self.rng)
            return candidate
        if wanted:
            raise CheckpointError(
                f"none of the {len(wanted)} checkpoints under {self.prefix!r} can be read now. "
                "Nothing was deleted; bring missing devices back and try again."
            )
        return None

    def load(self, step: int, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Tensors of a step by name, without a model; `keys` limits them to names or prefixes."""
        manifest = self.manifest(step)
        memory = self._verified(manifest)

        def wanted(name: str) -> bool:
            return keys is None or any(name == k or name.startswith(f"{k}/") for k in keys)

        found = {i.name: item_tensor(memory, i) for i in manifest.items if wanted(i.name)}
        absent = [
            k for k in keys or () if not any(n == k or n.startswith(f"{k}/") for n in found)
        ]  # fmt: skip
        if absent:
            raise CheckpointError(f"step {step} holds no {absent}")
        return found

    def _load_tree(self, step: int) -> dict[str, Any]:
        """The state of a step as plain nested values, verified."""
        manifest = self.manifest(step)
        memory = self._verified(manifest)
        by_name = {item.name: item for item in manifest.items}

        def tensor(name: str) -> torch.Tensor:
            if name not in by_name:
                raise CheckpointError(f"manifest of step {step} names no item {name!r}")
            return item_tensor(memory, by_name[name])

        tree: dict[str, Any] = decode_tree(manifest.tree, tensor)
        return tree

    def _verified(self, manifest: Manifest) -> Bytes:
        memory = self._read_segment(manifest, aligned_array(manifest.segments[0].size))
        wrong = damaged_items(manifest, memory)
        if wrong:
            raise IntegrityError(
                f"step {manifest.step}: {len(wrong)} items do not match their hash, among them "
                f"{wrong[0]!r}"
            )
        return memory

    def _read_segment(self, manifest: Manifest, memory: Bytes) -> Bytes:
        segment = manifest.segments[0]
        for item in manifest.items:
            if item.offset < 0 or item.length < 0 or item.offset + item.length > segment.size:
                raise IntegrityError(f"step {manifest.step}: item {item.name!r} lies outside")
        if len(memory) and self.pool.read_into(segment.key, memory.data) != segment.size:
            raise IntegrityError(f"segment {segment.key} is shorter than its manifest says")
        return memory

    # --- keeping ----------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Delete a step: its manifest first, then what it alone names."""
        key = manifest_key(self.prefix, step)
        try:
            segments = [segment.key for segment in self.manifest(step).segments]
        except (IntegrityError, RedundancyError):
            segments = []
        self.pool.delete(key)
        for segment in segments:
            try:
                self.pool.delete(segment)
            except ObjectNotFound:
                continue

    def _retain(self, committed: int) -> None:
        """Remove what retention does not keep. Failing at it does not fail the save."""
        try:
            drop = steps_to_drop(
                self.steps(),
                committed=committed,
                keep_last=self.keep_last,
                keep_every=self.keep_every,
            )
            for step in drop:
                self.delete(step)
        except (HpstoreError, OSError) as error:
            _log.warning("retention under %r is postponed: %s", self.prefix, error)

    def collect_garbage(self) -> int:
        """Remove segments that no manifest and no living save names; returns how many.

        Does nothing while some manifest cannot be read: it might name them.
        """
        try:
            first, dead = self._orphans()
            if not first and not dead:
                return 0
            # looked at twice: a listing is no snapshot, and a save may commit while it is made
            second, dead = self._orphans()
        except (HpstoreError, OSError) as error:
            _log.warning("garbage under %r is left: %s", self.prefix, error)
            return 0
        for key in (*(first & second), *dead):
            self._delete_if_there(key)
        return len(first & second)

    def _orphans(self) -> tuple[set[str], list[str]]:
        """Segments that belong to nobody, and notes of dead saves."""
        listing = self._listing()
        living, dead = self._attempts(listing)
        named = {s.key for step in listing.steps for s in self.manifest(step).segments}
        return set(orphans(listing, named, living)), dead

    def _attempts(self, listing: Listing) -> tuple[set[str], list[str]]:
        """Nonces of saves that may still be under way, keys of notes of dead ones."""
        living, dead = set(), []
        now_ms = time.time_ns() // 1_000_000
        for key, (_, nonce) in listing.attempts.items():
            try:
                attempt = Attempt.decode(self.pool.get(key), where=key)
            except (HpstoreError, OSError, KeyError, ValueError):
                living.add(nonce)  # what cannot be read is taken for alive
                continue
            if attempt_lives(attempt, now_ms):
                living.add(nonce)
            else:
                dead.append(key)
        return living, dead

    def _delete_if_there(self, key: str) -> None:
        try:
            self.pool.delete(key)
        except ObjectNotFound:
            return
        except (HpstoreError, OSError) as error:
            _log.warning("%s could not be removed: %s", key, error)


def item_tensor(memory: Bytes, item: Item) -> torch.Tensor:
    """A copy of an item, owned by the caller."""
    dtype = dtype_named(item.dtype)
    if not item.length:
        return torch.empty(item.shape, dtype=dtype)
    flat = torch.from_numpy(memory[item.offset : item.offset + item.length].copy())
    try:
        return flat.view(dtype).view(item.shape)
    except RuntimeError as error:
        raise IntegrityError(f"item {item.name!r} does not have its shape: {error}") from error


def damaged_items(manifest: Manifest, memory: Bytes) -> tuple[str, ...]:
    """Names of items whose bytes do not match their hash."""
    found = item_digests(memory, manifest.items)
    return tuple(
        item.name
        for item, digest, wanted in zip(manifest.items, found, manifest.digests, strict=True)
        if digest != wanted
    )


__all__ = ["Checkpointer", "VerifyReport"]
