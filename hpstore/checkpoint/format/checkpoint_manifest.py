"""The record that makes a checkpoint real. JSON with a digest; bytes in docs/format.md."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hpstore.checkpoint.format.items import (
    FRAME_BYTES,
    Item,
    ItemColumns,
    decode_items,
    encode_items,
    whole,
)
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.state.scalars import TAG
from hpstore.checkpoint.state.state_tree import check_tree
from hpstore.errors import ConfigError, FormatTooNew, IntegrityError
from hpstore.format.checksum import digest128
from hpstore.format.records import unseal
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.format.untrusted_bytes import whole as whole_number
from hpstore.units import KIB

MAGIC = b"hpstore checkpoint "
FORMAT = 3  # 2 has no bytes of tensors; 1 was a sealed record with rows for items; both are read
HEAD_BYTES = 64 * KIB  # what is read of a manifest for its facts: mostly all that is not tensors
STEP_DIGITS = 12
MAX_STEP = 10**STEP_DIGITS - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed checkpoint. `tree` is the state without its tensors
    (hpstore/checkpoint/state/state_tree.py).

    `extra`: what else its writer recorded, JSON: metrics, lineage, torch's own metadata.
    """

    step: int
    created_ms: int
    segments: tuple[Segment, ...]
    items: tuple[Item, ...]
    tree: Any  # Any: decoded JSON, checked leaf by leaf when it is decoded
    world: int = 1
    session: str = ""  # of the checkpointer that wrote it
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all segments, those shared with other checkpoints included."""
        return sum(segment.size for segment in self.segments)

    @property
    def objects(self) -> tuple[Segment, ...]:
        """The segments that are objects of their own."""
        return tuple(segment for segment in self.segments if segment.key)

    @property
    def segment_keys(self) -> set[str]:
        """Their keys."""
        return {segment.key for segment in self.objects}

    @property
    def within_bytes(self) -> int:
        """Bytes of tensors that are in the manifest itself."""
        return sum(segment.size for segment in self.segments if not segment.key)

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the trainer said of the step, such as its validation loss."""
        found: Mapping[str, float] = self.extra.get("metrics", {})
        return found

    def encode(self, columns: ItemColumns | None = None, tree_text: str | None = None) -> bytes:
        """A line with magic, format and digest, then compact JSON in the order it was given, then
        the bytes of a segment without a key.

        `columns`: the items, when they are not in `items`. `tree_text`: compact(self.tree), when
        somebody has made it already.
        """
        body = {
            "step": self.step,
            "created_ms": self.created_ms,
            "world": self.world,
            "session": self.session,
            "segments": [[s.key, s.size, s.version] for s in self.segments],
            "items": columns.json() if columns is not None else encode_items(self.items),
            "extra": self.extra,
        }
        tree = compact(self.tree) if tree_text is None else tree_text
        text = f'{compact(body)[:-1]},"tree":{tree}}}'.encode()
        digest = digest128(text).hex()
        within = [segment.data.data for segment in self.segments if segment.data is not None]
        if not within:  # as before: an older hpstore reads it
            return MAGIC + f"2 {digest}\n".encode() + text
        return b"".join((MAGIC, f"3 {digest} {len(text)}\n".encode(), text, *within))

    @classmethod
    def decode(cls, data: bytes, *, where: str, facts_only: bool = False) -> Manifest:
        """Inverse of encode; `facts_only`: without items and tree, at a fraction of the cost.

        Raises IntegrityError, FormatTooNew.
        """
        body, items, rest = _opened(data, where, facts_only=facts_only)
        try:
            return cls(
                step=whole_number(body["step"], "step"),
                created_ms=whole_number(body["created_ms"], "created_ms"),
                world=whole_number(body.get("world", 1), "world", least=1),
                session=str(body.get("session", "")),
                segments=_segments(body["segments"], rest, facts_only=facts_only),
                items=() if facts_only else _checked_items(items(), body["segments"]),
                extra=_checked_extra(body.get("extra", {})),
                tree=None if facts_only else _checked_tree(body["tree"]),
            )
        except MALFORMED as error:
            raise IntegrityError(f"{where}: manifest is malformed: {brief(error)}") from error


# Any: JSON
def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _opened(data: bytes, where: str, *, facts_only: bool) -> tuple[dict[str, Any], Any, memoryview]:
    """The body of a manifest of any format, how to make its items, and what comes after it.

    For facts the bytes of tensors need not be there.
    """
    nothing = memoryview(b"")
    if not data.startswith(MAGIC):
        old: dict[str, Any] = unseal(data, where=where, users=True)
        return old, lambda: _first_items(old["items"]), nothing
    start = data.find(b"\n", 0, 256) + 1
    line = data[len(MAGIC) : max(start - 1, 0)]
    try:
        version, digest, *length = line.decode("ascii").split(" ")
        if int(version) > FORMAT:
            raise FormatTooNew(
                f"{where}: checkpoint format {version}, this hpstore reads up to {FORMAT}"
            )
        end = start + whole_number(int(length[0]), "length") if int(version) > 2 else len(data)
    except (ValueError, IndexError) as error:
        raise IntegrityError(f"{where}: not a manifest") from error
    text = data[start:end]
    if digest != digest128(text).hex():
        raise IntegrityError(f"{where}: manifest does not match its digest")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where}: manifest is malformed: {error}") from error
    return body, lambda: decode_items(body["items"]), memoryview(data)[end:]


def needs_more(head: bytes) -> bool:
    """Whether the facts of a manifest are longer than this beginning of it."""
    line, _, text = head.partition(b"\n")
    words = line.removeprefix(MAGIC).split(b" ")
    if not line.startswith(MAGIC) or words[0] != b"3" or not words[-1].isdigit():
        return True
    return len(text) < int(words[-1])


# Any: decoded JSON
def _segments(rows: Sequence[Any], rest: memoryview, *, facts_only: bool) -> tuple[Segment, ...]:
    """Raise ValueError unless the one without a key, if any, is what the manifest ends with."""
    found = [
        Segment(key=str(k), size=whole_number(s, "a segment's size"), version=str(v))
        for k, s, v in rows
    ]
    within = [n for n, segment in enumerate(found) if not segment.key]
    if facts_only:
        return tuple(found)
    if len(within) > 1 or len(rest) != sum(found[n].size for n in within):
        raise ValueError("the bytes after it are not those of its segment")
    for n in within:
        found[n] = replace(found[n], data=np.frombuffer(rest, np.uint8))
    return tuple(found)


def _first_items(rows: Sequence[Sequence[Any]]) -> tuple[Item, ...]:
    """Items of format 1: rows, whole tensors, one segment."""
    return tuple(
        Item(
            name=str(name),
            dtype=str(dtype),
            shape=tuple(shape),
            box=whole(shape),
            offset=int(offset),
            length=int(length),
            digest=str(digest),
        )
        for name, dtype, shape, offset, length, digest in rows
    )


def _checked_items(items: tuple[Item, ...], segments: Sequence[Sequence[Any]]) -> tuple[Item, ...]:
    """Raise ValueError for an item that lies outside its segment, or has another length than its
    shape says: what is read of it would not be what it is called."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for item in items:
        numbers = (
            *item.shape,
            *item.box.offsets,
            *item.box.sizes,
            item.segment,
            item.offset,
            item.length,
            *item.frames,
        )
        if any(type(n) is not int or n < 0 for n in numbers) or not all(
            type(text) is str for text in (item.name, item.dtype, item.digest, item.codec)
        ):
            raise ValueError(f"item {item.name!r} is not made of whole numbers and texts")
        if not len(item.shape) == len(item.box.offsets) == len(item.box.sizes):
            raise ValueError(f"item {item.name!r} has a box of other dimensions")
        if any(
            a + n > s for a, n, s in zip(item.box.offsets, item.box.sizes, item.shape, strict=True)
        ):
            raise ValueError(f"item {item.name!r} has a box outside of its shape")
        if tensors.setdefault(item.name, (item.dtype, item.shape)) != (item.dtype, item.shape):
            raise ValueError(f"items of {item.name!r} have several dtypes or shapes")
        size = int(segments[item.segment][1]) if item.length else item.offset
        if item.length > size - item.offset:
            raise ValueError(f"item {item.name!r} lies outside its segment")
        dtype = getattr(torch, str(item.dtype), None)
        # one that this torch does not know is an error when it is wanted
        if isinstance(dtype, torch.dtype) and not _fits(item, item.box.count * dtype.itemsize):
            raise ValueError(f"item {item.name!r} has not the length that its shape says")
    return items


def _checked_extra(extra: Any) -> Mapping[str, Any]:  # Any: JSON
    """Raise ValueError unless what is read of it is of its type."""
    metrics = extra.get("metrics", {})
    if not isinstance(metrics, dict) or not all(type(v) in (int, float) for v in metrics.values()):
        raise ValueError("its metrics are no numbers by name")
    found: Mapping[str, Any] = extra
    return found


def _checked_tree(tree: Any) -> Any:  # Any: JSON
    """Raise ValueError for anything that is not an encoded state."""
    if not isinstance(tree, dict) or tree.get(TAG) not in (None, "dict", "dcp"):
        raise ValueError("its state is no dict")
    check_tree(tree)
    return tree


def _fits(item: Item, raw: int) -> bool:
    if not item.codec:
        return item.length == raw
    count, last = len(item.frames), raw - (len(item.frames) - 1) * FRAME_BYTES
    return (
        0 < last <= FRAME_BYTES
        and sum(item.frames) == item.length
        and all(0 < n <= FRAME_BYTES for n in item.frames)
        and item.frames[count - 1] <= last
    )


def checked_step(step: object) -> int:
    """A step as an int. Raises ConfigError for what is not a whole number in range."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise ConfigError(f"step {step!r} is not a whole number between 0 and {MAX_STEP}")
    return number


def step_prefix(prefix: str, step: int) -> str:
    """Where the objects of a step are."""
    return f"{prefix}/step-{checked_step(step):0{STEP_DIGITS}d}"


def manifest_key(prefix: str, step: int) -> str:
    """Key of a step's manifest."""
    return f"{step_prefix(prefix, step)}/manifest"


def segment_key(prefix: str, step: int, nonce: str, rank: int = 0, part: int = 0) -> str:
    """Key of a segment; the nonce keeps a second save of the step off committed bytes."""
    return f"{step_prefix(prefix, step)}/{segment_name(nonce, rank, part)}"


def segment_name(nonce: str, rank: int, part: int) -> str:
    """Last component of a segment's key."""
    return f"segment-{nonce}-r{rank:05d}" + (f"-p{part:04d}" if part else "")


def attempt_key(prefix: str, step: int, nonce: str) -> str:
    """Key of the note that a save is under way (PROTOCOL 18)."""
    return f"{prefix}/attempts/{step:0{STEP_DIGITS}d}-{nonce}"


_MANIFEST = re.compile(rf"step-(\d{{{STEP_DIGITS}}})/manifest")
_SEGMENT = re.compile(rf"step-(\d{{{STEP_DIGITS}}})/segment-([0-9a-f]+)-r\d+(?:-p\d+)?")
_ATTEMPT = re.compile(rf"attempts/(\d{{{STEP_DIGITS}}})-([0-9a-f]+)")
_CONDEMNED = re.compile(rf"condemned/(\d{{{STEP_DIGITS}}})-([0-9a-f]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The objects under a checkpoint prefix, sorted out."""

    steps: tuple[int, ...]  # with a manifest, ascending
    segments: dict[str, tuple[int, str]]  # key -> (step, nonce)
    attempts: dict[str, tuple[int, str]]  # key -> (step, nonce)
    condemned: dict[str, tuple[int, str]]  # key -> (step, nonce)


def sort_out(prefix: str, keys: Iterable[str]) -> Listing:
    """Steps, segments and attempts among keys under `prefix`. Pure."""
    steps: list[int] = []
    segments, attempts, condemned = {}, {}, {}
    for key in keys:
        rest = key.removeprefix(f"{prefix}/")
        if found := _MANIFEST.fullmatch(rest):
            steps.append(int(found[1]))
        elif found := _SEGMENT.fullmatch(rest):
            segments[key] = (int(found[1]), found[2])
        elif found := _ATTEMPT.fullmatch(rest):
            attempts[key] = (int(found[1]), found[2])
        elif found := _CONDEMNED.fullmatch(rest):
            condemned[key] = (int(found[1]), found[2])
    return Listing(
        steps=tuple(sorted(steps)), segments=segments, attempts=attempts, condemned=condemned
    )
