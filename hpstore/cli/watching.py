"""`hpstore status --watch`: devices, objects, work and decisions, drawn anew every two seconds.

Where an agent runs its rounds are shown, which cost nothing; else the pool is asked each time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpstore.agent.status import read_status
from hpstore.cli.output import show_status
from hpstore.pool import Pool
from hpstore.status import PoolStatus
from hpstore.units import format_bytes

_SECONDS = 2.0
_DECISIONS = 8
_BARS = "▁▂▃▄▅▆▇█"
_BAR_VALUES = 24
_STYLES = {"online": "green", "faulted": "red", "removed": "red", "evicted": "red",
           "missing": "red"}  # fmt: skip
# of JSON: every part is checked by its type
Row = Mapping[str, object]


def watch(pool: Pool) -> NoReturn:
    """Until interrupted. On what is no terminal: a plain status each time."""
    console, run_directory = Console(), pool.run_directory
    if not console.is_terminal:
        while True:
            show_status(pool.status())
            sys.stdout.flush()
            time.sleep(_SECONDS)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            found = read_status(run_directory, pool.clock.wall_ms())
            live.update(pool_view(pool.status()) if found is None else agent_view(found),
                        refresh=True)  # fmt: skip
            time.sleep(_SECONDS)


def pool_view(status: PoolStatus) -> RenderableType:
    """What a pool says of itself."""
    rows = Table()
    for name in ("device", "state", "free", "of", "problem"):
        rows.add_column(name, overflow="fold")
    for device in status.devices:
        rows.add_row(
            device.url, Text(device.state, _STYLES.get(device.state, "yellow")),
            format_bytes(device.free_bytes), format_bytes(device.total_bytes), device.problem,
        )  # fmt: skip
    return Group(
        Text(f"{status.name} {status.data}+{status.parity}: no agent runs on this node", "bold"),
        rows,
        Text(
            f"{status.objects} objects: {status.degraded} degraded, {status.unreadable} unreadable "
            f"now; {status.losses_tolerated} more devices may be lost"
        ),
    )


def agent_view(status: Row) -> RenderableType:
    """What an agent has left, as JSON."""
    urls = {str(d.get("device")): str(d.get("url")) for d in _rows(status, "devices")}
    parts: list[RenderableType] = [
        Text(
            f"{status.get('pool')} {status.get('data')}+{status.get('parity')}, generation "
            f"{status.get('generation')}, agent {status.get('process')}", "bold",
        ),
        _devices(status),
    ]  # fmt: skip
    parts += [Text(f"! {text}", "red") for text in _list(status, "warnings")]
    found = status.get("condition")
    if isinstance(found, Mapping):
        parts.append(Text(
            f"{found.get('objects')} objects: {found.get('degraded')} degraded, "
            f"{found.get('unreadable')} unreadable now; {found.get('losses_tolerated')} more "
            "devices may be lost"
        ))  # fmt: skip
    put_off = status.get("put_off")
    if isinstance(put_off, Mapping):
        parts += [Text(f"put off: {count} objects: {why}") for why, count in put_off.items()]
    job = status.get("job")
    if isinstance(job, Mapping):
        done, total = _number(job, "done"), _number(job, "total")
        parts += [
            Text(f"{job.get('kind')} {job.get('reason')}: {done:.0f} of {total:.0f} objects, "
                 f"{format_bytes(_number(job, 'bytes_per_second'))}/s"),
            ProgressBar(total=total or 1.0, completed=done, width=60),
        ]  # fmt: skip
    for said in _rows(status, "decisions")[:_DECISIONS]:
        at = datetime.fromtimestamp(_number(said, "at_seconds"), UTC).strftime("%H:%M:%S")
        url = urls.get(str(said.get("device")), str(said.get("device")))
        parts.append(Text(f"{at} {url}: {said.get('was')} -> {said.get('becomes')}: "
                          f"{said.get('reason')}", "dim"))  # fmt: skip
    return Group(*parts)


def _devices(status: Row) -> Table:
    rows = Table()
    for name in ("device", "state", "probe", "", "full", "why"):
        rows.add_column(name, overflow="fold")
    for device in _rows(status, "devices"):
        probes = [float(v) for v in _list(device, "probe_seconds") if isinstance(v, int | float)]
        total, free = _number(device, "total_bytes"), _number(device, "free_bytes")
        state = str(device.get("state"))
        rows.add_row(
            str(device.get("url")), Text(state, _STYLES.get(state, "yellow")),
            f"{probes[-1] * 1e3:.3g} ms" if probes else "", bars(probes),
            f"{1 - free / total:.0%}" if total else "",
            str(device.get("problem") or device.get("refused") or ""),
        )  # fmt: skip
    return rows


def bars(values: list[float]) -> str:
    """The last values as a row of bars, from 0 to their greatest."""
    shown = values[-_BAR_VALUES:]
    top = max(shown, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(v / top * len(_BARS)))] for v in shown)


def _list(row: Row, name: str) -> list[object]:
    found = row.get(name)
    return list(found) if isinstance(found, list | tuple) else []


def _rows(row: Row, name: str) -> list[Row]:
    return [entry for entry in _list(row, name) if isinstance(entry, Mapping)]


def _number(row: Row, name: str) -> float:
    found = row.get(name)
    return float(found) if isinstance(found, int | float) else 0.0


__all__ = ["agent_view", "bars", "pool_view", "watch"]
