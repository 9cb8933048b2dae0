"""The part of the status page on hosts: disks under them, links, what may be lost. Pure."""

from __future__ import annotations

from html import escape

from hpstore.agent.agent_status import AgentStatus, HostView
from hpstore.units import format_bytes

HOSTS_HEAD = ("host", "state", "disks", "columns of an object", "may be lost", "link")


def host_rows(status: AgentStatus) -> list[str]:
    """A row for each host, its disks named."""
    urls = {device.device: device.url for device in status.devices}
    return [_row(host, urls) for host in status.hosts]


def _row(host: HostView, urls: dict[str, str]) -> str:
    found = host.status
    disks = ", ".join(sorted(urls.get(device, device[:8]) for device in found.devices))
    kind = "good" if host.state == "online" else "bad" if host.away_seconds is not None else ""
    cells = (
        escape(found.host),
        f"<span class='s {kind}'>{escape(host.state)}</span>",
        escape(f"{found.answering} of {len(found.devices)}: {disks}"),
        str(found.columns),
        "yes" if found.may_be_lost else "no",
        escape(link_in_words(host)),
    )
    return f"<tr>{''.join(f'<td class=w>{cell}</td>' for cell in cells)}</tr>"


def link_in_words(host: HostView) -> str:
    """What this process has sent to a host and received from it."""
    link = host.status.link
    if not link.calls:
        return "none of this process"
    rate = f"{format_bytes(link.bytes_per_second)}/s a call, " if link.timed_bytes else ""
    return (
        f"{rate}{format_bytes(link.sent_bytes)} sent, {format_bytes(link.received_bytes)} received,"
        f" {link.errors} of {link.calls} calls failed"
    )


def hosts_in_words(status: AgentStatus) -> str:
    """How many hosts may be lost yet; "" for a pool on one host."""
    if not status.hosts:
        return ""
    count = status.hosts_tolerated
    return f", or {count or 'no'} host{'s' * (count != 1)} whole"


def keeper_in_words(status: AgentStatus) -> str:
    """Who decides; "" for a pool on one host."""
    return "" if status.keeper.alone else f" Keeper: {status.keeper}."
