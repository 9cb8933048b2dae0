"""What an unfinished ingest has stored: one small object, `data/<name>/journal`.

Written whole after each part, with the version of the one before as its condition: of two processes
that ingest under one name, one stops. It names the nonce of the part being written, so that a kill
leaves nothing that the next run would not find.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Self

from hpstore.errors import IngestError, IntegrityError, ObjectNotFound, VersionConflict
from hpstore.format.records import seal, unseal
from hpstore.format.untrusted_bytes import MALFORMED, brief, whole
from hpstore.loaders.dataset.dataset_manifest import (
    NEWEST_FORMAT,
    PREFIX,
    DatasetPart,
    format_of,
    journal_key,
)
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.stored_manifests import require_pool
from hpstore.loaders.ingestion.write_order import IngestPosition
from hpstore.pool.pool import Pool

KIND = "ingest"

CHOSEN = "fields_chosen"
"""In a plan: whether the user chose the fields; older journals do not say. Who chooses them later
cannot go on: a record that was bad is good then, and windows that are cut by bytes hold others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A record that was left out."""

    name: str
    origin: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """What is stored, and where to go on."""

    source: str  # fingerprint
    plan: Mapping[str, Any]  # fields, layout, order, ...: what must be equal to go on
    place: IngestPosition = field(default_factory=IngestPosition)
    parts: tuple[DatasetPart, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    nbytes: int = 0  # of samples
    writing: tuple[str, ...] = ()  # nonces of parts that are not in `parts` yet

    @property
    def rows(self) -> int:
        """Samples stored."""
        return sum(part.rows for part in self.parts)

    def encode(self) -> bytes:
        """A sealed record."""
        return seal(
            {
                "kind": KIND,
                "format": _format(self.plan),
                "source": self.source,
                "plan": dict(self.plan),
                "place": self.place.to_json(),
                "parts": [part.to_json() for part in self.parts],
                "skipped": [[s.name, s.origin, s.problem] for s in self.skipped],
                "bytes": self.nbytes,
                "writing": list(self.writing),
            }
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Self:
        """Inverse of encode. Raises IntegrityError, FormatTooNew."""
        body: dict[str, Any] = unseal(data, where=where, newest=NEWEST_FORMAT)
        try:
            return cls(
                source=str(body["source"]),
                plan=dict(body["plan"]),
                place=IngestPosition(**{n: whole(at, n) for n, at in body["place"].items()}),
                parts=tuple(DatasetPart.from_json(part) for part in body["parts"]),
                skipped=tuple(
                    Skipped(name=str(n), origin=whole(o, "a number"), problem=str(p))
                    for n, o, p in body["skipped"]
                ),
                nbytes=whole(body["bytes"], "bytes"),
                writing=tuple(map(str, body["writing"])),
            )
        except MALFORMED as error:
            raise IntegrityError(f"{where}: journal is malformed: {brief(error)}") from error


def _format(plan: Mapping[str, Any]) -> int:
    """That of a manifest with the fields of the plan."""
    return format_of(Field.from_json(raw) for _, *raw in plan.get("fields", ()))


class Journal:
    """The journal of one ingest. One thread at a time."""

    def __init__(self, pool: Pool, name: str) -> None:
        self._pool, self._name, self._key = pool, name, journal_key(name)
        self._version: str | None = None

    def read(self) -> Progressed | None:
        """What an earlier run left; None when there is none."""
        try:
            version = self._pool.stat(self._key).version
            found = Progressed.decode(self._pool.get(self._key), where=self._key)
        except ObjectNotFound:
            return None
        self._version = version
        return found

    def save(self, progressed: Progressed) -> None:
        """Make it what a restart finds. Durable on return.

        Raises IngestError when another process has written the journal since, or removed it.
        """
        try:
            info = self._pool.put(
                self._key,
                progressed.encode(),
                if_absent=self._version is None,
                if_version=self._version,
            )
        except VersionConflict as error:
            if error.maybe_visible:
                raise IngestError(
                    f"the journal of the ingest of data set {self._name!r} was changed meanwhile, "
                    "by another process or by a put of this one whose answer was lost: this one "
                    "stops. Unless another ingests it, the same call goes on from there"
                ) from error
            raise IngestError(self._lost()) from error
        self._version = info.version

    def is_own(self) -> bool:
        """Whether it is there as this one has saved it last: no other ingest has begun."""
        try:
            return self._version == self._pool.stat(self._key).version
        except ObjectNotFound:
            return False

    def removes(self, nonces: Set[str]) -> bool:
        """Whether the ingest whose journal is there removes objects of these parts now."""
        try:
            found = Progressed.decode(self._pool.get(self._key), where=self._key)
        except ObjectNotFound:
            return False
        return not nonces.isdisjoint(found.writing)

    def _lost(self) -> str:
        """Why the journal is not this ingest's any more."""
        if self._version is not None and not self._pool.exists(self._key):
            return (
                f"the ingest of data set {self._name!r} was ended meanwhile by another process, "
                "which finished it or deleted the data set: this one stops"
            )
        return f"another process ingests data set {self._name!r}: this one stops, that one goes on"

    def remove(self) -> None:
        """The ingest is over. Idempotent."""
        if self._version is not None:
            self._pool.delete(self._key)
            self._version = None


def unfinished_ingests(pool: Pool) -> dict[str, Progressed]:
    """Find the ingests that were cut short.

    Parameters
    ----------
    pool
        An open pool.

    Returns
    -------
    dict
        What each of them has stored, and where it goes on (Progressed), by the name of the dataset.

    Raises
    ------
    IntegrityError, FormatTooNew
        A journal is damaged, or was written by a newer hpstore.
    ConfigError
        `pool` is not an open pool.
    """
    found = {}
    for key in require_pool(pool, "unfinished_ingests").list(f"{PREFIX}/"):
        name, _, last = key.removeprefix(f"{PREFIX}/").rpartition("/")
        left = Journal(pool, name).read() if last == "journal" and name else None
        if left is not None:
            found[name] = left
    return found


def mismatch(found: Progressed, wanted: Progressed) -> str:
    """Why an ingest cannot go on where another stopped; "" when it can. Pure."""
    if found.source != wanted.source:
        return f"the source has changed (fingerprint {found.source}, now {wanted.source})"
    for name, value in wanted.plan.items():
        if name != CHOSEN and found.plan.get(name) != value:
            return f"{name} was {found.plan.get(name)}, now it is {value}"
    return ""
