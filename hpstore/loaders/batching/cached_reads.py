"""A cache between a loader and its dataset: records through it, and the order that is to come."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.cache import AnyAttached, Cache, MemoryLost
from hpstore.loaders.cache.record_source import RecordSource
from hpstore.loaders.dataset.dataset import Dataset
from hpstore.loaders.dataset.large_records import Lost
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.record_stream import Stream
from hpstore.loaders.sampling.order import Order
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.loaders.sampling.rank_slices import Slices
from hpstore.loaders.sampling.sampler_replay import foretell, foretell_own
from hpstore.runtime.closing import Closing
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
MOST_TOLD = 20_000_000  # requests: 16 bytes each are kept, and computed before the first batch
LEAST_EPOCHS, MOST_EPOCHS = 2, 16  # told ahead
SETTLE_SECONDS = 30.0  # for reads of a run that was left


class CachedReads(Closing):
    """Records of one dataset through a cache, for one loader: one run after the other."""

    def __init__(self, cache: Cache, data: Dataset, *, batch_rows: int) -> None:
        self.data = data
        self.attached: dict[int, AnyAttached] = {}
        try:
            for stream in data.streams:
                self.attached[stream.number] = cache.attach(
                    RecordSource(data, stream), batch_blocks=batch_rows
                )
        except BaseException:
            self._detach()
            raise
        self._run: CachedRun | None = None

    def begin(self) -> CachedRun:
        """A run; the one before is left, and its requests come before those that this foretells."""
        before = self._run
        if before is not None:
            before.leave()
            before.settle()
        self._run = CachedRun(self)
        for attached in self.attached.values():
            attached.begin_epoch(None)
        return self._run

    def expect(self, epoch: int, blocks: Int64s | None) -> None:
        """Of all streams: a sample is a record in each."""
        for attached in self.attached.values():
            attached.expect(epoch, blocks)

    def close(self) -> None:
        """This loader is gone; what it brought into the cache stays. Idempotent."""
        if self._run is not None:
            self._run.leave()
        self._detach()

    def let_go(self) -> None:
        """As close(), without waiting for a lock of the cache: for the garbage collector."""
        if self._run is not None:
            self._run.let_go()
        for attached in self.attached.values():
            attached.let_go()

    def _detach(self) -> None:
        for attached in self.attached.values():
            attached.close()


class CachedRun:
    """One run of a loader through its cache. read() and reached() are for many threads.

    Once it is left its reads pass the cache by: they are no part of the next run's order.
    """

    def __init__(self, reads: CachedReads) -> None:
        self._reads = reads
        self._following: _Following | None = None
        self._left, self._told_so, self._reading = False, False, 0
        self._moved = threading.Condition()  # guards all three

    def read(
        self,
        stream: Stream,
        indices: Int64s,
        rows: Sequence[Bytes] | Bytes,
        lost: Lost | None = None,
    ) -> bool:
        """As StoredData.read_rows."""
        with self._moved:
            left = self._left
            self._reading += not left
        if left:
            return self._reads.data.read_rows(stream, indices, list(rows), lost=lost)
        try:
            self._reads.attached[stream.number].read(indices, rows)
        except MemoryLost as error:
            if lost is not None and error.late is not None:
                lost(error.late)
            return False
        finally:
            with self._moved:
                self._reading -= 1
                self._moved.notify_all()
        return True

    def follow(self, order: Order | None, slices: Slices | None, epoch: int, position: int) -> None:
        """Requests come in this order from here on; before the first of them."""
        if order is None or slices is None:
            return
        share = max(1, order.length // max(1, slices.world_size))
        if order.length > MOST_TOLD:
            self._reads.data.pool.metrics.count("order_not_told_total")
            _log.warning(
                "an order of %d samples is too long to be told to the cache (%d), which learns "
                "instead",
                order.length,
                MOST_TOLD,
            )
            return
        ahead = min(MOST_EPOCHS, max(LEAST_EPOCHS, 2 * slices.world_size), MOST_TOLD // share)
        self._following = _Following(self._reads, order, slices, epoch, position, max(1, ahead))

    def follow_sampler(self, sampler: Any, mapping: Indices | None, epoch: int, skip: int) -> bool:
        """Requests come as a sampler of the user's yields them, from its batch `skip` on.

        False when that is not known: tell the batches by drawn().
        """
        told = foretell(sampler)
        if not told:
            self._reads.expect(epoch, None)
            return False
        size = getattr(sampler, "batch_size", 1) or 1
        samples = np.asarray(told[0], np.int64)[skip * size :]
        self._reads.expect(epoch, samples if mapping is None else mapping[samples])
        return True

    def drawn(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches of samples; each is told to the cache as soon as it is drawn.

        They are drawn ahead of being made, so that of an order which nobody knows these are known.
        """
        for batch in batches:
            if not self._left:
                blocks = np.array(batch, np.int64).reshape(-1)
                for attached in self._reads.attached.values():
                    attached.drawn(blocks)
            yield batch

    def reached(self, epoch: int) -> None:
        """A batch of an epoch is about to be made. Waits until it has been told."""
        if self._following is not None and self._following.reached(epoch):
            for attached in self._reads.attached.values():
                attached.begin_epoch(None)

    def leave(self) -> None:
        """Nothing more is read, and what was told does not hold any more. Idempotent."""
        with self._moved:
            self._left, before, self._told_so = True, self._told_so, True
        if before:
            return
        if self._following is not None:
            self._following.stop()
        self._reads.expect(0, None)

    def let_go(self) -> None:
        """Nothing more is read. The cache is told by leave(), or knows when its reader goes."""
        self._left = True
        if self._following is not None:
            self._following.stop(wait=False)

    def settle(self) -> None:
        """Wait until its reads have ended."""
        with self._moved:
            if not self._moved.wait_for(lambda: not self._reading, SETTLE_SECONDS):
                _log.warning("reads of an earlier run do not end: the next order counts as left")


class _Following:
    """Tells epochs ahead: the first ones at once, others on a thread as the run goes on."""

    def __init__(
        self,
        reads: CachedReads,
        order: Order,
        slices: Slices,
        epoch: int,
        position: int,
        ahead: int,
    ) -> None:
        self._reads, self._order, self._slices = reads, order, slices
        self._epoch, self._ahead, self._stopped = epoch, ahead, False
        self._told = epoch
        self._moved = threading.Condition()  # guards _epoch, _told and _stopped
        self._tell(epoch, position)
        self._thread = threading.Thread(target=self._run, name="hpstore-order", daemon=True)
        start_thread(self._thread)

    def _tell(self, epoch: int, position: int = 0) -> None:
        self._reads.expect(epoch, foretell_own(self._order, self._slices, epoch, position))

    def _run(self) -> None:
        try:
            self._follow()
        except Exception:  # noqa: BLE001 (an order may be of anybody's)
            self._reads.data.pool.metrics.count("order_not_told_total")
            _log.exception("an order is told to the cache no further, which learns instead")
            with self._moved:  # who waits for it goes on
                self._stopped = True
                self._moved.notify_all()
            self._reads.expect(0, None)

    def _follow(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(
                    lambda: self._stopped or self._told < self._epoch + self._ahead - 1
                )
                if self._stopped:
                    return
            self._tell(self._told + 1)
            with self._moved:
                self._told += 1
                self._moved.notify_all()

    def reached(self, epoch: int) -> bool:
        """True for an epoch that is new. Waits until it has been told."""
        with self._moved:
            new = epoch > self._epoch
            self._epoch = max(epoch, self._epoch)
            self._moved.notify_all()
            self._moved.wait_for(lambda: self._stopped or self._told >= epoch)
        return new

    def stop(self, *, wait: bool = True) -> None:
        """Tell no more. Waits for what is being told."""
        with self._moved:
            self._stopped = True
            self._moved.notify_all()
        if wait:
            self._thread.join()
