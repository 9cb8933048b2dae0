"""A data set in parts of about one shard, each kept by the journal as soon as it is stored."""

from __future__ import annotations

import contextlib
import secrets
import time
from array import array
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from hpstore.errors import ObjectNotFound
from hpstore.loaders.dataset import read_manifest
from hpstore.loaders.fields import Field
from hpstore.loaders.ingest.journal import Journal, Progressed, Skipped
from hpstore.loaders.ingest.ordering import Place
from hpstore.loaders.layout import Int64s
from hpstore.loaders.manifest import (
    ORDER,
    DatasetManifest,
    column_key,
    joined_content,
    manifest_key,
    object_prefix,
)
from hpstore.loaders.side import object_hash
from hpstore.loaders.streams import COLUMN_ROWS
from hpstore.loaders.writer import DatasetWriter
from hpstore.pool import Pool

FILL = 0.9
"""Of a shard's bytes: a part ends there, so that padding does not begin another, tiny shard."""


class PartsWriter:
    """Writes parts one after another: each is finished by a thread while the next one is filled.

    A context manager; one thread at a time. After an error or a kill the journal names what is
    finished and the nonces of what was not, which the next run removes. `progressed`: what the
    journal holds.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        fields: Mapping[str, Field],
        start: Progressed,
        journal: Journal,
        *,
        seed: int | None,
        overwrite: bool,
        metadata: Mapping[str, object],
        shard_bytes: int,
        **options: Any,  # Any: layout, unit_bytes and compression of DatasetWriter
    ) -> None:
        self._pool, self._name, self._journal, self._seed = pool, name, journal, seed
        self._options = {"fields": fields, "shard_bytes": shard_bytes, "overwrite": overwrite,
                         "metadata": metadata, **options}  # fmt: skip
        self._part_bytes = int(shard_bytes * FILL)
        self.progressed, self.nbytes = start, start.nbytes
        self._place, self._skipped = start.place, list(start.skipped)
        self._origins = array("q")  # of the samples in the part being filled
        self._held = 0  # bytes of samples in the part being filled
        self._finishing: Future[None] | None = None  # what it saves is read after it is done
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hpstore-ingest-part")
        remove_objects(pool, name, start.writing)
        self._nonces = (new_nonce(), new_nonce())
        self._save(start)
        self._writer = self._fresh()
        self._replaces = self._writer.replaces

    @property
    def skipped(self) -> int:
        """Records left out so far."""
        return len(self._skipped)

    def _fresh(self) -> DatasetWriter:
        """The writer of the next part, with the pages that the first one chose."""
        like = self.progressed.parts[0] if self.progressed.parts else None
        return DatasetWriter(
            self._pool, self._name, nonce=self._nonces[0], like=like, **self._options
        )

    def _save(self, progressed: Progressed) -> None:
        """Tell the journal, with the nonces of the parts that may have objects before the next."""
        progressed = replace(progressed, writing=self._nonces)
        self._journal.save(progressed)
        self.progressed = progressed

    def write(self, sample: Mapping[str, object], origin: int, nbytes: int) -> None:
        """Append a sample. Raises ConfigError when it does not fit the fields."""
        self._writer.write(sample)
        self._origins.append(origin)
        self._held += nbytes
        self.nbytes += nbytes

    def skip(self, skipped: Skipped) -> None:
        """Leave a record out."""
        self._skipped.append(skipped)

    def took(self, after: Place) -> None:
        """The record before this place is done with; a part that is full is finished."""
        self._place = after
        if self._held >= self._part_bytes:
            self._turn()

    def _turn(self) -> None:
        """Finish the part by a thread, and go on with the next one.

        The first part is waited for: all take its pages.
        """
        self._settle()
        full, origins, state = self._writer, self._origins, self._state()
        self._nonces = (self._nonces[1], new_nonce())
        self._origins, self._held = array("q"), 0
        self._finishing = self._executor.submit(self._finish, full, origins, state)
        if not self.progressed.parts:
            self._settle()
        self._writer = self._fresh()

    def _state(self) -> Progressed:
        return replace(
            self.progressed, place=self._place, skipped=tuple(self._skipped), nbytes=self.nbytes
        )

    def _finish(self, full: DatasetWriter, origins: array[int], state: Progressed) -> None:
        """Store the rest of a part and tell the journal."""
        part = full.detach()
        hashes = self._put_origins(full.nonce, np.frombuffer(origins, np.int64))
        part = replace(part, columns={**part.columns, ORDER: hashes})
        self._save(replace(state, parts=(*state.parts, part)))

    def _put_origins(self, nonce: str, origins: Int64s) -> tuple[str, ...]:
        """Store which record of the source each sample was, as a column; returns its hashes."""
        hashes = []
        for cut, first in enumerate(range(0, len(origins), COLUMN_ROWS)):
            raw = origins[first : first + COLUMN_ROWS].astype("<i8").view(np.uint8)
            self._pool.put(column_key(self._name, nonce, ORDER, cut), raw)
            hashes.append(object_hash(raw.data))
        return tuple(hashes)

    def _settle(self) -> None:
        """Wait for the part before; raises what kept it from being finished."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()

    def publish(self) -> DatasetManifest:
        """Finish the last part, and make all of them the data set. Durable on return."""
        self._settle()
        if len(self._writer) or not self.progressed.parts:
            self._finish(self._writer, self._origins, self._state())
        else:
            self._save(self._state())
        manifest = self._manifest()
        self._pool.put(
            manifest_key(self._name), manifest.encode(),
            if_absent=self._replaces is None, if_version=self._replaces,
        )  # fmt: skip
        self._journal.remove()
        return manifest

    def _manifest(self) -> DatasetManifest:
        writer, parts = self._writer, self.progressed.parts
        return DatasetManifest(
            fields=writer.fields, layout=writer.layout, data=self._pool.data,
            compression=writer.compression, shuffle_seed=self._seed, metadata=writer.metadata,
            parts=parts, content=joined_content(parts), created_ms=time.time_ns() // 1_000_000,
        )  # fmt: skip

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
        if error is not None:
            self._writer.abandon()


def new_nonce() -> str:
    """Names the objects of one part."""
    return secrets.token_hex(8)


def remove_objects(pool: Pool, name: str, nonces: Iterable[str]) -> None:
    """Delete what was stored under these nonces."""
    for nonce in nonces:
        for key in pool.list(object_prefix(name, nonce) + "/"):
            with contextlib.suppress(ObjectNotFound):
                pool.delete(key)


def discard(pool: Pool, name: str, found: Progressed) -> None:
    """Delete what an unfinished ingest stored; what was published meanwhile stays."""
    kept = _published(pool, name)
    nonces = [part.nonce for part in found.parts] + list(found.writing)
    remove_objects(pool, name, [nonce for nonce in nonces if nonce not in kept])


def is_published(pool: Pool, name: str, found: Progressed) -> bool:
    """Whether the run that left this journal had published, and was killed right after."""
    parts = {part.nonce for part in found.parts}
    return bool(parts) and parts <= _published(pool, name)


def _published(pool: Pool, name: str) -> set[str]:
    """Nonces that the data set of this name consists of."""
    try:
        return {part.nonce for part in read_manifest(pool, name).parts}
    except ObjectNotFound:
        return set()


__all__ = ["PartsWriter", "discard", "is_published", "new_nonce", "remove_objects"]
