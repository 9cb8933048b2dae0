"""What a loader did and where the time went: the parts of stats()."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hpstore.loaders.batching.gather_copy import How
from hpstore.pool.pool import Pool
from hpstore.runtime.stopwatch import Stopwatch

T = TypeVar("T")


@dataclass(slots=True)
class Counts:
    """Of one loader: hints, not exact beside other threads."""

    gathered_total: int = 0  # records out of pages in memory
    read_total: int = 0  # records read by themselves
    copies: Counter[How] = field(default_factory=Counter)  # of records into batches
    make_seconds: float = 0.0  # of whole batches, reading and waiting for pages included
    reading: Stopwatch = field(default_factory=Stopwatch)  # records, while a batch is made
    awaiting: Stopwatch = field(default_factory=Stopwatch)  # for pages, likewise
    filling: Stopwatch = field(default_factory=Stopwatch)  # pages, ahead of the batches

    @property
    def fetch_seconds(self) -> float:
        """What of make_seconds is not work on the batch."""
        return self.reading.seconds + self.awaiting.seconds

    def stalls(self, decode_seconds: float) -> dict[str, float]:
        """Rows of the stall table, in seconds of threads, none of which is part of another one.

        `decode_seconds` went by inside of reading and filling.
        """
        read = self.reading.seconds + self.filling.seconds
        return {
            "device_seconds": max(0.0, read - decode_seconds),
            "decode_seconds": decode_seconds,
            "page_wait_seconds": self.awaiting.seconds,
            "assemble_seconds": max(0.0, self.make_seconds - self.fetch_seconds),
        }


@dataclass(slots=True)
class Waits:
    """Of the thread that takes batches; over all runs of a loader. Times of perf_counter()."""

    data_seconds: float = 0.0  # it waited for a batch
    trainer_seconds: float = 0.0  # the next batch was there and waited for it
    began: float = 0.0  # one was asked for, the first time
    until: float = 0.0  # one was taken, the last time

    def waited(self, asked: float) -> None:
        """For a batch, from `asked` until now."""
        self.began = self.began or asked
        self.until = time.perf_counter()
        self.data_seconds += self.until - asked

    def stats(self, samples: int) -> dict[str, float]:
        """`samples` were taken in all this time."""
        seconds = self.until - self.began
        return {
            "wait_seconds": self.data_seconds,
            "trainer_seconds": self.trainer_seconds,
            "samples_per_second": samples / seconds if seconds else 0.0,
        }


class PoolReads:
    """What reads of some pools had to do beyond reading, since this was made; by whomever."""

    _NAMES = (
        ("degraded_reads", "read_degraded_total"),
        ("damaged_reads", "column_mismatch_total"),
        ("repaired_objects", "read_repair_total"),
    )

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools = list({id(pool): pool for pool in pools}.values())
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        return {
            name: sum(pool.metrics.value(counter) for pool in self._pools)
            for name, counter in self._NAMES
        }

    def stats(self) -> dict[str, Any]:
        """Counters of this process: several loaders of a pool see each other's."""
        return {name: value - self._before[name] for name, value in self._now().items()}
