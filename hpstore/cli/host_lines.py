"""Hosts of a pool in `hpstore status`: disks under them, links, who decides, what may be lost."""

from __future__ import annotations

from hpstore.cli.pool_verdict import AgentSight
from hpstore.pool.host_status import HostStatus
from hpstore.pool.status import PoolStatus
from hpstore.units import format_bytes

_HEADINGS = ("HOST", "DISKS", "COLUMNS", "STATE", "MAY BE LOST", "LINK OF THIS PROCESS")
_GAP = "  "


def host_lines(status: PoolStatus, agent: AgentSight | None) -> list[str]:
    """A table of hosts and two lines below it; nothing for a pool on one host. `COLUMNS`: of an
    object that are lost with a host."""
    if not status.hosts:
        return []
    rows = [_HEADINGS, *(_row(host, agent) for host in status.hosts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    count = status.hosts_tolerated
    lines.append(
        f"{count or 'no'} more host{'s' * (count != 1)} may be lost, whichever it is"
        if count < 2
        else f"{count} more hosts may be lost, whichever they are"
    )
    if agent is not None and agent.keeper:
        lines.append(f"keeper: {agent.keeper}")
    elif agent is None:
        lines.append("keeper: not known here, no agent runs on this node")
    return lines


def _row(host: HostStatus, agent: AgentSight | None) -> tuple[str, ...]:
    away = len(host.devices) - host.answering
    state = "away" if not host.answering else f"{away} disks away" if away else "online"
    if agent is not None and host.host in agent.hosts:
        state = agent.hosts[host.host]
    link, text = host.link, "-"
    if link.calls:
        rate = f"{format_bytes(link.bytes_per_second)}/s, " if link.timed_bytes else ""
        text = f"{rate}{link.errors} of {link.calls} calls failed"
    return (
        host.host,
        f"{host.answering} of {len(host.devices)}",
        str(host.columns),
        state,
        "yes" if host.may_be_lost else "no",
        text,
    )
