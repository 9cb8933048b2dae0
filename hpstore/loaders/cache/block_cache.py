"""The cache in front of slow devices: what will be read next, in memory and on a local disk."""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import ExitStack
from typing import TypeAlias

from hpstore.errors import AlreadyClosed, ConfigError
from hpstore.loaders.cache.block_source import BlockSource
from hpstore.loaders.cache.cache_core import Core
from hpstore.loaders.cache.cache_counters import CacheTally, shares
from hpstore.loaders.cache.disk_tier import DiskTier
from hpstore.loaders.cache.local_reader import Attached, Beside
from hpstore.loaders.cache.memory_tier import OwnMemory, Pin, SharedMemory
from hpstore.loaders.cache.messages import listen
from hpstore.loaders.cache.partition import Division
from hpstore.loaders.cache.policy_interface import MakePolicy
from hpstore.loaders.cache.prefetch import Prefetcher
from hpstore.loaders.cache.shared_reader import SharedAttached
from hpstore.loaders.cache.shared_server import MOST_CONNECTIONS, CacheServer
from hpstore.loaders.policy import CachePolicy
from hpstore.runtime.clock import Clock, SystemClock
from hpstore.runtime.closing import Closing
from hpstore.runtime.local_messages import Lost
from hpstore.units import bytes_argument, whole_argument

PREFETCH_THREADS = 2


AnyAttached: TypeAlias = Attached | SharedAttached | Beside


class Cache(Closing):
    """Blocks of any number of sources, in memory and on a local disk. See docs/cache.md.

    Thread-safe. The memory is reserved now. The disk tier survives the process: another cache with
    the same path starts with it. It may be deleted, fill up or fail at any time. Only what its
    source can give again is kept.

    Parameters
    ----------
    memory_bytes
        Memory for blocks: a number or text such as "64GiB".
    disk_path
        Directory on a local filesystem, for this cache alone. None: no disk tier.
    disk_bytes
        Size of the disk tier, a number or text. Above 0 with `disk_path`, 0 without it.
    share
        Processes of one user and node that give the same name have one cache. The first one owns
        it; the memory, the disk tier and the other arguments are the owner's. When the owner ends
        the others go on without a cache, at the pace of their sources.
    pin
        Called once with the memory, (memory_bytes,) uint8, to page-lock it.
    prefetch_threads
        Threads that read ahead; 0: nothing is prefetched.
    policy
        Makes what decides which blocks stay.
    clock
        Measures time. Default: the system's.

    Raises
    ------
    ConfigError
        The memory is not there, the disk path cannot be used or is used by another cache, another
        user has taken the name, or an argument is wrong.
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
    ) -> AnyAttached:
        """Make a reader of `source` for one job. The caller closes it.

        A source that the cache does not hold yet changes the shares of the others: the memory is
        then emptied once.

        Parameters
        ----------
        source
            Numbered blocks that never change. Threads of the cache read it, too.
        job
            Name of the job. Default: the source's name.
        batch_blocks
            Blocks that the reader reads at once.

        Returns
        -------
        Attached or SharedAttached or Beside
            Its read() may be called by many threads. It is a SharedAttached in a process that does
            not own the shared cache, a fork of the owner's too. In a fork of the process of any
            other cache it is a Beside, which reads the source.

        Raises
        ------
        AlreadyClosed
            The cache is closed.
        ConfigError
            A batch does not fit; the message states the least memory. Or the source has too many
            readers or blocks, or the owner of the shared cache is gone.
        """
        if self._closed:
            raise AlreadyClosed("this cache is closed")
        forked = self._pid != os.getpid()
        if forked:
            self._tally.renew()
            if self.share is None:
                return Beside(source, self._tally)
        if self._owned is None or forked:
            assert self.share is not None
            try:
                made_here = SharedAttached(
                    self.share, source, job or source.name, batch_blocks, self._tally
                )
            except Lost as error:
                raise ConfigError(
                    f"the owner of the shared cache {self.share!r} is gone, or was stopped "
                    f"({error}): make the cache again, or give share= another name"
                ) from error
            self._readers.add(made_here)
            return made_here
        core, division = self._owned.core, self._owned.division
        stock, made = division.attach(source, job or source.name, batch_blocks)
        return Attached(core, division, source, stock, made)

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what they mean: see counts.shares and docs/cache.md."""
        self._tally.renew()
        found = self._tally.snapshot()
        found |= shares(found)
        if self._owned is not None and self._pid == os.getpid():  # else its locks may be held
            found |= self._owned.gauges()
        return found

    def flush(self) -> None:
        """Wait until blocks on their way to the disk are there, for some seconds at most."""
        ours = self._owned is not None and self._pid == os.getpid()
        if ours and self._owned is not None and self._owned.disk is not None:
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
