"""What a pool says of itself. Plain data, and the functions that gather it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from hpstore.devices.base import Device, Usage
from hpstore.devices.io_uring import problem as ring_problem
from hpstore.devices.opener import RELEASED_NOTE
from hpstore.devices.remote_opener import driver_of
from hpstore.devices.reserve import reserve_bytes, shortage
from hpstore.errors import DeviceError, DeviceReadOnly
from hpstore.format.records import DeviceState, Member, shown_members
from hpstore.health.decision_log import history_path
from hpstore.health.decision_notes import verdicts_of_processes
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.history import History
from hpstore.health.monitor import Monitor
from hpstore.health.policy.states import Decision
from hpstore.health.snapshot import DeviceSight
from hpstore.maintenance.survey_condition import survey_condition
from hpstore.membership.agent_observations import ObservedDevice, observed_devices
from hpstore.membership.device_places import filesystem_of, sharing_a_disk
from hpstore.objects.context import PATIENCE, PoolContext
from hpstore.objects.write.debts import read_debts
from hpstore.pool.host_status import HostStatus, host_statuses, hosts_tolerated
from hpstore.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One device. `state` is online, full, read-only, draining, evicted, missing or sitting-out."""

    device: str
    url: str
    state: str
    mode: str  # direct, buffered, memory, remote; "" when it did not answer
    domain: str
    total_bytes: int
    free_bytes: int
    kept_bytes: int  # of it in files that are kept for overwriting
    rebuilt: bool  # evicted, and what it held has been made up for since
    released: bool  # missing because an operator has released it for maintenance
    waiting: int  # calls queued for it in this process
    problem: str
    known_by: str  # how state and problem are known: by a write, a read, or an agent's word
    health: str  # as this process judges it: online, suspect, sitout ...; else as another one does
    score: float  # of its slowness: above 10 it is suspect
    reason: str  # of what is held against it now
    driver: str = ""  # of a store: what it is reached by, obstore or fsspec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """A pool at one moment."""

    name: str
    pool_id: str
    generation: int
    data: int
    parity: int
    effective_data: int  # k' of new objects now; 0 means reads only
    unit_bytes: int
    erasure_backend: str
    batched_reads: str  # how many reads are made: all in one call, or why one by one
    devices: tuple[DeviceStatus, ...]
    sharing: tuple[str, ...]  # members that lie on the disk of another one
    past: int  # devices that left long ago and are not among them: nothing depends on these
    objects: int  # that a listing shows
    degraded: int  # readable, but short of their full stripe
    unreadable: int  # need devices that are missing now
    losses_tolerated: int  # further devices that may be lost: the pool opens, all objects read
    hosts: tuple[HostStatus, ...] = ()  # none for a pool on one host
    hosts_tolerated: int = 0  # further hosts that may be lost, whichever they are
    expiring: Mapping[str, int]  # degraded objects that soon go, so are healed last: why, how many
    debts: int
    used_bytes: int  # of capacity_bytes, by whatever lies there
    capacity_bytes: int  # of all devices that answer; what shares a filesystem counts once
    usable_bytes: int  # object bytes that still fit, at the geometry of now; see room_known
    room_known: bool  # False: stores without a quota could take more than is known
    can_shrink_by: int  # devices that may go before new data loses its full parity
    read_only: bool
    authenticated: bool  # files carry MACs of the pool's key; without, a device can forge them
    decisions: tuple[str, ...]  # about devices, of all processes of this node; the newest last
    counters: Mapping[str, float]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


_AWAY = ("missing", "evicted")
_DECISIONS = 10  # that a status shows
_LOOKED_AT = 200  # decisions, for what other processes hold against devices
_UNTRIED = "read now; whether it takes writes was not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """At a device that answers. `refused`: why it takes no writes."""

    usage: Usage
    refused: DeviceError | None


def device_status(
    store: PoolContext,
    problems: Mapping[str, str],
    sights: Mapping[str, DeviceSight],
    observed: Mapping[str, ObservedDevice],
    told: Mapping[str, Decision],
    *,
    past: bool = True,
) -> list[DeviceStatus]:
    """Every member and evicted device, without those that are `past` where these are not wanted.
    `observed`: as an agent's probes found them, for a store
    that may not write; `told`: what other processes hold against them."""

    def look(device_id: str, device: Device) -> _Look:
        store.generation_on(device_id, device)
        refused = store.probe(device_id, device)
        return _Look(usage=device.usage(), refused=refused)

    looks = store.each(store.view.devices, look, patience=PATIENCE)
    rows = []
    for member in shown_members(store.view.record, store.clock.wall_ms(), past=past):
        device = store.view.devices.get(member.device_id)
        found, sight = looks.get(member.device_id), sights.get(member.device_id)
        space = found.usage if isinstance(found, _Look) else Usage(total=0, free=0)
        url = device.url if device is not None else member.url
        problem = problems.get(member.url, "") or problems.get(url, "")
        if isinstance(found, _Look) and (found.refused is not None or url == member.url):
            problem = str(found.refused or "")  # what was there before it answered is over
        elif isinstance(found, Exception):
            problem = str(found)
        seen = observed.get(member.device_id)
        known = _Known(state=_state(store, member, found), problem=problem, by=_known_by(store))
        health, reason = _held_against(sight, None if member.left else told.get(member.device_id))
        if seen is not None and not member.left:
            known = _with_word(known, seen)
        rows.append(
            DeviceStatus(
                device=member.device_id,
                url=url,
                state=known.state,
                mode=device.mode if device is not None else "",
                domain=member.domain,
                total_bytes=space.total,
                free_bytes=space.free,
                kept_bytes=space.kept,
                rebuilt=member.state is DeviceState.HEALED,
                released=known.state == "missing" and RELEASED_NOTE in known.problem,
                waiting=store.scheduler.queued(member.device_id),
                problem=known.problem,
                known_by="" if member.left else known.by,
                health=health,
                score=0.0 if sight is None else sight.score,
                reason=reason,
                driver="" if device is None else driver_of(device),
            )
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is said of a device, and how it is known."""

    state: str
    problem: str
    by: str


def _known_by(store: PoolContext) -> str:
    return _UNTRIED if store.read_only else "written, synced and read back now"


def _with_word(known: _Known, seen: ObservedDevice) -> _Known:
    """What this process saw by reading, and an agent by writing: the worse of the two."""
    if known.state == "missing":
        return known
    if not seen.answers:
        return _Known(state="missing", problem=f"{seen.problem} ({seen.source})", by=seen.source)
    by = f"read now; writes: {seen.source}"
    if seen.read_only and known.state == "online":
        return _Known(state="read-only", problem=f"{seen.problem} ({seen.source})", by=by)
    return replace(known, problem=known.problem or seen.problem, by=by)


def _held_against(sight: DeviceSight | None, said: Decision | None) -> tuple[str, str]:
    """State and reason by this process' own reads; where they say nothing, by another process'."""
    if said is not None and (sight is None or sight.state is HealthState.ONLINE):
        return said.becomes.value, f"{said.reason} (another process of this node)"
    return ("", "") if sight is None else (sight.state.value, sight.reason)


def _state(store: PoolContext, member: Member, found: object) -> str:
    if member.left:
        return "evicted"
    if not isinstance(found, _Look):
        return "missing"
    if member.device_id in store.view.sitting_out:
        return "sitting-out"
    if member.state is DeviceState.ONLINE and isinstance(found.refused, DeviceReadOnly):
        return "read-only"
    if member.state is DeviceState.ONLINE and shortage(found.usage):
        return "full"
    return member.state.value


def usable_bytes(devices: Sequence[DeviceStatus], data: int, width: int) -> int:
    """Object bytes that still fit: each stripe takes `width` different devices, and what devices
    on one filesystem have free is there once. Without what is left for deletes. 0 for `data` 0, and
    where devices that do not say what they have could take all."""
    unsaid = sum(not d.total_bytes for d in devices)
    devices, width = [d for d in devices if d.total_bytes], width - unsaid
    if width < 1:
        return 0
    filesystems = [filesystem_of(d.url) or d.device for d in devices]
    sharing = Counter(filesystems)
    free = sorted(
        max(0, d.free_bytes - reserve_bytes(Usage(total=d.total_bytes, free=d.free_bytes)))
        // sharing[where]
        for d, where in zip(devices, filesystems, strict=True)
    )
    if not data:
        return 0
    for largest in range(min(width, len(free))):  # these hold a column of every stripe
        rest = free[: len(free) - largest]
        stripes = sum(rest) // (width - largest)
        if rest[-1] <= stripes:
            return stripes * data
    return 0


def filesystem_bytes(devices: Sequence[DeviceStatus]) -> tuple[int, int]:
    """Bytes in all and free bytes of the filesystems that devices are on, each once."""
    found = {filesystem_of(d.url) or d.device: (d.total_bytes, d.free_bytes) for d in devices}
    return sum(total for total, _ in found.values()), sum(free for _, free in found.values())


def recent_decisions(store: PoolContext) -> list[Decision]:
    """What was decided about devices on this node, by any process, the newest first."""
    path = history_path(store.settings, store.view.record.pool_id)
    if not path.exists():
        return []
    history = History(path, store.metrics, read_only=True)
    found = history.decisions(_LOOKED_AT, until_seconds=store.clock.wall_ms() / 1000)
    history.close()
    return found


def _line(decision: Decision, urls: Mapping[str, str]) -> str:
    when = time.strftime("%F %T", time.localtime(decision.at_seconds))
    where = urls.get(decision.device, decision.device[:8])
    step = f"{decision.was} -> {decision.becomes}"
    if decision.was is decision.becomes:
        step = f"stays {decision.was}"
    return f"{when} {where} {step}: {decision.reason}"


def pool_status(
    store: PoolContext, name: str, problems: Mapping[str, str], health: Monitor, *, past: bool
) -> PoolStatus:
    """Gather a status; walks all keys."""
    record = store.view.record
    sights = health.snapshot().devices if health.enabled else {}
    decisions, now_ms = recent_decisions(store), store.clock.wall_ms()
    observed: Mapping[str, ObservedDevice] = {}
    if store.read_only:
        observed = observed_devices(store.settings.run_path(record.pool_id), now_ms)
    told = verdicts_of_processes(decisions, now_ms / 1000)
    # first: it finds out who takes columns
    devices = device_status(store, problems, sights, observed, told, past=past)
    usable = store.usable()
    effective = max(0, min(record.data, usable - record.parity))
    found = survey_condition(store, {d.device for d in devices if d.state == "missing"})
    room = [d for d in devices if d.state == "online"]
    answering = {d.device for d in devices if d.state not in _AWAY}
    capacity, free = filesystem_bytes([d for d in devices if d.total_bytes])
    urls = {device_id: device.url for device_id, device in store.view.devices.items()}
    return PoolStatus(
        name=name,
        pool_id=record.pool_id,
        generation=record.generation,
        data=record.data,
        parity=record.parity,
        effective_data=effective,
        unit_bytes=record.unit_bytes,
        erasure_backend=store.code.backend.name,
        batched_reads=ring_problem() or "io_uring",
        devices=tuple(devices),
        sharing=tuple(sharing_a_disk([d.url for d in devices if d.state not in _AWAY])),
        past=len(record.members) + len(record.evicted) - len(devices),
        objects=found.objects,
        degraded=found.degraded,
        unreadable=found.unreadable,
        losses_tolerated=found.losses_tolerated,
        hosts=host_statuses(store, answering, found.losses_tolerated),
        hosts_tolerated=hosts_tolerated(record, answering, found.losses_tolerated),
        expiring=found.expiring,
        debts=len(read_debts(store)),
        used_bytes=capacity - free,
        capacity_bytes=capacity,
        room_known=sum(not d.total_bytes for d in room) < effective + record.parity,
        usable_bytes=usable_bytes(room, effective, effective + record.parity),
        can_shrink_by=max(0, usable - record.parity - 1),
        read_only=store.read_only,
        authenticated=store.pool_key is not None and not store.pool_key.lost,
        decisions=tuple(_line(said, urls) for said in reversed(decisions[:_DECISIONS])),
        counters=store.metrics.snapshot(),
    )


def state_in_brief(store: PoolContext, name: str) -> str:
    """A pool's state in one line, for the messages of what failed: devices that answer now, room,
    and the losses that it still bears. Cheap, where pool_status() walks all keys: asks each device,
    with a deadline."""

    def look(device_id: str, device: Device) -> Usage:
        store.generation_on(device_id, device)
        return device.usage()

    answers = store.each(store.view.devices, look, patience=PATIENCE)
    found = [answer for answer in answers.values() if isinstance(answer, Usage)]
    free = [usage.free for usage in found if usage.known]
    silent = {device for device, answer in answers.items() if not isinstance(answer, Usage)}
    room = f"{format_bytes(min(free))} free on the fullest, " if free else ""
    return (
        f"pool {name!r}: {len(found)} of {len(store.view.record.members)} devices answer, {room}"
        f"{store.view.may_leave(silent)} further losses tolerated"
    )
