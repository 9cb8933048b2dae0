"""Copy a committed step into another pool: a save there, of bytes that this pool holds.

PROTOCOL 18 and 19 hold in the other pool as for any save: a note before bytes, the manifest last,
nothing removed that it may name. PROTOCOL 26: what is committed there is what the first pool has
committed at that moment.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from hpstore.checkpoint.catalog.dead_saves import taken_for_dead
from hpstore.checkpoint.catalog.fence_record import FenceRecord, read_fence
from hpstore.checkpoint.catalog.removed_steps import reading_step
from hpstore.checkpoint.catalog.run_index import put_manifest
from hpstore.checkpoint.catalog.segment_safety import existing_version, is_there, require_safe
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import Heartbeat
from hpstore.checkpoint.format.checkpoint_manifest import Manifest, manifest_key, segment_key
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.tiers.hidden_copies import ROLLBACKS, rollback_names
from hpstore.errors import CheckpointError, HpstoreError, ObjectNotFound, VersionConflict
from hpstore.objects.object_info import ObjectInfo

_log = logging.getLogger(__name__)
COPIED = "copied_segments"  # of a manifest's `extra`: the keys that its segments had, in order
Progress = Callable[[int, int], None]  # bytes done, and in all


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """A step in another pool, durable there. It survives `losses_tolerated` further losses."""

    step: int
    tier: str  # name of that pool
    key: str  # of the manifest
    bytes: int  # written for this copy; 0 when it was there
    referenced_bytes: int  # that an earlier copy holds
    seconds: float
    losses_tolerated: int


class CopyStopped(CheckpointError):
    """A copy was given up because it was asked to end. Nothing of it can be read."""


def copy_step(
    source: StepCatalog,
    step: int,
    target: StepCatalog,
    *,
    rate_bytes_per_second: float | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> CopyReport:
    """Commit a step of `source` in `target`, under the same prefix; durable there on return.

    What an earlier copy holds already is not written again. A step of this number that is another
    one is replaced. A crash leaves what was there before. `progress` is called by this thread.

    Raises CheckpointError: there is no such step, or it was removed or saved again meanwhile.
    """
    return _Copy(source, step, target, stop or threading.Event()).run(
        rate_bytes_per_second, progress
    )


class _Copy:
    """One run of copy_step."""

    def __init__(
        self, source: StepCatalog, step: int, target: StepCatalog, stop: threading.Event
    ) -> None:
        self._source, self._target, self._step, self._stop = source, target, step, stop
        self._key = manifest_key(source.prefix, step)
        self._own: list[str] = []  # keys of segments that were put
        self._maybe_visible = False
        self._heartbeat: Heartbeat | None = None

    def run(self, rate: float | None, progress: Progress | None) -> CopyReport:
        began = time.perf_counter()
        manifest, version = self._read()
        before = existing_version(self._target.pool, self._key)
        if before is not None and self._is_same(manifest):
            self._target.settle(self._step)
            info = self._target.pool.stat(self._key)
            return self._report(info, info.losses_tolerated, 0, 0, began)
        earlier = self._earlier() if manifest.objects else {}
        nonce = secrets.token_hex(8)
        self._heartbeat = Heartbeat(
            self._target.pool,
            self._target.prefix,
            self._step,
            nonce,
            "",  # of no session: notes and this step's version in the source decide
            sorted(segment.key for segment in earlier.values()),
            manifest=self._key,
            replaces=before is not None,
        )
        committed = False
        try:
            known = self._referable(earlier)
            with reading_step(self._source, manifest):
                parts, tolerated = self._segments(manifest, nonce, known, rate, progress)
            extra = {
                **manifest.extra,
                COPIED: [segment.key for segment in manifest.segments],
                ROLLBACKS: rollback_names(self._source),
            }
            made = replace(manifest, segments=tuple(parts), extra=extra)
            info = self._publish(made, version, before)
            committed = True
        except VersionConflict:
            if not self._is_same(manifest):
                raise
            info = self._target.pool.stat(self._key)  # another process has copied it
            return self._report(info, info.losses_tolerated, 0, 0, began)
        finally:
            self._end(committed=committed)
        written = sum(s.size for s in parts if not s.key or nonce in s.key)
        referenced = sum(s.size for s in parts) - written
        return self._report(info, min(info.losses_tolerated, tolerated), written, referenced, began)

    def _report(
        self, info: ObjectInfo, tolerated: int, written: int, referenced: int, began: float
    ) -> CopyReport:
        return CopyReport(
            step=self._step,
            tier=self._target.pool.config.name,
            key=self._key,
            bytes=written,
            referenced_bytes=referenced,
            seconds=time.perf_counter() - began,
            losses_tolerated=tolerated,
        )

    def _read(self) -> tuple[Manifest, str]:
        """The step's manifest, and the version that it is."""
        pool = self._source.pool
        try:
            version = pool.stat(self._key).version
            if not self._source.counts(self._step, version):
                raise ObjectNotFound(f"{self._key} is no step", key=self._key)
            return Manifest.decode(pool.get(self._key, version=version), where=self._key), version
        except ObjectNotFound:
            self._source.manifest(self._step)  # says which steps there are
            raise

    def _is_same(self, manifest: Manifest) -> bool:
        """Whether what is there is a copy of this step, whole: not one of another line."""
        try:
            there = self._target.facts(self._step)
            for segment in there.objects:
                self._target.pool.stat(segment.key)
            version = self._target.pool.stat(self._key).version
            if not self._target.counts(self._step, version):
                return False
        except (HpstoreError, OSError):
            return False  # it is replaced
        mine = (manifest.step, manifest.created_ms, manifest.session)
        return (there.step, there.created_ms, there.session) == mine

    def _earlier(self) -> dict[str, Segment]:
        """What earlier copies hold, by the key that it has in the source."""
        found: dict[str, Segment] = {}
        for facts in self._readable():
            keys = facts.extra.get(COPIED)
            if isinstance(keys, list) and len(keys) == len(facts.segments):
                pairs = zip(keys, facts.segments, strict=True)
                found |= {str(key): segment for key, segment in pairs if segment.key}
        return found

    def _readable(self) -> Iterator[Manifest]:
        """What each step of the target records, as far as that can be read."""
        for step in self._target.all():
            try:
                facts = self._target.facts(step)
            except (HpstoreError, OSError) as error:
                _log.info("step %d of %s is not referred to: %s", step, self._target.prefix, error)
                continue
            yield facts

    def _referable(self, earlier: Mapping[str, Segment]) -> dict[str, Segment]:
        """Those that a manifest names now, after the note was put (PROTOCOL 18)."""
        if not earlier:
            return {}
        named = {segment.key for facts in self._readable() for segment in facts.objects}
        return {
            key: segment
            for key, segment in earlier.items()
            if segment.key in named and is_there(self._target.pool, segment.key)
        }

    def _segments(
        self,
        manifest: Manifest,
        nonce: str,
        known: Mapping[str, Segment],
        rate: float | None,
        progress: Progress | None,
    ) -> tuple[list[Segment], int]:
        """The segments as they are in the target, and how many losses they survive."""
        pool, tolerated = self._target.pool, self._target.pool.parity
        total = sum(s.size for s in manifest.objects)
        parts: list[Segment] = []
        done = 0

        def moved(count: int) -> None:
            nonlocal done
            self._require_going_on()
            done += count
            if progress is not None:
                progress(min(done, total), total)

        for number, segment in enumerate(manifest.segments):
            if not segment.key:
                parts.append(segment)
                continue
            there = known.get(segment.key)
            if there is not None and there.size == segment.size:
                tolerated = min(tolerated, require_safe(pool, there.key, version=there.version))
                parts.append(there)
                moved(segment.size)
                continue
            key = segment_key(self._target.prefix, self._step, nonce, number)
            self._own.append(key)
            with self._source.pool.open(segment.key, version=segment.version) as opened:
                info = pool.put(key, opened, rate_bytes_per_second=rate, progress=moved)
            tolerated = min(tolerated, require_safe(pool, key, version=info.version, info=info))
            parts.append(Segment(key=key, size=info.size, version=info.version))
        return parts, tolerated

    def _require_going_on(self) -> None:
        if self._stop.is_set():
            raise CopyStopped(f"the copy of step {self._step} was stopped; it is not committed")

    def _publish(self, made: Manifest, version: str, before: str | None) -> ObjectInfo:
        """Put the manifest: that is the commit."""
        self._require_going_on()
        self._maybe_visible = True
        try:
            info = put_manifest(
                self._target,
                self._step,
                made.encode(),
                before=before,
                look=lambda: self._require_current(version),
            )
        except HpstoreError as error:
            self._maybe_visible = error.maybe_visible
            raise
        self._target.note_facts(made, info.version)
        return info

    def _require_current(self, version: str) -> FenceRecord | None:
        """Under the claim of the manifest's put: raise unless this copy may still be committed. The
        record of the fence there."""
        self._require_going_on()
        try:
            gone = self._heartbeat is None or self._heartbeat.removed()
            same = existing_version(self._source.pool, self._key) == version
            same = same and self._source.counts(self._step, version)
        except (HpstoreError, OSError) as error:
            raise CheckpointError(f"whether this copy is over cannot be seen: {error}") from error
        if gone:
            raise taken_for_dead()
        if not same:
            raise CheckpointError(
                f"step {self._step} was removed or saved again while it was copied; nothing of the "
                "copy can be read"
            )
        return read_fence(self._target.pool, self._target.prefix)

    def _end(self, *, committed: bool) -> None:
        try:
            if not committed and not self._maybe_visible:
                self._target.pool.delete_many(self._own, missing_ok=True)
        except (HpstoreError, OSError) as error:
            _log.info("what a copy has left goes with the next one: %s", error)
        finally:
            self._end_heartbeat(committed=committed)

    def _end_heartbeat(self, *, committed: bool) -> None:
        beating, self._heartbeat = self._heartbeat, None
        if beating is None:
            return
        if self._maybe_visible and not committed:  # the note protects what may yet be read
            self._target.unclear.add(beating.nonce)
            beating.fade()
        else:
            beating.stop()
