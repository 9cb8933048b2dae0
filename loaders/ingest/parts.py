"""A data set in parts of about one shard, each kept by the journal as soon as it is stored."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from hpstore.errors import ObjectNotFound
from hpstore.loaders.dataset import read_manifest
from hpstore.loaders.fields import Field
from hpstore.loaders.ingest.journal import Journal, Progressed, Skipped
from hpstore.loaders.ingest.ordering import Place
from hpstore.loaders.manifest import DatasetManifest, object_prefix
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
        overwrite: bool,
        metadata: Mapping[str, object],
        shard_bytes: int,
        **options: Any,  # Any: layout, unit_bytes and compression of DatasetWriter
    ) -> None:
        self._pool, self._name, self._journal = pool, name, journal
        self._options = {"fields": fields, "shard_bytes": shard_bytes, "overwrite": overwrite,
                         "metadata": metadata, **options}  # fmt: skip
        self._part_bytes = int(shard_bytes * FILL)
        self.progressed, self.nbytes = start, start.nbytes
        self._place, self._skipped = start.place, list(start.skipped)
        self._held = 0  # bytes of samples in the part being filled
        self._finishing: Future[None] | None = None  # what it saves is read after it is done
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hpstore-ingest-part")
        remove_objects(pool, name, start.writing)
        self._nonces = (new_nonce(), new_nonce())
        self._save(start)
        self._writer = self._fresh()

    @property
    def skipped(self) -> int:
        """Records left out so far."""
        return len(self._skipped)

    def _fresh(self) -> DatasetWriter:
        """The writer of the next part, with the pages that the first one chose."""
        like = self.progressed.parts[0] if self.progressed.parts else None
        return DatasetWriter(
            self._pool, self._name, nonce=self._nonces[0], like=like, origins=True, **self._options
        )

    def _save(self, progressed: Progressed) -> None:
        """Tell the journal, with the nonces of the parts that may have objects before the next."""
        progressed = replace(progressed, writing=self._nonces)
        self._journal.save(progressed)
        self.progressed = progressed

    def write(self, sample: Mapping[str, object], origin: int, nbytes: int) -> None:
        """Append a sample. Raises ConfigError when it does not fit the fields."""
        self._writer.write(sample, origin=origin)
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
        full, state = self._writer, self._state()
        self._nonces, self._held = (self._nonces[1], new_nonce()), 0
        self._finishing = self._executor.submit(self._finish, full, state)
        if not self.progressed.parts:
            self._settle()
        self._writer = self._fresh()

    def _state(self) -> Progressed:
        return replace(
            self.progressed, place=self._place, skipped=tuple(self._skipped), nbytes=self.nbytes
        )

    def _finish(self, full: DatasetWriter, state: Progressed) -> None:
        """Store the rest of a part and tell the journal."""
        part = full.detach()
        self._save(replace(state, parts=(*state.parts, part)))

    def _settle(self) -> None:
        """Wait for the part before; raises what kept it from being finished."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()

    def publish(self) -> DatasetManifest:
        """Finish the last part, and make all of them the data set. Durable on return."""
        self._settle()
        if len(self._writer) or not self.progressed.parts:
            self._finish(self._writer, self._state())
        else:
            self._save(self._state())
        manifest = self._writer.publish_parts(self.progressed.parts)
        self._journal.remove()
        return manifest

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
    """Delete what an unfinished ingest stored; parts that were published meanwhile stay."""
    try:
        manifest = read_manifest(pool, name)
    except ObjectNotFound:
        published = set()
    else:
        published = {part.nonce for part in manifest.parts}
    nonces = [part.nonce for part in found.parts] + list(found.writing)
    remove_objects(pool, name, [nonce for nonce in nonces if nonce not in published])


__all__ = ["PartsWriter", "discard", "new_nonce", "remove_objects"]
