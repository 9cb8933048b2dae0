"""Even out how full devices are: move columns of whole objects from full devices to empty ones.

A column is copied to a device outside its stripe, durably, before its old file goes; so no object
has less than its full stripe at any moment, and a kill leaves a column twice, which the next
rebuild clears up. Nothing is remembered: a move that was made is not made again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from hpstore.devices.base import Usage
from hpstore.errors import HpstoreError
from hpstore.format.checksum import digest128
from hpstore.format.keys import Kind
from hpstore.format.placement import domain_cap
from hpstore.format.records import DeviceState
from hpstore.maintenance.move_column import move_column
from hpstore.maintenance.rebuild import Progress, ProgressCallback, WorkPace
from hpstore.objects.context import PoolContext, View
from hpstore.objects.key_listing import walk
from hpstore.objects.survey import Layout, Survey
from hpstore.runtime.rate_limit import RateLimit

_log = logging.getLogger(__name__)
SPREAD = 0.1  # of fullness, between two devices: less is not worth moving anything
_LOOKED_EVERY = 64  # moves between two looks at the space there is


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFill:
    """Space of one device. `takes`: new columns may go there."""

    device: str
    domain: str
    total_bytes: int
    used_bytes: int
    takes: bool

    @property
    def share(self) -> float:
        """How full it is, 0 to 1."""
        return self.used_bytes / self.total_bytes

    def after(self, nbytes: int) -> DeviceFill:
        """With so many bytes more."""
        return replace(self, used_bytes=self.used_bytes + nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMove:
    """One column's."""

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceReport:
    """What was moved. `failed` maps keys to reasons; they are as they were.

    The spreads are of fullness, between the fullest and the emptiest device.
    """

    columns_moved: int
    bytes: int
    seconds: float
    spread_before: float
    spread_after: float
    stopped: bool = False
    failed: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def spread_of(fills: Iterable[DeviceFill]) -> float:
    """Between the fullest device and the emptiest that takes columns, at least 0. Pure."""
    found = list(fills)
    takers = [fill.share for fill in found if fill.takes]
    return max(fill.share for fill in found) - min(takers) if takers else 0.0


def plan_move(
    layout: Layout,
    fills: Mapping[str, DeviceFill],
    *,
    parity: int,
    least: float,
    spread: int | None = None,
) -> ColumnMove | None:
    """From the fullest device of an object to the emptiest outside it. Pure.

    Only between devices that are more than `least` apart, and only where the failure domain has
    room: no domain gets more columns than its cap, unless the column stays in its domain.
    """
    devices = [file.device for file in layout.files]
    domains = {fill.domain for fill in fills.values()}
    cap = min(domain_cap(layout.width, len(domains), parity), spread or parity)
    taken = Counter(fills[d].domain for d in devices if d in fills)
    outside = sorted(
        (fill for d, fill in fills.items() if fill.takes and d not in devices),
        key=lambda fill: (fill.share, fill.device),
    )
    sources = sorted(
        (fills[d] for d in devices if d in fills), key=lambda fill: (-fill.share, fill.device)
    )
    for source in sources:
        for target in outside:
            if source.share - target.share <= least:
                break  # the others are fuller still
            if target.domain == source.domain or taken[target.domain] < cap:
                return ColumnMove(source=source.device, target=target.device)
    return None


def evens_out(source: DeviceFill, target: DeviceFill, nbytes: int) -> bool:
    """Whether the target is still the emptier one with so many bytes moved. Pure."""
    return target.after(nbytes).share <= source.after(-nbytes).share


def movable(view: View, survey: Survey) -> Layout | None:
    """The layout of an object that has all its columns once, on online devices, and nothing else:
    any other one is a rebuild's. By names."""
    layouts = survey.layouts()
    if len(layouts) != 1 or layouts[0].kind is Kind.TOMBSTONE:
        return None
    layout = layouts[0]
    online = view.staying()
    one_each = len(layout.files) == len(layout.columns) == layout.width
    return layout if one_each and all(f.device in online for f in layout.files) else None


def fills_of(store: PoolContext) -> dict[str, DeviceFill]:
    """Space of the online members that answer and can be written, by device id."""
    takers = {candidate.device for candidate in store.candidates()}
    online = {
        m.device_id: m
        for m in store.view.members()
        if m.state is DeviceState.ONLINE and m.device_id not in store.refusing
    }
    usages = store.each(online, lambda _, device: device.usage())
    return {
        d: DeviceFill(
            device=d,
            domain=online[d].domain,
            total_bytes=usage.total,
            used_bytes=usage.total - usage.free,
            takes=d in takers,
        )
        for d, usage in usages.items()
        if isinstance(usage, Usage) and usage.total and not usage.read_only
    }


class _Tally:
    """What was moved so far, and how full that makes the devices."""

    def __init__(self, store: PoolContext) -> None:
        self._store, self._began = store, store.clock.monotonic()
        self._given_up: set[str] = set()  # devices that failed to take a column
        self.fills = fills_of(store)
        self._before = self.spread
        self.columns = self.bytes = 0
        self.failed: dict[str, str] = {}
        self.stopped = False

    @property
    def spread(self) -> float:
        """Of fullness, as far as is known."""
        return spread_of(self.fills.values())

    def moved(self, move: ColumnMove, nbytes: int) -> None:
        self.columns += 1
        self.bytes += nbytes
        self.fills[move.source] = self.fills[move.source].after(-nbytes)
        self.fills[move.target] = self.fills[move.target].after(nbytes)
        if not self.columns % _LOOKED_EVERY:
            self.fills = fills_of(self._store)  # others write and delete meanwhile
            self._leave_out()

    def failed_on(self, key: str, move: ColumnMove, error: Exception) -> None:
        """Nothing more is moved to that device this time."""
        self.failed[key] = str(error)
        self._given_up.add(move.target)
        self._leave_out()

    def _leave_out(self) -> None:
        for device in self._given_up & self.fills.keys():
            self.fills[device] = replace(self.fills[device], takes=False)

    def report(self) -> RebalanceReport:
        return RebalanceReport(
            columns_moved=self.columns,
            bytes=self.bytes,
            seconds=self._store.clock.monotonic() - self._began,
            spread_before=self._before,
            spread_after=self.spread,
            stopped=self.stopped,
            failed=dict(self.failed),
        )


def rebalance_all(
    store: PoolContext,
    *,
    spread: float = SPREAD,
    progress: ProgressCallback | None = None,
    rate_bytes_per_second: float | None = None,
    pace: WorkPace | None = None,
) -> RebalanceReport:
    """Move columns until devices differ by half of `spread`, one column of each object at most.

    Begins only when they differ by more than `spread`. With a `pace` the rate is not looked at.
    Objects that are not whole are left to a rebuild. Resumable by running again.
    """
    tally, pace = _Tally(store), pace or RateLimit(rate_bytes_per_second, store.clock)
    if tally.spread <= spread:
        return tally.report()
    surveys = walk(store).surveys
    keys = _in_order(surveys)
    for number, key in enumerate(keys, 1):
        if tally.spread <= spread / 2:
            break
        if not pace.go_on():
            tally.stopped = True
            break
        layout = movable(store.view, surveys[key])
        move = layout and plan_move(
            layout,
            tally.fills,
            parity=store.view.record.parity,
            least=spread / 2,
            spread=store.view.record.spread,
        )
        if move:
            _make(store, key, move, tally, pace)
        if progress is not None:
            progress(Progress(done=number, total=len(keys), bytes=tally.bytes, key=key))
    return tally.report()


def _make(store: PoolContext, key: str, move: ColumnMove, tally: _Tally, pace: WorkPace) -> None:
    source, target = tally.fills[move.source], tally.fills[move.target]
    try:
        nbytes = move_column(
            store,
            key,
            move.source,
            move.target,
            pace,
            worth=lambda count: evens_out(source, target, count),
        )
    except (HpstoreError, OSError) as error:
        store.metrics.count("column_move_error_total")
        _log.warning("a column of %r was not moved: %s", key, error)
        tally.failed_on(key, move, error)
        return
    if nbytes:
        store.metrics.count("column_move_total")
        tally.moved(move, nbytes)


def _in_order(surveys: Mapping[str, Survey]) -> Sequence[str]:
    """Striped objects first: small ones cost as many syncs and give no space. Else an order that
    has nothing to do with the keys, always the same: a device that is new gets columns of all
    kinds, not those of one dataset."""

    def rank(key: str) -> tuple[bool, bytes]:
        return surveys[key].files[0].name.kind is not Kind.COLUMN, digest128(key.encode())

    return sorted((key for key in surveys if surveys[key].files), key=rank)
