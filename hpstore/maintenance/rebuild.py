"""Heal all objects: plan by names (pure), most endangered first, then repair one by one.

Nothing is remembered between runs: what is whole is passed over, so a rebuild that was killed is
resumed by running it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol

from hpstore.errors import HpstoreError, IntegrityError, ObjectNotFound, TooManyErasures
from hpstore.format.keys import Kind
from hpstore.maintenance.deferred_repair import Postponing, read_notes
from hpstore.maintenance.repair_object import Repair, RepairAction, repair_object
from hpstore.maintenance.repair_runner import Outcome, RepairJob, RepairRunner, RepairsHere
from hpstore.maintenance.sweep import sweep_surveyed
from hpstore.objects.context import PoolContext, View
from hpstore.objects.key_listing import Catalog, walk
from hpstore.objects.survey import Survey, newest_by_name, spare_losses, survey_key
from hpstore.objects.write.debts import clear_debt, read_debts
from hpstore.runtime.clock import Clock
from hpstore.runtime.rate_limit import RateLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a long operation is."""

    done: int
    total: int
    bytes: int
    key: str


ProgressCallback = Callable[[Progress], None]


class WorkPace(Protocol):
    """How fast long work goes. Called by the thread that works, or by one at a time for it."""

    def __call__(self, nbytes: int) -> None:
        """Bytes are about to be moved; may wait."""

    def go_on(self) -> bool:
        """Asked before each object; False stops the work there, to be taken up later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildReport:
    """What a rebuild or scrub did. `objects` are those that a listing shows, as everywhere.

    `unreadable` (more units lost than parity) and `failed` (readable, but not healed this time) map
    keys to reasons; nothing was deleted there.
    """

    objects: int
    bytes: int
    seconds: float
    healthy: int
    rebuilt: int
    relaid: int
    waiting: int  # for missing devices that may return
    stuck: int  # too few devices for full parity
    damaged_columns: int
    columns_written: int
    deletes: int = 0  # records of deleted objects that were looked at
    swept: int = 0  # tombstones and torn puts past their horizon
    set_aside: int = 0  # files that are none of this pool's, now in quarantine/
    stopped: bool = False  # before all was looked at
    unlisted: tuple[str, ...] = ()  # devices that are open, and could not be listed to the end
    absent: tuple[str, ...] = ()  # members that were missing when it listed what there is
    unreadable: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    put_off: dict[str, int] = field(default_factory=dict)  # why -> objects that soon expire
    put_off_until_ms: int = 0  # when they should be looked at again; 0 for none

    @property
    def whole(self) -> bool:
        """Every object has its full stripe now."""
        return not (self.unmended or self.put_off or self.stopped)

    @property
    def unmended(self) -> bool:
        """Something is not as it should be, or was not seen."""
        left = self.unreadable or self.failed or self.waiting or self.stuck
        return bool(left or self.unlisted)

    @property
    def clean(self) -> bool:
        """Every object is whole and nothing had to be mended."""
        return self.whole and not (self.damaged_columns or self.columns_written or self.set_aside)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "clean": self.clean}


class RepairTally:
    """Adds up repairs."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began = clock, clock.monotonic()
        self.actions: Counter[RepairAction] = Counter()
        self.objects = self.bytes = self.damaged = self.columns = self.swept = self.deletes = 0
        self.set_aside = 0
        self.unreadable: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.stopped = False
        self.unlisted: tuple[str, ...] = ()
        self.absent: tuple[str, ...] = ()
        self.expiring: Postponing | None = None

    def listed(self, store: PoolContext, catalog: Catalog) -> None:
        """Note which devices the catalog lacks: what only they hold was not looked at."""
        missing = store.view.missing
        lacks = [m for m in store.view.record.members if m.device_id in catalog.unknown]
        self.unlisted = tuple(sorted(m.url for m in lacks if m.device_id not in missing))
        self.absent = tuple(sorted(m.url for m in lacks if m.device_id in missing))

    def add(self, repair: Repair, *, deleted: bool) -> None:
        """Count one object, or the record of one that is `deleted`."""
        if repair.action is not RepairAction.ABSENT:
            self.count(deleted=deleted)
        if not (deleted and repair.action is RepairAction.NOTHING):
            self.actions[repair.action] += 1
        self.bytes += repair.bytes
        self.damaged += repair.damaged
        self.columns += repair.columns
        self.set_aside += repair.set_aside

    def count(self, *, deleted: bool) -> None:
        """One more was looked at."""
        if deleted:
            self.deletes += 1
        else:
            self.objects += 1

    def count_whole(self, count: int, deleted: int) -> None:
        """That many keys needed nothing, `deleted` of them records of deleted objects."""
        self.deletes += deleted
        self.objects += count - deleted
        self.actions[RepairAction.NOTHING] += count - deleted

    def note(self, key: str, outcome: Outcome, *, deleted: bool) -> None:
        """Count what became of a key."""
        if isinstance(outcome, Repair):
            self.add(outcome, deleted=deleted)
        else:
            self.fail(key, outcome)

    def fail(self, key: str, error: Exception) -> None:
        """Count an object that could not be healed."""
        self.objects += 1
        lost = isinstance(error, (TooManyErasures, IntegrityError))
        (self.unreadable if lost else self.failed)[key] = str(error)

    def report(self) -> RebuildReport:
        """The sum."""
        return RebuildReport(
            objects=self.objects,
            bytes=self.bytes,
            seconds=self._clock.monotonic() - self._began,
            healthy=self.actions[RepairAction.NOTHING],
            rebuilt=self.actions[RepairAction.REBUILT],
            relaid=self.actions[RepairAction.RELAID],
            waiting=self.actions[RepairAction.WAITING],
            stuck=self.actions[RepairAction.STUCK],
            damaged_columns=self.damaged,
            columns_written=self.columns,
            deletes=self.deletes,
            swept=self.swept,
            set_aside=self.set_aside,
            unreadable=dict(self.unreadable),
            failed=dict(self.failed),
            stopped=self.stopped,
            unlisted=self.unlisted,
            absent=self.absent,
            put_off=dict(self.expiring.put_off) if self.expiring else {},
            put_off_until_ms=self.expiring.until_ms if self.expiring else 0,
        )


def needs_work(view: View, survey: Survey, usable: int) -> bool:
    """Whether a key's files, by their names alone, are anything but one whole layout in place."""
    if survey.strangers or survey.blanks:
        return True
    layouts = survey.layouts()
    if len(layouts) != 1:
        return True
    layout = layouts[0]
    online = view.staying()
    if layout.kind is Kind.TOMBSTONE:
        return len({file.device for file in layout.files} & online) < layout.parity + 1
    devices = {file.device for file in layout.files}
    one_each = len(layout.files) == len(layout.columns) == len(devices) == layout.width
    whole = one_each and all(file.device in online for file in layout.files)
    k = min(view.record.data, usable - view.record.parity)
    return not whole or (layout.kind is Kind.COLUMN and layout.data < k)


def plan_rebuild(view: View, catalog: Catalog, usable: int) -> list[str]:
    """Keys to repair, most endangered first, then by name."""

    def danger(key: str) -> tuple[int, str]:
        layout = newest_by_name(view, catalog.surveys[key])
        return (-1 if layout is None else spare_losses(view, layout), key)

    keys = [key for key, survey in catalog.surveys.items() if needs_work(view, survey, usable)]
    return sorted(keys, key=danger)


def is_deleted(view: View, survey: Survey) -> bool:
    """Whether the newest there is of a key, by names, says that the object was deleted."""
    layout = newest_by_name(view, survey)
    return layout is not None and layout.kind is Kind.TOMBSTONE


def domains_of(view: View, catalog: Catalog, key: str) -> list[str]:
    """Failure domains that hold columns of a key, those with the most first."""
    domain = {member.device_id: member.domain for member in view.record.members}
    held = Counter(domain[f.device] for f in catalog.surveys[key].files if f.device in domain)
    return [name for name, _ in sorted(held.items(), key=lambda item: (-item[1], item[0]))]


def put_last(keys: Sequence[str], late: Collection[str]) -> list[str]:
    """Keys in their order, but those of `late` after all others. Pure."""
    return [k for k in keys if k not in late] + [k for k in keys if k in late]


def rebuild_all(
    store: PoolContext,
    *,
    progress: ProgressCallback | None = None,
    rate_bytes_per_second: float | None = None,
    include_missing: bool = False,
    everything: bool = False,
    pace: WorkPace | None = None,
    may_sweep: Callable[[], bool] = lambda: True,
    repairs: RepairRunner | None = None,
) -> RebuildReport:
    """Bring every object to its full stripe on the current membership. Resumable by running again.

    `may_sweep` is asked at its end: whether what is past its time goes, too.

    What its owner soon deletes comes last, or is put off (deferred_repair.py) unless `everything`
    is wanted. With a `pace` the rate is not looked at. An object that cannot be read is reported
    and left as it is. `repairs`: who does the work, by default this thread.
    """
    tally, pace = RepairTally(store.clock), pace or RateLimit(rate_bytes_per_second, store.clock)
    catalog = walk(store)
    tally.listed(store, catalog)
    usable = store.usable()
    keys = plan_rebuild(store.view, catalog, usable)
    whole = catalog.surveys.keys() - set(keys)
    notes = read_notes(store, catalog) if keys and not everything else []
    tally.expiring = expiring = Postponing(store, notes, keys)
    ordered = put_last(keys, expiring.late)
    number = {key: at for at, key in enumerate(ordered, 1)}

    def told(key: str) -> None:
        if progress is not None:
            at = Progress(done=number[key], total=len(keys), bytes=tally.bytes, key=key)
            progress(at)

    def chosen() -> Iterator[str]:
        for key in ordered:
            if not pace.go_on():
                tally.stopped = True
                return
            if not expiring.puts_off(key, tally.bytes):
                yield key
            else:
                told(key)

    job = RepairJob(
        domains=partial(domains_of, store.view, catalog),
        include_missing=include_missing,
        rate_bytes_per_second=rate_bytes_per_second,
    )
    for key, outcome in (repairs or RepairsHere(store, pace))(chosen(), job):
        tally.note(key, outcome, deleted=is_deleted(store.view, catalog.surveys[key]))
        expiring.healed(key)
        told(key)
    if tally.stopped:
        return tally.report()
    pay_debts(store)
    tally.swept = sweep_surveyed(store, catalog.surveys) if may_sweep() else 0
    tally.count_whole(len(whole), sum(is_deleted(store.view, catalog.surveys[k]) for k in whole))
    return tally.report()


def pay_debts(store: PoolContext) -> int:
    """Repair every object with a recorded debt; forget debts of versions that are gone."""
    paid = 0
    for debt in read_debts(store):
        try:
            repair = repair_object(store, debt.key)
        except ObjectNotFound:
            repair = Repair(key=debt.key, action=RepairAction.ABSENT)
        except (HpstoreError, OSError):
            store.metrics.count("debt_unpaid_total")
            continue
        gone = repair.action is RepairAction.ABSENT and not survey_key(store, debt.key).unknown
        if gone or repair.losses_tolerated >= store.view.record.parity:
            clear_debt(store, debt)
            paid += 1
    return paid
