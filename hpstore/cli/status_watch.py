"""`hpstore status --watch`: devices, objects, work and decisions, refreshed every two seconds.

If an agent runs, its rounds are shown, which cost nothing; otherwise the pool is asked each time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import hpstore
from hpstore.agent.agent_status import LOOKING_AGAIN
from hpstore.cli.output import plain, visible
from hpstore.cli.pool_verdict import items, number, verdict_of
from hpstore.cli.status_report import shared_directory, show_status
from hpstore.membership.agent_observations import read_status
from hpstore.pool.pool import Pool
from hpstore.pool.status import PoolStatus
from hpstore.units import format_bytes, format_seconds

_SECONDS = 2.0
_DECISIONS = 8
_BARS = "▁▂▃▄▅▆▇█"
_BAR_VALUES = 24
_WHY = ("problem", "refused", "process_reason")  # the first that is there
_STYLES = {
    "online": "green",
    "faulted": "red",
    "removed": "red",
    "evicted": "red",
    "missing": "red",
}
# of JSON: every part is checked by its type
Row = Mapping[str, object]


def watch(where: str) -> NoReturn:
    """Until interrupted. On what is no terminal: a plain status each time.

    The pool is open only while no agent's rounds are there to be shown: whoever has it open without
    asking it anything keeps a device busy that was given up, and it could not be unmounted.
    """
    console = Console()
    with ExitStack() as stack:
        pool = stack.enter_context(hpstore.open(where, read_only=True))
        run_directory, clock = pool.admin.run_directory, pool.admin.clock
        while not console.is_terminal:
            show_status(pool.status(), pool=where)
            sys.stdout.flush()
            time.sleep(_SECONDS)
        held: Pool | None = pool
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        while True:
            found = read_status(run_directory, clock.wall_ms())
            if found is None:
                held = held or stack.enter_context(hpstore.open(where, read_only=True))
                live.update(pool_view(held.status(), where), refresh=True)
            else:
                live.update(agent_view(found), refresh=True)
                if held is not None:
                    held.close()
                held = None
            time.sleep(_SECONDS)


def pool_view(status: PoolStatus, pool: str) -> RenderableType:
    """The verdict on a pool that no agent looks after, its devices and objects."""
    verdict = verdict_of(status, pool, None)
    rows = Table()
    for name in ("device", "state", "free", "of", "problem"):
        rows.add_column(name, overflow="fold")
    for device in status.devices:
        rows.add_row(
            plain(device.url),
            plain(device.state, _STYLES.get(device.state, "yellow")),
            format_bytes(device.free_bytes),
            format_bytes(device.total_bytes),
            plain(device.problem),
        )
    return Group(
        plain(f"{status.name} {status.data}+{status.parity}   {verdict}", "bold"),
        plain(" ".join(filter(None, (verdict.action, "(no agent runs on this node)")))),
        rows,
        plain(
            f"{status.objects} objects: {status.degraded} degraded, {status.unreadable} unreadable "
            f"now; {status.losses_tolerated} more devices may be lost"
        ),
    )


def agent_view(status: Row) -> RenderableType:
    """What an agent has left, as JSON."""
    urls = {str(d.get("device")): str(d.get("url")) for d in _rows(status, "devices")}
    above = shared_directory(list(urls.values()))
    urls = {device: url.removeprefix(above) for device, url in urls.items()}
    parts: list[RenderableType] = [
        plain(
            f"{status.get('pool')} {status.get('data')}+{status.get('parity')}, generation "
            f"{status.get('generation')}, agent {status.get('process')}",
            "bold",
        ),
        *([plain(f"devices are in {above}")] if above else []),
        _devices(status, above),
    ]
    parts += [plain(f"! {text}", "red") for text in items(status, "warnings")]
    found = status.get("condition")
    if isinstance(found, Mapping):
        parts.append(
            plain(
                f"{found.get('objects')} objects: {found.get('degraded')} degraded, "
                f"{found.get('unreadable')} unreadable now; {found.get('losses_tolerated')} more "
                "devices may be lost"
            )
        )
        if status.get("condition_current") is False:
            parts.append(plain(LOOKING_AGAIN, "yellow"))
    put_off = status.get("put_off")
    if isinstance(put_off, Mapping):
        parts += [plain(f"put off: {count} objects: {why}") for why, count in put_off.items()]
    job = status.get("job")
    if isinstance(job, Mapping):
        done, total = number(job, "done"), number(job, "total")
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=total or 1.0, completed=done, width=60))
        parts += [
            plain(
                f"{job.get('kind')}: {job.get('reason')}; {done:.0f} of {total:.0f} objects, "
                f"{format_bytes(number(job, 'bytes_per_second'))}/s"
            ),
            bar,
        ]
    decisions = _rows(status, "decisions")[:_DECISIONS]
    parts += [plain(_decided(said, urls), "dim") for said in decisions]
    return Group(*parts)


def _decided(said: Row, urls: Mapping[str, str]) -> str:
    """When, where, what, by whom, why."""
    at = datetime.fromtimestamp(number(said, "at_seconds"), UTC).strftime("%H:%M:%S")
    where = urls.get(str(said.get("device")), str(said.get("device")))
    change = f"{said.get('was')} -> {said.get('becomes')}"
    if said.get("was") == said.get("becomes"):
        change = f"stays {said.get('was')}"
    return f"{at} {where}: {change} by {said.get('role')}: {said.get('reason')}"


def _devices(status: Row, above: str) -> Table:
    rows = Table()
    for name in ("device", "state", "probe", "", "full"):
        rows.add_column(name, no_wrap=True)
    rows.add_column("why", overflow="fold")
    for device in _rows(status, "devices"):
        probes = [float(v) for v in items(device, "probe_seconds") if isinstance(v, int | float)]
        total, free = number(device, "total_bytes"), number(device, "free_bytes")
        state = str(device.get("state"))
        rows.add_row(
            plain(str(device.get("url")).removeprefix(above)),
            _state(state, str(device.get("process_state") or "")),
            format_seconds(probes[-1]) if probes else "",
            bars(probes),
            f"{1 - free / total:.0%}" if total else "",
            plain(next(filter(None, map(device.get, _WHY)), "")),
        )
    return rows


def _state(agent: str, process: str) -> Text:
    """What the agent makes of a device, and what a process of the node, where that differs."""
    shown = plain(agent, _STYLES.get(agent, "yellow"))
    if process in ("", agent):
        return shown
    return shown.append(visible(f", {process} in a process"), "yellow")


def bars(values: list[float]) -> str:
    """The last values as a row of bars, from 0 to their greatest."""
    shown = values[-_BAR_VALUES:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(v / top * len(_BARS)))] for v in shown)


def _rows(row: Row, name: str) -> list[Row]:
    return [entry for entry in items(row, name) if isinstance(entry, Mapping)]
