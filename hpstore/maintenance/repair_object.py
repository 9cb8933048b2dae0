"""Bring one object to its full stripe: rebuild columns, move them, or lay it out anew.

The one function behind debts, rebuild, scrub, drain and settling (PROTOCOL 8, 10). It never serves
or removes anything on incomplete knowledge: an older version goes only when the newest is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from hpstore.codec.galois import Bytes
from hpstore.devices.base import READABLE
from hpstore.devices.horizon_guard import HorizonPassed
from hpstore.errors import IntegrityError, ObjectNotFound, TooFewDevices, TooManyErasures
from hpstore.format.column_header import column_file_bytes
from hpstore.format.geometry import Code, Geometry
from hpstore.format.keys import Kind, Version
from hpstore.format.placement import choose, placeable
from hpstore.format.records import Debt, DeviceState
from hpstore.maintenance.rebuild_columns import rebuild_columns
from hpstore.objects.context import PoolContext
from hpstore.objects.horizon import read_horizons
from hpstore.objects.read.object_reader import Changed, ObjectReader
from hpstore.objects.read.resolve import open_survey
from hpstore.objects.strangers import cleared_survey
from hpstore.objects.survey import ColumnFile, Survey, newest_by_name
from hpstore.objects.write.column_writer import MembershipMoved
from hpstore.objects.write.debts import clear_debt
from hpstore.objects.write.delete_files import remove_files
from hpstore.objects.write.put import WriteFailed, settle_or_owe, write_columns, write_tombstone
from hpstore.objects.write.put_plan import PutContent, plan_columns
from hpstore.objects.write.stripe_writer import Throttle
from hpstore.runtime.budget import inside_a_lease

REPAIR_TRIES = 6


class RepairAction(StrEnum):
    """What a repair did."""

    NOTHING = "nothing"
    REBUILT = "rebuilt"  # columns made again on devices outside the stripe
    RELAID = "relaid"  # laid out anew over more or fewer columns
    WAITING = "waiting"  # for a missing device that may return; parity is left
    STUCK = "stuck"  # too few devices for full parity
    ABSENT = "absent"  # deleted, or a torn put


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Result of repairing one object."""

    key: str
    action: RepairAction
    columns: int = 0  # rebuilt or written
    damaged: int = 0  # columns found damaged
    bytes: int = 0  # object bytes looked at
    losses_tolerated: int = 0
    set_aside: int = 0  # files that are none of this pool's, now in quarantine/


def no_throttle(_: int) -> None:
    """At full speed."""


def dead_devices(store: PoolContext, failed: Collection[str]) -> frozenset[str]:
    """Of devices that failed a read, those that do not work at all. The others have a bad sector.

    Parameters
    ----------
    store
        The pool.
    failed
        Ids of devices; each is probed.

    Returns
    -------
    frozenset[str]
        Ids of devices of which the probe failed.
    """
    write = not store.read_only
    answers = store.each(failed, lambda _, device: device.probe(write=write))
    return frozenset(
        device
        for device in failed
        if isinstance(answer := answers.get(device), Exception) and not isinstance(answer, READABLE)
    )


def repair_object(
    store: PoolContext,
    key: str,
    *,
    verify: bool = False,
    throttle: Throttle = no_throttle,
    include_missing: bool = False,
) -> Repair:
    """Make the newest version of `key` complete on the current membership.

    With `verify` every block of every column is read. Columns on missing members are waited for
    while parity is left, unless `include_missing`. Raises TooManyErasures when it cannot be read.
    """
    with store.key_lock(key):  # for efficiency alone: two would do the same work
        return _repair_locked(
            store, key, verify=verify, throttle=throttle, include_missing=include_missing
        )


def _repair_locked(
    store: PoolContext, key: str, *, verify: bool, throttle: Throttle, include_missing: bool
) -> Repair:
    last: Exception | None = None
    exclude: set[str] = set()  # devices that failed to take a column
    aside = 0
    for _ in range(REPAIR_TRIES):
        horizons = read_horizons(store)  # before the survey: a sweep after it stops the repair
        survey, moved = cleared_survey(store, key, verify)
        aside += moved
        now = store.pinned()
        try:
            reader = open_survey(now, survey)
        except ObjectNotFound:
            try:
                return replace(_finish_delete(store, survey, horizons), set_aside=aside)
            except HorizonPassed as error:
                last = error
                continue
        except Changed as error:
            last = error
            continue
        try:
            repairer = _Repairer(now, survey, horizons, reader, throttle, include_missing, exclude)
            return replace(repairer.run(verify=verify), set_aside=aside)
        except (Changed, MembershipMoved, HorizonPassed) as error:
            last = error
            store.refresh()
        except WriteFailed as error:
            last = error
            exclude |= error.devices.keys()
        finally:
            reader.close()
    raise TooFewDevices(f"repair of {key!r} met {REPAIR_TRIES} changes in a row: {last}", key=key)


def _finish_delete(store: PoolContext, survey: Survey, horizons: Mapping[str, int]) -> Repair:
    """A tombstone seen means finish it (PROTOCOL 12); torn puts are left alone.

    Written anew it keeps its counter and nonce: a put may have come since the survey."""
    newest = newest_by_name(store.view, survey)
    if newest is not None and newest.kind is Kind.TOMBSTONE:
        online = store.view.staying()
        copies = {file.device for file in newest.files} & online
        if len(copies) <= newest.parity and len(online) <= newest.parity:
            return Repair(
                key=survey.key, action=RepairAction.ABSENT
            )  # what it stands for stays (rule 8)
        if len(copies) <= newest.parity:
            version = write_tombstone(
                store, survey.key, survey, revise=newest.version, horizons=horizons
            ).version
        else:
            version = newest.version
        remove_files(store, survey.key, [f for f in survey.files if f.name.version < version])
    return Repair(key=survey.key, action=RepairAction.ABSENT)


class _Repairer:
    """Repairs one object whose reader is open."""

    def __init__(
        self,
        store: PoolContext,
        survey: Survey,
        horizons: Mapping[str, int],
        reader: ObjectReader,
        throttle: Throttle,
        include_missing: bool,
        exclude: set[str],
    ) -> None:
        self._exclude, self._horizons = exclude, horizons
        self._alive = 0  # losses that a new layout tolerates
        self._store, self._survey, self._reader = store, survey, reader
        reader.judging = False  # what a scrub or repair comes upon is no new sign
        self._throttle, self._include_missing = throttle, include_missing
        self._geometry: Geometry = reader.header.geometry
        self._states = {m.device_id: m.state for m in store.view.record.members}

    def run(self, *, verify: bool) -> Repair:
        self._reader.open_columns(range(self._geometry.width))
        if verify:
            self._verify()
        self._require_readable()
        staying = self._staying()
        missing = [c for c in range(self._geometry.width) if c not in staying]
        waiting = [] if self._include_missing else self._waiting(missing, len(staying))
        urgent = [c for c in missing if c not in waiting]
        action, columns = RepairAction.WAITING if waiting else RepairAction.NOTHING, 0
        if urgent:
            action, columns, staying = self._heal_all(urgent, staying)
        elif not waiting and self._wider() is not None:
            action, columns = self._relay()
        if action in (RepairAction.NOTHING, RepairAction.REBUILT) and not waiting:
            self._settled(staying)
        return Repair(
            key=self._survey.key,
            action=action,
            columns=columns,
            damaged=self._damaged(),
            bytes=self._geometry.size,
            losses_tolerated=(
                self._alive
                if action is RepairAction.RELAID
                else max(0, len(staying) - self._geometry.data)
            ),
        )

    def _damaged(self) -> int:
        """Columns with bytes that do not match; what could not be read is not damaged by that."""
        whole = {
            column
            for column, error in self._reader.damaged.items()
            if isinstance(error, IntegrityError)
        }
        return len(whole | self._reader.erasures.columns)

    def _verify(self) -> None:
        for column in sorted(self._reader.columns):
            self._reader.verify_column(column, self._throttle)

    def _require_readable(self) -> None:
        if len(self._reader.columns) < self._geometry.data:
            raise TooManyErasures(
                f"object {self._survey.key!r}: {len(self._reader.columns)} of "
                f"{self._geometry.data} units needed are intact: "
                + "; ".join(str(error) for error in self._reader.damaged.values())
                + ". Nothing was deleted.",
                key=self._survey.key,
            )

    def _staying(self) -> dict[int, str]:
        """Intact columns on devices that keep them, one on each: of two on one device, which a
        repair that died has left, one counts, and the other is made again elsewhere."""
        found: dict[str, int] = {}
        for column, reader in sorted(self._reader.columns.items()):
            online = self._states.get(reader.device_id) is DeviceState.ONLINE
            if online and column not in self._reader.erasures.columns:
                found.setdefault(reader.device_id, column)
        return {column: device for device, column in found.items()}

    def _waiting(self, missing: list[int], staying: int) -> list[int]:
        """Columns that are probably on a missing member, while parity is left (PROTOCOL 17)."""
        if staying <= self._geometry.data:
            return []
        devices = self._reader.header.devices
        away = self._survey.unknown | self._died()
        return [c for c in missing if devices[c] in away and devices[c] in self._states]

    def _died(self) -> frozenset[str]:
        """Devices that failed a read of this object and do not work at all: they are away, while
        one bad sector of a device that works is healed at once."""
        return dead_devices(
            self._store,
            {
                self._reader.header.devices[column]
                for column, error in self._reader.damaged.items()
                if not isinstance(error, IntegrityError)
            },
        )

    def _heal_all(
        self, urgent: list[int], staying: dict[int, str]
    ) -> tuple[RepairAction, int, dict[int, str]]:
        """As _heal, again for columns that turned out to be damaged while they were read."""
        made: set[int] = set()
        written = 0
        while True:
            action, columns, staying = self._heal(urgent, staying)
            written += columns
            if action is not RepairAction.REBUILT:
                return action, written, staying
            made.update(urgent)
            sound = self._reader.columns.keys() - self._reader.erasures.columns
            urgent = [column for column in staying if column not in sound | made]
            if not urgent:
                return action, written, staying
            staying = {c: device for c, device in staying.items() if c not in urgent}

    def _heal(
        self, urgent: list[int], staying: dict[int, str]
    ) -> tuple[RepairAction, int, dict[int, str]]:
        """Rebuild onto devices outside the stripe, or lay out anew when there are too few.

        Returns what was done, columns written, and where the columns are now.
        """
        held = set(staying.values())
        candidates = self._store.candidates(
            exclude=held | self._exclude, file_bytes=column_file_bytes(self._geometry)
        )
        domains = self._store.domains(held)
        spread = self._store.view.record.spread
        if placeable([c.domain for c in candidates], spread, domains) < len(urgent):
            return (*self._relay(), staying)
        chosen = choose(
            self._survey.key,
            candidates,
            len(urgent),
            parity=self._geometry.parity,
            occupied=domains,
            spread=spread,
        )
        targets = {c.device: column for c, column in zip(chosen, urgent, strict=True)}
        rebuild_columns(self._store, self._reader, targets, self._throttle, self._horizons)
        return RepairAction.REBUILT, len(urgent), {**staying, **{c: d for d, c in targets.items()}}

    def _wider(self) -> int | None:
        """The k' that the pool allows now, when it is more than the object has."""
        if self._geometry.code is Code.COPIES:
            return None
        usable = self._store.usable(self._exclude)
        k = min(self._store.view.record.data, usable - self._store.view.record.parity)
        return k if k > self._geometry.data else None

    def _relay(self) -> tuple[RepairAction, int]:
        """Shrink or grow: the same version as a new revision over the usable devices."""
        header = self._reader.header
        try:
            geometry, devices = plan_columns(
                self._store,
                header.key,
                self._geometry.size,
                exclude=self._exclude,
                unit_bytes=self._geometry.unit_bytes,
            )
        except TooFewDevices:
            return RepairAction.STUCK, 0
        content = PutContent(
            key=header.key,
            version=self._next_revision(header.version),
            kind=header.kind,
            created_ms=header.created_ms,
            metadata=header.metadata,
        )
        source = ObjectSource(self._reader, self._throttle)
        with self._store.relay_lock:  # it holds memory while it waits for more: one at a time
            columns = write_columns(
                self._store,
                content,
                geometry,
                devices,
                source,
                roll_back=False,
                background=True,
                horizons=self._horizons,
            )
        settle_or_owe(self._store, columns)
        self._alive = len(columns.published()) - geometry.data
        if len(columns.published()) == geometry.width:
            older = [f for f in self._survey.files if f.name.version < content.version]
            self._reader.close()  # its locks would keep the files from being recycled
            remove_files(self._store, header.key, older)
            self._clear_debts(header.version)
        return RepairAction.RELAID, geometry.width

    def _next_revision(self, version: Version) -> Version:
        seen = [v.revision for v in self._survey.versions() if v.content == version.content]
        return Version(version.counter, version.nonce, max(seen)).revised()

    def _settled(self, staying: dict[int, str]) -> None:
        """The newest version is complete: drop what it supersedes, and columns that moved away."""
        version = self._reader.header.version

        def stale(file: ColumnFile) -> bool:
            if file.name.version < version:
                return True
            if file.name.version != version:
                return False
            keeper = staying.get(file.name.column)
            leaving = self._states.get(file.device) is not DeviceState.ONLINE
            return leaving or (keeper is not None and keeper != file.device)

        files = [f for f in self._survey.files if stale(f)]
        if files:
            self._reader.close()
            remove_files(self._store, self._survey.key, files)
        self._clear_debts(version)

    def _clear_debts(self, version: Version) -> None:
        for v in {version, *(x for x in self._survey.versions() if x.content == version.content)}:
            clear_debt(self._store, Debt(key=self._survey.key, version=v, missing=()))


class ObjectSource:
    """A stored object as the source of its new layout. Serialises its readers."""

    leases = True

    def __init__(self, reader: ObjectReader, throttle: Throttle) -> None:
        self._reader, self._throttle = reader, throttle
        self.size = reader.header.geometry.size
        self._lock = threading.Lock()  # an ObjectReader serves one thread at a time

    def view(self, start: int, end: int) -> Bytes | None:
        return None

    def read_into(self, start: int, out: Bytes) -> None:
        self._throttle(len(out))
        with self._lock, inside_a_lease():
            self._reader.read_into(start, out)
