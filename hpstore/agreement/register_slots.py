"""Bytes of registers on a device: 512 a record, two copies that are written in turn. Pure.

A copy is small enough for one sector, and the one that is not being written stays whole: a crash
leaves the old record or the new one. docs/format.md has the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hpstore.agreement.registers import (
    BUCKETS,
    HOLDS,
    VALUE_BYTES_MOST,
    ChangeOf,
    Register,
    claim_registers,
)
from hpstore.devices.base import REGISTERS_BYTES
from hpstore.format.checksum import digest128

SLOT_BYTES = 512
COPY_BYTES = 256
_HEAD = struct.Struct("<8sQQQH")  # magic, promised, round, sequence, bytes of the value
_MAGIC = b"hpreg-01"
_DIGEST_BYTES = 16
_LOCKS_ONLY = 1 << 24  # offsets beyond the file: nothing is stored there
_NUMBER_END = 1 << 62  # no count comes near it
_BLANK = bytes(SLOT_BYTES)
CLAIMS = (0, BUCKETS * SLOT_BYTES)  # offset and bytes of all records of claims

assert _HEAD.size + VALUE_BYTES_MOST + _DIGEST_BYTES <= COPY_BYTES
assert REGISTERS_BYTES == (BUCKETS + 32) * SLOT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEntry:
    """A record as one device has it.

    `order` is (round, sequence). `promised`: a round that was begun; what is of an earlier one and
    was not seen by then came too late. `copy`: which of the two it was read from.
    """

    promised: int = 0
    order: tuple[int, int] = (0, 0)
    value: bytes | None = None
    copy: int = 1  # the first write goes to copy 0


def range_of(name: str) -> tuple[int, int]:
    """Offset and bytes of a record, or of what is only locked."""
    kind, _, number = name.rpartition("-")
    if kind == "key":
        return int(number) * SLOT_BYTES, SLOT_BYTES
    if kind == "repair":
        return _LOCKS_ONLY + int(number), 1
    return (BUCKETS + HOLDS.index(name)) * SLOT_BYTES, SLOT_BYTES


def encode_entry(entry: SlotEntry) -> tuple[int, bytes]:
    """Offset within the slot and bytes of the copy that comes next."""
    value = entry.value or b""
    if len(value) > VALUE_BYTES_MOST:
        raise ValueError(f"a record of {len(value)} bytes: {VALUE_BYTES_MOST} at most")
    head = _HEAD.pack(_MAGIC, entry.promised, *entry.order, len(value) + (entry.value is not None))
    body = (head + value).ljust(COPY_BYTES - _DIGEST_BYTES, b"\0")
    return (1 - entry.copy) * COPY_BYTES, body + digest128(body)


def decode_entry(slot: bytes) -> SlotEntry:
    """The newer of the copies that are whole; a blank one when none is."""
    if slot == _BLANK:
        return SlotEntry()
    found = [entry for copy in (0, 1) if (entry := _decode_copy(slot, copy)) is not None]
    return max(found, key=lambda e: (e.promised, e.order), default=SlotEntry())


def _decode_copy(slot: bytes, copy: int) -> SlotEntry | None:
    data = slot[copy * COPY_BYTES : (copy + 1) * COPY_BYTES]
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    magic, promised, turn, sequence, length = _HEAD.unpack_from(body)
    if magic != _MAGIC or digest128(body) != digest:
        return None
    if length > VALUE_BYTES_MOST + 1 or max(promised, turn, sequence) >= _NUMBER_END:
        return None  # sealed by somebody else: it could not be written on
    value = body[_HEAD.size : _HEAD.size + length - 1] if length else None
    return SlotEntry(promised=promised, order=(turn, sequence), value=value, copy=copy)


def merge(images: Mapping[str, bytes]) -> dict[str, dict[int, SlotEntry]]:
    """What each device lacks of the newest records: device -> offset -> entry to write there."""
    newest: dict[int, SlotEntry] = {}
    mine: dict[str, dict[int, SlotEntry]] = {device: {} for device in images}
    for device, image in images.items():
        for offset in range(0, len(image), SLOT_BYTES):
            slot = image[offset : offset + SLOT_BYTES]
            if slot == _BLANK:
                continue
            entry = mine[device][offset] = decode_entry(slot)
            known = newest.get(offset, SlotEntry())
            top = max(known, entry, key=lambda e: e.order)
            promised = max(known.promised, entry.promised)
            newest[offset] = SlotEntry(promised=promised, order=top.order, value=top.value)
    lacking: dict[str, dict[int, SlotEntry]] = {}
    for device, entries in mine.items():
        lacking[device] = {}
        for offset, top in newest.items():
            own = entries.get(offset, SlotEntry())
            if (own.promised, own.order) != (top.promised, top.order):
                lacking[device][offset] = SlotEntry(
                    promised=top.promised, order=top.order, value=top.value, copy=own.copy
                )
    return lacking


def change_all(
    images: Mapping[str, bytearray], change: ChangeOf, *, begin: bool
) -> Iterator[Mapping[str, bytearray]]:
    """Images of all records of claims in the order in which they must be written.

    `images`: of each device, as they are; they are changed in place. `begin`: some member takes no
    part, so a round is begun first (see device_registers.py).
    """
    rows: list[tuple[int, dict[str, int], SlotEntry]] = []  # offset, copy of each device, entry
    for name in claim_registers():
        offset, _ = range_of(name)
        slots = {d: bytes(image[offset : offset + SLOT_BYTES]) for d, image in images.items()}
        known = {slot: decode_entry(slot) for slot in set(slots.values())}  # most have the same
        entries = {d: known[slot] for d, slot in slots.items()}
        copies = {d: entry.copy for d, entry in entries.items()}
        top = max(known.values(), key=lambda e: e.order)
        turn = max(entry.promised for entry in known.values()) + begin
        if begin:
            for device, entry in entries.items():
                _put_entry(images[device], offset, replace(entry, promised=turn), entry.copy)
                copies[device] = 1 - entry.copy
        value = change(name, Register(order=top.order, value=top.value))
        sequence = top.order[1] + (value is not None)
        made = SlotEntry(
            promised=turn, order=(turn, sequence), value=top.value if value is None else value
        )
        rows.append((offset, copies, made))
    if begin:
        yield images
    for offset, copies, made in rows:
        encoded = encode_entry(made)[1]
        for device, copy in copies.items():
            _put_copy(images[device], offset, encoded, copy)
    yield images


def _put_entry(image: bytearray, offset: int, entry: SlotEntry, copy: int) -> None:
    """Write an entry into an image, where it was read last from `copy`."""
    _put_copy(image, offset, encode_entry(entry)[1], copy)


def _put_copy(image: bytearray, offset: int, encoded: bytes, copy: int) -> None:
    at = offset + (1 - copy) * COPY_BYTES
    image[at : at + COPY_BYTES] = encoded
