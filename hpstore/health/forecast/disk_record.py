"""A record of this machine's disks, a row a disk and day, in the form of drive-stats files.

The agent and `report --record` add to it; it is the history that rises are told from, and can be
trained on. What one process has learned of a disk is there for the next one, and for others at the
same time: each adds under a lock on the file (flock), and looks there which disks have their row.
"""

from __future__ import annotations

import csv
import fcntl
import io
import math
import os
from collections.abc import Iterable, Sequence
from datetime import date

from hpstore.errors import ForecastError
from hpstore.health.smart.counters import COUNTERS
from hpstore.health.smart.readout import SmartReading
from hpstore.runtime.clock import Clock, SystemClock

COLUMNS = (
    "date",
    "serial_number",
    "model",
    "capacity_bytes",
    "failure",
    *(counter.column for counter in COUNTERS),
)
_MODE = 0o600  # serial numbers are nobody else's business
_LOCK_SECONDS, _POLL_SECONDS = 10.0, 0.02


def append(
    path: str,
    day: int,
    readings: Sequence[SmartReading],
    *,
    clock: Clock | None = None,
    lock_seconds: float = _LOCK_SECONDS,
) -> int:
    """Add a row for each disk that has none of this day yet; return how many were added.

    Makes the file when it is not there. Synced on return. Any number of processes may call it at
    once: no row is lost, and none is written twice. A crash leaves at most a row that is cut short,
    which readers leave out and the next call ends. Blocks for `lock_seconds` at most while another
    process adds.

    Raises
    ------
    ForecastError
        The file has other columns, is held by another process, or cannot be written (whole).
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        try:
            _lock(path, file, clock or SystemClock(), lock_seconds)
            return _append(path, file, day, readings)
        finally:
            os.close(file)  # which ends the lock
    except OSError as error:
        raise ForecastError(f"cannot write the record {path}: {error.strerror or error}") from error


def _lock(path: str, file: int, clock: Clock, lock_seconds: float) -> None:
    until = clock.monotonic() + lock_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if clock.monotonic() >= until:
                raise ForecastError(
                    f"another process has held the record {path} for {lock_seconds:g} s: nothing "
                    "was added, what is there is whole; the next look adds today's counters"
                ) from error
            clock.wait(_POLL_SECONDS)
        else:
            return


def _append(path: str, file: int, day: int, readings: Sequence[SmartReading]) -> int:
    """Under the lock."""
    beginning = _beginning(path, file)
    there = _serials_of(path, date.fromordinal(day).isoformat())
    new = {found.serial: found for found in readings if found.serial not in there}
    if not new and not beginning:
        return 0
    rows = (beginning + _text(day, new.values())).encode()
    written = os.write(file, rows)
    os.fsync(file)
    if written < len(rows):
        raise ForecastError(
            f"{written} of {len(rows)} bytes went into the record {path}: is there no space "
            "left? What was there before is whole"
        )
    return len(new)


def _serials_of(path: str, day: str) -> set[str]:
    """The disks that have a whole row of a day; a row that was cut short is none."""
    with open(path, encoding="utf-8", errors="replace", newline="") as text:
        rows = csv.reader(line for line in text if line.startswith(f"{day},"))
        return {cells[1] for cells in rows if len(cells) == len(COLUMNS)}


def _text(day: int, readings: Iterable[SmartReading]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for found in readings:
        cells = ["" if math.isnan(value) else f"{value:.17g}" for value in found.values]
        writer.writerow(
            [
                date.fromordinal(day).isoformat(),
                found.serial,
                found.model,
                found.capacity_bytes,
                0,
                *cells,
            ]
        )
    return text.getvalue()


def _beginning(path: str, file: int) -> str:
    """What must stand before new rows: the header, or the end of a row that is cut short."""
    size = os.fstat(file).st_size
    if size == 0:
        return ",".join(COLUMNS) + "\n"
    header = (",".join(COLUMNS) + "\n").encode()
    if os.pread(file, len(header), 0) != header:
        raise ForecastError(
            f"{path} has other columns than a record of this version: nothing was added. Move it "
            "away; `hpstore health report` reads it as a table all the same"
        )
    return "" if os.pread(file, 1, size - 1) == b"\n" else "\n"
