"""What several disks of a host say in one answer, for a survey. Pure: values <-> bytes.

A request's body is JSON, [[disk, [directory, ...]], ...]. The answer is one line of JSON, an object
for each disk in that order, then for each the names in its directories as encode_listings has them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpstore.errors import IntegrityError
from hpstore.format.host_calls import (
    MOST_LISTED,
    Names,
    check_directory_path,
    decode_json,
    decode_listings,
    encode_json,
    encode_listings,
)
from hpstore.format.untrusted_bytes import parsing, whole

MOST_DISKS = 256  # that one request names
MOST_DISK_NUMBER = 9999
_MOST_SECTOR_BYTES = 512
_MOST = 1 << 64
_NAME = re.compile(r"[A-Za-z]{1,40}")
_FIELDS = {"error", "late", "mark", "names", "seconds", "stamp", "usage"}
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLook:
    """What one disk says. `late`: it has not answered in time and is asked by itself; else `error`:
    class and text of what went wrong, or all the rest.

    `stamp` of its record of membership, None where that is gone, seen before the `listings`.
    `mark`: the sector of that counter. `usage`: as the operation `usage` answers; None where it was
    not asked for, or is not known. `seconds` that the disk took.
    """

    late: bool = False
    error: tuple[str, str] | None = None
    stamp: tuple[int, int, int] | None = None
    listings: Sequence[Names] = ()
    mark: bytes = b""
    usage: Numbers | None = None
    seconds: float = 0.0


def encode_wanted(wanted: Sequence[tuple[int, Sequence[str]]]) -> bytes:
    """Disks and their directories, for a request."""
    return encode_json([[disk, list(paths)] for disk, paths in wanted])


def decode_wanted(data: bytes) -> list[tuple[int, list[str]]]:
    """Inverse of encode_wanted. Raises IntegrityError."""
    with parsing("what is looked for"):
        body = json.loads(data)
        if not isinstance(body, list) or not 0 < len(body) <= MOST_DISKS:
            raise ValueError(f"a look is at 1 to {MOST_DISKS} disks")
        found = []
        for disk, paths in body:
            if not isinstance(paths, list):
                raise ValueError("directories are a list")
            checked = [check_directory_path(path) for path in paths]
            found.append((whole(disk, "a disk", most=MOST_DISK_NUMBER), checked))
        if len({disk for disk, _ in found}) < len(found):
            raise ValueError("a disk is named twice")
        if sum(len(paths) for _, paths in found) > MOST_LISTED:
            raise ValueError(f"a look lists {MOST_LISTED} directories at most")
        return found


def encode_looks(looks: Sequence[DiskLook]) -> bytes:
    """For an answer."""
    names = [encode_listings(look.listings) for look in looks]
    rows = [
        {
            "late": look.late,
            "error": look.error,
            "stamp": look.stamp,
            "mark": base64.b64encode(look.mark).decode(),
            "usage": look.usage,
            "seconds": round(look.seconds, 6),
            "names": len(part),
        }
        for look, part in zip(looks, names, strict=True)
    ]
    return b"".join((encode_json(rows), b"\n", *names))


def decode_looks(data: bytes, wanted: Sequence[int]) -> list[DiskLook]:
    """Inverse of encode_looks; `wanted`: how many directories were asked of each disk.

    Raises IntegrityError for what is no answer to that.
    """
    line, newline, rest = data.partition(b"\n")
    rows = decode_json(line)
    if not newline or not isinstance(rows, list) or len(rows) != len(wanted):
        raise IntegrityError("a look lacks a disk")
    found = []
    with parsing("a look"):
        for row, count in zip(rows, wanted, strict=True):
            nbytes = whole(row["names"], "bytes of names", most=len(rest))
            found.append(_look(row, rest[:nbytes], count))
            rest = rest[nbytes:]
        if rest:
            raise ValueError("more names than were told")
    return found


def _look(row: dict[str, object], names: bytes, count: int) -> DiskLook:
    """Raises what MALFORMED names."""
    if row.keys() != _FIELDS or not isinstance(row["late"], bool):
        raise ValueError("a disk has other fields")
    listings, error = decode_listings(names), None
    if row["error"] is not None:
        error = _error(row["error"])
    silent = row["late"] or error is not None
    if len(listings) != (0 if silent else count):
        raise ValueError("other directories than were asked for")
    stamp, usage = _numbers(row["stamp"]), _numbers(row["usage"])
    if stamp is not None and len(stamp) != 3:
        raise ValueError("a stamp is three numbers")
    if usage is not None and len(usage) != 6:
        raise ValueError("a usage is six numbers")
    mark = base64.b64decode(str(row["mark"]), validate=True)
    if len(mark) > _MOST_SECTOR_BYTES:
        raise ValueError("a counter is one sector")
    return DiskLook(
        late=row["late"],
        error=error,
        stamp=None if stamp is None else (stamp[0], stamp[1], stamp[2]),
        listings=listings,
        mark=mark,
        usage=usage,
        seconds=_seconds(row["seconds"]),
    )


def _error(value: object) -> tuple[str, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("an error is a class and a text")
    name, text = value
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(text, str):
        raise ValueError("an error is a class and a text")
    return name, text[:2000]


def _numbers(value: object) -> Numbers | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("numbers are a list")
    return tuple(whole(part, "a number", most=_MOST) for part in value)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError("seconds are a number")
    return float(value)
