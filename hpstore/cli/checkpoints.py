"""Checkpoint commands. torch is imported only when one of them runs."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

import hpstore
from hpstore.cli.output import UNMENDED_EXIT_CODE, emit_json, table
from hpstore.units import format_bytes

if TYPE_CHECKING:
    from hpstore.checkpoint import Checkpointer

checkpoints = typer.Typer(no_args_is_help=True, help="List, inspect, verify, remove checkpoints.")

PoolName = Annotated[str, typer.Argument(help="pool.toml, or the name of a registered pool")]
Prefix = Annotated[str, typer.Argument(help="where the checkpoints are, such as runs/gpt")]
Step = Annotated[int, typer.Argument(help="a committed step")]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


def _open(pool: hpstore.Pool, prefix: str) -> Checkpointer:
    from hpstore.checkpoint import Checkpointer

    return Checkpointer(pool, prefix)


@checkpoints.command()
def ls(pool: PoolName, prefix: Prefix, as_json: Json = False) -> None:
    """List committed steps.  hpstore checkpoint ls pool.toml runs/gpt"""
    with hpstore.open(pool, read_only=True) as opened, _open(opened, prefix) as checkpointer:
        manifests = [checkpointer.manifest(step) for step in checkpointer.steps()]
    if as_json:
        emit_json([{"step": m.step, "bytes": m.total_bytes, "items": len(m.items),
                    "created_ms": m.created_ms} for m in manifests])  # fmt: skip
        return
    rows = [
        (m.step, format_bytes(m.total_bytes), len(m.items),
         time.strftime("%F %T", time.localtime(m.created_ms / 1000)))
        for m in manifests
    ]  # fmt: skip
    table("", ("step", "size", "items", "saved"), rows)


@checkpoints.command()
def inspect(pool: PoolName, prefix: Prefix, step: Step, as_json: Json = False) -> None:
    """Show what a step holds.  hpstore checkpoint inspect pool.toml runs/gpt 100"""
    with hpstore.open(pool, read_only=True) as opened, _open(opened, prefix) as checkpointer:
        manifest = checkpointer.manifest(step)
    if as_json:
        emit_json([{"name": i.name, "dtype": i.dtype, "shape": i.shape, "bytes": i.length}
                   for i in manifest.items])  # fmt: skip
        return
    rows = [(i.name, i.dtype, list(i.shape), format_bytes(i.length)) for i in manifest.items]
    table("", ("item", "dtype", "shape", "size"), rows)


@checkpoints.command()
def verify(pool: PoolName, prefix: Prefix, step: Step, as_json: Json = False) -> None:
    """Read every byte and compare every item.  hpstore checkpoint verify pool.toml runs/gpt 100"""
    with hpstore.open(pool, read_only=True) as opened, _open(opened, prefix) as checkpointer:
        report = checkpointer.verify(step)
    if as_json:
        emit_json(report.as_dict())
    else:
        sys.stdout.write(
            f"step {step}: {report.items} items, {format_bytes(report.bytes)}: "
            + ("all as saved\n" if report.ok else f"DAMAGED {', '.join(report.damaged)}\n")
        )
    if not report.ok:
        raise typer.Exit(UNMENDED_EXIT_CODE)


@checkpoints.command()
def rm(pool: PoolName, prefix: Prefix, step: Step) -> None:
    """Delete a step.  hpstore checkpoint rm pool.toml runs/gpt 100"""
    with hpstore.open(pool) as opened, _open(opened, prefix) as checkpointer:
        checkpointer.delete(step)


__all__ = ["checkpoints"]
