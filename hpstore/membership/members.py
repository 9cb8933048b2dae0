"""Who belongs to the pool: create, open, and every change of it (PROTOCOL 14-17).

A change is made under the host's change lock: read the records of all devices, roll the newest
forward, then write its successor to max(m + 1, majority) of the old and of the new members. A crash
anywhere leaves the old record or the new one; whichever is newest is rolled forward at next use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hpstore.agreement.registers import Registers, Successor
from hpstore.config import PoolConfig
from hpstore.devices.base import Device
from hpstore.devices.opener import Opener
from hpstore.devices.unused_places import alone, make_place, mark, remove_place, require_unused
from hpstore.errors import (
    ConfigError,
    DeviceDenied,
    DeviceError,
    DeviceFull,
    DeviceInUse,
    DeviceMissing,
    FormatTooNew,
    IntegrityError,
    MembershipError,
    RegistersUnavailable,
    without_promise,
)
from hpstore.format.device_urls import without_secrets
from hpstore.format.geometry import BLOCK_BYTES, check_unit_bytes, check_width
from hpstore.format.host_calls import host_domain
from hpstore.format.placement import bound_spread
from hpstore.format.records import (
    IDENTITY_FILE,
    MAX_RECORD_BYTES,
    POOL_FILE,
    DeviceState,
    Identity,
    Member,
    PoolRecord,
    RegisterPlace,
)
from hpstore.objects.context import PATIENCE, PoolContext

_log = logging.getLogger(__name__)


class UnclearChange(MembershipError):
    """A record was written, on too few devices to be certain, or may be in the registers: the
    newest one found decides."""


def create_members(
    urls: list[str],
    domains: list[str] | None,
    opener: Opener,
    config: PoolConfig,
    *,
    data: int,
    parity: int,
    unit_bytes: int,
    keep: Callable[[], None] = lambda: None,
) -> PoolRecord:
    """Claim every device for a new pool and write the first record. Durable on return.

    Nothing is claimed unless every device can be. `keep` is called when all are claimed and none
    has a record: a key that is not kept must not become that of a pool.
    Raises ConfigError, DeviceInUse, DeviceError.
    """
    check_width(data, parity)
    check_unit(config, data + parity, unit_bytes)
    if len(urls) < parity + 1:
        raise ConfigError(
            f"{len(urls)} devices cannot hold data={data} parity={parity}: at least {parity + 1} "
            f"are needed, {data + parity} for the full width"
        )
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as closing:
        for url in urls:
            if make_place(url, config.settings):
                undo.callback(remove_place, url)
        devices = [closing.enter_context(contextlib.closing(opener(url))) for url in urls]
        _require_fit(devices)
        domains = domains or _by_host(urls)
        record = _first_record(urls, domains, config, data, parity, unit_bytes)
        record.encode(config.key)  # refused before anything is claimed
        try:
            for device in devices:
                closing.enter_context(alone(device))
        except DeviceInUse:
            undo.pop_all()  # also a place that was made here may be another process's now
            raise
        _claim_all(devices, record, config, keep)
        undo.pop_all()
    return record


def _require_fit(devices: Sequence[Device]) -> None:
    """Raise ConfigError or DeviceInUse where they cannot be those of a new pool."""
    places = [_place(device) for device in devices]
    if len(set(places)) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        url = devices[places.index(twice)].url
        raise ConfigError(f"device {url} is given twice")
    for device in devices:
        require_unused(device)


def _by_host(urls: Sequence[str]) -> list[str] | None:
    """Domains where some devices are on other hosts: the host, and its own for any other device."""
    hosts = [host_domain(url) for url in urls]
    if not any(hosts):
        return None
    return [host or f"d{i:03d}" for i, host in enumerate(hosts)]


def _first_record(
    urls: list[str],
    domains: list[str] | None,
    config: PoolConfig,
    data: int,
    parity: int,
    unit_bytes: int,
) -> PoolRecord:
    pool_id = uuid.uuid4().hex
    members = [
        Member(device_id=uuid.uuid4().hex, url=url, domain=domains[i] if domains else f"d{i:03d}")
        for i, url in enumerate(map(without_secrets, urls))
    ]
    return PoolRecord(
        spread=bound_spread(data + parity, parity, list(Counter(domains or urls).values())),
        pool_id=pool_id,
        generation=1,
        nonce=secrets.token_hex(8),
        parent="",
        data=data,
        parity=parity,
        unit_bytes=unit_bytes,
        members=tuple(members),
        key_id="" if config.key is None else config.key.fingerprint(pool_id),
    )


def _claim_all(
    devices: Sequence[Device], record: PoolRecord, config: PoolConfig, keep: Callable[[], None]
) -> None:
    claimed: list[tuple[Device, Identity]] = []
    try:
        for device, member in zip(devices, record.members, strict=True):
            identity = _identity(record, member)
            mark(device, identity)
            claimed.append((device, identity))
        keep()
        for device in devices:
            device.write_small(POOL_FILE, record.encode(config.key))
    except BaseException:  # the pool never came to be: let the places go, after Ctrl-C too
        for device, identity in claimed:
            _let_go(device, identity)
        raise


def _let_go(device: Device, identity: Identity) -> None:
    """Unless it is another pool's by now, as it may be where nothing locks."""
    for name in (POOL_FILE, IDENTITY_FILE):
        try:
            if device.read_small(IDENTITY_FILE, MAX_RECORD_BYTES) != identity.encode():
                return
            device.delete(name)
        except FileNotFoundError:
            continue
        except DeviceError as error:
            _log.warning(
                "%s of the pool that was not made stays on %s: %s", name, device.url, error
            )


def _place(device: Device) -> str:
    """What two URLs of one place have in common: links and bind mounts are seen through."""
    if "://" in device.url or not os.path.isdir(device.url):
        return device.url
    status = os.stat(device.url)
    return f"{status.st_dev}:{status.st_ino}"


def check_unit(config: PoolConfig, width: int, unit_bytes: int) -> None:
    """Raise ConfigError unless objects of this unit can be written and read here."""
    check_unit_bytes(unit_bytes)
    if unit_bytes > BLOCK_BYTES and unit_bytes % BLOCK_BYTES:
        # batches begin on a checksum block: other units would make batches of up to 16 of them
        raise ConfigError(f"unit of {unit_bytes} bytes: above 64 KiB, a multiple of 64 KiB")
    check_memory(config, width, unit_bytes)


def check_memory(config: PoolConfig, width: int, unit_bytes: int) -> None:
    """A stripe being written and one being read must fit the memory budget together."""
    needed = 2 * width * unit_bytes
    if needed > config.settings.memory_bytes:
        raise ConfigError(
            f"a stripe of {width} units of {unit_bytes} bytes needs memory_bytes >= {needed}; "
            f"{config.settings.memory_bytes} are set"
        )


def _identity(record: PoolRecord, member: Member) -> Identity:
    return Identity(
        pool_id=record.pool_id,
        device_id=member.device_id,
        domain=member.domain,
        weight=member.weight,
    )


def newest_of(found: Sequence[PoolRecord], known: PoolRecord | None = None) -> PoolRecord:
    """The record of the highest generation among those that devices hold. Pure. PROTOCOL 14.

    A change that died on its first device may be followed by another of the same generation while
    that device is away. The one on more devices is then the one that was committed: `known`, which
    is in use, gives way to one on a quorum only; the nonce decides what is left.
    """
    records = {record.order: record for record in found}
    held = Counter(record.order for record in found)
    top = max(record.generation for record in (*found, *([known] if known else ())))
    rivals = [record for record in records.values() if record.generation == top]
    if known is not None and known.generation == top:
        rivals = [r for r in rivals if held[r.order] >= r.quorum()] or [known]
    return max(rivals, key=lambda record: (held[record.order], record.nonce))


def newest_record(store: PoolContext) -> PoolRecord:
    """The newest record on any device that answers."""
    found = [record for record in _records(store) if record is not None]
    return newest_of(found, store.view.record)


def is_rolled_forward(store: PoolContext) -> bool:
    """Whether every device that answers has the record in use."""
    return all(r is not None and r.order == store.view.record.order for r in _records(store))


def _records(store: PoolContext) -> list[PoolRecord | None]:
    """Of the devices that answer; None for one without a whole record of this pool."""

    def read(_: str, device: Device) -> PoolRecord | None:
        try:
            return PoolRecord.decode(
                device.read_small(POOL_FILE, MAX_RECORD_BYTES),
                where=f"{device.url}/{POOL_FILE}",
                pool_key=store.pool_key,
            )
        except (FileNotFoundError, IntegrityError):
            return None

    results = store.each(store.view.devices, read, patience=PATIENCE)
    found: list[PoolRecord | None] = []
    for result in results.values():
        if isinstance(result, FormatTooNew):
            raise result
        if not isinstance(result, Exception):
            ours = result is not None and result.pool_id == store.view.record.pool_id
            found.append(result if ours else None)
    return found


def roll_forward(store: PoolContext, record: PoolRecord) -> int:
    """Bring devices that are behind, or hold a rival of its generation, up to `record`; returns
    how many members hold it now."""

    def update(device_id: str, device: Device) -> None:
        try:
            data = device.read_small(POOL_FILE, MAX_RECORD_BYTES)
            found = PoolRecord.decode(data, where=device.url, pool_key=store.pool_key)
            if found.generation > record.generation or found.order == record.order:
                return
        except (FileNotFoundError, IntegrityError):
            if device.stamp(IDENTITY_FILE) is None:
                raise DeviceMissing(f"device {device.url} was wiped", device=device_id) from None
        device.write_small(POOL_FILE, record.encode(store.pool_key))

    results = store.each(store.view.devices, update, patience=PATIENCE)
    return sum(not isinstance(result, Exception) for result in results.values())


def commit_record(
    store: PoolContext,
    new: PoolRecord,
    extra: Mapping[str, Device],
    *,
    force: bool,
    registers: Registers | None = None,
) -> None:
    """Write a successor record to old and new members. The caller holds the membership.

    While it is written no other process writes one, and it is refused unless it follows the newest
    record there is: a caller that was paused and has lost its hold cannot make a second successor.
    `registers`: those that make sure of it, by default the pool's.

    Raises MembershipError before anything is written when too few devices answer (unless forced),
    or after, when too many failed in between; then the newest record decides at the next use.
    """
    old = store.view.record
    devices = writable_devices(store, new, extra, force=force)
    staying = [m.device_id for m in new.members]
    with (registers or store.registers).exchange(dict(extra), staying, force=force) as exchange:
        _require_successor(store, new)
        try:
            exchange.settle(successor_of(store, new))
        except RegistersUnavailable as error:
            raise UnclearChange(
                f"generation {new.generation} may count or not: {without_promise(error)} What the "
                "registers have decides at the next change; run it again then."
            ) from error
        held = _write_record(store, new, devices)
    if force and held:
        _log.warning(
            "membership generation %d was forced onto %d devices", new.generation, len(held)
        )
    elif not (old.reached_by(held) and new.reached_by(held)):
        raise UnclearChange(
            f"generation {new.generation} reached {len(held)} of {len(devices)} devices, too few "
            "to be certain. The newest record found at the next open decides; run it again."
        )


def writable_devices(
    store: PoolContext, new: PoolRecord, extra: Mapping[str, Device], *, force: bool
) -> dict[str, Device]:
    """Those that can be given a successor record now, the `extra` ones taken for granted.

    Counted beforehand, with devices that are full: else a change could end half done. Raises
    MembershipError when they are too few, unless forced; nothing has changed then.
    """

    def look(device_id: str, device: Device) -> None:
        store.generation_on(device_id, device)
        if not device.takes_records():
            raise DeviceFull(f"{device.url} has no space for a record", device=device_id)

    view = store.view
    old, members = view.record, view.devices
    answers = store.each(members, look, patience=PATIENCE)
    alive = {d for d, answer in answers.items() if not isinstance(answer, Exception)}
    alive -= store.refusing.keys()
    devices = {**{d: members[d] for d in alive}, **extra}
    if not force and not (old.reached_by(set(devices)) and new.reached_by(set(devices))):
        full = [str(answer) for answer in answers.values() if isinstance(answer, DeviceFull)]
        denied = [str(answer) for answer in answers.values() if isinstance(answer, DeviceDenied)]
        raise MembershipError(
            f"{len(devices)} devices can be written; a change needs {old.quorum()} of the "
            f"{len(old.members)} members now and {new.quorum()} of the {len(new.members)} members "
            "then. Nothing was changed. "
            + (f"Full: {'; '.join(full)}. {store.make_room} " if full else "")
            + (f"Refused: {'; '.join(denied)}. " if denied else "")
            + "Bring devices back, or force it if they are gone for good."
        )
    return devices


def _require_successor(store: PoolContext, new: PoolRecord) -> None:
    """Raise MembershipError unless a record follows the newest there is."""
    newest = newest_record(store)
    if newest.order != store.view.record.order or new.generation != newest.generation + 1:
        raise MembershipError(
            f"generation {new.generation} was made from {new.generation - 1}, and "
            f"{newest.generation} is there: another process has changed the membership. "
            "Nothing was changed; look at it, and run this again if it is still wanted."
        )


def successor_of(store: PoolContext, new: PoolRecord) -> Successor:
    """A membership that follows the one in use, for registers."""
    return Successor(
        order=new.order, parent=store.view.record.order, data=new.encode(store.pool_key)
    )


def _write_record(store: PoolContext, new: PoolRecord, devices: Mapping[str, Device]) -> set[str]:
    """Write it to all that have no newer one; the devices that have it now."""
    data = new.encode(store.pool_key)

    def write(device_id: str) -> None:
        device = devices[device_id]
        if new.registers is not None and device_id in store.view.devices:  # no lock keeps others
            newest = store.generation_on(device_id, device)
            if newest > new.generation:
                raise UnclearChange(f"{device.url} has generation {newest} already")
        device.write_small(POOL_FILE, data)

    results = store.scheduler.gather(
        {d: partial(write, d) for d in devices}, store.settings.device_deadline_seconds
    )
    return {d for d, result in results.items() if not isinstance(result, Exception)}


def with_states(record: PoolRecord, states: Mapping[str, DeviceState]) -> PoolRecord:
    """The next generation, in which these members have other states."""
    members = [replace(m, state=states.get(m.device_id, m.state)) for m in record.members]
    return record.successor(members=members, evicted=record.evicted, nonce=secrets.token_hex(8))


def with_registers(record: PoolRecord, place: RegisterPlace) -> PoolRecord:
    """The next generation, which has its registers in another place."""
    new = record.successor(
        members=record.members, evicted=record.evicted, nonce=secrets.token_hex(8)
    )
    return replace(new, registers=place)


def with_healed(record: PoolRecord, healed: Mapping[str, int]) -> PoolRecord:
    """The next generation, in which devices that were evicted at these times (ms) have been made up
    for, unless they came back and were evicted again since."""
    evicted = [
        replace(m, state=DeviceState.HEALED) if healed.get(m.device_id) == m.since_ms else m
        for m in record.evicted
    ]
    return record.successor(members=record.members, evicted=evicted, nonce=secrets.token_hex(8))


def without_members(
    record: PoolRecord, leaving: Collection[str], state: DeviceState, now_ms: int
) -> PoolRecord:
    """The next generation, in which members have left: EVICTED, or HEALED when emptied."""
    gone = [
        replace(m, state=state, since_ms=now_ms) for m in record.members if m.device_id in leaving
    ]
    members = [m for m in record.members if m.device_id not in leaving]
    evicted = [m for m in record.evicted if m.device_id not in leaving]
    return record.successor(members=members, evicted=[*evicted, *gone], nonce=secrets.token_hex(8))


def with_member(record: PoolRecord, member: Member) -> PoolRecord:
    """The next generation with a new or readmitted member."""
    members = [m for m in record.members if m.device_id != member.device_id]
    evicted = [m for m in record.evicted if m.device_id != member.device_id]
    return record.successor(members=[*members, member], evicted=evicted, nonce=secrets.token_hex(8))


def find_member(
    record: PoolRecord, devices: Mapping[str, Device], wanted: str, *, returning: bool = False
) -> Member:
    """A member or evicted device by URL, path, id or a unique beginning of the id.

    A place is that of the device which is open there now, and of those that were last there: disks
    are replaced at their mount points, and change them. Members come first; with `returning` those
    that have left or drain. Of several that a place may mean none is chosen: MembershipError names
    them with their ids.
    """
    wanted = without_secrets(wanted)
    plain = wanted.removeprefix("file://").rstrip("/")
    everyone = [*record.members, *record.evicted]

    def is_at(member: Member) -> bool:
        device = devices.get(member.device_id)
        url = member.url if device is None else device.url
        return url.removeprefix("file://").rstrip("/") == plain

    def first(member: Member) -> bool:
        leaves = member.left or member.state is DeviceState.DRAINING
        return leaves if returning else not member.left

    there = [m for m in everyone if is_at(m)]
    found = [m for m in there if first(m)] or there
    found = found or [m for m in everyone if len(wanted) >= 4 and m.device_id.startswith(wanted)]
    if len(found) != 1:
        rows = ", ".join(_described(m, devices) for m in found or everyone)
        raise MembershipError(
            f"{wanted!r} may be any of {len(found)} devices of this pool: {rows}. Nothing was "
            "changed. Say which, by the beginning of its id."
            if found
            else f"{wanted!r} names no device of this pool; it has {rows}"
        )
    return found[0]


def _described(member: Member, devices: Mapping[str, Device]) -> str:
    """A device for people who have to tell it from others at its place."""
    device = devices.get(member.device_id)
    where = "is there now" if device is not None else "was there last, does not answer"
    url = member.url if device is None else device.url
    return f"{member.device_id[:8]} ({url}, {member.state}, {where})"
