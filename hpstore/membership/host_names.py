"""Hosts and failure domains by name: which members `host:b` and `domain:rack1` mean. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from hpstore.agreement.register_url import DEVICES
from hpstore.errors import MembershipError
from hpstore.format.host_calls import parse_url
from hpstore.format.records import Member, PoolRecord

HOST, DOMAIN = "host:", "domain:"


def host_of(url: str) -> str:
    """The host in the URL of another host's disk; "" for anything else."""
    try:
        return parse_url(url)[0]
    except ValueError:
        return ""


def host_domains(record: PoolRecord) -> dict[str, frozenset[str]]:
    """The failure domains that are hosts, with the ids of their members: those with disks behind
    `hpd://`, and those that are called host-..."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for member in record.members:
        found[member.domain].add(member.device_id)
    hosts = {m.domain for m in record.members if host_of(m.url) or m.domain.startswith("host-")}
    return {domain: frozenset(found[domain]) for domain in sorted(hosts)}


def over_several_hosts(record: PoolRecord) -> bool:
    """Whether agents of several hosts may look after a pool: it has disks of other hosts, or
    registers outside of its devices."""
    outside = record.registers is not None and record.registers.url != DEVICES
    return outside or bool(host_domains(record))


def members_named(record: PoolRecord, places: Mapping[str, str], name: str) -> list[Member] | None:
    """The members of `host:b` or `domain:rack1`; None for a name of one device.

    A host is found by the URLs of its disks (`places`: of those that are open, by device id), and
    by the failure domains `b` and `host-b`. Raises MembershipError where there are none, or where
    the two mean different devices.
    """
    if name.startswith(DOMAIN):
        wanted = name.removeprefix(DOMAIN)
        return _some(record, name, [m for m in record.members if m.domain == wanted])
    if not name.startswith(HOST):
        return None
    host = name.removeprefix(HOST)
    urls = {m.device_id: host_of(places.get(m.device_id, m.url)) for m in record.members}
    there = [m for m in record.members if host and urls[m.device_id] == host]
    domains = {host, f"host-{host}", name} if host else set()
    same = [m for m in record.members if m.domain in domains]
    if there and same and there != same:
        raise MembershipError(
            f"{name} may mean the {len(there)} devices at hpd://{host}, or the {len(same)} of "
            f"failure domain {same[0].domain}. Nothing was changed. Say {DOMAIN}{same[0].domain}, "
            "or name the devices."
        )
    if not there and len(both := sorted({m.domain for m in same})) > 1:
        raise MembershipError(
            f"{name} may mean the failure domains {' and '.join(both)}. Nothing was changed. Say "
            f"{' or '.join(DOMAIN + domain for domain in both)}."
        )
    return _some(record, name, there or same)


def _some(record: PoolRecord, name: str, found: list[Member]) -> list[Member]:
    if found:
        return found
    domains = ", ".join(f"{DOMAIN}{name}" for name in sorted({m.domain for m in record.members}))
    raise MembershipError(
        f"{name} has no device of this pool. Nothing was changed. It has {domains}."
    )
