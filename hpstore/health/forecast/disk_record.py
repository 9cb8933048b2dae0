"""A record of this machine's disks, a row a disk and day, in the form of drive-stats files.

`report --record` adds to it; it is the history that rises are told from, and can be trained on.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from datetime import date

from hpstore.errors import ForecastError
from hpstore.health.smart.counters import COUNTERS
from hpstore.health.smart.readout import SmartReading

COLUMNS = (
    "date",
    "serial_number",
    "model",
    "capacity_bytes",
    "failure",
    *(counter.column for counter in COUNTERS),
)
_MODE = 0o600  # serial numbers are nobody else's business


def append(path: str, day: int, readings: Sequence[SmartReading]) -> None:
    """Add a row for each reading; makes the file when it is not there. Synced on return.

    A crash leaves at most a row that is cut short, which readers leave out and the next call ends.
    Called by one process at a time.

    Raises
    ------
    ForecastError
        The file has other columns, or cannot be written (whole).
    """
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
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        try:
            rows = (_beginning(path, file) + text.getvalue()).encode()
            written = os.write(file, rows)
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise ForecastError(f"cannot write the record {path}: {error.strerror or error}") from error
    if written < len(rows):
        raise ForecastError(
            f"{written} of {len(rows)} bytes went into the record {path}: is there no space "
            "left? What was there before is whole"
        )


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
