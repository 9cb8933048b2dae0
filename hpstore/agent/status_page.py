"""The status page: one HTML document, no script, nothing from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from hpstore.agent.agent_status import LOOKING_AGAIN, AgentStatus, DeviceView
from hpstore.agent.host_rows import HOSTS_HEAD, host_rows, hosts_in_words, keeper_in_words
from hpstore.agent.verdict_page import HEAD, NOTE, STYLE, verdict_rows
from hpstore.units import format_bytes, format_seconds

_WIDTH, _HEIGHT = 120, 22
_GOOD, _BAD = ("online",), ("faulted", "removed", "evicted")
_STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:1.5em auto;max-width:112em;padding:0 1.5em;
color:#1b1f24;background:#fff}
h1{font-size:1.3em;margin:.3em 0}h2{font-size:1.05em;margin:1.3em 0 .2em}p{margin:.4em 0}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.2em .7em;border-bottom:1px solid #ddd;vertical-align:middle;
white-space:nowrap;font-variant-numeric:tabular-nums}
th{font-weight:600;color:#555}th:last-child,.w{white-space:normal;width:99%;min-width:18em}
td.n{text-align:right}
.s{display:inline-block;padding:0 .5em;border-radius:.7em;background:#fbe3b5}
.good{background:#cdeccd}.bad{background:#f6c5c0}
.bar{display:inline-block;background:#e4e6ea;width:5em;height:.7em;border-radius:.35em;
overflow:hidden}.long{width:24em}
.bar span{display:block;background:#5b8def;height:100%}.full span{background:#d9534f}
.warn{background:#f6c5c0;padding:.5em .8em;border-radius:.3em;margin:.3em 0}
.quiet{color:#777}svg{display:block}polyline{fill:none;stroke:#5b8def;stroke-width:1.5}
@media(prefers-color-scheme:dark){body{color:#dde;background:#16181c}th,td{border-color:#333}
th{color:#aab}.s{background:#6b5420}.good{background:#235a2b}.bad,.warn{background:#73302b}
.bar{background:#333}}
"""


def render(status: AgentStatus, *, refresh_seconds: int = 5) -> str:
    """The document."""
    title = f"{status.pool} {status.data}+{status.parity}"
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<meta http-equiv=refresh content={refresh_seconds:d}>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{_STYLE}{STYLE}</style></head><body>",
        f"<h1>Pool {escape(title)}{' (dry run)' if status.dry_run else ''}</h1>",
        f"<p>{_summary(status)}{escape(keeper_in_words(status))}</p>",
        *(f"<div class=warn>{escape(text)}</div>" for text in status.warnings),
        *([f"<h2>Hosts</h2>{_table(HOSTS_HEAD, host_rows(status))}"] if status.hosts else []),
        "<h2>Devices</h2>",
        _devices(status),
        "<h2>Verdicts</h2>",
        NOTE,
        _table(HEAD, verdict_rows(status.devices)),
        "<h2>Work</h2>",
        _work(status),
        "<h2>Degraded objects</h2>",
        _degraded(status),
        "<h2>Decisions</h2>",
        _decisions(status),
        "<h2>Events</h2>",
        _events(status),
        f"<p class=quiet>generation {status.generation}, process {status.process}, "
        f"{status.ticks} rounds since {_when(status.began_ms)}; as of {_when(status.at_ms)}. "
        "Times without a date are of that day, UTC.</p>",
        "</body></html>",
    ]
    return "".join(parts)


def sparkline(values: Sequence[float]) -> str:
    """Values as a line in an inline SVG, from 0 to their greatest; "" for fewer than two."""
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
    step = _WIDTH / (len(values) - 1)
    points = " ".join(
        f"{i * step:.1f},{_HEIGHT - 2 - (_HEIGHT - 4) * max(0.0, value) / top:.1f}"
        for i, value in enumerate(values)
    )
    return (
        f"<svg width={_WIDTH} height={_HEIGHT} viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img>"
        f"<title>up to {format_seconds(top)}</title><polyline points='{points}'/></svg>"
    )


def _summary(status: AgentStatus) -> str:
    found = status.condition
    if found is None:
        return "Objects have not been looked at yet."
    return (
        f"{found.objects} objects: {found.degraded} degraded, {found.unreadable} unreadable now. "
        f"{found.losses_tolerated} more devices may be lost{hosts_in_words(status)}. "
        f"{'' if status.condition_current else escape(LOOKING_AGAIN)}"
    ).strip()


def _devices(status: AgentStatus) -> str:
    told = any(device.disks for device in status.devices)
    head = ["device", "state", "since", "latency", "probe", "reads p50 / p99", "full", "why"]
    rows = [_device(device, status.at_ms, told=told) for device in status.devices]
    return _table([*head, "disks"] if told else head, rows)


def _device(device: DeviceView, now_ms: int, *, told: bool) -> str:
    """A row. `told`: with what the disks below say of themselves."""
    last = format_seconds(device.probe_seconds[-1]) if device.probe_seconds else ""
    reads = ""
    if device.read_seconds_p99:
        middle, high = device.read_seconds_p50, device.read_seconds_p99
        reads = f"{format_seconds(middle)} / {format_seconds(high)}"
    line = device.latency_seconds if len(device.latency_seconds) > 1 else device.probe_seconds
    words = [device.problem, device.reason, device.refused]
    if device.process_state != device.state:
        words.append(device.process_reason)
    said = "; ".join(dict.fromkeys(filter(None, words)))
    disks = ", ".join(
        f"{d.disk}: {d.risk or d.readout}" + (f" ({'; '.join(d.reasons)})" if d.reasons else "")
        for d in device.disks
    )
    return (
        f"<tr><td title='{escape(device.device)}'>{escape(device.url)}</td>"
        f"<td>{_badges(device)}</td>"
        f"<td>{_when(int(device.since_seconds * 1000), now_ms)}</td>"
        f"<td>{sparkline(line)}</td><td title='write, sync, read'>{last}</td><td>{reads}</td>"
        f"<td>{_fullness(device)}</td><td class=w>{escape(said)}</td>"
        + (f"<td class=w>{escape(disks)}</td></tr>" if told else "</tr>")
    )


def _badges(device: DeviceView) -> str:
    """The agent's state; the pool's, and that of a process of this node, where they differ."""
    kind = "good" if device.state in _GOOD else "bad" if device.state in _BAD else ""
    shown = f"<span class='s {kind}'>{escape(device.state)}</span>"
    if device.pool_state not in ("online", device.state):
        shown += f" {escape(device.pool_state)}"
    if device.process_state not in ("", device.state):
        shown += f" <span class=s>{escape(device.process_state)}</span> in a process"
    return shown


def _fullness(device: DeviceView) -> str:
    if not device.total_bytes:
        return ""
    share = 1 - device.free_bytes / device.total_bytes
    kind = " full" if share > 0.9 else ""
    return (
        f"<span class='bar{kind}'><span style='width:{share:.0%}'></span></span> "
        f"{share:.0%} of {format_bytes(device.total_bytes)}"
    )


def _work(status: AgentStatus) -> str:
    job, parts = status.job, []
    if job is None:
        parts.append("<p class=quiet>Nothing is under way.</p>")
    else:
        share = job.done / job.total if job.total else 0.0
        parts.append(
            f"<p><b>{escape(job.kind)}</b>: {escape(job.reason)}</p>"
            f"<p><span class='bar long'><span style='width:{share:.0%}'></span></span> "
            f"{job.done} of {job.total} objects, {format_bytes(job.bytes)} in {job.seconds:.0f} s, "
            f"{format_bytes(job.bytes_per_second)}/s of "
            f"{format_bytes(job.bytes_per_second_alone)}/s alone</p>"
        )
    if status.waiting:
        parts.append(f"<p>Then: {escape(', '.join(status.waiting))}</p>")
    parts += [
        f"<p>Put off: {count} objects: {escape(why)}</p>" for why, count in status.put_off.items()
    ]
    others = status.foreground_bytes_per_second
    told = "cannot be told, so healing yields" if others is None else f"{format_bytes(others)}/s"
    scrub = "none yet"
    if status.scrub_began_ms > status.scrub_ended_ms:
        scrub = f"begun {_when(status.scrub_began_ms, status.at_ms)}"
    elif status.scrub_ended_ms:
        scrub = f"ended {_when(status.scrub_ended_ms, status.at_ms)}"
    parts.append(f"<p>Others' use of the disks: {told}. Last scrub: {scrub}.</p>")
    return "".join(parts)


def _degraded(status: AgentStatus) -> str:
    found = status.condition
    if found is None or not found.most_endangered:
        return "<p class=quiet>None.</p>"
    rows = [
        f"<tr><td class=n>{row.spare}</td><td class=w>{escape(row.key)}</td></tr>"
        for row in found.most_endangered
    ]
    return _table(("losses it survives", "object (the most endangered first)"), rows)


def _decisions(status: AgentStatus) -> str:
    urls = {device.device: device.url for device in status.devices}
    rows = []
    for said in status.decisions:
        change = f"{said.was} → {said.becomes}"
        if said.was is said.becomes:
            change = f"stays {said.was}"
        rows.append(
            f"<tr><td>{_when(int(said.at_seconds * 1000), status.at_ms)}</td>"
            f"<td>{escape(urls.get(said.device, said.device))}</td><td>{escape(change)}</td>"
            f"<td>{escape(said.role)}</td><td class=w>{escape(said.reason)}</td></tr>"
        )
    return _table(("at", "device", "change", "by", "reason"), rows)


def _events(status: AgentStatus) -> str:
    rows = [
        f"<tr><td>{_when(event.at_ms, status.at_ms)}</td>"
        f"<td class=w>{'' if event.ok else '⚠ '}{escape(event.text)}</td></tr>"
        for event in status.events
    ]
    return _table(("at", "event"), rows)


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    if not rows:
        return "<p class=quiet>None.</p>"
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<div class=wide><table><tr>{cells}</tr>{''.join(rows)}</table></div>"


def _when(at_ms: int, now_ms: int = 0) -> str:
    """A time in UTC; without its date on the day of `now_ms`."""
    if not at_ms:
        return ""
    at, now = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (at_ms, now_ms))
    return at.strftime("%H:%M:%S" if at.date() == now.date() else "%Y-%m-%d %H:%M:%S UTC")
