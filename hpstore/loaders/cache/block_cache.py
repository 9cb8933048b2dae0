"""The cache in front of slow devices: what will be read next, in memory and on a local disk."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import ExitStack

from hpstore.errors import AlreadyClosed, ConfigError
from hpstore.loaders.cache.block_source import BlockSource
from hpstore.loaders.cache.cache_core import Core
from hpstore.loaders.cache.cache_counters import CacheTally, shares
from hpstore.loaders.cache.decisions import MakePolicy
from hpstore.loaders.cache.disk_tier import DiskTier
from hpstore.loaders.cache.local_reader import Attached
from hpstore.loaders.cache.memory_tier import OwnMemory, Pin, SharedMemory
from hpstore.loaders.cache.messages import Lost, listen
from hpstore.loaders.cache.partition import Division
from hpstore.loaders.cache.prefetch import Prefetcher
from hpstore.loaders.cache.shared_reader import SharedAttached
from hpstore.loaders.cache.shared_server import MOST_CONNECTIONS, CacheServer
from hpstore.loaders.policy import CachePolicy
from hpstore.runtime.clock import Clock, SystemClock
from hpstore.runtime.closing import Closing
from hpstore.units import bytes_argument, whole_argument

PREFETCH_THREADS = 2


class Cache(Closing):
    """Blocks of any number of sources in `memory_bytes`, and `disk_bytes` at `disk_path`.
    Both are numbers or text such as "64GiB".

    With `share`, processes of one user and node that give the same name have one cache: the first
    one owns it, and when that ends the others go on without, at the pace of their sources.

    The memory is reserved now; `pin` is given it once, to page-lock it. Thread-safe. The disk
    tier survives the process: another cache with the same path starts with it. It may be deleted,
    fill up or fail at any time. Only what its source can give again is kept.

    Raises ConfigError when the memory is not there, or the disk path cannot be used or is used by
    another cache.
    """

    def __init__(
        self,
        memory_bytes: int | str,
        *,
        disk_path: str | os.PathLike[str] | None = None,
        disk_bytes: int | str = 0,
        share: str | None = None,
        pin: Pin | None = None,
        prefetch_threads: int = PREFETCH_THREADS,
        policy: MakePolicy = CachePolicy,
        clock: Clock | None = None,
    ) -> None:
        memory_bytes = bytes_argument("memory_bytes", memory_bytes, least=1)
        disk_bytes = bytes_argument("disk_bytes", disk_bytes)
        whole_argument("prefetch_threads", prefetch_threads, least=0)
        if share is not None and not (isinstance(share, str) and share):
            raise ConfigError(f"share is {share!r}: the name that processes share the cache by")
        self.share, self._clock = share, clock or SystemClock()
        if (disk_path is None) != (disk_bytes <= 0):
            raise ConfigError("a disk tier needs both disk_path and disk_bytes above 0")
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self._tally, self._pid, self._closed = CacheTally(), os.getpid(), False
        self._owned: _Owned | None = None
        self._readers: weakref.WeakSet[SharedAttached] = weakref.WeakSet()
        listener = None if share is None else listen(share, MOST_CONNECTIONS, self._clock)
        if share is None or listener is not None:
            disk = None if disk_path is None else (os.fspath(disk_path), disk_bytes)
            self._owned = _Owned(
                self._tally,
                memory_bytes,
                pin,
                disk,
                listener,
                policy,
                prefetch_threads,
                self._clock,
            )

    def attach(
        self, source: BlockSource, *, job: str | None = None, batch_blocks: int = 1
    ) -> Attached | SharedAttached:
        """A reader of `source`, for one job; the caller closes it.

        `batch_blocks`: blocks that it reads at once. Raises ConfigError, stating the least memory,
        when a batch of them does not fit.
        """
        if self._closed:
            raise AlreadyClosed("this cache is closed")
        if self._owned is None:
            assert self.share is not None
            try:
                made_here = SharedAttached(
                    self.share, source, job or source.name, batch_blocks, self._tally
                )
            except Lost as error:
                raise ConfigError(
                    f"the owner of the shared cache {self.share!r} is gone ({error}): make the "
                    "cache again"
                ) from error
            self._readers.add(made_here)
            return made_here
        core, division = self._owned.core, self._owned.division
        stock, made = division.attach(source, job or source.name, batch_blocks)
        return Attached(core, division, source, stock, made)

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what they mean: see counts.shares and docs/cache.md."""
        found = self._tally.snapshot()
        found |= shares(found)
        if self._owned is not None:
            found |= self._owned.gauges()
        return found

    def flush(self) -> None:
        """Wait until blocks on their way to the disk are there, for some seconds at most."""
        if self._owned is not None and self._owned.disk is not None:
            self._owned.disk.flush()

    def close(self) -> None:
        """Stop prefetching, keep what was learned, finish what is being written. Idempotent.

        Readers that are still attached, of other processes too, read their sources from now on.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        for reader in list(self._readers):
            reader.close()
        if self._owned is not None:
            self._owned.close()


class _Owned(Closing):
    """What the process has that owns a cache."""

    def __init__(
        self,
        tally: CacheTally,
        memory_bytes: int,
        pin: Pin | None,
        disk: tuple[str, int] | None,
        listener: socket.socket | None,
        policy: MakePolicy,
        threads: int,
        clock: Clock,
    ) -> None:
        self.core = Core(tally, clock)
        with ExitStack() as undo:
            if listener is not None:
                undo.callback(listener.close)
            memory: OwnMemory | SharedMemory
            if listener is None:
                memory = OwnMemory(memory_bytes, pin)
            else:
                memory = undo.enter_context(SharedMemory(memory_bytes, pin))
            tier: DiskTier | None = None
            if disk is not None:
                tier = undo.enter_context(DiskTier(*disk, tally))
            self.division = Division(self.core, memory, tier, policy)
            undo.callback(self.division.save)
            undo.enter_context(Prefetcher(self.core, threads, self.division.save))
            if listener is not None:
                assert isinstance(memory, SharedMemory)
                undo.enter_context(CacheServer(listener, self.core, self.division, memory))
            self.disk = tier
            self._parts = undo.pop_all()

    def gauges(self) -> dict[str, float]:
        """What is so now, and how the busiest source's hits compare with the best there could be.

        That needs its order to be known afterwards: of one block in 16, the last LOG_LENGTH.
        """
        with self.core.lock:
            stocks = list(self.core.stocks.values())
            parts = [stock.disk for stock in stocks if stock.disk is not None]
            found: dict[str, float] = {
                "ahead_bytes": sum(stock.ahead_bytes for stock in stocks),
                "disk_used_bytes": sum(part.used_bytes for part in parts),
            }
        if stocks:
            share = max(stocks, key=lambda stock: stock.log.count).log.share_of_min()
            found |= {} if share is None else {"share_of_min": share}
        return found

    def close(self) -> None:
        """The other way round than it was made."""
        self._parts.close()
