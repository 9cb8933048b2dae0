"""What the object functions work on: the view of the membership and the machinery of one pool."""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from hpstore.agreement.registers import LocalRegisters, Registers
from hpstore.codec import ErasureCode
from hpstore.config import Settings
from hpstore.devices.base import READABLE, Device, Stamp, Usage
from hpstore.devices.horizon_guard import MARK
from hpstore.devices.reserve import shortage
from hpstore.errors import (
    BudgetExceeded,
    DeviceError,
    DeviceMissing,
    DeviceReadOnly,
    IntegrityError,
    TooFewDevices,
)
from hpstore.format.keys import MAX_COUNTER, NameTags, Version
from hpstore.format.placement import Candidate, placeable
from hpstore.format.pool_key import PoolKey
from hpstore.format.records import MAX_RECORD_BYTES, POOL_FILE, DeviceState, Member, PoolRecord
from hpstore.objects.read_routing import Routing
from hpstore.runtime.buffers import BufferPool, Lease
from hpstore.runtime.clock import Clock, HybridCounter, SystemClock
from hpstore.runtime.deadline_wait import Patience
from hpstore.runtime.metrics import Metrics
from hpstore.runtime.scheduler import Scheduler
from hpstore.units import format_bytes

T = TypeVar("T")
_log = logging.getLogger(__name__)
READ_PATIENCE = 0.25  # seconds that a read waits for a device that it can do without
PATIENCE = 2.0  # what writes: without a device it places narrower stripes, or leaves old files
LOOK_SECONDS = 5.0  # between two looks for devices that are there again
MARK_STEP_MS = 2000  # a process that puts raises the mark so often: no put pays a sync of its own
AHEAD_STEP_MS = 16  # while counters are ahead of the clock, so that it catches up
MARK_TRIES = 6  # others raise it, too


def _no_lock(_: str) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The membership as this process sees it. Immutable; a change makes a new one."""

    record: PoolRecord
    devices: Mapping[str, Device]  # members that answered at open, by device id
    sitting_out: frozenset[str] = frozenset()  # this process' own decision about reads

    @property
    def missing(self) -> frozenset[str]:
        """Members that did not answer."""
        return frozenset(m.device_id for m in self.record.members) - self.devices.keys()

    def may_leave(self, silent: Collection[str]) -> int:
        """Further members that may stop answering before the pool cannot be opened, or cannot say
        that a key is absent (PROTOCOL 7, 14), when those `silent` and those missing do not answer
        now. What was evicted and not made up for by a rebuild counts as lost, too."""
        lost = self.missing.union(silent, self.record.unhealed())
        return max(0, self.record.parity - self.record.weight(lost))

    def differs(self, other: View) -> bool:
        """Whether it has another record, or other devices: some have come or were opened anew."""
        return self.record.generation != other.record.generation or any(
            other.devices.get(device) is not opened for device, opened in self.devices.items()
        )

    def members(self) -> list[Member]:
        """Members that answered."""
        return [m for m in self.record.members if m.device_id in self.devices]

    def staying(self) -> set[str]:
        """Devices that answered and are not leaving the pool."""
        return {m.device_id for m in self.members() if m.state is DeviceState.ONLINE}


class Offer(NamedTuple):
    """A device that takes new columns, and its space. Made for each device by each put: a tuple."""

    candidate: Candidate
    usage: Usage


@dataclass(slots=True, kw_only=True)
class PoolContext:
    """One open pool, seen from below."""

    view: View
    scheduler: Scheduler
    code: ErasureCode
    buffers: BufferPool
    metrics: Metrics
    clock: Clock
    counter: HybridCounter
    settings: Settings
    read_only: bool = False
    pool_key: PoolKey | None = None  # None: a pool of before, whose files are not authenticated
    routing: Routing = field(default_factory=Routing)
    refresh: Callable[[], None] = field(default=lambda: None)  # reads the membership anew
    damage: Callable[[str], None] = field(default=lambda key: None)  # a key that needs repair
    registers: Registers = field(default_factory=lambda: LocalRegisters(SystemClock()))
    key_lock: Callable[[str], AbstractContextManager[object]] = field(default=_no_lock)
    relay_lock: threading.Lock = field(default_factory=threading.Lock)  # one re-layout at a time
    refusing: dict[str, str] = field(default_factory=dict)  # device -> why it cannot be written
    deleted: deque[tuple[int, str]] = field(  # (counter, key), by this process, not swept yet
        default_factory=lambda: deque(maxlen=8192)
    )
    looking: threading.Lock = field(default_factory=threading.Lock)  # see look_again()
    _looked_at: float = -math.inf  # by the clock; guarded by looking
    _stamps: dict[str, tuple[Stamp, int]] = field(default_factory=dict)
    _marks: dict[str, int] = field(default_factory=dict)  # of devices, as candidates() saw them
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards _stamps

    def pinned(self) -> PoolContext:
        """The same machinery with the view of now: a plan and its execution see one membership."""
        return replace(self)

    def without(self, silent: Collection[str]) -> PoolContext:
        """The same machinery as if these devices were missing: what they list may come out of a
        cache, and a call on them may hang."""
        here = {d: device for d, device in self.view.devices.items() if d not in set(silent)}
        return replace(self, view=replace(self.view, devices=here))

    def each(
        self,
        devices: Iterable[str],
        call: Callable[[str, Device], T],
        *,
        patience: float | None = None,
        brief: str = "",
    ) -> dict[str, T | Exception]:
        """Run `call` on devices side by side, under the device deadline.

        With a `patience` in seconds, no longer than about that for devices that the pool can be
        opened without: what they hold is unknown, as of any that do not answer. `brief` as
        Scheduler.gather has it.
        """
        found = self.view.devices
        return self.scheduler.gather(
            {d: lambda d=d: call(d, found[d]) for d in devices if d in found},  # type: ignore[misc]
            self.settings.device_deadline_seconds,
            patience=None if patience is None else Patience(patience, self.shows_without),
            brief=brief,
        )

    def shows_without(self, silent: Collection[str]) -> bool:
        """Whether every acknowledged version shows although these devices do not answer, either."""
        record = self.view.record
        return record.opens_without(self.view.missing.union(silent, record.unhealed()))

    def look_again(self, before: View) -> bool:
        """Before an operation fails for devices that did not answer while `before` was the view:
        whether the membership shows others now, or some anew, so that it is worth another try.

        One thread looks, under the open deadline, those that come meanwhile wait for what it finds.
        A look that ended less than LOOK_SECONDS ago is not repeated. Thread-safe.
        """
        with self.looking:
            if self.view.differs(before):
                return True  # somebody has looked since
            if self.clock.monotonic() - self._looked_at < LOOK_SECONDS:
                return False
            self.refresh()
            self._looked_at = self.clock.monotonic()
            return self.view.differs(before)

    def owing(self) -> set[str]:
        """Devices that have owed an answer for longer than writes wait for one."""
        return self.scheduler.late(self.view.devices, PATIENCE)

    def scratch(self, nbytes: int, what: str, *, keep: bool = True) -> Lease | None:
        """Memory for reads that have another way, a slower one; None where all is in use.

        Counted as `<what>_without_memory_total`, and logged once. `keep`: see BufferPool.lease().
        """
        try:
            return self.buffers.lease(nbytes, 0.0, keep=keep)
        except BudgetExceeded:
            if self.metrics.count(f"{what}_without_memory_total") == 1:
                _log.warning(
                    "memory_bytes (%s) is all in use, reads that wanted %s more take slower ways; "
                    "%s_without_memory_total counts them. Raise it where they are many.",
                    format_bytes(self.buffers.budget.limit_bytes),
                    format_bytes(nbytes),
                    what,
                )
            return None

    def kept_off(self) -> tuple[str, ...]:
        """Devices that get no ordinary reads at all now, the worst first."""
        routed = (device for device, share in self.routing.avoided.items() if not share)
        return (*self.view.sitting_out, *routed)

    def patience_seconds(self, device: str, nbytes: int) -> float | None:
        """How long a read that is submitted now may take; None when that is not known.

        What peers need, for each call that is before it; a millisecond for what is not the device.
        """
        seconds = self.routing.patience_seconds(device, nbytes)
        if seconds is None:
            return None
        rounds = 1 + self.scheduler.queued(device) // self.settings.workers_per_device
        return rounds * seconds + 0.001

    def note_damage(self, device: str) -> None:
        """A read of a device brought other bytes than were written there."""
        meter = self.routing.meter(device)
        if meter is not None:
            meter.note_damage()

    def name_tags(self, key: str) -> NameTags:
        """Which names files of an object may have."""
        return NameTags(self.pool_key, self.view.record.pool_id, key)

    def note_suspect(self, counter: str, count: int, key: str, text: str) -> None:
        """Files of a key are not what a writer of the pool made: counted, logged the first time,
        and queued for a repair. Any thread."""
        if self.metrics.count(counter, count) == count:
            _log.warning("%s", text)
        self.damage(key)

    def avoided(self) -> tuple[str, ...]:
        """Devices that the next read keeps off, the worst first: an operator's, the monitor's."""
        found = self.routing.avoided_now()
        manual = self.view.sitting_out
        return found if not manual else (*manual, *(d for d in found if d not in manual))

    def new_version(
        self,
        seen: Iterable[Version] = (),
        *,
        above: int = 0,
        next_counter: Callable[[int], int] | None = None,
    ) -> Version:
        """A version above all that were seen, and above a counter (PROTOCOL 1).

        `next_counter`: of the claim whose counters it takes. To be called after candidates(), which
        looks at the marks of other processes. Raises TooFewDevices when it cannot be made sure that
        later versions are above it.
        """
        highest = max((v.counter for v in seen), default=0)
        highest = max(highest, above, self._behind())
        counter = (next_counter or self.counter.next)(highest)
        while counter <= self.counter.highest:  # else its key alone is far ahead, by a damaged name
            mark = max(self._marks.values(), default=0)
            far = mark > max(counter, self.clock.wall_ms()) + MARK_STEP_MS
            if not far and counter <= self.counter.covered:
                break
            sure = self._under_the_mark(counter)
            if next_counter is None or sure == counter:
                counter = sure
                break
            counter = next_counter(sure - 1)
        if counter >= MAX_COUNTER:
            raise IntegrityError(
                f"a version with counter {highest} leaves no room above it: a damaged file name?"
            )
        return Version(counter, secrets.randbits(64), 0)

    def _behind(self) -> int:
        """The mark, where this machine's clock is behind it and another process raised it; else 0.

        By "highest seen + 1" alone a clock that is behind gives out counters that are below, or
        equal to, that of a put of another process which cannot be seen now. A process that raised
        the mark itself goes on below it, so the numbers rise by a step an exchange, no more.
        """
        mark = max(self._marks.values(), default=0)
        others = mark > self.counter.covered
        return mark if others and mark > self.clock.wall_ms() + MARK_STEP_MS else 0

    def _under_the_mark(self, counter: int) -> int:
        """Raise the pool's mark above a counter before any file carries it; which counter to take.

        Durable on m + 1 devices, for the next two seconds of puts of this process. Where another
        mark is farther ahead than such a step, its writer's clock was ahead of this one: a version
        that nobody has acknowledged may be hidden on a device that is away, with a counter up to
        that mark, so this one goes above it.
        """
        for _ in range(MARK_TRIES):
            ahead = counter > self.clock.wall_ms() + MARK_STEP_MS
            limit = counter + (AHEAD_STEP_MS if ahead else MARK_STEP_MS)
            marks = self._raise_mark(limit)
            if max(marks) <= max(limit, self.clock.wall_ms() + MARK_STEP_MS):
                self.counter.cover(limit)
                break
            counter = self.counter.next(max(marks), trusted=True)
            if self.metrics.count("counter_ahead_total") == 1:
                _log.warning(
                    "versions of this pool are %.0f s ahead of this machine's clock: it is behind, "
                    "or another one was ahead. New ones go above them; deletes are swept as much "
                    "later.",
                    (counter - self.clock.wall_ms()) / 1000,
                )
        return counter

    def note_mark(self, device_id: str, mark: Callable[[], int]) -> None:
        """Remember what a device's mark is, as a put looks at it."""
        try:
            self._marks[device_id] = mark()
        except IntegrityError:  # the others have it; it is written again with the next raise
            self.metrics.count("mark_damaged_total")

    def _raise_mark(self, limit: int) -> list[int]:
        answers = self.each(
            self.view.devices,
            lambda _, d: d.raise_counter(MARK, limit, self.pool_key),
            patience=PATIENCE,
        )
        marks = [answer for answer in answers.values() if not isinstance(answer, Exception)]
        noted = [d for d, answer in answers.items() if not isinstance(answer, Exception)]
        if self.view.record.weight(noted) <= self.view.record.parity:
            reasons = [str(answer) for answer in answers.values() if isinstance(answer, Exception)]
            raise TooFewDevices(
                f"{len(marks)} devices can note how far versions are counted; "
                f"{self.view.record.parity + 1} are needed: {'; '.join(reasons)}. Nothing was "
                "changed; reading goes on. Bring devices back."
            )
        return marks

    def generation_on(self, device_id: str, device: Device) -> int:
        """The membership generation that a device itself records.

        Raises DeviceMissing when the record is gone: the device was wiped underneath, and what it
        does not show is unknown, not absent.
        """
        return self.generation_of(device_id, device, device.stamp(POOL_FILE))

    def generation_of(self, device_id: str, device: Device, stamp: Stamp | None) -> int:
        """The same of a device whose record has this stamp now."""
        if stamp is None:
            raise DeviceMissing(
                f"device {device.url} lost its {POOL_FILE}: wiped or unmounted", device=device_id
            )
        with self._lock:
            known = self._stamps.get(device_id)
        if known is not None and known[0] == stamp:
            return known[1]
        try:
            data = device.read_small(POOL_FILE, MAX_RECORD_BYTES)
        except FileNotFoundError as error:
            raise DeviceMissing(f"device {device.url} lost its {POOL_FILE}") from error
        where = f"{device.url}/{POOL_FILE}"
        record = PoolRecord.decode(data, where=where, pool_key=self.pool_key)
        if record.pool_id != self.view.record.pool_id:
            raise DeviceMissing(f"device {device.url} belongs to another pool now")
        with self._lock:
            self._stamps[device_id] = (stamp, record.generation)
        return record.generation

    def record_stamp(self, device_id: str, generation: int) -> Stamp | None:
        """The stamp of the record that generation_on() saw last, if it is not newer than that."""
        with self._lock:
            known = self._stamps.get(device_id)
        return known[0] if known is not None and known[1] <= generation else None

    def note_write(self, device_id: str, url: str, answer: object) -> None:
        """Learn from how a write on a device ended: an error, or anything else when it worked.

        One that is read-only takes no new columns until a write works again; what it holds is read
        as ever. Counted, and logged once. Any thread.
        """
        known = device_id in self.refusing
        if isinstance(answer, DeviceReadOnly) and not known:
            self.refusing[device_id] = str(answer)
            self.metrics.count("device_read_only_total")
            _log.warning("device %s is read-only: it is read, and takes no new columns", url)
        elif known and not isinstance(answer, Exception):
            self.refusing.pop(device_id, None)
            _log.warning("device %s can be written again", url)

    def probe(self, device_id: str, device: Device) -> DeviceError | None:
        """Write, sync and read back (pool open read-only: look) on a device; blocks.

        Returns why it takes no writes though it can be read. Raises DeviceError when it does not
        really answer: statvfs and cached listings succeed on a dead filesystem.
        """
        refused: DeviceError | None = None
        try:
            device.probe(write=not self.read_only)
        except READABLE as error:
            refused = error
        if not self.read_only:
            self.note_write(device_id, device.url, refused)
        elif device.usage().read_only:
            refused = DeviceReadOnly(f"device {device.url} is mounted read-only", device=device_id)
        return refused

    def offer(self, device_id: str, device: Device) -> Usage | None:
        """Its space, when a device takes new columns. Looks at its mark, too (new_version)."""
        if device_id in self.refusing and self.probe(device_id, device) is not None:
            return None
        self.note_mark(device_id, lambda: device.counter(MARK, self.pool_key))
        return device.usage()

    def offers(
        self, exclude: Iterable[str] = (), *, seen: Mapping[str, Usage | None] | None = None
    ) -> list[Offer]:
        """Devices that take new columns (PROTOCOL 3), full ones, too, with their space.

        `seen`: what offer() has said of all that answered a moment ago, so that none is asked.
        """
        left_out = set(exclude) | self.view.sitting_out
        asked = [
            m
            for m in self.view.members()
            if m.device_id not in left_out and m.state is DeviceState.ONLINE and m.weight > 0
        ]
        space: Mapping[str, Usage | Exception | None]
        if seen is not None:
            space = {m.device_id: seen.get(m.device_id) for m in asked}
        else:
            space = self.each(
                (m.device_id for m in asked), self.offer, patience=PATIENCE, brief="offer"
            )
        return [
            Offer(
                candidate=Candidate(device=m.device_id, domain=m.domain, weight=m.weight),
                usage=usage,
            )
            for m in asked
            if isinstance(usage := space[m.device_id], Usage) and not usage.read_only
        ]

    def with_room(
        self, offers: Sequence[Offer], *, file_bytes: int = 0, inodes: int = 1
    ) -> list[Candidate]:
        """Those that have room for a column of `file_bytes` (0: of any size) and its `inodes`."""
        return self.without_slow(
            [
                offer.candidate
                for offer in offers
                if not shortage(offer.usage, file_bytes=file_bytes, inodes=inodes)
            ]
        )

    def candidates(self, exclude: Iterable[str] = (), *, file_bytes: int = 0) -> list[Candidate]:
        """Devices that may take new columns now (PROTOCOL 3)."""
        return self.with_room(self.offers(exclude), file_bytes=file_bytes)

    def without_slow(self, found: list[Candidate]) -> list[Candidate]:
        """Without devices that are slow: at most m of them, and never so many that no new object
        could be placed. A slow device is better than none."""
        parity = self.view.record.parity
        spare = min(parity, len(found) - parity - 1)
        slow = [d for d in self.routing.no_new if any(c.device == d for c in found)]
        left_out = frozenset(slow[: max(0, spare)])
        return [c for c in found if c.device not in left_out]

    def why_full(self, *, file_bytes: int = 0, inodes: int = 1) -> str:
        """For an error: which devices have no space for new columns, and how much; "" for none."""

        def look(_: str, device: Device) -> str:
            usage = device.usage()
            short = "" if usage.read_only else shortage(usage, file_bytes=file_bytes, inodes=inodes)
            return short and f"{device.url} ({short})"

        answers = self.each(self.view.devices, look)
        full = [answer for answer in answers.values() if isinstance(answer, str) and answer]
        if not full:
            return ""
        more = f", and {len(full) - 3} more" if len(full) > 3 else ""
        return f"Full: {'; '.join(full[:3])}{more}. {self.make_room} "

    @property
    def make_room(self) -> str:
        """For an error: what helps where devices are full."""
        seconds = self.settings.tombstone_seconds
        return (
            "Delete objects: large ones make room at once, small ones leave tombstones, which a "
            f"scrub sweeps {seconds:.0f} s later."
        )

    def usable(self, exclude: Iterable[str] = ()) -> int:
        """How many columns a new object can have now."""
        found = self.candidates(exclude)
        return placeable([c.domain for c in found], self.view.record.spread)

    def domains(self, devices: Iterable[str]) -> list[str]:
        """Failure domains of devices."""
        by_id = {m.device_id: m.domain for m in self.view.record.members}
        return [by_id[d] for d in devices if d in by_id]

    def forget_stamps(self) -> None:
        """After a fork or a membership change."""
        self._lock, self.relay_lock = threading.Lock(), threading.Lock()
        self._stamps.clear()
