"""Looks at many devices at once, in which disks of one host are asked by one request.

What is asked of a local device is some calls in a cached directory; of a disk of another host each
is a round trip. So its service makes those calls for all its disks (host_looks.py there), and a
disk that has not answered it in time is asked by itself, as any other device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from hpstore.devices.base import Device, Stamp, Usage
from hpstore.devices.horizon_guard import MARK, decode_counter
from hpstore.devices.host_disks import HostDisk, begin_look, host_disk, look_at_disks
from hpstore.format.disk_looks import MOST_DISKS, DiskLook
from hpstore.objects.context import PoolContext
from hpstore.runtime.deadline_wait import Patience, still_owes, wait_awake, wait_for_enough
from hpstore.runtime.scheduler import outcome
from hpstore.runtime.split_calls import Sent, SplitCall, Unfinished

T = TypeVar("T")
_ANY_GENERATION = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLook(Generic[T]):
    """What is looked for. `alone`: the calls on one device. `seen`: the same of what was seen of it
    together with others of its host, `paths` of directories among that. `usage`: its space, too."""

    alone: Callable[[str, Device], T]
    seen: Callable[[str, Device, DiskLook], T]
    paths: Callable[[Device], Sequence[str]]
    usage: bool = False


class _Late(Exception):
    """A disk did not answer its host's service in time."""


def look_at_devices(
    store: PoolContext,
    devices: Mapping[str, Device],
    looking: SharedLook[T],
    *,
    patience: Patience | None = None,
    brief: str = "",
    ask_late: bool = False,
) -> dict[str, T | Exception]:
    """Answers or errors by device, under the device deadline; `patience`, `brief` and `ask_late` as
    Scheduler.gather has them."""
    limit, scheduler = store.settings.device_deadline_seconds, store.scheduler
    alone = {d: partial(looking.alone, d, device) for d, device in devices.items()}
    disks = {d: disk for d, device in devices.items() if (disk := host_disk(device)) is not None}
    if not disks:
        return scheduler.gather(alone, limit, patience=patience, brief=brief, ask_late=ask_late)
    late: set[str] = set()
    if patience is not None and not ask_late:
        late = scheduler.late(devices, patience.seconds)
        late = late if patience.spare(late) else set()  # else all of them are needed
    groups = _by_host({d: disk for d, disk in disks.items() if d not in late})
    calls: dict[str, Callable[[], Mapping[str, T | Exception]]] = {
        name: SplitCall(
            partial(_begin_host, store, members, devices, looking),
            partial(_ask_host, members, devices, looking),
        )
        for name, members in groups.items()
    }
    for device in devices.keys() - disks.keys() - late:
        calls[device] = partial(_ask_device, device, alone[device])
    futures = _waited(store, calls, groups, patience, brief, late)
    found: dict[str, T | Exception] = {d: still_owes(d) for d in late}
    for name, future in futures.items():
        found |= _answers(name, groups, future, limit)
    again = {d: alone[d] for d, answer in found.items() if isinstance(answer, _Late)}
    if again:
        failed = {d for d, answer in found.items() if isinstance(answer, Exception)} - again.keys()
        wait = patience and Patience(patience.seconds, lambda s: patience.spare(failed | s))
        found |= scheduler.gather(again, limit, patience=wait, ask_late=ask_late)
    return found


def is_known(store: PoolContext, device_id: str, stamp: Stamp | None) -> bool:
    """Whether PoolContext.generation_of asks no device about a record with this stamp."""
    return stamp is None or stamp == store.record_stamp(device_id, _ANY_GENERATION)


def note_offer(store: PoolContext, device_id: str, device: Device, look: DiskLook) -> Usage | None:
    """As PoolContext.offer, of a disk that was looked at with others of its host."""
    if device_id in store.refusing or look.usage is None:
        return store.offer(device_id, device)
    where, key = f"{device.url}/{MARK}", store.pool_key
    store.note_mark(device_id, lambda: decode_counter(MARK, look.mark, where=where, pool_key=key))
    return Usage.of_numbers(look.usage)


def _by_host(disks: Mapping[str, HostDisk]) -> dict[str, dict[str, HostDisk]]:
    """Disks that one request asks, by the name of a lane for it."""
    hosts: defaultdict[str, list[str]] = defaultdict(list)
    for device, disk in disks.items():
        hosts[disk.host].append(device)
    return {
        f"host {host} {at}": {d: disks[d] for d in mine[at : at + MOST_DISKS]}
        for host, mine in hosts.items()
        for at in range(0, len(mine), MOST_DISKS)
    }


def _ask_host(
    members: Mapping[str, HostDisk], devices: Mapping[str, Device], looking: SharedLook[T]
) -> Mapping[str, T | Exception]:
    looks = look_at_disks(_wanted(members, devices, looking), usage=looking.usage)
    return _as_seen(members, devices, looking, looks)


def _begin_host(
    store: PoolContext,
    members: Mapping[str, HostDisk],
    devices: Mapping[str, Device],
    looking: SharedLook[T],
) -> Sent[Mapping[str, T | Exception]] | None:
    """The same in two halves."""
    sent = begin_look(_wanted(members, devices, looking), usage=looking.usage)
    if sent is None:
        return None

    def seen(looks: list[DiskLook | Exception]) -> Mapping[str, T | Exception]:
        asks_none = all(
            _needs_no_call(store, device, look, usage=looking.usage)
            for device, look in zip(members, looks, strict=True)
        )
        if not asks_none:
            raise Unfinished(partial(_as_seen, members, devices, looking, looks))
        return _as_seen(members, devices, looking, looks)

    return sent.then(seen)


def _needs_no_call(
    store: PoolContext, device_id: str, look: DiskLook | Exception, *, usage: bool
) -> bool:
    """Whether what was seen of a disk is judged without another call on it."""
    if isinstance(look, Exception) or look.late:
        return True
    if usage and (device_id in store.refusing or look.usage is None):
        return False
    return is_known(store, device_id, look.stamp)


def _wanted(
    members: Mapping[str, HostDisk], devices: Mapping[str, Device], looking: SharedLook[T]
) -> list[tuple[HostDisk, Sequence[str]]]:
    return [(disk, looking.paths(devices[d])) for d, disk in members.items()]


def _as_seen(
    members: Mapping[str, HostDisk],
    devices: Mapping[str, Device],
    looking: SharedLook[T],
    looks: Sequence[DiskLook | Exception],
) -> Mapping[str, T | Exception]:
    found: dict[str, T | Exception] = {}
    for device, look in zip(members, looks, strict=True):
        if isinstance(look, Exception):
            found[device] = look
        elif look.late:
            found[device] = _Late()
        else:
            found |= _ask_device(device, partial(looking.seen, device, devices[device], look))
    return found


def _ask_device(device: str, call: Callable[[], T]) -> Mapping[str, T | Exception]:
    try:
        return {device: call()}
    except Exception as error:  # noqa: BLE001 (of this device alone)
        return {device: error}


def _waited(
    store: PoolContext,
    calls: Mapping[str, Callable[[], Mapping[str, T | Exception]]],
    groups: Mapping[str, Collection[str]],
    patience: Patience | None,
    brief: str,
    late: Collection[str],
) -> dict[str, Future[Mapping[str, T | Exception]]]:
    """The calls, those begun that were waited for as long as that makes sense."""
    limit, scheduler, began = (
        store.settings.device_deadline_seconds,
        store.scheduler,
        time.monotonic(),
    )
    futures = scheduler.start(calls, brief=brief)
    if patience is None:
        wait_awake(futures.values(), limit)
        return futures

    def spare(silent: Collection[str]) -> bool:
        assert patience is not None
        failed = {d for future in futures.values() for d in _without_answer(future)}
        devices = {d for name in silent for d in groups.get(name, (name,))}
        return patience.spare({*devices, *failed, *late})

    wait_for_enough(futures, limit, Patience(patience.seconds, spare), ())
    for name, future in futures.items():
        scheduler.note_late(dict.fromkeys(groups.get(name, (name,)), future), began)
    return futures


def _without_answer(future: Future[Mapping[str, T | Exception]]) -> list[str]:
    """Devices of which a call that is over has no answer."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return []
    return [d for d, answer in future.result().items() if isinstance(answer, Exception)]


def _answers(
    name: str,
    groups: Mapping[str, Collection[str]],
    future: Future[Mapping[str, T | Exception]],
    limit: float,
) -> Mapping[str, T | Exception]:
    found: dict[str, T | Exception] = {}
    for device in groups.get(name, (name,)):
        answer = outcome(future, device, limit)
        found[device] = answer if isinstance(answer, Exception) else answer[device]
    return found
