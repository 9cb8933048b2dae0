"""Membership changes that look at what devices hold (PROTOCOL 12-17): add, evict, drain, return."""

from __future__ import annotations

import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

from hpstore.devices.base import Device
from hpstore.errors import (
    DeviceTimeout,
    HpstoreError,
    IntegrityError,
    LockTimeout,
    MembershipError,
    TooFewDevices,
    TooManyErasures,
)
from hpstore.keys import ColumnName, Kind
from hpstore.membership import commit_record, with_member, with_state, without_member
from hpstore.objects.catalog import walk
from hpstore.objects.debts import keep_debts
from hpstore.objects.horizon import come_back_at, come_back_below
from hpstore.objects.repair import Action, Throttle, repair_object
from hpstore.objects.store import Store, View
from hpstore.objects.survey import (
    Found,
    Layout,
    Survey,
    Verdict,
    judge,
    may_be_acknowledged,
    newest_by_name,
    path_on,
    survey_keys,
    unknown_devices,
)
from hpstore.opening import claim, same_form
from hpstore.records import IDENTITY_FILE, MAX_RECORD_BYTES, DeviceState, Identity, Member

T = TypeVar("T")
_log = logging.getLogger(__name__)
RESCANS = 10  # rounds of looking for columns that were put meanwhile
PUT_WAITS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before each further look at what a put began
_NAMED = 5  # keys named in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What became of the files on a device that came back."""

    kept: int
    removed: int
    quarantined: int


def require_no_member(store: Store, device: Device, url: str) -> None:
    """Raise MembershipError for a second name of a place that is open as a member already."""
    identity = _own_identity(store, device)
    member = None if identity is None else store.view.devices.get(identity.device_id)
    if identity is not None and member is not None and same_form(member.url) != url:
        raise MembershipError(
            f"{url} is a member already: {member.url} ({identity.device_id[:8]}). Nothing was "
            "changed."
        )


def add_member(
    store: Store, device: Device, url: str, domain: str | None, *, force: bool
) -> Member:
    """Claim an unused device and make it a member. The caller holds the change lock."""
    record = store.view.record
    identity = _own_identity(store, device)
    if identity is not None and identity.pool_id == record.pool_id:
        member = record.member(identity.device_id)
        if member is not None:
            return member  # an add that was cut short after its record was written
        if identity.device_id in {m.device_id for m in record.evicted}:
            raise MembershipError(f"{url} was evicted from this pool; it comes back with readmit")
        device_id = identity.device_id  # claimed by an add that was cut short
    else:
        device_id = uuid.uuid4().hex
        fresh = Identity(
            pool_id=record.pool_id, device_id=device_id, domain=domain or f"d-{device_id[:8]}"
        )
        _ask_once(store, device, lambda: claim(device, fresh))
        identity = fresh
    come_back_at(store, device, partial(_ask_once, store, device), None)
    member = Member(device_id=device_id, url=url, domain=domain or identity.domain)
    commit_record(store, with_member(record, member), {device_id: device}, force=force)
    return member


def _ask_once(store: Store, device: Device, call: Callable[[], T]) -> T:
    """Make a call on a device that is no member, under the open deadline: whoever holds the change
    lock waits for nobody longer (PROTOCOL 15). Raises what it raises."""
    deadline = store.settings.open_deadline_seconds
    (answer,) = store.scheduler.gather_once({device.url: call}, deadline).values()
    if isinstance(answer, Exception):
        raise answer
    return answer


def claimed_by(store: Store, device: Device) -> bool:
    """Whether a place was made a device of the pool, or may be yet: it does not answer."""
    try:
        identity = _own_identity(store, device)
    except DeviceTimeout:
        return True
    except HpstoreError:
        return False
    return identity is not None and identity.pool_id == store.view.record.pool_id


def _own_identity(store: Store, device: Device) -> Identity | None:
    def read() -> Identity | None:
        try:
            data = device.read_small(IDENTITY_FILE, MAX_RECORD_BYTES)
        except FileNotFoundError:
            return None
        return Identity.decode(data, where=f"{device.url}/{IDENTITY_FILE}")

    return _ask_once(store, device, read)


def lost_without(view: View, layout: Layout, leaving: str) -> bool:
    """Whether a layout could no longer be read when a device leaves, judged by names."""
    rest = {f.name.column for f in layout.files if f.device in view.devices and f.device != leaving}
    return len(rest) < layout.data


def endangered(store: Store, leaving: str, *, emptied: bool) -> list[str]:
    """Keys that would drop below k' without a device, which is closed for new columns already.

    A put that is under way may look like one of them: what is young is looked at again, for three
    seconds at most. Raises MembershipError when so many devices are unknown that an object may be
    there unseen, unless the device was `emptied` under our eyes.
    """
    catalog = walk(store)
    found = _lost_keys(store, catalog.surveys, leaving)
    for seconds in PUT_WAITS:
        if not found or (seconds and not _may_be_in_progress(store, found)):
            break
        store.clock.wait(seconds)
        found = _lost_keys(store, survey_keys(store, list(found)), leaving)
    unknown = catalog.unknown | store.view.record.unhealed() | {leaving}
    if not found and not emptied and not store.view.record.opens_without(unknown):
        raise MembershipError(
            f"{len(unknown) - 1} devices do not answer or were evicted since the last rebuild; "
            "with one more gone, objects could be lost without a trace. Nothing was changed. "
            "Rebuild, or bring devices back first."
        )
    return sorted(found)


def _lost_keys(store: Store, surveys: Mapping[str, Survey], leaving: str) -> dict[str, Layout]:
    """The objects among these that could no longer be read without a device."""
    found = {}
    for key, survey in surveys.items():
        layout = newest_by_name(store.view, survey)
        if layout is None or layout.kind is Kind.TOMBSTONE:
            continue
        if lost_without(store.view, layout, leaving):
            found[key] = layout
    return found


def _may_be_in_progress(store: Store, layouts: Mapping[str, Layout]) -> bool:
    """Whether a put may be about to publish more columns of one of these: a walk is no snapshot,
    and a put renames one column after another. It sees that the device leaves, and plans anew."""
    oldest = store.clock.wall_ms() - store.settings.put_deadline_seconds * 1000
    return any(layout.version.counter > oldest for layout in layouts.values())


def set_state(store: Store, device_id: str, state: DeviceState, *, force: bool = False) -> None:
    """Change a member's state. The caller holds the change lock and refreshes afterwards."""
    commit_record(store, with_state(store.view.record, device_id, state), {}, force=force)


def evict_member(
    store: Store,
    member: Member,
    refresh: Callable[[], None],
    *,
    force: bool,
    emptied: bool = False,
) -> None:
    """Take a device out; what it holds counts as lost. The caller holds the change lock.

    First it is closed for new columns, then what depends on it is looked at; so no put can slip
    in between (PROTOCOL 16). Refuses, and opens it again, when an object would be lost.
    """
    record = store.view.record
    left = record.weight({m.device_id for m in record.members} - {member.device_id})
    if left < record.parity + 1 and not force:
        raise MembershipError(
            f"without {member.url} {left} devices (or domains) are left; {record.parity + 1} are "
            "needed to take new data with full parity. Add a device first, or force it."
        )
    before = member.state
    set_state(store, member.device_id, DeviceState.DRAINING, force=force)
    refresh()
    judged = store.view.record
    if not force:
        try:
            if keys := endangered(store, member.device_id, emptied=emptied):
                raise MembershipError(
                    f"{len(keys)} objects need {member.url} to be readable, among them "
                    f"{', '.join(keys[:_NAMED])}. Nothing was changed. Drain it, or rebuild first."
                )
            keep_debts(store, member.device_id)
        except HpstoreError:
            set_state(store, member.device_id, before)
            refresh()
            raise
    state = DeviceState.HEALED if emptied else DeviceState.EVICTED
    now = store.clock.wall_ms()
    record = without_member(judged, member.device_id, state, now)  # refused if it has moved since
    commit_record(store, record, {}, force=force)
    refresh()


def drain_member(
    store: Store,
    member: Member,
    refresh: Callable[[], None],
    throttle: Throttle,
    progress: Callable[[int, int, str], None],
) -> int:
    """Move what is left on a draining device off it, then evict it; returns how many objects moved.

    One that is read-only keeps its files, and leaves when all they hold is elsewhere. The caller
    holds the change lock. Stops with MembershipError, the device draining still, when some object
    cannot be moved; running it again goes on.
    """
    moved = 0
    for _ in range(RESCANS):
        found = move_off(store, member, throttle, progress)
        if found is None:
            evict_member(store, member, refresh, force=False, emptied=True)
            return moved
        moved += found
    raise MembershipError(f"{member.url} still gets files after {RESCANS} rounds; drain again")


def move_off(
    store: Store,
    member: Member,
    throttle: Throttle,
    progress: Callable[[int, int, str], None],
) -> int | None:
    """Go over all objects that need a draining device, and move them; how many were moved, or None
    when there are none. Raises MembershipError for those that cannot be, after the others."""
    catalog = walk(store)
    if member.device_id in catalog.unknown:
        raise MembershipError(
            f"{member.url} does not answer, so nothing can be moved off it. It stays draining; "
            "bring it back and drain again, or evict it and rebuild."
        )
    keys = sorted(
        key
        for key, survey in catalog.surveys.items()
        if holds_live_files(store.view, survey, member.device_id)
    )
    kept = member.device_id in store.refusing and not any(
        depends_on(store.view, catalog.surveys[key], member.device_id) for key in keys
    )
    if not keys or kept:
        return None
    moved, stuck = 0, dict[str, str]()
    for number, key in enumerate(keys, 1):
        try:
            repair = repair_object(store, key, throttle=throttle)
        except (TooManyErasures, TooFewDevices, IntegrityError, LockTimeout) as error:
            stuck[key] = str(error)  # the others can leave
        else:
            moved += repair.action in (Action.REBUILT, Action.RELAID)
            if repair.action in (Action.STUCK, Action.WAITING):
                stuck[key] = "too few other devices, or some are missing"
        progress(number, len(keys), key)
    _remove_tombstones(store, member.device_id)
    if stuck:
        raise MembershipError(
            f"{len(stuck)} objects cannot leave {member.url} "
            f"({', '.join(list(stuck)[:_NAMED])}): {next(iter(stuck.values()))}. It stays "
            "draining; add a device or bring missing ones back, and drain again, or readmit it."
        )
    return moved


def holds_live_files(view: View, survey: Survey, device_id: str) -> bool:
    """Whether a device has files of a key that are not those of a torn put."""
    unknown = unknown_devices(view, survey)
    return any(
        any(file.device == device_id for file in layout.files)
        and (
            layout.kind is Kind.TOMBSTONE
            or judge(layout, valid=len(layout.columns), corrupt=0, unknown_devices=unknown)
            is not Verdict.TORN
        )
        for layout in survey.layouts()
    )


def depends_on(view: View, survey: Survey, device_id: str) -> bool:
    """Whether something of a key would be lost with a device, judged by names. Pure.

    That is a column of the newest version, or a copy of a tombstone, that no device which stays
    has; or an older version while the newer is not whole without the device (PROTOCOL 8).
    """
    newest = newest_by_name(view, survey)
    if newest is None:
        return False  # torn puts
    staying = {m.device_id for m in view.members() if m.state is DeviceState.ONLINE} - {device_id}
    elsewhere = [file for file in newest.files if file.device in staying]
    if newest.kind is Kind.TOMBSTONE:
        return len({file.device for file in elsewhere}) <= newest.parity
    held = {file.name.column for file in elsewhere}
    mine = {file.name.column for file in newest.files if file.device == device_id}
    older = any(f.device == device_id and f.name.version < newest.version for f in survey.files)
    return not mine <= held or (older and len(held) < newest.width)


def _remove_tombstones(store: Store, device_id: str) -> None:
    """Drop a leaving device's copies of tombstones that have m + 1 copies on devices that stay."""
    staying = {m.device_id for m in store.view.members() if m.state is DeviceState.ONLINE}
    for key, survey in walk(store).surveys.items():
        layout = newest_by_name(store.view, survey)
        if layout is None or layout.kind is not Kind.TOMBSTONE:
            continue
        elsewhere = {f.device for f in layout.files} & staying - {device_id}
        mine = [file.name for file in layout.files if file.device == device_id]
        for name in mine if len(elsewhere) > layout.parity else ():
            _on_device(store, device_id, partial(_delete, key, name))


def _on_device(store: Store, device_id: str, call: Callable[[Device], None]) -> None:
    """Make a call on a device of the view, under the device deadline. Raises what it raises."""
    for answer in store.each([device_id], lambda _, device: call(device)).values():
        if isinstance(answer, Exception):
            raise answer


def _delete(key: str, name: ColumnName, device: Device) -> None:
    device.delete(path_on(device, key, name))


def _quarantine(key: str, name: ColumnName, device: Device) -> None:
    device.quarantine(path_on(device, key, name))


class Return(StrEnum):
    """What becomes of a file on a device that returns."""

    KEEP = "keep"
    REMOVE = "remove"
    QUARANTINE = "quarantine"  # not served, not deleted
    UNCLEAR = "unclear"  # members that do not answer may have what decides


def reconcile(store: Store, device_id: str, device: Device, swept: int = 0) -> Reconciled:
    """Judge every file of a returning device by what the pool knows now (PROTOCOL 12).

    `swept`: up to this counter a tombstone that would speak against a file may be gone.

    A column stays while its version lives elsewhere; what is superseded or deleted is removed; what
    nobody else knows is put in quarantine. All is judged before anything is touched. Raises
    MembershipError, with nothing changed, when the device cannot be listed, when members that do
    not answer may have what decides, and for a member: what it holds counts already (PROTOCOL 7),
    and a rebuild brings it up to date.
    """
    view = store.view
    if view.record.member(device_id) is not None:
        raise MembershipError(f"{device.url} is a member: rebuild brings it up to date")
    here = here_store(store, _with_device(view, device_id, device))
    catalog = walk(here)
    if device_id in catalog.unknown:
        raise MembershipError(
            f"what {device.url} holds cannot be listed: it failed or did not answer. Nothing was "
            "changed, and nothing there is served."
        )
    recent = _age_seconds(store, device_id) < store.settings.tombstone_seconds
    judged = [
        (key, file.name, verdict)
        for key, survey in catalog.surveys.items()
        for file, verdict in judge_survey(view, survey, device_id, recent=recent, swept=swept)
    ]
    unclear = sorted({key for key, _, verdict in judged if verdict is Return.UNCLEAR})
    if unclear:
        raise MembershipError(
            f"{len(catalog.unknown)} members do not answer, so that nobody can tell whether what "
            f"{device.url} holds of {len(unclear)} objects ({', '.join(unclear[:_NAMED])}) is "
            "still good. Nothing was changed. Bring them back, or evict them if they are gone."
        )
    for key, name, verdict in judged:
        if verdict is Return.REMOVE:
            _on_device(here, device_id, partial(_delete, key, name))
        elif verdict is Return.QUARANTINE:
            _on_device(here, device_id, partial(_quarantine, key, name))
    count = Counter(verdict for _, _, verdict in judged)
    found = Reconciled(kept=count[Return.KEEP], removed=count[Return.REMOVE],
                       quarantined=count[Return.QUARANTINE])  # fmt: skip
    _log.info("device %s returns: %d kept, %d removed, %d quarantined", device.url, found.kept,
              found.removed, found.quarantined)  # fmt: skip
    return found


def readmit_member(store: Store, member: Member, device: Device) -> Reconciled:
    """Reconcile an evicted device, then make it a member. The caller holds the change lock."""
    _ask_once(store, device, lambda: device.probe(write=True))
    ask = partial(_ask_once, store, device)
    swept = come_back_below(store, device, ask)
    found = reconcile(store, member.device_id, device, swept)
    come_back_at(store, device, ask, swept)
    back = replace(member, url=device.url, state=DeviceState.ONLINE)
    record = with_member(store.view.record, back)
    commit_record(store, record, {member.device_id: device}, force=False)
    return found


def _age_seconds(store: Store, device_id: str) -> float:
    """How long ago a device was evicted."""
    gone = next((m for m in store.view.record.evicted if m.device_id == device_id), None)
    return (store.clock.wall_ms() - gone.since_ms) / 1000 if gone is not None else math.inf


def judge_survey(
    view: View, survey: Survey, device_id: str, *, recent: bool, swept: int = 0
) -> list[tuple[Found, Return]]:
    """Every file of a key on a returning device, by what the others know. Pure."""
    others = tuple(file for file in survey.files if file.device != device_id)
    newest = newest_by_name(view, Survey(key=survey.key, files=others, unknown=survey.unknown))
    unhealed = view.record.unhealed() - survey.unknown - {device_id}
    return [
        (file, judge_return(
            file, newest, [f for f in others if f.name.layout == file.name.layout],
            recent=recent and file.name.version.counter > swept,
            silent=view.record.weight(survey.unknown), unhealed=view.record.weight(unhealed),
        ))
        for file in survey.files if file.device == device_id
    ]  # fmt: skip


def judge_return(
    file: Found, newest: Layout | None, fellows: Collection[Found], *, recent: bool, silent: int,
    unhealed: int,
) -> Return:  # fmt: skip
    """What becomes of one file of a returning device. Pure.

    `newest`: what a read would choose without it. `fellows`: files of its own layout on others.
    `recent`: it left within the time of tombstones, and no sweep passed the file since: a tombstone
    would be there, and what
    nobody else knows may be the last copies of something. `silent` members do not answer;
    `unhealed` devices were evicted, and not made up for. Both may hide fellows.
    """
    version, kind, data, parity = file.name.layout
    if newest is not None and version < newest.version:
        needed = newest.parity + 1 if newest.kind is Kind.TOMBSTONE else newest.width
        if len(newest.columns) >= needed:  # PROTOCOL 8: only what is settled supersedes
            return Return.REMOVE
    elif newest is not None and file.name.layout == newest.files[0].name.layout:
        held = {other.name.column for other in newest.files}
        return Return.REMOVE if file.name.column in held else Return.KEEP
    if recent:
        return Return.KEEP
    mine = Layout(version=version, kind=kind, data=data, parity=parity, files=(file, *fellows))
    seen = len(mine.columns)
    if fellows and may_be_acknowledged(mine, seen=seen, unknown_devices=silent + unhealed):
        return Return.KEEP  # it lives elsewhere, and what is newer is not whole
    if may_be_acknowledged(mine, seen=seen, unknown_devices=silent):
        return Return.UNCLEAR
    return Return.QUARANTINE


def _with_device(view: View, device_id: str, device: Device) -> View:
    return View(
        record=view.record, devices={**view.devices, device_id: device},
        sitting_out=view.sitting_out,
    )  # fmt: skip


def here_store(store: Store, view: View) -> Store:
    """The same store looking at another view (a device that is not a member yet)."""
    return Store(
        view=view, scheduler=store.scheduler, code=store.code, buffers=store.buffers,
        metrics=store.metrics, clock=store.clock, counter=store.counter, settings=store.settings,
        read_only=store.read_only, routing=store.routing,
    )  # fmt: skip


__all__ = ["Reconciled", "Return", "add_member", "claimed_by", "drain_member", "endangered",
           "evict_member", "judge_return", "judge_survey", "lost_without", "readmit_member",
           "reconcile", "set_state"]  # fmt: skip
