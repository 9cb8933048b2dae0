"""Registers that a host's service keeps, in bodies of calls. Pure: values <-> JSON.

A record has a name POOL/EPOCH/REGISTER, bytes in base64, and a revision: a number that no other
change of that service has had; 0 where there is no record.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpstore.errors import IntegrityError
from hpstore.format.host_calls import decode_json, encode_json
from hpstore.format.untrusted_bytes import parsing, whole
from hpstore.units import MIB

MOST_RECORDS_AT_ONCE = 256  # that one request reads or changes
MOST_RECORD_BYTES = 2 * MIB
_NAME = re.compile(r"[0-9A-Za-z-]{1,64}/[0-9a-f]{1,64}/[a-z0-9-]{1,64}")
_MOST_REVISION = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """A record as the service has it. `data` None: there is none, and its revision is 0."""

    revision: int = 0
    data: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSwap:
    """A record is to become `data` if it is still of this revision."""

    name: str
    revision: int
    data: bytes


def check_record_name(value: object) -> str:
    """Raises ValueError."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise ValueError("a register is POOL/EPOCH/NAME")


def register_of(name: str) -> str:
    """What a record is of: the last part of its name."""
    return name.rpartition("/")[2]


def encode_names(names: Sequence[str]) -> bytes:
    """For a request that reads."""
    return encode_json(list(names))


def decode_names(data: bytes) -> list[str]:
    """Inverse of encode_names. Raises IntegrityError."""
    with parsing("names of registers"):
        return [check_record_name(name) for name in _rows(data)]


def encode_swaps(swaps: Sequence[RecordSwap]) -> bytes:
    """For a request that writes."""
    return encode_json([[one.name, one.revision, _text(one.data)] for one in swaps])


def decode_swaps(data: bytes) -> list[RecordSwap]:
    """Inverse of encode_swaps. Raises IntegrityError."""
    with parsing("registers to be swapped"):
        found = []
        for name, revision, text in _tuples(data, 3):
            made = RecordSwap(
                name=check_record_name(name),
                revision=whole(revision, "a revision", most=_MOST_REVISION),
                data=_bytes(text),
            )
            found.append(made)
        if len({one.name for one in found}) < len(found):
            raise ValueError("a register is named twice")
        return found


def encode_records(records: Sequence[HostRecord]) -> bytes:
    """For an answer."""
    return encode_json(
        [[one.revision, None if one.data is None else _text(one.data)] for one in records]
    )


def decode_records(data: bytes, count: int) -> list[HostRecord]:
    """Inverse of encode_records, of so many. Raises IntegrityError."""
    with parsing("registers of a host"):
        rows = _tuples(data, 2)
        if len(rows) != count:
            raise ValueError("other registers than were asked for")
        return [_record(revision, text) for revision, text in rows]


def decode_swapped(data: bytes) -> bool:
    """Whether swaps were made. Raises IntegrityError."""
    found = decode_json(data)
    if not isinstance(found, bool):
        raise IntegrityError("whether registers were swapped is true or false")
    return found


def _record(revision: object, text: object) -> HostRecord:
    if text is None:
        whole(revision, "the revision of no record", most=0)
        return HostRecord()
    number = whole(revision, "a revision", least=1, most=_MOST_REVISION)
    return HostRecord(revision=number, data=_bytes(text))


def _tuples(data: bytes, length: int) -> list[Sequence[object]]:
    found: list[Sequence[object]] = []
    for row in _rows(data):
        if not isinstance(row, list) or len(row) != length:
            raise ValueError(f"a register is {length} values")
        found.append(row)
    return found


def _rows(data: bytes) -> list[object]:
    rows = json.loads(data)
    if not isinstance(rows, list) or not 0 < len(rows) <= MOST_RECORDS_AT_ONCE:
        raise ValueError(f"a call is about 1 to {MOST_RECORDS_AT_ONCE} registers")
    return rows


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: object) -> bytes:
    if not isinstance(text, str) or len(text) > 4 * -(-MOST_RECORD_BYTES // 3):
        raise ValueError("a register is text in base64, not too long")
    data = base64.b64decode(text, validate=True)
    if len(data) > MOST_RECORD_BYTES:
        raise ValueError(f"a register has {MOST_RECORD_BYTES} bytes at most")
    return data
