"""`hpstore agent`: look after a pool on this node, or show what its agent does."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import hpstore
from hpstore.cli.options import Json, PoolName
from hpstore.cli.output import (
    StdoutConsole,
    emit_json,
    json_text,
    log_with_times,
    table,
    write_err,
    write_out,
)
from hpstore.config import PoolConfig, find_config
from hpstore.pool.pool import Pool
from hpstore.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hpstore.agent import Agent, AgentConfig
    from hpstore.agent.agent_status import AgentStatus

_LISTEN = "127.0.0.1:9640"
_STOPPING = (signal.SIGTERM, signal.SIGINT)


class _AgentGroup(TyperGroup):
    """`hpstore agent POOL ...` is `hpstore agent run POOL ...`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click's Context
        """Put `run` first where no command of the group is named."""
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: typer.Context, incomplete: str) -> list[Any]:  # type: ignore[override]  # Any: click's items
        """Commands, then what `run` takes."""
        pool = self.commands["run"].params[0]
        return super().shell_complete(ctx, incomplete) + pool.shell_complete(ctx, incomplete)


agents = typer.Typer(
    cls=_AgentGroup,
    no_args_is_help=True,
    help="Look after a pool; short for run: hpstore agent pool.toml",
)


@agents.command()
def run(
    pool: PoolName,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT of the status page and of /metrics; none for neither")
    ] = _LISTEN,
    once: Annotated[
        bool, typer.Option("--once", help="one round with all its work, then end")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="decide and tell, change nothing")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="a line of JSON a round on standard output")
    ] = False,
) -> None:
    """Look after a pool: rebuild, drain, readmit, scrub; serve a status page and metrics.

    hpstore agent pool.toml --listen 127.0.0.1:9640

    A pool that is called `run` or `status` needs the long form: hpstore agent run status
    """
    from hpstore.agent import Agent
    from hpstore.agent.http_server import StatusServer

    log_with_times()
    config = find_config(pool)
    with ExitStack() as stack:
        opened = stack.enter_context(Pool(config, read_only=dry_run))
        agent = stack.enter_context(
            Agent(opened, _settings(config, once=once, dry_run=dry_run), threads=not once)
        )
        if once:
            _once(agent, as_json=as_json)
            return
        server = None if listen == "none" else stack.enter_context(StatusServer(listen))
        stop = stack.enter_context(_stopped_by_signals())
        if server is not None:
            write_err(f"hpstore: status page and metrics at {server.url}\n")

        def each(status: AgentStatus) -> None:
            if server is not None:
                server.show(status)
            if as_json:
                emit_line(status)

        agent.run(stop, each)


@agents.command()
def status(
    pool: PoolName,
    as_json: Json = False,
) -> None:
    """Show what the agent of this node does; exit code 1 where none runs.

    hpstore agent status pool.toml
    """
    from hpstore.cli.status_watch import agent_view
    from hpstore.membership.agent_observations import read_status

    with hpstore.open(pool, read_only=True) as opened:
        found = read_status(opened.admin.run_directory, opened.admin.clock.wall_ms())
    if as_json:
        emit_json({"running": found is not None, **(found or {})})
    elif found is None:
        write_out(f"no agent of {pool} runs on this node\n")
    else:
        StdoutConsole().print(agent_view(found))
    if found is None:
        raise typer.Exit(1)


def _settings(config: PoolConfig, *, once: bool, dry_run: bool) -> AgentConfig:
    from hpstore.agent import agent_config

    made = agent_config(config, dry_run=dry_run)
    return replace(made, scrub_days=0.0) if once else made  # a scrub takes days


def emit_line(status: AgentStatus) -> None:
    """A status in one line, for a program that reads along."""
    sys.stdout.write(json_text(status.as_dict()) + "\n")
    sys.stdout.flush()


def _once(agent: Agent, *, as_json: bool) -> None:
    """A round, the work that it asks for, and a look at what came of it."""
    agent.tick()
    agent.finish_jobs()
    status = agent.tick()
    if as_json:
        emit_json(status.as_dict())
    else:
        show_agent(status)


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; the handlers from before are back at the end."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in _STOPPING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_agent(status: AgentStatus) -> None:
    """A status for people."""
    rows = [
        (
            d.device[:8],
            d.url,
            d.state,
            "" if d.pool_state == d.state else d.pool_state,
            format_seconds(d.probe_seconds[-1]) if d.probe_seconds else "",
            format_bytes(d.free_bytes) if d.total_bytes else "",
            d.problem or d.refused,
        )
        for d in status.devices
    ]
    from hpstore.agent.agent_status import LOOKING_AGAIN

    table("", ("device", "url", "state", "pool says", "probe", "free", "why"), rows)
    found = status.condition
    if found is not None:
        write_out(
            f"{found.objects} objects: {found.degraded} degraded, {found.unreadable} unreadable "
            f"now; {found.losses_tolerated} more devices may be lost\n"
            + ("" if status.condition_current else f"{LOOKING_AGAIN}\n")
        )
    for why, count in status.put_off.items():
        write_out(f"put off: {count} objects: {why}\n")
    for warning in status.warnings:
        write_out(f"WARNING {warning}\n")
    for event in status.events[:10]:
        at = datetime.fromtimestamp(event.at_ms / 1000, UTC).strftime("%H:%M:%S")
        write_out(f"{at} {event.text}\n")
