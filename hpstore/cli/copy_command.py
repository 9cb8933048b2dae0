"""`hpstore checkpoint copy`: steps into another pool. torch is imported when it runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

import hpstore
from hpstore.cli.options import Json, PoolName, Prefix, Rate
from hpstore.cli.output import emit_json, table
from hpstore.cli.progress_bar import progress_bar
from hpstore.cli.step_words import resolved, steps_of
from hpstore.errors import ConfigError
from hpstore.units import format_bytes


def copy(
    pool: PoolName,
    prefix: Prefix,
    to: Annotated[str, typer.Argument(help="the other pool: its pool.toml, or its name")],
    steps: Annotated[
        list[str] | None, typer.Argument(help="committed steps, or latest (default: latest)")
    ] = None,
    rate: Rate = None,
    as_json: Json = False,
) -> None:
    """Copy steps into another pool, under the same prefix.

    What an earlier copy holds already is not written again. Call it again after an interruption.

    hpstore checkpoint copy pool.toml runs/gpt cold.toml 1000 2000
    """
    from hpstore.checkpoint.catalog.step_catalog import StepCatalog
    from hpstore.checkpoint.tiers.copy_step import copy_step

    with hpstore.open(pool, read_only=True) as opened, hpstore.open(to) as other:
        if opened.admin.record.pool_id == other.admin.record.pool_id:
            raise ConfigError(f"{to} is the same pool as {pool}: steps are there already")
        source = steps_of(opened, prefix)
        target = StepCatalog(other, source.prefix)
        numbers = sorted({resolved(source, step) for step in steps or ["latest"]})
        done = []
        for number in numbers:
            with progress_bar(f"copy step {number}") as bar:
                copied = copy_step(
                    source, number, target, rate_bytes_per_second=rate, progress=bar.of_bytes
                )
            done.append(copied)
    if as_json:
        emit_json([asdict(copied) for copied in done])
        return
    headings = ("step", "written", "held already", "seconds", "losses tolerated")
    rows = [
        (
            copied.step,
            format_bytes(copied.bytes),
            format_bytes(copied.referenced_bytes),
            f"{copied.seconds:.1f}",
            copied.losses_tolerated,
        )
        for copied in done
    ]
    table(f"copied to {to}", headings, rows)
