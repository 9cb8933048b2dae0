"""The heart of a cache: what is asked, who fetches it, where it goes. One lock, no I/O under it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.loaders.cache.block_source import BlockSource, bytes_of, sizes_of
from hpstore.loaders.cache.cache_counters import CacheTally
from hpstore.loaders.cache.disk_tier import DiskPart, Taken
from hpstore.loaders.cache.page_allocator import NO_PAGE, FoundPages, Int32s, pages_needed
from hpstore.loaders.cache.policy_interface import Bools, CacheDecision, Floats
from hpstore.loaders.cache.source_state import (
    AHEAD,
    FETCHED,
    Asked,
    BlockFetch,
    Fetched,
    FetchTurn,
    Landing,
    Leaving,
    ReaderJob,
    Room,
    SourceState,
)
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.runtime.clock import Clock
from hpstore.units import MIB

_log = logging.getLogger(__name__)
_NONE: Int64s = np.empty(0, np.int64)
TURN_SECONDS = 5.0  # that a batch waits for one which should have come before it
MOST_COPIES_BYTES = 16 * MIB  # of blocks that memory had no room for, on their way to the disk
REST_SECONDS = 1.0  # that a fetched block waits for pages which others still copy
LATE_SECONDS = 10.0  # how long a request waits for a fetch by another thread or process


class Core:
    """Requests and fetches of all stocks of one cache. Thread-safe.

    The room is set by whoever divides the memory. `lock` guards every stock and all of this but
    the memory's bytes: pages that were just taken belong to who took them until they are published.
    """

    def __init__(self, tally: CacheTally, clock: Clock) -> None:
        self.tally, self.clock = tally, clock
        self.lock = threading.Lock()
        self.landed = threading.Condition(self.lock)  # a flight ended, a job or a writer moved
        self.wanted = threading.Condition(self.lock)  # there may be something to prefetch
        self.stocks: dict[str, SourceState] = {}
        self.leaving: Leaving = deque()  # readers that were dropped
        self.room: Room
        self.layout = 0  # counts the rooms
        self.writing = 0  # threads that write into pages: the room must stay
        self.demanding = 0  # requests that read their source now: prefetches wait
        self.spill_limit = 0  # bytes of pages that may be on their way to the disk
        self._spilling = 0
        self._copies = 0  # bytes on their way that are in no page
        self._short = 0  # landings that wait for pages
        self.closed = False

    # --- requests -----------------------------------------------------------------------------

    def ask(self, stock: SourceState, job: ReaderJob, blocks: Int64s) -> Asked:
        """Where the blocks are, and which of them the caller has to fetch.

        It then ends every flight of `fetch` by land() or give_up().
        """
        with self.lock:
            self._await_turn(job, blocks)
            plan = self._access(stock, job, blocks)
            found = self.room.pages.find(stock.first, blocks)
            asked = Asked(self.room, found, self.room.free.begin_copy())
            self._note_used(stock, blocks, found.heads >= 0)
            missing = np.flatnonzero(found.heads < 0)
            if len(missing) or len(plan.admit):
                self._send_off(stock, plan, blocks, missing, asked)
            if len(plan.evict):
                self.evict(stock, plan.evict)
            self._moved(stock, job)
        return asked

    def note(self, stock: SourceState, job: ReaderJob, blocks: Int64s, told: int) -> None:
        """Requests that were served without asking, by a process that maps the memory.

        `told`: messages about its order that it had sent before; if they were of an order that
        was left since then, the requests say nothing of the present one.
        """
        with self.lock:
            if told > job.left_at:
                self._await_turn(job, blocks)
            if stock.replaced or told <= job.left_at:
                return
            plan = self._access(stock, job, blocks)
            self._note_used(stock, blocks, np.ones(len(blocks), bool))
            absent = plan.admit[stock.first[plan.admit] < 0]
            stock.policy.dropped(absent)  # nobody fetches them: they left after they were read
            if len(plan.evict):
                self.evict(stock, plan.evict)
            self._moved(stock, job)

    def _access(self, stock: SourceState, job: ReaderJob, blocks: Int64s) -> CacheDecision:
        plan = stock.policy.access(job.number, blocks)
        if job.foretold and stock.policy.mismatched(job.number):
            job.forget()  # nobody waits for a turn, and nothing is prefetched, by a wrong order
            self.tally.add(order_left_total=1)
        job.moved(len(blocks), self.clock.monotonic())
        return plan

    def _moved(self, stock: SourceState, job: ReaderJob) -> None:
        if job.early:
            self.landed.notify_all()
        if job.foretold or stock.warming:
            job.idle = False
            self.wanted.notify()

    def expect(self, stock: SourceState, job: ReaderJob, epoch: int, blocks: Int64s | None) -> None:
        """As Attached.expect."""
        with self.lock:
            if stock.replaced:
                return
            next_one = job.last_epoch is not None and epoch == job.last_epoch + 1
            if blocks is None or not next_one or stock.policy.mismatched(job.number):
                stock.policy.expect(job.number, None)
                job.forget()
                job.left_at = job.heard
                self.landed.notify_all()
            if blocks is not None:
                stock.policy.expect(job.number, blocks)
                job.tell(blocks)
                job.last_epoch = epoch
                job.idle = False
                self.wanted.notify_all()

    def drawn(self, stock: SourceState, job: ReaderJob, blocks: Int64s) -> None:
        """As Attached.drawn."""
        with self.lock:
            if stock.replaced or stock.policy.mismatched(job.number):
                return
            stock.policy.expect(job.number, blocks, drawn=True)
            job.tell(blocks, batch=True)
            job.idle = False
            self.wanted.notify_all()

    def begin_epoch(self, stock: SourceState, job: ReaderJob, requests: int | None) -> None:
        """As Attached.begin_epoch."""
        with self.lock:
            if not stock.replaced:
                stock.policy.begin_epoch(job.number, requests)

    def heard(self, job: ReaderJob) -> None:
        """Another message about the order of a job, of another process, has been heeded."""
        with self.lock:
            job.heard += 1
            self.landed.notify_all()

    def await_told(self, job: ReaderJob, messages: int) -> None:
        """Until so many messages are heeded: they come by another connection than requests."""
        with self.lock:
            came = self.landed.wait_for(lambda: job.heard >= messages or self.closed, TURN_SECONDS)
        if not came:
            self.tally.add(turn_missed_total=1)

    def _await_turn(self, job: ReaderJob, blocks: Int64s) -> None:
        """Batches made side by side come in some order; the policy is asked in the foretold one."""
        turn = FetchTurn(job, blocks)
        if turn.has_come():
            return
        job.early += 1
        came = self.landed.wait_for(lambda: turn.has_come() or self.closed, TURN_SECONDS)
        job.early -= 1
        if not came:
            self.tally.add(turn_missed_total=1)

    def _send_off(
        self, stock: SourceState, plan: CacheDecision, blocks: Int64s, missing: Int64s, asked: Asked
    ) -> None:
        """Flights for what is missing: others', or the asker's own."""
        admitted = set(plan.admit.tolist())
        mine: dict[int, int] = {}
        ahead: list[int] = []  # on its way by a prefetch, which was not soon enough
        flights, fetch = stock.flights, asked.fetch
        coming, resident = plan.late[missing].tolist(), plan.hit[missing].tolist()
        requests = zip(missing.tolist(), blocks[missing].tolist(), coming, resident, strict=True)
        for i, block, told, held in requests:
            if block in mine:
                asked.again.append((i, mine[block]))
                continue
            flight = flights.get(block)
            # the policy may know it as a resident, or as coming, though nobody fetches it
            keep = told or held or block in admitted
            if flight is not None:
                flight.keep |= keep
                flight.waiting += 1
                if flight.ahead and not flight.asked:
                    flight.asked = True
                    ahead.append(block)
                asked.late.append((i, block, flight))
                continue
            mine[block] = i
            flight = flights[block] = BlockFetch(keep, told=told)
            fetch.append((i, block, flight))
        if ahead:
            self.tally.add(
                prefetch_late_total=len(ahead),
                prefetch_late_bytes=bytes_of(stock.sizes, np.array(ahead, np.int64)),
            )

    def _note_used(self, stock: SourceState, blocks: Int64s, here: Bools) -> None:
        """Note requests, and which of them found their block."""
        ahead = stock.marks[blocks] & AHEAD != 0
        stock.log.record(blocks, here & ~ahead)  # a prefetch was a fetch, as a miss is
        used = stock.clear_ahead(blocks[here & ahead]) if ahead.any() else _NONE
        if len(used):
            self.tally.add(
                prefetch_used_total=len(used), prefetch_used_bytes=bytes_of(stock.sizes, used)
            )

    def wait(self, stock: SourceState, late: Sequence[tuple[int, int, BlockFetch]]) -> None:
        """Wait until all of these flights have ended. A flight that takes too long is given up, and
        is not waited for again: its process may have been stopped."""
        with self.lock:
            self.landed.wait_for(lambda: all(f.done for _, _, f in late), LATE_SECONDS)
            for _, _, flight in late:
                flight.waiting -= 1
            overdue = [(block, flight) for _, block, flight in late if not flight.done]
            self._drop(stock, overdue)
            for _, flight in overdue:  # it may still land: nothing is kept of it then
                flight.keep = flight.ahead = flight.told = False
        if overdue and self.tally.first("overdue_total"):
            _log.warning(
                "%s: a fetch by another thread or process takes more than %.0f s, so the blocks "
                "are fetched again by those who wait. No data is lost; overdue_total counts these",
                stock.name,
                LATE_SECONDS,
            )

    def copied(self, room: Room, ticket: int) -> None:
        """The pages that were found are not needed any more."""
        with self.lock:
            if room.free.end_copy(ticket) and self._short:
                self.landed.notify_all()

    def forget_late(self, late: Sequence[tuple[int, int, BlockFetch]]) -> None:
        """Whoever waited for these is gone."""
        with self.lock:
            for _, _, flight in late:
                flight.waiting -= 1

    # --- fetches ------------------------------------------------------------------------------

    def land(self, stock: SourceState, room: Room, fetched: Sequence[Fetched]) -> None:
        """End flights: bytes go into memory where they are to be kept, and to those who wait.

        The data stay the caller's. `room`: the one in which the blocks were asked for.
        """
        with self.lock:
            kept = [f for f in fetched if f.flight.keep]
            self._await_pages(room, kept)
            heads = self._take_pages(stock, room, kept)
            kept = kept[: len(heads)]
            self.writing += 1
        landing = Landing(stock, room, fetched, kept, heads)
        try:
            for one, head in zip(kept, heads.tolist(), strict=True):
                room.pages.write(head, one.data)
            while lacking := self._end_landing(landing):
                for one in lacking:
                    one.flight.data = one.data.copy()
        except BaseException:
            with self.lock:
                self._publish(landing, whole=False)
            raise
        if stock.disk is not None:
            self._spill_passed_by(stock, [one for one in fetched if not one.flight.keep])

    def _await_pages(self, room: Room, kept: Sequence[Fetched]) -> None:
        """Until copies of evicted blocks are over, whose pages are needed."""
        need = sum(pages_needed(len(one.data), room.pages.page_bytes) for one in kept)
        if room.free.ready_count < need <= room.free.free_count:
            self._short += 1
            self.landed.wait_for(lambda: room.free.ready_count >= need, REST_SECONDS)
            self._short -= 1

    def _take_pages(self, stock: SourceState, room: Room, kept: Sequence[Fetched]) -> Int32s:
        """First pages for as many of these as there is room for."""
        if room is not self.room or stock.replaced or not kept:
            return np.empty(0, np.int32)
        return room.take(np.array([len(one.data) for one in kept], np.int64))

    def _end_landing(self, landing: Landing) -> list[Fetched]:
        """Publish, unless somebody waits for a copy: then those blocks."""
        with self.lock:  # also what is kept may be gone again before they look
            lacking = [o for o in landing.fetched if o.flight.waiting and o.flight.data is None]
            if not lacking:
                self._publish(landing, whole=True)
        return lacking

    def _publish(self, landing: Landing, *, whole: bool) -> None:
        """Make blocks visible and end their flights; pages without use go back."""
        self.writing -= 1
        stock, room, lost = landing.stock, landing.room, []
        heads = dict(zip((one.block for one in landing.kept), landing.heads.tolist(), strict=True))
        for one in landing.fetched:
            head = heads.pop(one.block, None)
            if head is not None and not (whole and one.flight.keep):
                self._free(stock, room, np.array([one.block], np.int64), np.array([head], np.int32))
                head = None
            if head is not None:
                stock.first[one.block] = head
                if one.flight.ahead and not one.flight.asked:
                    stock.marks[one.block] |= AHEAD
            elif one.flight.keep:
                lost.append(one.block)
        arrived = [o.block for o in landing.fetched if o.flight.ahead or o.flight.told]
        if not stock.replaced:
            stock.policy.arrived(np.array(arrived, np.int64))
            stock.policy.dropped(np.array(lost, np.int64))
        self._end(stock, [(one.block, one.flight) for one in landing.fetched])

    def give_up(self, stock: SourceState, flights: Iterable[tuple[int, BlockFetch]]) -> None:
        """End flights without bytes: who waits fetches for himself."""
        with self.lock:
            self._drop(stock, list(flights))

    def _drop(self, stock: SourceState, flights: Sequence[tuple[int, BlockFetch]]) -> None:
        lost = [block for block, flight in flights if flight.keep]
        if lost and not stock.replaced:
            stock.policy.dropped(np.array(lost, np.int64))
        self._end(stock, flights)

    def _end(self, stock: SourceState, flights: Sequence[tuple[int, BlockFetch]]) -> None:
        for block, flight in flights:
            flight.done = True
            if stock.flights.get(block) is flight:
                del stock.flights[block]
            if flight.ahead and not stock.marks[block] & AHEAD:
                stock.ahead_bytes -= bytes_of(stock.sizes, np.array([block], np.int64))
        self.landed.notify_all()
        self.wanted.notify()

    def from_disk(self, stock: SourceState, blocks: Int64s, targets: Sequence[Bytes]) -> list[int]:
        """Fill targets with blocks that are on the disk; which ones are left."""
        part = stock.disk
        there = np.flatnonzero(part.holds(blocks)) if part is not None else _NONE
        if part is None or not len(there):
            return list(range(len(blocks)))
        left = set(range(len(blocks)))
        self.tally.add(
            disk_read_total=len(there), disk_read_bytes=bytes_of(stock.sizes, blocks[there])
        )
        for i, data in zip(there.tolist(), part.read(blocks[there]), strict=True):
            if data is not None:
                targets[i][:] = data
                left.discard(i)
        return sorted(left)

    def read_source(
        self, stock: SourceState, source: BlockSource, blocks: Int64s, targets: Sequence[Bytes]
    ) -> None:
        """Read blocks where they come from, and note it. Raises what reading raises."""
        began = self.clock.monotonic()
        source.read(blocks, targets)
        seconds = self.clock.monotonic() - began
        nbytes = bytes_of(stock.sizes, blocks)
        with self.lock:
            before = blocks[stock.marks[blocks] & FETCHED != 0]
            stock.marks[blocks] |= FETCHED
            stock.pace.add(nbytes, seconds)
        self.tally.add(
            source_reads_total=1,
            source_blocks=len(blocks),
            source_bytes=nbytes,
            source_again_bytes=bytes_of(stock.sizes, before),
        )

    @contextmanager
    def demand(self) -> Iterator[None]:
        """While somebody waits for a source, nothing is prefetched."""
        with self.lock:
            self.demanding += 1
        try:
            yield
        finally:
            with self.lock:
                self.demanding -= 1
                self.wanted.notify()

    # --- leaving ------------------------------------------------------------------------------

    def evict(self, stock: SourceState, blocks: Int64s) -> None:
        """Blocks leave the memory, to the disk if that is worth it. Under the lock."""
        heads = stock.first[blocks]
        for block in blocks[heads < 0].tolist():
            if block in stock.flights:  # it leaves before it has come
                stock.flights[block].keep = False
        there = heads >= 0
        blocks, heads = blocks[there], heads[there]
        stock.first[blocks] = NO_PAGE
        unused = stock.clear_ahead(blocks)
        self.tally.add(
            evicted_total=len(blocks),
            prefetch_wasted_total=len(unused),
            prefetch_wasted_bytes=bytes_of(stock.sizes, unused),
        )
        if stock.disk is not None and len(blocks):
            spilt = self._spill(stock, stock.disk, blocks, heads)
            blocks, heads = blocks[~spilt], heads[~spilt]
        self._free(stock, self.room, blocks, heads)

    def _free(self, stock: SourceState, room: Room, blocks: Int64s, heads: Int32s) -> None:
        if len(heads) and room is self.room:
            counts = room.pages.pages_each(sizes_of(stock.sizes, blocks))
            room.free.give_back(room.pages.chained(heads, counts))

    def uses_beside_memory(self, stock: SourceState, blocks: Int64s) -> Floats:
        """When blocks on the disk are needed; never, where they are in memory as well."""
        uses = stock.policy.expected_use(blocks).copy()
        uses[stock.first[blocks] >= 0] = np.inf
        return uses

    def _offer(self, stock: SourceState, part: DiskPart, blocks: Int64s, limit_bytes: int) -> Taken:
        """Which blocks the disk takes, the soonest first."""
        return part.offer(
            blocks,
            self.uses_beside_memory(stock, blocks),
            limit_bytes,
            lambda others: self.uses_beside_memory(stock, others),
        )

    def _spill(self, stock: SourceState, part: DiskPart, blocks: Int64s, heads: Int32s) -> Bools:
        """Which of the evicted blocks keep their pages until they are on the disk."""
        nothing = np.zeros(len(blocks), bool)
        taken = self._offer(stock, part, blocks, self.spill_limit - self._spilling)
        chosen, pages = blocks[taken.take], heads[taken.take]
        if not len(chosen):
            return nothing
        self._spilling += bytes_of(stock.sizes, chosen)
        call = partial(self._write_evicted, stock, part, self.room, chosen, pages, taken.drop)
        if not part.tier.later(call):
            self._spilling -= bytes_of(stock.sizes, chosen)
            part.cancel(chosen.tolist(), taken.drop)
            return nothing
        return taken.take

    def _write_evicted(
        self,
        stock: SourceState,
        part: DiskPart,
        room: Room,
        blocks: Int64s,
        heads: Int32s,
        drop: list[int],
    ) -> None:
        """On the thread that writes: take evicted blocks out of their pages, then write them."""
        sizes = sizes_of(stock.sizes, blocks)
        data = [np.empty(size, np.uint8) for size in sizes.tolist()]
        room.pages.copy(FoundPages(heads, np.zeros(len(heads), np.uint32)), sizes, data)
        with self.lock:
            self._spilling -= int(sizes.sum())
            current = room is self.room  # else others may have written into the pages
            self._free(stock, room, blocks, heads)
        if current:
            part.write(blocks.tolist(), data, drop)
        else:
            part.cancel(blocks.tolist(), drop)

    def _spill_passed_by(self, stock: SourceState, fetched: Sequence[Fetched]) -> None:
        """Blocks that memory had no room for may be worth their place on the disk."""
        part = stock.disk
        if part is None or not fetched:
            return
        blocks = np.array([one.block for one in fetched], np.int64)
        with self.lock:
            if stock.replaced:
                return
            taken = self._offer(stock, part, blocks, MOST_COPIES_BYTES - self._copies)
            nbytes = bytes_of(stock.sizes, blocks[taken.take])
            self._copies += nbytes
        data = [fetched[i].data.copy() for i in np.flatnonzero(taken.take).tolist()]
        chosen = blocks[taken.take].tolist()
        if not chosen:
            return

        def write() -> None:
            with self.lock:
                self._copies -= nbytes
            part.write(chosen, data, taken.drop)

        if not part.tier.later(write):
            with self.lock:
                self._copies -= nbytes
            part.cancel(chosen, taken.drop)
