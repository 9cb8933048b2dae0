"""What devices took in earlier processes, by cell: one that is slow from the start is then known.

One small sealed file beside the pool's history on a node, as times are of a path to a device.
Bounds are checked before anything is taken from it. Pure but for `load` and `save`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpstore.errors import IntegrityError
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.health.detect.histogram import FloatArray
from hpstore.runtime.text_files import read_text_file, write_atomically

LEARNT_FILE = "learnt.json"
_DEVICES_MOST, _CELLS_MOST, _BYTES_MOST = 1024, 24, 4 << 20
_IOS_LEAST = 32.0  # of a cell, to be remembered
_WEIGHT = 0.2  # of a process, against all before
_SECONDS = (1e-7, 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntTimes:
    """Usual seconds by device and flat cell index. A device has at most 24 cells, its busiest."""

    cells: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """JSON with a digest."""
        devices = {d: [[cell, x] for cell, x in row.items()] for d, row in self.cells.items()}
        return seal({"format": FORMAT, "devices": devices})

    @classmethod
    def decode(cls, data: bytes, *, cells: int, where: str) -> LearntTimes:
        """Raises IntegrityError or FormatTooNew."""
        if len(data) > _BYTES_MOST:
            raise IntegrityError(f"{where}: {len(data)} bytes of learnt times are too many")
        body = unseal(data, where=where)
        try:
            devices = body["devices"]
            if not isinstance(devices, dict) or len(devices) > _DEVICES_MOST:
                raise ValueError("devices are none, or too many")
            return cls(cells={str(d): _row(row, cells) for d, row in devices.items()})
        except MALFORMED as error:
            raise IntegrityError(f"{where}: learnt times are malformed: {brief(error)}") from error

    def table(self, device: str, cells: int) -> FloatArray:
        """Seconds by flat cell; 0 where nothing is known."""
        found = np.zeros(cells)
        for cell, seconds in self.cells.get(device, {}).items():
            found[cell] = seconds
        return found

    def learn(self, device: str, ios: FloatArray, seconds: FloatArray) -> LearntTimes:
        """With what this process has seen: counts and sums of seconds by flat cell."""
        known = dict(self.cells.get(device, {}))
        busiest = np.argsort(-ios)[:_CELLS_MOST].tolist()
        for cell in busiest:
            if ios[cell] < _IOS_LEAST:
                continue
            mean = float(np.clip(seconds[cell] / ios[cell], *_SECONDS))
            before = known.pop(cell, mean)  # the newest stand last
            known[cell] = before + _WEIGHT * (mean - before)
        kept = dict(list(known.items())[-_CELLS_MOST:])
        rows = {d: row for d, row in self.cells.items() if d != device}
        rows = dict(list(rows.items())[-(_DEVICES_MOST - 1) :])
        return LearntTimes(cells={**rows, device: kept} if kept else rows)


def _row(row: object, cells: int) -> dict[int, float]:
    if not isinstance(row, list) or len(row) > _CELLS_MOST:
        raise ValueError("cells of a device are none, or too many")
    found = {}
    for cell, seconds in row:
        low, high = _SECONDS
        if type(cell) is not int or not 0 <= cell < cells or not low <= float(seconds) <= high:
            raise ValueError(f"cell {cell!r} of {seconds!r} seconds")
        found[cell] = float(seconds)
    return found


def load_learnt(directory: Path, *, cells: int) -> LearntTimes:
    """What is in a directory; nothing where there is no file. Raises IntegrityError, OSError."""
    path = directory / LEARNT_FILE
    try:
        data = read_text_file(path, _BYTES_MOST).encode()
    except FileNotFoundError:
        return LearntTimes()
    except ValueError as error:
        raise IntegrityError(f"{path}: not learnt times: {error}") from error
    return LearntTimes.decode(data, cells=cells, where=str(path))


def save_learnt(directory: Path, learnt: LearntTimes) -> None:
    """Replace the file. Of two processes the last one's stays. Raises OSError."""
    write_atomically(directory / LEARNT_FILE, learnt.encode().decode(), durable=False)
