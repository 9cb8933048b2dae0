"""The machinery of one pool in one process: threads, buffers, counters; made anew after a fork."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hpstore.codec import Backend, ErasureCode
from hpstore.config import Settings
from hpstore.format.pool_key import PoolKey
from hpstore.objects.context import PoolContext, View
from hpstore.objects.read_routing import Routing
from hpstore.runtime.budget import ByteBudget
from hpstore.runtime.buffers import BufferPool
from hpstore.runtime.clock import Clock, HybridCounter
from hpstore.runtime.metrics import Metrics
from hpstore.runtime.scheduler import Scheduler


def make_scheduler(settings: Settings, *, threads: bool) -> Scheduler:
    """Lanes and compute threads within the settings' limits."""
    return Scheduler(
        workers_per_device=settings.workers_per_device,
        queue_depth=settings.queue_depth,
        compute_threads=settings.compute_threads,
        threads=threads,
        stuck_seconds=settings.device_deadline_seconds,
    )


def make_store(
    view: View,
    settings: Settings,
    backend: Backend,
    clock: Clock,
    scheduler: Scheduler,
    *,
    read_only: bool,
    pool_key: PoolKey | None,
) -> PoolContext:
    """A store with empty counters and no memory taken yet."""
    return PoolContext(
        view=view,
        scheduler=scheduler,
        code=ErasureCode(backend),
        buffers=BufferPool(ByteBudget(settings.memory_bytes)),
        metrics=Metrics(),
        clock=clock,
        counter=HybridCounter(clock),
        settings=settings,
        read_only=read_only,
        pool_key=pool_key,
        routing=Routing(settings.hedge_percent / 100),
    )


def renew_after_fork(store: PoolContext) -> None:
    """Replace, in a forked child, what the parent's threads may have held (PROTOCOL 22).

    Runs in the fork hook: takes no lock and does no I/O. Devices reopen their root at first use.
    """
    store.scheduler.after_fork()
    store.buffers = BufferPool(ByteBudget(store.settings.memory_bytes))
    store.metrics = Metrics()
    store.counter = HybridCounter(store.clock)
    store.looking = threading.Lock()
    store.forget_stamps()


class RepairQueue:
    """Keys that a read found damaged, repaired by one background thread; bounded.

    A key that is being repaired is not queued again: the repair reads all of it, and meets the same
    damage. One whose repair failed rests, twice as long each time.
    """

    LIMIT = 1024
    REST_SECONDS, MOST_SECONDS = 60.0, 3600.0

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._keys: dict[str, None] = {}
        self._busy: str | None = None
        self._failed: dict[str, tuple[float, float]] = {}  # key -> when it may be tried, its rest
        self.lock = threading.Lock()  # guards all of these
        self.dropped = 0

    def add(self, key: str) -> bool:
        """Remember a key; False when it is known already, rests, or the queue is full."""
        with self.lock:
            if key in self._keys or key == self._busy:
                return False
            if key in self._failed and self._now() < self._failed[key][0]:
                return False
            if len(self._keys) >= self.LIMIT:
                self.dropped += 1  # a scrub finds it
                return False
            self._keys[key] = None
            return True

    def take(self) -> str | None:
        """The oldest key, or None. To be followed by done()."""
        with self.lock:
            key = self._busy = next(iter(self._keys), None)
            if key is not None:
                del self._keys[key]
            return key

    def done(self, key: str, *, good: bool) -> None:
        """Its repair has ended."""
        with self.lock:
            self._busy = None
            _, rest = self._failed.pop(key, (0.0, self.REST_SECONDS / 2))
            if not good:
                rest = min(2 * rest, self.MOST_SECONDS)
                self._failed[key] = (self._now() + rest, rest)
                while len(self._failed) > self.LIMIT:
                    del self._failed[next(iter(self._failed))]

    def rest_no_more(self) -> None:
        """Devices have come or gone: what failed may work now."""
        with self.lock:
            self._failed.clear()
