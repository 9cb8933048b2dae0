"""Latencies by the quarter power of two: of fixed size, added to by arrays, mergeable."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

LOWEST_SECONDS = 1e-7  # below the cost of a system call
_PER_OCTAVE = 4
BUCKETS = 128  # up to 1e-7 * 2**32 = 429 s; the last bucket holds all above


def buckets_of(seconds: FloatArray) -> npt.NDArray[np.int64]:
    """The bucket of each observation."""
    steps = _PER_OCTAVE * np.log2(np.maximum(seconds, LOWEST_SECONDS) / LOWEST_SECONDS)
    return np.minimum(steps.astype(np.int64), BUCKETS - 1)


def upper_edges(buckets: npt.NDArray[np.intp]) -> FloatArray:
    """Seconds at which buckets end."""
    return LOWEST_SECONDS * 2.0 ** ((buckets + 1) / _PER_OCTAVE)


class LogHistogram:
    """Counts by bucket, and the sum. Its 128 buckets span 0.1 us to 429 s. Not thread-safe."""

    __slots__ = ("counts", "sum_seconds")

    def __init__(self) -> None:
        self.counts = np.zeros(BUCKETS, np.int64)
        self.sum_seconds = 0.0

    @property
    def total(self) -> int:
        """Observations."""
        return int(self.counts.sum())

    def add(self, seconds: FloatArray, count: FloatArray | None = None) -> None:
        """Count observations of any shape, each once or, with a flat array, `count` times."""
        buckets = buckets_of(seconds).ravel()
        self.counts += np.bincount(buckets, count, minlength=BUCKETS).astype(np.int64)
        self.sum_seconds += float((seconds if count is None else seconds * count).sum())

    def merge(self, other: LogHistogram) -> None:
        """Add what another one counted."""
        self.counts += other.counts
        self.sum_seconds += other.sum_seconds

    def quantile(self, share: float) -> float:
        """Upper edge in seconds of the bucket that holds the quantile; 0 when empty."""
        total = self.total
        if not total:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self.counts), max(share * total, 1)))
        return float(upper_edges(np.array(bucket)))
