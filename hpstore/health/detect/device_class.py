"""What a device of a class takes at the most, by the size of a call. Pure.

An honest device of a class stays below a curve of size and latency: a seek and a stream. One beyond
it is slow, though it has no peer. Generous on purpose: the curve is that of old and busy
devices, so a device within it may be slow, too.
"""

from __future__ import annotations

import numpy as np

from hpstore.health.detect.evidence import Media
from hpstore.health.detect.histogram import FloatArray

_MB = 1e6  # bytes
_CURVES: dict[Media, tuple[float, float]] = {
    Media.NVME: (2e-3, 300 * _MB),
    Media.SSD: (5e-3, 100 * _MB),
    Media.HDD: (40e-3, 50 * _MB),
    Media.REMOTE: (200e-3, 10 * _MB),
}
"""Seconds of the smallest call, bytes per second of large ones."""


def slowest_of_class(media: Media, nbytes: FloatArray, in_flight: FloatArray) -> FloatArray:
    """Seconds that calls of honest devices take at the most: calls in flight wait for each other.

    A device of an unknown class may be a hard disk.
    """
    seek, rate = _CURVES.get(media, _CURVES[Media.HDD])
    return np.asarray(np.maximum(in_flight, 1.0) * (seek + nbytes / rate))
