"""How one device stands to its class and to its own past, and how busy it is. Pure.

For devices without peers, or with few: means over the last few ticks, halved by each tick that has
I/Os. An honest device of a class stays below a curve of size and latency: a seek and a stream. One
beyond it is slow, though it has no peer. The curve is generous on purpose, that of old and busy
devices, so a device within it may be slow, too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hpstore.health.detect.evidence import Media
from hpstore.health.detect.histogram import FloatArray
from hpstore.health.detect.io_recorder import IoRows, Operation

_MB = 1e6  # bytes
_CURVES: dict[Media, tuple[float, float]] = {
    Media.NVME: (2e-3, 300 * _MB),
    Media.SSD: (5e-3, 100 * _MB),
    Media.HDD: (40e-3, 50 * _MB),
    Media.REMOTE: (200e-3, 10 * _MB),
}
"""Seconds of the smallest call, bytes per second of large ones."""
_KEPT = 0.5  # of what was, by each tick with I/Os
_RATIO_MOST = 50.0
_LEAST = 2.0  # I/Os, for a ratio
_PAST_SHARE = 0.5  # of the I/Os must be of cells that earlier processes knew


def slowest_of_class(media: Media, nbytes: FloatArray, in_flight: FloatArray) -> FloatArray:
    """Seconds that calls of honest devices take at the most: calls in flight wait for each other.

    A device of an unknown class may be a hard disk.
    """
    seek, rate = _CURVES.get(media, _CURVES[Media.HDD])
    return np.asarray(np.maximum(in_flight, 1.0) * (seek + nbytes / rate))


class DeviceStanding:
    """Of one device. `past`: usual seconds by flat cell, 0 where nothing is known."""

    def __init__(self) -> None:
        self.media = Media.UNKNOWN
        self.past: FloatArray | None = None
        self.busy_share = 0.0
        self._class = np.zeros(2)  # sum of ratios, I/Os
        self._past = np.zeros(2)
        self._ios = 0.0

    def look(
        self,
        rows: IoRows,
        judged: npt.NDArray[np.bool_],
        cells: npt.NDArray[np.intp],
        elapsed_seconds: float,
        oldest_seconds: float,
    ) -> None:
        """Take the I/Os of a tick; `cells` are the flat ones of those that are judged."""
        if elapsed_seconds > 0:
            worked = float((rows.seconds * rows.count / np.maximum(rows.in_flight, 1.0)).sum())
            worked += min(oldest_seconds, elapsed_seconds)
            self.busy_share = min(1.0, worked / elapsed_seconds)
        if not judged.any():
            return
        count, seconds = rows.count[judged], rows.seconds[judged]
        moved = rows.operation[judged] != Operation.SYNC
        allowed = slowest_of_class(self.media, rows.nbytes[judged], rows.in_flight[judged])
        self._class = _KEPT * self._class + _sums(seconds / allowed, np.where(moved, count, 0.0))
        self._ios = _KEPT * self._ios + float(count.sum())
        if self.past is not None:
            usual = self.past[cells]
            known = (usual > 0) & (rows.usual[judged] <= 0)  # a batch's times are others
            ratios = seconds / np.where(known, usual, 1.0)
            self._past = _KEPT * self._past + _sums(ratios, np.where(known, count, 0.0))

    @property
    def class_ratio(self) -> float:
        """Mean time to the most that its class takes; 0 where too little is known."""
        return float(self._class[0] / self._class[1]) if self._class[1] >= _LEAST else 0.0

    @property
    def past_ratio(self) -> float:
        """Mean time to that of earlier processes; 0 where too little is known."""
        known = self._past[1] >= max(_LEAST, _PAST_SHARE * self._ios)
        return float(self._past[0] / self._past[1]) if known else 0.0


def _sums(ratios: FloatArray, count: FloatArray) -> FloatArray:
    return np.array([float((np.minimum(ratios, _RATIO_MOST) * count).sum()), float(count.sum())])
