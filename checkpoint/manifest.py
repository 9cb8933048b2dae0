"""The record that makes a checkpoint real. JSON with a digest; bytes in docs/format.md."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

from hpstore.checkpoint.arena import Item
from hpstore.errors import CheckpointError, IntegrityError
from hpstore.records import FORMAT, seal, unseal

STEP_DIGITS = 12
MAX_STEP = 10**STEP_DIGITS - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One object of raw tensor bytes."""

    key: str
    size: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed checkpoint. `tree` is the state without its tensors (checkpoint/tree.py)."""

    step: int
    created_ms: int
    segments: tuple[Segment, ...]
    items: tuple[Item, ...]  # all in segment 0 while one process writes
    digests: tuple[str, ...]  # xxh3-128 of each item's bytes, hex
    tree: Any  # Any: decoded JSON, checked leaf by leaf when it is decoded

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments)

    def encode(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "step": self.step,
                "created_ms": self.created_ms,
                "segments": [[s.key, s.size, s.version] for s in self.segments],
                "items": [
                    [i.name, i.dtype, list(i.shape), i.offset, i.length, digest]
                    for i, digest in zip(self.items, self.digests, strict=True)
                ],
                "tree": self.tree,
            }
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Manifest:
        """Inverse of encode. Raises IntegrityError, FormatTooNew."""
        # Any: decoded JSON; malformed values end in the except below
        body: dict[str, Any] = unseal(data, where=where)
        try:
            items = tuple(
                Item(name=str(n), dtype=str(d), shape=tuple(int(x) for x in s), offset=int(o),
                     length=int(length))
                for n, d, s, o, length, _ in body["items"]
            )  # fmt: skip
            return cls(
                step=int(body["step"]),
                created_ms=int(body["created_ms"]),
                segments=tuple(
                    Segment(key=str(k), size=int(s), version=str(v)) for k, s, v in body["segments"]
                ),
                items=items,
                digests=tuple(str(row[5]) for row in body["items"]),
                tree=body["tree"],
            )
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise IntegrityError(f"{where}: manifest is malformed: {error}") from error


def checked_step(step: object) -> int:
    """A step as an int. Raises CheckpointError for what is no whole number in range."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise CheckpointError(f"step {step!r} is not a whole number between 0 and {MAX_STEP}")
    return number


def step_prefix(prefix: str, step: int) -> str:
    """Where the objects of a step are."""
    return f"{prefix}/step-{checked_step(step):0{STEP_DIGITS}d}"


def manifest_key(prefix: str, step: int) -> str:
    """Key of a step's manifest."""
    return f"{step_prefix(prefix, step)}/manifest"


def segment_key(prefix: str, step: int, nonce: str, rank: int = 0) -> str:
    """Key of a segment; the nonce keeps a second save of the step off committed bytes."""
    return f"{step_prefix(prefix, step)}/segment-{nonce}-r{rank:05d}"


def attempt_key(prefix: str, step: int, nonce: str) -> str:
    """Key of the note that a save is under way (PROTOCOL 18)."""
    return f"{prefix}/attempts/{step:0{STEP_DIGITS}d}-{nonce}"


_MANIFEST = re.compile(rf"step-(\d{{{STEP_DIGITS}}})/manifest")
_SEGMENT = re.compile(rf"step-(\d{{{STEP_DIGITS}}})/segment-([0-9a-f]+)-r\d+")
_ATTEMPT = re.compile(rf"attempts/(\d{{{STEP_DIGITS}}})-([0-9a-f]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The objects under a checkpoint prefix, sorted out."""

    steps: tuple[int, ...]  # with a manifest, ascending
    segments: dict[str, tuple[int, str]]  # key -> (step, nonce)
    attempts: dict[str, tuple[int, str]]  # key -> (step, nonce)


def sort_out(prefix: str, keys: list[str]) -> Listing:
    """Steps, segments and attempts among keys under `prefix`. Pure."""
    steps, segments, attempts = [], {}, {}
    for key in keys:
        rest = key.removeprefix(f"{prefix}/")
        if found := _MANIFEST.fullmatch(rest):
            steps.append(int(found[1]))
        elif found := _SEGMENT.fullmatch(rest):
            segments[key] = (int(found[1]), found[2])
        elif found := _ATTEMPT.fullmatch(rest):
            attempts[key] = (int(found[1]), found[2])
    return Listing(steps=tuple(sorted(steps)), segments=segments, attempts=attempts)


__all__ = ["Listing", "Manifest", "Segment", "attempt_key", "checked_step", "manifest_key",
           "segment_key", "sort_out", "step_prefix"]  # fmt: skip
