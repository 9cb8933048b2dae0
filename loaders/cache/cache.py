"""The cache in front of slow devices: what will be read next, in memory and on a local disk."""

from __future__ import annotations

import os

from hpstore.clock import Clock, SystemClock
from hpstore.closing import Closing
from hpstore.errors import ConfigError
from hpstore.loaders.cache.ahead import Prefetcher
from hpstore.loaders.cache.attached import Attached
from hpstore.loaders.cache.core import Core
from hpstore.loaders.cache.counts import Tally, shares
from hpstore.loaders.cache.deciding import MakePolicy
from hpstore.loaders.cache.disk import DiskTier
from hpstore.loaders.cache.dividing import Division
from hpstore.loaders.cache.memory import OwnMemory, Pin
from hpstore.loaders.cache.source import BlockSource
from hpstore.loaders.policy import CachePolicy
from hpstore.units import parse_bytes

PREFETCH_THREADS = 2


class Cache(Closing):
    """Blocks of any number of sources in `memory_bytes`, and `disk_bytes` at `disk_path`.

    The memory is reserved now; `pin` is given it once, to page-lock it. Thread-safe. The disk
    tier survives the process: another cache with the same path starts with it. It may be deleted,
    fill up or fail at any time. Only what its source can give again is kept.

    Raises ConfigError when the memory is not there, or the disk path cannot be used or is used by
    another cache.
    """

    def __init__(
        self, memory_bytes: int | str, *, disk_path: str | os.PathLike[str] | None = None,
        disk_bytes: int | str = 0, pin: Pin | None = None,
        prefetch_threads: int = PREFETCH_THREADS, policy: MakePolicy = CachePolicy,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        memory_bytes, disk_bytes = parse_bytes(memory_bytes), parse_bytes(disk_bytes)
        if (disk_path is None) != (disk_bytes <= 0):
            raise ConfigError("a disk tier needs both disk_path and disk_bytes above 0")
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self._tally = Tally()
        self._memory = OwnMemory(memory_bytes, pin)
        self._disk: DiskTier | None = None
        if disk_path is not None:
            self._disk = DiskTier(os.fspath(disk_path), disk_bytes, self._tally)
        self._core = Core(self._tally, clock or SystemClock())
        self._division = Division(self._core, self._memory, self._disk, policy)
        self._prefetcher = Prefetcher(self._core, prefetch_threads, self._division.save)
        self._pid = os.getpid()
        self._closed = False

    def attach(
        self, source: BlockSource, *, job: str | None = None, batch_blocks: int = 1
    ) -> Attached:
        """A reader of `source`, for one job; the caller closes it.

        `batch_blocks`: blocks that it reads at once. Raises ConfigError, stating the least memory,
        when a batch of them does not fit.
        """
        if self._closed:
            raise ConfigError("this cache is closed")
        stock, made = self._division.attach(source, job or source.name, batch_blocks)
        return Attached(self._core, self._division, source, stock, made)

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what they mean: see counts.shares and docs/cache.md."""
        found = self._tally.snapshot()
        found |= shares(found)
        with self._core.lock:
            for stock in self._core.stocks.values():
                found["ahead_bytes"] = found.get("ahead_bytes", 0) + stock.ahead_bytes
                if stock.disk is not None:
                    found["disk_used_bytes"] = (
                        found.get("disk_used_bytes", 0) + stock.disk.used_bytes
                    )
        return found

    def close(self) -> None:
        """Stop prefetching, keep what was learned, finish what is being written. Idempotent.

        Readers that are still attached read their sources from now on.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._prefetcher.close()
        if self._disk is not None:
            self._division.save()
            self._disk.close()


__all__ = ["Cache"]
