"""Membership changes that look at what devices hold (PROTOCOL 12-17): add, evict, drain, return."""

from __future__ import annotations

import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from hpstore.devices.base import Device
from hpstore.devices.opener import same_form
from hpstore.devices.unused_places import claim
from hpstore.errors import (
    DeviceFull,
    DeviceInUse,
    DeviceMissing,
    DeviceTimeout,
    HpstoreError,
    IntegrityError,
    LockTimeout,
    MembershipError,
    TooFewDevices,
    TooManyErasures,
    without_promise,
)
from hpstore.format.host_calls import host_domain
from hpstore.format.keys import ColumnName, Kind
from hpstore.format.records import (
    IDENTITY_FILE,
    MAX_RECORD_BYTES,
    DeviceState,
    Identity,
    Member,
    PoolRecord,
    check_domain,
)
from hpstore.maintenance.dependents import depends_on, endangered, holds_live_files
from hpstore.maintenance.repair_object import RepairAction, repair_object
from hpstore.membership.members import (
    UnclearChange,
    commit_record,
    newest_record,
    with_member,
    with_states,
    without_members,
    writable_devices,
)
from hpstore.membership.returning_files import Return, judge_survey
from hpstore.objects.context import PATIENCE, PoolContext, View
from hpstore.objects.horizon import come_back_at, come_back_below
from hpstore.objects.key_listing import walk
from hpstore.objects.survey import newest_by_name, path_on
from hpstore.objects.write.debts import keep_debts
from hpstore.objects.write.stripe_writer import Throttle

T = TypeVar("T")
_log = logging.getLogger(__name__)
RESCANS = 10  # rounds of looking for columns that were put meanwhile
_NAMED = 5  # keys named in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """What became of the files on a device that came back."""

    kept: int
    removed: int
    quarantined: int


def require_no_member(store: PoolContext, device: Device, url: str) -> None:
    """Raise MembershipError for a second name of a place that is open as a member already."""
    identity = _own_identity(store, device)
    member = None if identity is None else store.view.devices.get(identity.device_id)
    if identity is not None and member is not None and same_form(member.url) != url:
        raise MembershipError(
            f"{url} is a member already: {member.url} ({identity.device_id[:8]}). Nothing was "
            "changed."
        )


def add_member(
    store: PoolContext, device: Device, url: str, domain: str | None, *, force: bool
) -> Member:
    """Claim an unused device and make it a member. The caller holds the change lock."""
    if domain is not None:
        check_domain(domain)
    domain = domain or host_domain(url)
    record = store.view.record
    identity = _own_identity(store, device)
    claimed = identity is not None and identity.pool_id == record.pool_id
    if identity is not None and identity.pool_id == record.pool_id:
        member = record.member(identity.device_id)
        if member is not None:
            return member  # an add that was cut short after its record was written
        if identity.device_id in {m.device_id for m in record.evicted}:
            raise MembershipError(f"{url} was evicted from this pool; it comes back with readmit")
        device_id = identity.device_id  # claimed by an add that was cut short
    else:
        device_id = uuid.uuid4().hex
        identity = Identity(
            pool_id=record.pool_id, device_id=device_id, domain=domain or f"d-{device_id[:8]}"
        )
    member = Member(device_id=device_id, url=url, domain=domain or identity.domain)
    new, joining = with_member(record, member), {device_id: device}
    writable_devices(store, new, joining, force=force)  # better refused before anything is written
    try:
        if not claimed:  # refused where another pool's device lies
            _ask_once(store, device, lambda: claim(device, identity))
        come_back_at(store, device, partial(_ask_once, store, device), None)
        commit_record(store, new, joining, force=force)
    except (UnclearChange, DeviceInUse):
        raise
    except HpstoreError:
        if not claimed:
            _let_go(store, device, identity)
        raise
    return member


def _let_go(store: PoolContext, device: Device, claimed: Identity) -> None:
    """Of an add that was refused: the place is no device of the pool any more. Best effort."""
    try:
        written = newest_record(store).member(claimed.device_id) is not None
        if not written and _own_identity(store, device) == claimed:
            _ask_once(store, device, lambda: device.delete(IDENTITY_FILE))
    except HpstoreError as error:
        _log.warning(
            "%s keeps its %s, adding it again goes on: %s", device.url, IDENTITY_FILE, error
        )


def _ask_once(store: PoolContext, device: Device, call: Callable[[], T]) -> T:
    """Make a call on a device that is no member, under the open deadline: whoever holds the change
    lock waits for nobody longer (PROTOCOL 15). Raises what it raises."""
    deadline = store.settings.open_deadline_seconds
    (answer,) = store.scheduler.gather_once({device.url: call}, deadline).values()
    if isinstance(answer, Exception):
        raise answer
    return answer


def claimed_by(store: PoolContext, device: Device) -> bool:
    """Whether a place was made a device of the pool, or may have been: it does not answer, or is
    not there any more."""
    try:
        identity = _own_identity(store, device)
    except (DeviceTimeout, DeviceMissing):
        return True
    except HpstoreError:
        return False
    return identity is not None and identity.pool_id == store.view.record.pool_id


def _own_identity(store: PoolContext, device: Device) -> Identity | None:
    def read() -> Identity | None:
        try:
            data = device.read_small(IDENTITY_FILE, MAX_RECORD_BYTES)
        except FileNotFoundError:
            return None
        return Identity.decode(data, where=f"{device.url}/{IDENTITY_FILE}")

    return _ask_once(store, device, read)


def set_state(
    store: PoolContext, device_id: str, state: DeviceState, *, force: bool = False
) -> None:
    """Change a member's state. The caller holds the change lock and refreshes afterwards."""
    commit_record(store, with_states(store.view.record, {device_id: state}), {}, force=force)


def evict_members(
    store: PoolContext,
    members: Sequence[Member],
    refresh: Callable[[], None],
    *,
    force: bool,
    emptied: bool = False,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Take devices out, all in one generation; what they hold counts as lost. The caller holds the
    change lock.

    First they are closed for new columns, then what depends on them is looked at; so no put can
    slip in between (PROTOCOL 16). Refuses, and opens them again, when an object would be lost.
    `confirm` is called before each membership is stored, and refuses it by raising.
    """
    leaving = frozenset(member.device_id for member in members)
    what = members[0].url if len(members) == 1 else f"{len(members)} devices"
    _require_enough_left(store.view.record, leaving, what, force=force)
    if not (force or emptied):
        _require_little_away(store, members, what)
    state = DeviceState.HEALED if emptied else DeviceState.EVICTED
    try:
        confirm()
        closed = dict.fromkeys(leaving, DeviceState.DRAINING)
        commit_record(store, with_states(store.view.record, closed), {}, force=force)
        with _opened_again_if_stopped(store, members, refresh):
            refresh()
            judged, now = store.view.record, store.clock.wall_ms()
            if not force:
                if keys := endangered(store, leaving, emptied=emptied):
                    raise MembershipError(
                        f"{len(keys)} objects need {what} to be readable, among them "
                        f"{', '.join(keys[:_NAMED])}. Nothing was changed. Drain it, or rebuild "
                        "first."
                    )
                keep_debts(store, leaving)
            record = without_members(judged, leaving, state, now)  # refused if it has moved
            confirm()
        commit_record(store, record, {}, force=force)
    except UnclearChange:
        raise  # one more record, of a higher generation, could beat what is committed meanwhile
    except HpstoreError as error:
        if problem := _open_again(store, members, refresh):
            raise type(error)(
                f"{without_promise(error)} {what} may stay draining, take it back with readmit: "
                f"{problem} What is stored can be read."
            ) from error
        raise
    refresh()


@contextmanager
def _opened_again_if_stopped(
    store: PoolContext, members: Sequence[Member], refresh: Callable[[], None]
) -> Iterator[None]:
    """Between two memberships of an eviction: Ctrl-C leaves the devices as they were, too.

    Ctrl-C within a commit leaves what a crash there leaves: which membership counts is unclear.
    """
    try:
        yield
    except HpstoreError:
        raise  # the caller's affair
    except (KeyboardInterrupt, SystemExit, Exception):
        _open_again(store, members, refresh)
        raise


def _require_enough_left(
    record: PoolRecord, leaving: frozenset[str], what: str, *, force: bool
) -> None:
    """Raise MembershipError where what stays could take no data with full parity."""
    staying = {m.device_id for m in record.members} - leaving
    left = record.weight(staying)
    if not staying or (left < record.parity + 1 and not force):
        raise MembershipError(
            f"without {what} {left} devices (or domains) are left; {record.parity + 1} are "
            "needed to take new data with full parity. Add a device first, or force it."
        )


def _require_little_away(store: PoolContext, members: Sequence[Member], what: str) -> None:
    """Raise MembershipError where more than m is away already, or would be without `members`, by
    weight (PROTOCOL 16, 17). Looked at before anything is written."""
    view, record = store.view, store.view.record
    answers = store.each(view.devices, store.generation_on, patience=PATIENCE)
    silent = {d for d, answer in answers.items() if isinstance(answer, Exception)} | view.missing
    away = record.unhealed() | silent
    gone = away.union(member.device_id for member in members)
    if record.opens_without(gone):
        return
    named = [m.url for m in record.members if m.device_id in silent]
    if unhealed := len(record.unhealed()):
        named.append(f"{unhealed} that were evicted since the last rebuild")
    raise MembershipError(
        f"{what} cannot be evicted: as much as {record.weight(gone)} columns of an object would be "
        f"away, {record.weight(away)} are now ({', '.join(named[-_NAMED:]) or 'none'}), and parity "
        f"replaces {record.parity}. Nothing was changed. Rebuild, or bring devices back first."
    )


def _open_again(store: PoolContext, members: Sequence[Member], refresh: Callable[[], None]) -> str:
    """After an eviction or drain that was refused: the states of before. Best effort: why they may
    not be, else ""."""
    try:
        refresh()
        found = {m.device_id: m.state for m in store.view.record.members}
        before = {m.device_id: m.state for m in members if m.device_id in found}
        if any(found[device] is not state for device, state in before.items()):
            commit_record(store, with_states(store.view.record, before), {}, force=False)
            refresh()
    except HpstoreError as error:
        _log.warning(
            "device %s may stay draining, take it back with readmit: %s",
            ", ".join(member.url for member in members),
            error,
        )
        return without_promise(error)
    return ""


def drain_member(
    store: PoolContext,
    member: Member,
    refresh: Callable[[], None],
    throttle: Throttle,
    progress: Callable[[int, int, str], None],
    confirm: Callable[[], None] = lambda: None,
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
            evict_members(store, [member], refresh, force=False, emptied=True, confirm=confirm)
            return moved
        moved += found
    raise MembershipError(f"{member.url} still gets files after {RESCANS} rounds; drain again")


def move_off(
    store: PoolContext,
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
            moved += repair.action in (RepairAction.REBUILT, RepairAction.RELAID)
            if repair.action in (RepairAction.STUCK, RepairAction.WAITING):
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


def _remove_tombstones(store: PoolContext, device_id: str) -> None:
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


def _on_device(store: PoolContext, device_id: str, call: Callable[[Device], None]) -> None:
    """Make a call on a device of the view, under the device deadline. Raises what it raises."""
    for answer in store.each([device_id], lambda _, device: call(device)).values():
        if isinstance(answer, Exception):
            raise answer


def _delete(key: str, name: ColumnName, device: Device) -> None:
    device.delete(path_on(device, key, name))


def _quarantine(key: str, name: ColumnName, device: Device) -> None:
    device.quarantine(path_on(device, key, name))


def reconcile(store: PoolContext, device_id: str, device: Device, swept: int = 0) -> Reconciled:
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
    here = here_store(store, replace(view, devices={**view.devices, device_id: device}))
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
    judged += [
        (key, file.name, Return.QUARANTINE)
        for key, survey in catalog.surveys.items()
        for file in (*survey.strangers, *survey.blanks)
        if file.device == device_id
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
    found = Reconciled(
        kept=count[Return.KEEP], removed=count[Return.REMOVE], quarantined=count[Return.QUARANTINE]
    )
    _log.info(
        "device %s returns: %d kept, %d removed, %d quarantined",
        device.url,
        found.kept,
        found.removed,
        found.quarantined,
    )
    return found


def readmit_member(store: PoolContext, member: Member, device: Device) -> Reconciled:
    """Reconcile an evicted device, then make it a member. The caller holds the change lock."""
    ask = partial(_ask_once, store, device)
    try:
        ask(lambda: device.probe(write=True))
    except DeviceFull:  # it answers, and what it holds is of use
        if not ask(device.takes_records):
            raise
    joining = {member.device_id: device}
    back = replace(member, url=device.url, state=DeviceState.ONLINE)
    record = with_member(store.view.record, back)
    writable_devices(store, record, joining, force=False)  # refused before a file is touched
    swept = come_back_below(store, device, ask)
    found = reconcile(store, member.device_id, device, swept)
    come_back_at(store, device, ask, swept)
    commit_record(store, record, joining, force=False)
    return found


def _age_seconds(store: PoolContext, device_id: str) -> float:
    """How long ago a device was evicted."""
    gone = next((m for m in store.view.record.evicted if m.device_id == device_id), None)
    return (store.clock.wall_ms() - gone.since_ms) / 1000 if gone is not None else math.inf


def here_store(store: PoolContext, view: View) -> PoolContext:
    """The same store looking at another view (a device that is not a member yet)."""
    return PoolContext(
        view=view,
        scheduler=store.scheduler,
        code=store.code,
        buffers=store.buffers,
        metrics=store.metrics,
        clock=store.clock,
        counter=store.counter,
        settings=store.settings,
        read_only=store.read_only,
        pool_key=store.pool_key,
        routing=store.routing,
    )
