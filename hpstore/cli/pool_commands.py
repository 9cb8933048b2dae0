"""Pool commands: create, status, rebuild, scrub, rebalance."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import hpstore
from hpstore.cli.device_commands import note_shared_disks, sharing
from hpstore.cli.options import (
    AllowRootDisk,
    DataUnits,
    Json,
    ParityUnits,
    PoolName,
    Rate,
    Ray,
    SchemeText,
    size_option,
)
from hpstore.cli.output import UNMENDED_EXIT_CODE, emit_json, show_rebalance, show_report, write_err
from hpstore.cli.pool_verdict import Level, agent_sight, verdict_of, verdict_of_closed
from hpstore.cli.progress_bar import progress_bar
from hpstore.cli.status_report import show_status, show_verdict
from hpstore.errors import ConfigError, TooFewDevices
from hpstore.maintenance.rebalance import SPREAD
from hpstore.maintenance.rebuild import RebuildReport
from hpstore.maintenance.repair_runner import RepairRunner
from hpstore.membership.agent_observations import read_status
from hpstore.node_memory.kept_datasets import NodeMemory, kept_datasets
from hpstore.node_memory.meeting_place import keeper_directory
from hpstore.pool.pool import Pool
from hpstore.pool.pool_names import VARIABLE, table_path
from hpstore.runtime.local_messages import Lost
from hpstore.units import MIB


def create(
    config: Annotated[Path, typer.Argument(help="the pool.toml to write")],
    devices: Annotated[list[str], typer.Argument(help="directories or URLs, one for each device")],
    data: DataUnits = None,
    parity: ParityUnits = None,
    scheme: SchemeText = None,
    name: Annotated[str | None, typer.Option(help="register for hpstore.open(NAME)")] = None,
    unit: Annotated[int, size_option("stripe unit", "1MiB")] = MIB,
    group: Annotated[str, typer.Option(help="whose members may use the pool, too")] = "",
    mode: Annotated[
        str | None, typer.Option(help="rights on its directories; 0770 with --group, else 0700")
    ] = None,
    domain: Annotated[
        list[str] | None, typer.Option(help="failure domain of each device, in their order")
    ] = None,
    allow_root_disk: AllowRootDisk = False,
    stores: Annotated[
        Path | None, typer.Option(help="a TOML file with [stores.NAME], for s3://NAME@bucket URLs")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a pool and write its pool.toml.

    hpstore create pool.toml --scheme 4+2 /mnt/a /mnt/b /mnt/c /mnt/d /mnt/e /mnt/f
    """
    pool = hpstore.create(
        devices,
        data=data,
        parity=parity,
        scheme=scheme,
        config=config,
        name=name,
        domains=domain,
        unit_bytes=unit,
        settings=sharing(group, mode),
        allow_root_disk=allow_root_disk,
        stores=stores,
    )
    if name is not None and os.environ.get(VARIABLE):
        write_err(f"hpstore: note: {name} is in {table_path()}, too, for URLs\n")
    with pool:
        status = pool.status()
    if status.effective_data < status.data:
        write_err(
            f"hpstore: note: {len(devices)} devices are too few for {status.data}+{status.parity}: "
            f"new objects are {status.effective_data}+{status.parity} until devices are added\n"
        )
    note_shared_disks(pool.config.devices)
    if as_json:
        emit_json(status.as_dict())
    else:
        show_status(replace(status, sharing=()), pool=str(config))  # sharing: was just said


def status(
    pool: PoolName,
    as_json: Json = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="refresh every 2 s; plain text where no terminal is")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="with devices that left a week ago or earlier")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="with generation, I/O, domains, kept files, decisions"
        ),
    ] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="0 whole, 1 degraded, 2 data at risk; for cron")
    ] = False,
) -> None:
    """Show whether the data is safe and what to do next, then space, objects, devices.

    hpstore status pool.toml --exit-code
    """
    if watch and exit_code:
        raise ConfigError("--watch has no end: leave it out, or --exit-code")
    if watch and not as_json:
        from hpstore.cli.status_watch import watch as show

        show(pool)
    try:
        with hpstore.open(pool, read_only=True) as opened:
            level = _show(opened, pool, past=everything, verbose=verbose, as_json=as_json)
            while watch:
                sys.stdout.flush()  # a pipe has all of it before the next one is due
                time.sleep(2.0)
                _show(opened, pool, past=everything, verbose=verbose, as_json=as_json)
    except TooFewDevices as error:
        level = _show_closed(pool, error, as_json=as_json)
        if not exit_code:
            raise
        write_err(f"hpstore: {type(error).__name__}: {error}\n")
    if exit_code:
        raise typer.Exit(level)


def _show(opened: hpstore.Pool, pool: str, *, past: bool, verbose: bool, as_json: bool) -> Level:
    """One status of an open pool."""
    found, now_ms = opened.status(past=past), opened.admin.clock.wall_ms()
    agent = agent_sight(read_status(opened.admin.run_directory, now_ms), found.pool_id, now_ms)
    scrubbed_ms = opened.admin.last_scrub_ms()
    verdict = verdict_of(found, pool, agent)
    memory = _node_memory(opened)
    if as_json:
        emit_json(
            {
                **found.as_dict(),
                "node_memory": memory.as_dict(),
                "verdict": verdict.level.word,
                "reason": verdict.reason,
                "next_command": verdict.command,
                "last_scrub_ms": scrubbed_ms,
            }
        )
    else:
        grace = 0.0 if agent is None else _grace_seconds(opened)
        show_status(
            found,
            pool=pool,
            agent=agent,
            scrubbed_ms=scrubbed_ms,
            grace_seconds=grace,
            verbose=verbose,
            memory=memory,
        )
    return verdict.level


def _node_memory(opened: hpstore.Pool) -> NodeMemory:
    """What loaders have left in this node's memory; nothing where the keeper does not answer."""
    try:
        return kept_datasets(keeper_directory(opened.config.settings))
    except Lost:
        return NodeMemory(process=0, datasets=())


def _grace_seconds(opened: hpstore.Pool) -> float:
    from hpstore.agent import agent_config

    return agent_config(opened.config).policy.grace_seconds


def _show_closed(pool: str, error: TooFewDevices, *, as_json: bool) -> Level:
    """The verdict on a pool that cannot be opened; the error has the devices."""
    verdict = verdict_of_closed(pool)
    if as_json:
        emit_json(
            {
                "verdict": verdict.level.word,
                "reason": verdict.reason,
                "next_command": verdict.command,
                "problem": str(error),
            }
        )
    else:
        show_verdict(f"pool {pool}", verdict, "", 0)
    return verdict.level


def rebuild(
    pool: PoolName,
    rate: Rate = None,
    include_missing: Annotated[
        bool, typer.Option(help="do not wait for missing devices that are still members")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="put nothing off that retention will soon delete")
    ] = False,
    ray: Ray = None,
    as_json: Json = False,
) -> None:
    """Bring every object back to its full parity.

    hpstore rebuild pool.toml --rate 500MB
    """
    with hpstore.open(pool) as opened, progress_bar("rebuild") as bar:
        report = opened.admin.rebuild(
            progress=bar.objects,
            rate_bytes_per_second=rate,
            include_missing=include_missing,
            everything=everything,
            repairs=_repairs(opened, ray),
        )
    _finish("rebuild", report, as_json)


def scrub(
    pool: PoolName,
    prefix: Annotated[str, typer.Option(help="only keys that begin so")] = "",
    rate: Rate = None,
    restart: Annotated[bool, typer.Option("--restart", help="from the beginning")] = False,
    ray: Ray = None,
    as_json: Json = False,
) -> None:
    """Verify every block and repair what is damaged.

    hpstore scrub pool.toml --rate 200MB
    """
    with hpstore.open(pool) as opened, progress_bar("scrub") as bar:
        report = opened.admin.scrub(
            prefix=prefix,
            progress=bar.objects,
            rate_bytes_per_second=rate,
            resume=not restart,
            repairs=_repairs(opened, ray),
        )
    _finish("scrub", report, as_json)


def rebalance(
    pool: PoolName,
    rate: Rate = None,
    spread: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="of fullness, above which columns are moved")
    ] = SPREAD,
    as_json: Json = False,
) -> None:
    """Move columns from full devices to empty ones.

    hpstore rebalance pool.toml --rate 200MB
    """
    with hpstore.open(pool) as opened, progress_bar("rebalance") as bar:
        report = opened.admin.rebalance(
            spread=spread, progress=bar.objects, rate_bytes_per_second=rate
        )
    if as_json:
        emit_json(report.as_dict())
    else:
        show_rebalance(report)
    if report.failed:
        raise typer.Exit(UNMENDED_EXIT_CODE)


def _repairs(pool: Pool, address: str | None) -> RepairRunner | None:
    """Tasks of the Ray cluster at `address`; None for this process."""
    if address is None:
        return None
    from hpstore.interop.ray_repairs import RayRepairs  # takes seconds to import

    return RayRepairs(pool, address=address)


def _finish(what: str, report: RebuildReport, as_json: bool) -> None:
    if as_json:
        emit_json(report.as_dict())
    else:
        show_report(what, report)
    if report.unmended:
        raise typer.Exit(UNMENDED_EXIT_CODE)
