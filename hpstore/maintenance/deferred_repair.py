"""What its owner will soon delete: healed last, or not at all when it would be gone before.

A checkpointer knows which steps its retention drops with the next save, and leaves a note beside
them. Whoever rebuilds reads it. A note is a word about the future and may be wrong: nothing is
deleted or left unread because of it, and past its limit it counts no more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from hpstore.errors import HpstoreError, IntegrityError
from hpstore.format.keys import check_key
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.objects.context import PoolContext
from hpstore.objects.key_listing import Catalog, live_layout
from hpstore.objects.read.object_reader import Changed
from hpstore.objects.read.resolve import open_object
from hpstore.objects.survey import (
    Survey,
    VersionVerdict,
    judge_by_names,
    spare_losses,
    survey_key,
    unknown_devices,
)

_log = logging.getLogger(__name__)
NOTE = "expiring"  # last component of a note's key
_KIND = "expiring objects"
_MAX_NOTE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """One note. Times in milliseconds since 1970.

    `sizes`: keys that will be deleted, with their bytes (0: not known). `instead`: keys that take
    their place. `expected_ms`: when they should be gone; `limit_ms`: until when that is believed.
    """

    reason: str
    sizes: Mapping[str, int]
    instead: tuple[str, ...]
    expected_ms: int
    limit_ms: int

    def encode(self) -> bytes:
        """The bytes of the note."""
        return seal(
            {
                "format": FORMAT,
                "kind": _KIND,
                "reason": self.reason,
                "sizes": dict(self.sizes),
                "instead": list(self.instead),
                "expected_ms": self.expected_ms,
                "limit_ms": self.limit_ms,
            }
        )

    @classmethod
    def decode(cls, data: bytes, *, key: str) -> Expiry:
        """Raises IntegrityError, FormatTooNew. A note may only name what lies beside it."""
        body = unseal(data, where=key)
        beside = key.rpartition("/")[0] + "/"
        sizes, instead = body.get("sizes"), body.get("instead")
        try:
            if body.get("kind") != _KIND or not isinstance(sizes, dict):
                raise ValueError("another kind of record")
            if not isinstance(instead, list) or not all(str(k).startswith(beside) for k in sizes):
                raise ValueError(f"it names objects that are not under {beside!r}")
            made = cls(
                reason=str(body["reason"]),
                sizes={check_key(str(k)): int(size) for k, size in sizes.items()},
                instead=tuple(check_key(str(k)) for k in instead),
                expected_ms=int(str(body["expected_ms"])),
                limit_ms=int(str(body["limit_ms"])),
            )
            if min(made.sizes.values(), default=0) < 0:
                raise ValueError("a size is negative")
            for at_ms in (made.expected_ms, made.limit_ms):
                _when(at_ms)  # raises for what is no date
            return made
        except (*MALFORMED, OSError) as error:
            raise IntegrityError(
                f"{key}: not a note on expiring objects: {brief(error)}"
            ) from error


def note_key(prefix: str) -> str:
    """Key of the note on objects under a prefix."""
    return f"{prefix}/{NOTE}"


def read_notes(store: PoolContext, catalog: Catalog) -> list[Expiry]:
    """Notes that count now; of those on what is replaced by objects that can be read, by names.

    One that cannot be read, or somebody's object of that name, is counted and left alone.
    """
    now, found = store.clock.wall_ms(), []
    for key, survey in sorted(catalog.surveys.items()):
        if key.rpartition("/")[2] != NOTE or live_layout(store, survey) is None:
            continue
        try:
            note = Expiry.decode(_read(store, key), key=key)
        except (HpstoreError, OSError, Changed) as error:
            store.metrics.count("expiry_note_ignored_total")
            _log.info("%s is not heeded: %s", key, error)
            continue
        there = [catalog.surveys.get(other) for other in note.instead]
        if now <= note.limit_ms and all(s is not None and _serves(store, s) for s in there):
            found.append(note)
    return found


def _read(store: PoolContext, key: str) -> bytes:
    reader = open_object(store, key)
    try:
        size = reader.header.geometry.size
        if size > _MAX_NOTE_BYTES:
            raise IntegrityError(f"{key}: {size} bytes are not a note")
        parts: list[bytes] = []
        reader.read_ranges([(0, size)], lambda _, part: parts.append(part.tobytes()))
        return b"".join(parts)
    finally:
        reader.close()


def _serves(store: PoolContext, survey: Survey) -> bool:
    layout = live_layout(store, survey)
    if layout is None:
        return False
    unknown = unknown_devices(store.view, survey)
    verdict = judge_by_names(layout, unknown)
    return verdict is VersionVerdict.SERVES


class Postponing:
    """Which expiring objects are not worth healing now. Of one rebuild, on its thread.

    `needed`: keys that need work.
    """

    def __init__(self, store: PoolContext, notes: Sequence[Expiry], needed: Iterable[str]) -> None:
        wanted = set(needed)
        self._store, self._began = store, store.clock.monotonic()
        self._notes = {key: note for note in notes for key in note.sizes if key in wanted}
        self._left = {note.reason: 0 for note in notes}  # bytes that are not whole yet
        for key, note in self._notes.items():
            self._left[note.reason] += note.sizes[key]
        self._replaced: dict[str, bool] = {}  # by reason: whether what takes its place is whole
        self.put_off: dict[str, int] = {}  # why -> objects
        self.until_ms = 0  # when the first of them has to be looked at again; 0: none

    @property
    def late(self) -> frozenset[str]:
        """Keys that come after all others."""
        return frozenset(self._notes)

    def puts_off(self, key: str, done_bytes: int) -> bool:
        """Whether to leave a key alone, which is noted; `done_bytes`: of objects healed so far.

        Only one that may lose a further device, while all that takes its place has its full parity,
        and that would be deleted before all of its kind were whole, at the rate so far.
        """
        note = self._notes.get(key)
        if note is None or self._in_time(note, done_bytes) or not self._may_wait(key, note):
            return False
        why = (
            f"{note.reason}, expected {_when(note.expected_ms)}; healed if it is still there "
            f"{_when(note.limit_ms)}"
        )
        self.put_off[why] = self.put_off.get(why, 0) + 1
        self.until_ms = min(self.until_ms or note.limit_ms, note.limit_ms)
        return True

    def healed(self, key: str) -> None:
        """A key was worked on."""
        note = self._notes.get(key)
        if note is not None:
            self._left[note.reason] -= note.sizes[key]

    def _in_time(self, note: Expiry, done_bytes: int) -> bool:
        """Whether the rest would be whole before it is gone. While no rate is known, any time that
        is left is enough: one object tells."""
        clock = self._store.clock
        now, seconds = clock.wall_ms(), clock.monotonic() - self._began
        if now > note.limit_ms:
            return True  # it has not gone
        needed_seconds = self._left[note.reason] * seconds / done_bytes if done_bytes else 0.0
        return needed_seconds < (note.expected_ms - now) / 1000

    def _may_wait(self, key: str, note: Expiry) -> bool:
        if note.reason not in self._replaced:
            self._replaced[note.reason] = all(self._spare(k, whole=True) for k in note.instead)
        return self._replaced[note.reason] and self._spare(key, whole=False)

    def _spare(self, key: str, *, whole: bool) -> bool:
        """Whether an object may lose one more device, or, `whole`, as many as parity says."""
        layout = live_layout(self._store, survey_key(self._store, key))
        if layout is None:
            return False
        return spare_losses(self._store.view, layout) >= (layout.parity if whole else 1)


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%F %T UTC")
