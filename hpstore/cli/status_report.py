"""`hpstore status` for people: the verdict and the next command, then figures, devices, hosts."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.text import Text

from hpstore.cli.output import StdoutConsole, plain, visible, write_out
from hpstore.cli.pool_verdict import AgentSight, Level, Verdict, judged, number, verdict_of
from hpstore.devices.remote_opener import S3FS
from hpstore.membership.device_places import sharing_note
from hpstore.node_memory.kept_datasets import NodeMemory
from hpstore.pool.host_status import HostStatus
from hpstore.pool.status import DeviceStatus, PoolStatus
from hpstore.units import format_bytes

_STYLES = {Level.WHOLE: "green", Level.DEGRADED: "yellow", Level.AT_RISK: "bold red"}
_HEADINGS = ("DEVICE", "PATH", "STATE", "FREE", "LATENCY", "NOTE")
_HOST_HEADINGS = ("HOST", "DISKS", "COLUMNS", "STATE", "MAY BE LOST", "LINK OF THIS PROCESS")
_PATH, _NOTE = 1, 5  # columns that are cropped where the terminal is narrow
_LEAST = 12  # characters of them that stay
_LONG_BYTES = 20  # a directory of all devices that is longer stands above the table, once
_GAP, _WIDE_GAP = "  ", " " * 4
_CROPPED = "\N{HORIZONTAL ELLIPSIS}"


def show_status(
    status: PoolStatus,
    *,
    pool: str = "",
    agent: AgentSight | None = None,
    scrubbed_ms: int | None = None,
    grace_seconds: float = 0.0,
    verbose: bool = False,
    memory: NodeMemory | None = None,
) -> None:
    """A pool's status on standard output, no wider than its terminal. `pool`: as the user calls it;
    `grace_seconds`: after which the agent evicts a device that does not answer."""
    verdict = verdict_of(status, pool or status.name, agent)
    console = StdoutConsole(highlight=False, soft_wrap=True)
    width = console.width if sys.stdout.isatty() else 0
    show_verdict(
        f"pool {status.name}  {status.data}+{status.parity}",
        verdict,
        str(agent or "agent: none on this node"),
        width,
    )
    lines = [_figures(status, scrubbed_ms, width)]
    lines += device_lines(status.devices, agent, width, grace_seconds)
    lines += host_lines(status, agent)
    lines += _warnings(status, agent)
    if memory is not None and memory.datasets:
        count = len(memory.datasets)
        lines.append(
            f"this node keeps {format_bytes(memory.bytes)} of {count} dataset{'s'[: count > 1]} in "
            "memory: hpstore memory list"
        )
    if verbose:
        lines += _details(status)
    write_out("\n".join(lines) + "\n")


def show_verdict(name: str, verdict: Verdict, agent: str, width: int) -> None:
    """The first line, of parts that are below each other where they do not fit into `width`."""
    head = Text.assemble(visible(name), "   ", (str(verdict), _STYLES[verdict.level]))
    rest = [part for part in (verdict.action, agent) if part]
    length = len(head) + sum(len(_WIDE_GAP) + len(part) for part in rest)
    gap = _WIDE_GAP if not width or length <= width else "\n"
    StdoutConsole(highlight=False, soft_wrap=True).print(Text(gap).join([head, *map(plain, rest)]))


def _space(status: PoolStatus) -> str:
    room = f"room for {format_bytes(status.usable_bytes)} of data"
    if not status.room_known:
        room = "room not known (stores without capacity_bytes)"
    if not status.capacity_bytes:
        return room
    share = status.used_bytes / status.capacity_bytes
    used = f"{format_bytes(status.used_bytes)} of {format_bytes(status.capacity_bytes)}"
    return f"disks {used} used ({share:.0%}), {room}"


def _figures(status: PoolStatus, scrubbed_ms: int | None, width: int) -> str:
    """Space, objects, the last scrub."""
    parts = [
        _space(status),
        f"objects {status.objects:,}: {status.degraded:,} short of parity, "
        f"{status.unreadable:,} unreadable"
        if status.objects
        else "no objects yet",
    ]
    if scrubbed_ms is not None:
        ago = max(0.0, time.time() - scrubbed_ms / 1000)
        parts.append(f"last scrub {_lasting(ago)} ago" if scrubbed_ms else "never scrubbed")
    line = _WIDE_GAP.join(parts)
    return line if not width or len(line) <= width else "\n".join(parts)


def _lasting(seconds: float) -> str:
    """A time for people, in one unit: 14 min."""
    for name, unit in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * unit or (name == "min" and seconds >= unit):
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def device_lines(
    devices: Sequence[DeviceStatus],
    agent: AgentSight | None,
    width: int,
    grace_seconds: float = 0.0,
) -> list[str]:
    """A table of devices. Where `width` (0: any) is too narrow, a directory that they share stands
    above it, and notes are cropped and whole below it: no row is wrapped."""
    seen = {} if agent is None else agent.devices
    latencies = _latencies(seen)
    rows = [
        (
            d.device[:8],
            d.url,
            _state(d, agent),
            format_bytes(d.free_bytes) if d.total_bytes else "-",
            latencies.get(d.device, "-"),
            _note(d, seen.get(d.device, {}), grace_seconds),
        )
        for d in devices
    ]
    if not width or max(map(len, _laid_out(_HEADINGS, rows))) <= width:
        return _laid_out(_HEADINGS, rows)
    above = shared_directory([row[_PATH] for row in rows])
    rows = [(row[0], row[1].removeprefix(above), *row[2:]) for row in rows]
    lines = [f"devices are in {above}"] if above else []
    cropped = _cropped(rows, width)
    lines += _laid_out(_HEADINGS, cropped)
    lines += [
        f"{row[0]}: {row[_NOTE]}"
        for row, shown in zip(rows, cropped, strict=True)
        if row[_NOTE] != shown[_NOTE]
    ]
    return lines


def _laid_out(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headings, *rows)
    ]


def _cropped(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Rows whose notes, then whose paths are short enough for `width`. Pure."""
    shown = [list(row) for row in rows]
    for column in (_NOTE, _PATH):
        excess = max(map(len, _laid_out(_HEADINGS, shown))) - width
        longest = max(len(row[column]) for row in shown)
        keep = max(_LEAST, longest - excess)
        for row in shown:
            if excess > 0 and len(row[column]) > keep:
                text = row[column]
                row[column] = (
                    text[: keep - 1] + _CROPPED if column == _NOTE else _CROPPED + text[1 - keep :]
                )
    return shown


def shared_directory(urls: Sequence[str]) -> str:
    """What the places of several devices begin with, where it is long enough to push their ends and
    other columns off a terminal; "" else. Pure."""
    start = os.path.commonprefix(list(urls)) if len(urls) > 1 else ""  # noqa: RUF071 (URLs too)
    found = start[: start.rfind("/") + 1]
    return found if len(found) > _LONG_BYTES else ""


def _state(device: DeviceStatus, agent: AgentSight | None) -> str:
    """What the pool says of a device, how long it has been missing, and what processes or the agent
    make of it where that differs."""
    if device.released:
        return "released"
    if device.state == "missing":
        row = {} if agent is None else agent.devices.get(device.device, {})
        since = number(row, "since_seconds") if row.get("state") == "removed" else 0.0
        return f"missing {_lasting(max(0.0, time.time() - since))}" if since else "missing"
    if device.state == "evicted":
        return "evicted" if device.rebuilt else "evicted, not rebuilt"
    return ", ".join(filter(None, (device.state, judged(device, agent))))


def _note(device: DeviceStatus, seen: Mapping[str, object], grace_seconds: float) -> str:
    """Why a device is not online, and what the agent does about it, in one line."""
    parts = [device.problem.removeprefix(f"device {device.url} ") or device.reason]
    if refused := seen.get("refused"):
        parts.append(f"the agent waits: {refused}")
    elif device.state == "missing" and seen.get("state") == "removed" and grace_seconds:
        left = number(seen, "since_seconds") + grace_seconds - time.time()
        parts.append(f"evicted in {_lasting(max(0.0, left))}")
    return " ".join("; ".join(filter(None, parts)).split())


def _latencies(seen: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """The last probe of each device by the agent, as a multiple of the pool's median."""
    probes = {}
    for device, row in seen.items():
        found = row.get("probe_seconds")
        if row.get("present") is True and isinstance(found, list) and found:
            probes[device] = float(found[-1])
    middle = statistics.median(probes.values()) if probes else 0.0
    return {device: f"{value / middle:.1f}x" for device, value in probes.items() if middle}


def host_lines(status: PoolStatus, agent: AgentSight | None) -> list[str]:
    """A table of hosts and two lines below it; nothing for a pool on one host. `COLUMNS`: of an
    object that are lost with a host."""
    if not status.hosts:
        return []
    lines = _laid_out(_HOST_HEADINGS, [_host_row(host, agent) for host in status.hosts])
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


def _host_row(host: HostStatus, agent: AgentSight | None) -> tuple[str, ...]:
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


def _warnings(status: PoolStatus, agent: AgentSight | None) -> list[str]:
    """What is wrong beside the verdict."""
    lines = [f"WARNING {text}" for text in (() if agent is None else agent.warnings)]
    if slow := sum(d.driver == S3FS for d in status.devices):
        lines.append(
            f"{slow} devices are reached through s3fs, which reads several times as slowly as "
            "obstore: pip install 'hpstore[s3]', or see the log for why it is not used"
        )
    lines += [
        f"{count} of the degraded objects are rebuilt last: {why}"
        for why, count in status.expiring.items()
    ]
    full = sum(device.state == "full" for device in status.devices)
    if full:
        takes = "no new data fits" if not status.effective_data else "they take no new columns"
        lines.append(f"FULL: {full} of {len(status.devices)} devices have no room left, {takes}")
    if 0 < status.effective_data < status.data:
        lines.append(
            f"new objects are {status.effective_data}+{status.parity}: "
            f"{status.data}+{status.parity} needs more devices"
        )
    if status.sharing:
        lines.append(sharing_note([d.url for d in status.devices if d.url in status.sharing]))
    if status.past:
        lines.append(f"{status.past} devices left long ago and are rebuilt: --all shows them")
    if not status.authenticated:
        lines.append(
            "NOT AUTHENTICATED: files carry no MACs of a key (or pool.toml gives it up for lost), "
            "so a device that is not trustworthy can replace and delete objects"
        )
    return lines


def _details(status: PoolStatus) -> list[str]:
    """What --verbose adds: how it works, where it lies, how the states are known, decisions."""
    lines = [
        f"generation {status.generation}, erasure code by {status.erasure_backend}, small reads by "
        f"{status.batched_reads}, stripe unit {format_bytes(status.unit_bytes)}",
        f"{status.debts} debts; can shrink by {status.can_shrink_by} devices with full parity",
    ]
    lines += [
        f"{d.device[:8]}  domain {d.domain}, {d.mode or 'no'} I/O"
        + (f" by {d.driver}" if d.driver else "")
        + f", {format_bytes(d.kept_bytes)} in kept files, "
        + (f"{format_bytes(d.total_bytes)} in all" if d.total_bytes else "size not known")
        for d in status.devices
    ]
    ways = Counter(device.known_by for device in status.devices if device.known_by)
    lines += [f"{count} devices: {way}" for way, count in ways.items()]
    return [*lines, *status.decisions]
