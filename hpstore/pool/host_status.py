"""The hosts of a pool: which disks are under them, what their links carry, what may be lost yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from hpstore.devices.link_counters import LinkSight, link_of
from hpstore.format.records import PoolRecord
from hpstore.membership.host_names import host_domains
from hpstore.objects.context import PoolContext


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """One host, which is a failure domain."""

    host: str  # the domain's name
    devices: tuple[str, ...]  # ids of its members
    answering: int  # of these
    columns: int  # of an object that it holds at most, which is what its loss costs
    may_be_lost: bool  # with all objects readable and the pool open
    link: LinkSight = field(default_factory=LinkSight)  # of this process; nothing for its own host


def host_statuses(
    store: PoolContext, answering: Collection[str], losses_tolerated: int
) -> tuple[HostStatus, ...]:
    """All hosts of a pool, by name. `answering`: ids of devices that do."""
    record = store.view.record
    found = []
    for host, devices in host_domains(record).items():
        columns, there = record.weight(devices), devices & set(answering)
        found.append(
            HostStatus(
                host=host,
                devices=tuple(sorted(devices)),
                answering=len(there),
                columns=columns,
                may_be_lost=not there or record.weight(there) <= losses_tolerated,
                link=_link(store, devices),
            )
        )
    return tuple(found)


def _link(store: PoolContext, devices: Iterable[str]) -> LinkSight:
    total = LinkSight()
    for device in devices:
        opened = store.view.devices.get(device)
        counters = None if opened is None else link_of(opened)
        if counters is not None:
            total += counters.sight()
    return total


def hosts_tolerated(record: PoolRecord, answering: Collection[str], losses_tolerated: int) -> int:
    """How many further hosts may be lost, whichever they are: the pool opens, all objects read.
    Pure."""
    there = set(answering)
    weights = [record.weight(devices & there) for devices in host_domains(record).values()]
    lost = count = 0
    for weight in sorted(filter(None, weights), reverse=True):
        lost += weight
        if lost > losses_tolerated:
            break
        count += 1
    return count
