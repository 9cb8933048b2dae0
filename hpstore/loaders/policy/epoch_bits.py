"""Where jobs stand in their epochs, and which blocks they have had in them.

A job that shuffles asks for every block once an epoch. So a block that it has not had yet comes
within the rest of this epoch, one that it has had within the next one: no order is needed for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.block_stats import Table
from hpstore.loaders.policy.cache_plan import Floats, Int32s, Int64s

JOBS = 8
"""Jobs that have a bit."""

_GRID = 65  # points of the integral over time; 129 change no hit ratio by 0.1 points
_FRESH = 1 / 256  # of an epoch: how old the table of expectations may be


class EpochBits:
    """ "Seen this epoch", one bit for a block and job, and the progress of every job."""

    def __init__(self, table: Table) -> None:
        self._blocks = table
        self.made = np.zeros(JOBS)
        self.length = np.zeros(JOBS)  # 0: no epoch has begun
        self._stale = np.inf
        self._table = np.empty(0, np.float32)
        self._told: tuple[int, ...] = ()

    @property
    def seen(self) -> npt.NDArray[np.uint8]:
        """uint8[blocks]: a view."""
        return self._blocks.seen

    def begin(self, job: int, requests: int | None) -> None:
        """An epoch of a job begins; `requests` as in CachePolicy.begin_epoch."""
        if job >= JOBS:
            return
        if self.made[job]:
            np.bitwise_and(self.seen, np.uint8(255 - (1 << job)), out=self.seen)
        self.length[job] = requests or self.made[job] or len(self.seen)
        self.made[job] = 0
        self._stale = np.inf

    def touch(self, job: int, blocks: Int64s, requests: int) -> None:
        """A job has asked for blocks."""
        if job < JOBS and self.length[job]:
            self.seen[blocks] |= np.uint8(1 << job)
            self.made[job] += requests
            self._stale += requests / self.length[job]

    def waits(
        self, blocks: Int64s | Int32s, jobs: tuple[int, ...], shares: Sequence[float]
    ) -> Floats:
        """float32[n]: ln of requests until one of `jobs`, who have begun epochs, needs a block.

        `shares`: of all requests, by job.
        """
        return self.by_pattern(jobs, shares)[self.seen[blocks]]

    def by_pattern(self, jobs: tuple[int, ...], shares: Sequence[float]) -> Floats:
        """float32[256]: as waits(), of a block with each pattern of bits."""
        if self._stale > _FRESH or jobs != self._told:
            self._table = self._expect(jobs, shares)
            self._stale, self._told = 0.0, jobs
        return self._table

    def state(self) -> dict[str, np.ndarray]:
        """Arrays, not copied."""
        return {"seen": self.seen, "made": self.made, "length": self.length}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """The opposite of state()."""
        self.seen[:] = arrays["seen"] if len(arrays["seen"]) else 0
        self.made = arrays["made"].astype(np.float64)
        self.length = arrays["length"].astype(np.float64)
        self._stale = np.inf

    def _expect(self, jobs: tuple[int, ...], shares: Sequence[float]) -> Floats:
        """ln of the expected minimum over the jobs, for every pattern of bits.

        Unseen: evenly spread over the rest of the epoch; seen: over the next one. The minimum of
        independent times has the product of their survival functions.
        """
        whole = {job: self.length[job] / max(shares[job], 1e-9) for job in jobs}
        rest = {
            job: max(1.0 - self.made[job] / self.length[job], 1e-3) * whole[job] for job in jobs
        }
        last = min(rest[job] + whole[job] for job in jobs)
        times = np.linspace(0.0, last, _GRID)
        patterns = np.arange(1 << JOBS)
        survival = np.ones((len(patterns), _GRID))
        for job in jobs:
            unseen = np.clip(1.0 - times / rest[job], 0.0, 1.0)
            seen = np.clip(1.0 - (times - rest[job]) / whole[job], 0.0, 1.0)
            survival *= np.where((patterns >> job & 1)[:, None] == 1, seen, unseen)
        means = np.trapezoid(survival, times, axis=1)
        table: Floats = np.log(np.maximum(means, 1e-3)).astype(np.float32)
        return table
