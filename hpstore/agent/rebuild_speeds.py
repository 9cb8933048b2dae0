"""How fast rebuilds of this node have been, kept beside the agent's memory for `durability --pool`.

One line of JSON a rebuild, appended by one call, so that agents that follow one another, and two at
once, lose nothing. It is a measurement: nothing that keeps data safe depends on it.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from hpstore.units import MIB

SPEEDS_FILE = "rebuilds.jsonl"
_LEAST_BYTES = 64 * MIB  # of objects: below it, opening files is what takes the time
_READ_BYTES = 1 << 16  # of the end of the file
_COUNTED = 9  # of the last rebuilds


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildSpeed:
    """Bytes of objects per second, pauses for other programs and all: the median of rebuilds."""

    bytes_per_second: float
    rebuilds: int
    last_ms: int  # since 1970


def note_rebuild(directory: Path, *, at_ms: int, nbytes: int, seconds: float) -> bool:
    """Keep what a rebuild of objects of `nbytes` took; return whether it says anything.

    Small ones do not. Raises OSError.
    """
    if nbytes < _LEAST_BYTES or not seconds > 0:
        return False
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    line = json.dumps({"at_ms": at_ms, "bytes": nbytes, "seconds": seconds}) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    file = os.open(directory / SPEEDS_FILE, flags, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
    return True


def measured_speed(directory: Path) -> RebuildSpeed | None:
    """The median of the last rebuilds; None when there was none. A line that is cut counts not."""
    try:
        with open(directory / SPEEDS_FILE, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BYTES))
            lines = file.read(_READ_BYTES).splitlines()
    except OSError:
        return None
    found = [one for one in map(_parsed, lines) if one is not None][-_COUNTED:]
    if not found:
        return None
    return RebuildSpeed(
        bytes_per_second=statistics.median(rate for rate, _ in found),
        rebuilds=len(found),
        last_ms=max(at_ms for _, at_ms in found),
    )


def _parsed(line: bytes) -> tuple[float, int] | None:
    try:
        body = json.loads(line)
        rate = float(body["bytes"]) / float(body["seconds"])
        return (rate, int(body["at_ms"])) if 0 < rate < 1e15 else None
    except (ValueError, TypeError, KeyError, OverflowError, ZeroDivisionError, RecursionError):
        return None
