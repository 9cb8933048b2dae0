"""The machinery of one pool in one process: threads, buffers, counters; made anew after a fork."""

from __future__ import annotations

import threading

from hpstore.budget import ByteBudget
from hpstore.buffers import BufferPool
from hpstore.clock import Clock, HybridCounter
from hpstore.codec import Backend, ErasureCode
from hpstore.config import Settings
from hpstore.metrics import Metrics
from hpstore.objects.routing import Routing
from hpstore.objects.store import Store, View
from hpstore.scheduler import Scheduler


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
    view: View, settings: Settings, backend: Backend, clock: Clock, scheduler: Scheduler,
    *, read_only: bool,
) -> Store:  # fmt: skip
    """A store with empty counters and no memory taken yet."""
    return Store(
        view=view,
        scheduler=scheduler,
        code=ErasureCode(backend),
        buffers=BufferPool(ByteBudget(settings.memory_bytes)),
        metrics=Metrics(),
        clock=clock,
        counter=HybridCounter(clock),
        settings=settings,
        read_only=read_only,
        routing=Routing(settings.hedge_percent / 100),
    )


def renew_after_fork(store: Store) -> None:
    """Replace, in a forked child, what the parent's threads may have held (PROTOCOL 22).

    Runs in the fork hook: takes no lock and does no I/O. Devices reopen their root at first use.
    """
    store.scheduler.after_fork()
    store.buffers = BufferPool(ByteBudget(store.settings.memory_bytes))
    store.metrics = Metrics()
    store.counter = HybridCounter(store.clock)
    store.forget_stamps()


class RepairQueue:
    """Keys that a read found damaged, repaired by one background thread; bounded."""

    LIMIT = 1024

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}
        self.lock = threading.Lock()  # guards _keys and dropped
        self.dropped = 0

    def add(self, key: str) -> bool:
        """Remember a key; False when it is known already or the queue is full."""
        with self.lock:
            if key in self._keys:
                return False
            if len(self._keys) >= self.LIMIT:
                self.dropped += 1  # a scrub finds it
                return False
            self._keys[key] = None
            return True

    def take(self) -> str | None:
        """The oldest key, or None."""
        with self.lock:
            key = next(iter(self._keys), None)
            if key is not None:
                del self._keys[key]
            return key


__all__ = ["RepairQueue", "make_scheduler", "make_store", "renew_after_fork"]
