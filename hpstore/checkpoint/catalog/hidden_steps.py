"""Steps that a rollback has hidden: their records, the copies of their manifests, what these name.

A step is hidden when its manifest lies here and no more where steps are committed. Every reader, of
older versions too, then takes it for a step that was deleted; its key is free to be saved again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from hpstore.checkpoint.format.checkpoint_manifest import STEP_DIGITS, Manifest, checked_step
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.format.untrusted_bytes import whole as whole_number
from hpstore.pool.pool import Pool

_NAME = re.compile(r"[0-9a-f]{16}")
_COPY = re.compile(rf"([0-9a-f]{{16}})/step-(\d{{{STEP_DIGITS}}})")
_RECORD = re.compile(r"([0-9a-f]{16})/record")


class RollbackState(StrEnum):
    """How far a rollback is. Moved by conditional puts: one process decides what becomes of it."""

    HIDDEN = "hidden"
    RETURNING = "returning"  # it is being taken back
    RETURNED = "returned"
    EXPIRED = "expired"  # what it has hidden is being removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A rollback and what it has hidden.

    `step`: the one that the run went back to. `hidden`: the later ones. `until_ms`: they are
    removed after this, milliseconds since 1970. `protections`: of hidden steps, by name.
    """

    name: str
    step: int
    hidden: tuple[int, ...]
    created_ms: int
    until_ms: int
    protections: Mapping[str, int] = field(default_factory=dict)
    state: RollbackState = RollbackState.HIDDEN

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of_dict(cls, body: Mapping[str, Any]) -> Rollback:
        """Inverse of as_dict. Raises what malformed bodies raise."""
        name = str(body["name"])
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is no name of a rollback")
        return cls(
            name=name,
            step=checked_step(body["step"]),
            hidden=tuple(map(checked_step, body["hidden"])),
            created_ms=whole_number(body["created_ms"], "created_ms"),
            until_ms=whole_number(body["until_ms"], "until_ms"),
            protections={str(n): checked_step(s) for n, s in body["protections"].items()},
            state=RollbackState(body["state"]),
        )

    def encode(self) -> bytes:
        """A sealed record; bytes in docs/format.md."""
        return seal({"format": FORMAT, "kind": "rollback", **asdict(self)})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Rollback:
        """Inverse of encode. Raises IntegrityError."""
        with parsing(where):
            body: Any = unseal(data, where=where)  # Any: JSON
            return cls.of_dict(body)


def record_key(prefix: str, name: str) -> str:
    """Where the record of a rollback is."""
    return f"{prefix}/rolled-back/{name}/record"


def copy_key(prefix: str, name: str, step: int) -> str:
    """Where the manifest of a step that it has hidden is."""
    return f"{prefix}/rolled-back/{name}/step-{step:0{STEP_DIGITS}d}"


class HiddenSteps:
    """What lies hidden under a prefix. Thread-safe."""

    def __init__(self, pool: Pool, prefix: str) -> None:
        self._pool, self._start = pool, f"{prefix}/rolled-back/"
        self.damaged: set[str] = set()  # keys of records that cannot be read: logged once
        self._named: dict[str, set[str]] = {}  # by copy, which never changes: segments it names

    def look(self) -> dict[str, str]:
        """All keys there, with their versions: for records() and without_record()."""
        return self._pool.admin.versions_under(self._start)

    def records(self, found: Mapping[str, str]) -> dict[str, str]:
        """Keys of the records of rollbacks, with their versions, in the order of these."""
        there = {
            key: version
            for key, version in found.items()
            if _RECORD.fullmatch(key.removeprefix(self._start))
        }
        return dict(sorted(there.items(), key=lambda row: row[1]))

    def without_record(self, found: Mapping[str, str]) -> list[str]:
        """Keys of copies that are left over: the record of a rollback is put before its copies, so
        it is looked at after them, and one that is gone does not come back."""
        names: dict[str, list[str]] = {}
        for key in found:
            if copy := _COPY.fullmatch(key.removeprefix(self._start)):
                names.setdefault(copy[1], []).append(key)
        prefix = self._start.removesuffix("/rolled-back/")
        gone = [
            name
            for name in names
            if record_key(prefix, name) not in found
            and not self._pool.exists(record_key(prefix, name))
        ]
        return [key for name in gone for key in names[name]]

    def segments(self) -> set[str]:
        """Keys of segments that hidden steps name.

        Look at the committed steps before: a step that is being hidden is here before it is gone
        there, so one of the two looks sees it. Raises what reading raises: then it is unclear.
        """
        keys = self._pool.list(self._start, certain=True)
        copies = [key for key in keys if _COPY.fullmatch(key.removeprefix(self._start))]
        named = {key: self._named.get(key) or self._read(key) for key in copies}
        self._named = named
        return set[str]().union(*named.values())

    def _read(self, key: str) -> set[str]:
        return Manifest.decode(self._pool.get(key), where=key, facts_only=True).segment_keys
