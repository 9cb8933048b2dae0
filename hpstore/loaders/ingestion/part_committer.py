"""A dataset in parts of about one shard, each kept by the journal as soon as it is stored."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from hpstore.errors import ConfigError, HpstoreError, ObjectNotFound, TooFewDevices, VersionConflict
from hpstore.loaders.dataset.dataset_manifest import (
    DatasetManifest,
    DatasetPart,
    check_dataset_name,
    manifest_key,
    nonce_of,
)
from hpstore.loaders.dataset.dataset_versions import read_manifest, withdraw_parts
from hpstore.loaders.dataset.fields import Field, stored_fields
from hpstore.loaders.dataset.page_compression import checked_compression
from hpstore.loaders.dataset.publish_dataset import begun_anew, joined_content, lost_object, publish
from hpstore.loaders.dataset.record_layout import group_fields
from hpstore.loaders.dataset.stored_manifests import kept_nonces, manifest_at
from hpstore.loaders.ingestion.ingest_append import appended
from hpstore.loaders.ingestion.ingest_journal import Journal, Progressed, Skipped
from hpstore.loaders.ingestion.source_rows import Column
from hpstore.loaders.ingestion.value_sizes import sample_bytes
from hpstore.loaders.ingestion.write_order import IngestPosition, PlacedRows
from hpstore.loaders.writer.dataset_writer import checked_batch, checked_sample
from hpstore.loaders.writer.part_writer import PartOptions, PartWriter, new_nonce
from hpstore.membership.members import check_unit
from hpstore.pool.pool import Pool
from hpstore.runtime.threads import WorkerThreads

_log = logging.getLogger(__name__)
FILL = 0.9
"""Of a shard's bytes: a part ends there, so that padding does not begin another, tiny shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The dataset to be: options as those of DatasetWriter. `seed` is None when not shuffled."""

    pool: Pool
    name: str
    fields: Mapping[str, Field]
    layout: str
    shard_bytes: int
    unit_bytes: int | None
    compression: str | None
    seed: int | None
    metadata: Mapping[str, object]
    replaces: str | None  # version of the manifest that it may replace
    base: DatasetManifest | None = None  # what is appended to
    label: str | None = None  # of the version that appending makes


class PartsWriter:
    """Writes parts one after another: each is finished by a thread while the next one is filled.

    A context manager; one thread at a time. After an error or a kill the journal names what is
    finished and the nonces of what was not, which the next run removes. `progressed`: what the
    journal holds.
    """

    def __init__(self, target: Target, start: Progressed, journal: Journal) -> None:
        self._target, self._journal = target, journal
        stored = stored_fields(target.fields)
        layout, records = group_fields(stored, target.layout)
        compression = checked_compression(target.compression)
        if target.unit_bytes is not None:
            width = target.pool.data + target.pool.parity
            check_unit(target.pool.config, width, target.unit_bytes)
        self._options = PartOptions(
            fields=stored,
            records=records,
            shard_bytes=target.shard_bytes,
            unit_bytes=target.unit_bytes,
            alike=False,
            compression=compression,
        )
        self._schema = DatasetManifest(
            fields=target.fields,
            layout=layout,
            data=target.pool.data,
            compression=compression,
            shuffle_seed=target.seed,
            metadata=json.loads(json.dumps(dict(target.metadata))),
            parts=(),
            content="",
        )
        self.progressed, self.nbytes = start, start.nbytes
        self._kept = bool(start.parts)  # of an earlier run
        self._place, self._skipped = start.place, list(start.skipped)
        self._held = 0  # bytes of samples in the part being filled
        self._finishing: Future[None] | None = None  # what it saves is read after it is done
        self._executor = WorkerThreads(1, "hpstore-ingest-part")
        self._nonces = (new_nonce(), new_nonce())
        self._made = set(self._nonces)
        self._claim(start)
        base = target.base
        known = start.parts or (base.parts if base is not None else ())
        self._writer: PartWriter | None = self._fresh(known[0].units if known else ())

    @property
    def skipped(self) -> int:
        """Records left out so far."""
        return len(self._skipped)

    def _fresh(self, units: Sequence[int]) -> PartWriter:
        """The writer of the next part, with the pages that the first one chose."""
        return PartWriter(
            self._target.pool,
            self._target.name,
            self._options,
            ordered=self._target.seed is not None,
            nonce=self._nonces[0],
            units=units,
        )

    def _current(self) -> PartWriter:
        if self._writer is None:
            raise AssertionError("a part failed to be finished; nothing more can be written")
        return self._writer

    def _claim(self, start: Progressed) -> None:
        """Tell the journal, then remove what an earlier run left: another process that still writes
        it stops at its next word there.
        """
        target, before = self._target, None
        if target.replaces is not None:
            before, _ = manifest_at(target.pool, target.name, manifest_key(target.name))
        try:
            self._save(start, *start.writing)
        except TooFewDevices:
            if start.parts or not start.writing:
                raise
            # a full pool takes tombstones, nothing else: there is nothing in the journal to lose
            _log.warning(
                "the pool is full: what an earlier ingest of %r stored is removed before this one "
                "is in the journal; were it killed now, remove_orphans would find it",
                self._target.name,
            )
            self._journal.remove()
            discard(target.pool, target.name, start.writing, before)
            self._save(start)
        else:
            discard(target.pool, target.name, start.writing, before)

    def _save(self, progressed: Progressed, *gone: str) -> None:
        """Tell the journal, with the nonces of the parts that may have objects before the next, and
        of what is about to be removed.
        """
        progressed = replace(progressed, writing=(*self._nonces, *gone))
        self._journal.save(progressed)
        self.progressed = progressed

    def write(self, sample: Mapping[str, object], origin: int) -> str:
        """Append a sample; returns why not when it does not fit the fields."""
        try:
            batch, ragged = checked_sample(self._target.fields, sample, "the sample")
        except ConfigError as error:
            return str(error)
        self._current().append(batch, ragged, 1, np.array([origin], np.int64))
        nbytes = sample_bytes(sample)
        self._held += nbytes
        self.nbytes += nbytes
        return ""

    def write_rows(self, columns: Mapping[str, Column], placed: PlacedRows) -> bool:
        """Append all of these records; False, and nothing is appended, unless all fit the fields.

        Parts end behind the same records as with write() and took().
        """
        try:
            batch, ragged, count = checked_batch(self._target.fields, columns, "the sample")
        except ConfigError:
            return False
        if count != len(placed.rows):
            return False
        ends = np.cumsum(placed.rows.nbytes)
        done, written = 0, 0
        while done < count:
            room = FILL * self._target.shard_bytes - self._held
            high = min(count, 1 + int(np.searchsorted(ends, written + room)))
            self._current().append(
                {name: values[done:high] for name, values in batch.items()},
                {name: values[done:high] for name, values in ragged.items()},
                high - done,
                placed.rows.origins[done:high],
            )
            nbytes = int(ends[high - 1]) - written
            self._held += nbytes
            self.nbytes += nbytes
            done, written = high, int(ends[high - 1])
            self.took(placed.after(high))
        return True

    def skip(self, skipped: Skipped) -> None:
        """Leave a record out."""
        self._skipped.append(skipped)

    def took(self, after: IngestPosition) -> None:
        """The record before this place is done with; a part that is full is finished."""
        self._place = after
        if self._held >= FILL * self._target.shard_bytes:
            self._turn()

    def _turn(self) -> None:
        """Finish the part by a thread, and go on with the next one."""
        full, state = self._full()
        units = full.chosen_units()
        self._finishing = self._executor.submit(self._finish, full, state)
        self._writer = self._fresh(units)

    def _full(self) -> tuple[PartWriter, Progressed]:
        """The part that is written, once the one before is finished, and the state behind it."""
        self._settle()
        full, self._writer = self._current(), None  # from now on the journal may name its objects
        state = self._state()
        self._nonces, self._held = (self._nonces[1], new_nonce()), 0
        self._made.update(self._nonces)
        return full, state

    def _state(self) -> Progressed:
        return replace(
            self.progressed, place=self._place, skipped=tuple(self._skipped), nbytes=self.nbytes
        )

    def _finish(self, full: PartWriter, state: Progressed) -> None:
        """Store the rest of a part and tell the journal."""
        self._save(replace(state, parts=(*state.parts, full.finish())))

    def _settle(self) -> None:
        """Wait for the part before; raises what kept it from being finished."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()

    def publish(self) -> DatasetManifest:
        """Finish the last part, and make all of them the dataset, or append them to it. Durable on
        return."""
        self._settle()
        target, state = self._target, self._state()
        if self._current().rows or not (state.parts or target.base):
            full, state = self._full()
            last = self._executor.submit(full.finish).result()
            state = replace(state, parts=(*state.parts, last))
        if target.base is not None:
            return self._append(target.base, state)
        parts = state.parts
        alone = len(parts) == 1 and not self._kept  # then it is there: this run has stored it
        try:
            joined = parts[0].content if alone else self._joined(parts)
        except ObjectNotFound:
            self._save(state)  # says so where another process removed them
            raise
        manifest = replace(self._schema, parts=parts, content=joined)
        # raises if another process has started over, which removes these parts
        self._save(state)
        key = manifest_key(target.name)
        manifest = publish(
            target.pool,
            target.name,
            key,
            manifest,
            version=target.replaces,
            stays=lambda: self._stays(parts),
        )
        self._end_journal()
        return manifest

    def _joined(self, parts: Sequence[DatasetPart]) -> str:
        return joined_content(self._target.pool, self._target.name, self._schema, parts)

    def _append(self, base: DatasetManifest, state: Progressed) -> DatasetManifest:
        """A new version with the parts of `state`; without any, what is there."""
        target, manifest, parts = self._target, base, state.parts
        self._save(state)  # as above
        if parts:
            manifest = appended(target.pool, target.name, target.fields, parts, label=target.label)
            if not self._stays(parts):
                withdraw_parts(target.pool, target.name, _nonces(parts))
                raise begun_anew(target.name, manifest_key(target.name))
        self._end_journal()
        return manifest

    def _stays(self, parts: Sequence[DatasetPart]) -> bool:
        """Whether what was just published stays: no other ingest removes its objects now, as its
        journal would say, and none has, or has taken it back (PROTOCOL 25)."""
        pool, name, made = self._target.pool, self._target.name, _nonces(parts)
        try:
            if self._journal.removes(made) or not made <= _published(pool, name):
                return False
            return lost_object(pool, name, parts) is None
        except HpstoreError as error:
            error.maybe_visible = True
            raise

    def _end_journal(self) -> None:
        """Once published. Best effort: the next ingest sees that its parts are published."""
        try:
            if self._journal.is_own():  # else another ingest has begun behind this one
                self._journal.remove()
        except (HpstoreError, OSError) as error:
            _log.warning(
                "data set %r is published; the journal of its ingest stays until the next one: %s",
                self._target.name,
                error,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is under way any more. After an error, parts that were finished are kept."""
        self._executor.shutdown(wait=True)
        if error is None:
            return
        if self._writer is not None:
            self._writer.remove()
        self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        """Where another process took the ingest over, or removed it, remove what it does not know
        of, as far as that goes now: a journal of this one names the rest for the next run."""
        pool, name = self._target.pool, self._target.name
        try:
            found = Journal(pool, name).read()
            if found is None or not self._made.intersection(found.writing[:1]):
                known = {part.nonce for part in found.parts} if found is not None else set()
                discard(pool, name, self._made - known)
        except (HpstoreError, OSError) as error:
            _log.warning("what an ingest of %r stored stays until remove_orphans: %s", name, error)


def replaceable(pool: Pool, name: str, *, overwrite: bool) -> str | None:
    """Version of the manifest that is there. Raises VersionConflict unless it may go."""
    try:
        version = pool.stat(manifest_key(check_dataset_name(name))).version
    except ObjectNotFound:
        return None
    if not overwrite:
        raise VersionConflict(
            f"data set {name!r} exists; it is unchanged. overwrite=True (--overwrite) replaces it"
        )
    return version


def _nonces(parts: Sequence[DatasetPart]) -> set[str]:
    return {nonce for part in parts for nonce in part.nonces}


def discard(
    pool: Pool, name: str, nonces: Iterable[str], before: DatasetManifest | None = None
) -> None:
    """Delete what unfinished ingests stored under these nonces; what is published stays. Their
    owner looks into the journal once it has published; what it published before it was killed, and
    before it looked, is withdrawn, for the dataset that was there `before` (PROTOCOL 25)."""
    gone = set(nonces)
    if not gone:
        return
    gone -= _published(pool, name)
    for key in pool.list(f"data/{name}/"):
        if nonce_of(name, key) in gone:
            with contextlib.suppress(ObjectNotFound):
                pool.delete(key)
    if gone & _published(pool, name):
        withdraw_parts(pool, name, gone, before)


def is_published(pool: Pool, name: str, found: Progressed) -> bool:
    """Whether the run that left this journal had published, and was killed right after."""
    parts = {part.nonce for part in found.parts}
    return bool(parts) and parts <= _published(pool, name)


def earlier_run(
    pool: Pool, name: str, journal: Journal, *, resume: bool
) -> tuple[Progressed | None, tuple[str, ...]]:
    """What an earlier run left to go on with, and the nonces of what it left to remove: none that
    is published, as the journal will say that they are removed."""
    found = journal.read()
    if found is None:
        return None, ()
    stored = (*(part.nonce for part in found.parts), *found.writing)
    if not resume or is_published(pool, name, found):
        published = _published(pool, name)
        return None, tuple(nonce for nonce in stored if nonce not in published)
    # without parts there is nothing to go on with, so nothing to refuse
    return (found, found.writing) if found.parts else (None, stored)


def _published(pool: Pool, name: str) -> set[str]:
    """Nonces that the dataset of this name and its versions consist of."""
    try:
        newest = read_manifest(pool, name).nonces
    except ObjectNotFound:
        newest = set()
    return newest | kept_nonces(pool, name)
