"""The tree of commands: groups, and the short names of those that are typed most."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import hpstore
from hpstore.cli import (
    bench_command,
    device_commands,
    durability_command,
    gpu_command,
    object_commands,
    pool_commands,
)
from hpstore.cli.agent_commands import agents
from hpstore.cli.cache_commands import cache
from hpstore.cli.checkpoint_commands import checkpoints
from hpstore.cli.dataset_commands import datasets
from hpstore.cli.health_commands import health
from hpstore.cli.host_commands import hosts
from hpstore.cli.memory_commands import memory
from hpstore.cli.register_commands import registers

Commands = dict[str, Callable[..., None]]

POOL: Commands = {
    "create": pool_commands.create,
    "status": pool_commands.status,
    "rebuild": pool_commands.rebuild,
    "scrub": pool_commands.scrub,
    "rebalance": pool_commands.rebalance,
}
OBJECT: Commands = {
    "put": object_commands.put,
    "get": object_commands.get,
    "ls": object_commands.ls,
    "stat": object_commands.stat,
    "versions": object_commands.versions,
    "rm": object_commands.rm,
}
DEVICE: Commands = {
    "add": device_commands.add,
    "drain": device_commands.drain,
    "evict": device_commands.evict,
    "readmit": device_commands.readmit,
    "replace": device_commands.replace,
    "release": device_commands.release,
    "sit-out": device_commands.sit_out,
}
TOOLS: Commands = {
    "bench": bench_command.run,
    "durability": durability_command.run,
    "gpu": gpu_command.run,
}
_POOL, _GROUPS, _TOOLS = "Pool", "Groups: hpstore GROUP --help", "Tools"
_OBJECT = "Objects: short for hpstore object ..."
_DEVICE = "Devices: short for hpstore device ..."


class _Commands(TyperGroup):
    """All commands. How a broken pipe and an interrupt end is said here: typer has its own way."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # click's
        """The order of --help: the pool, then groups, then short names and tools."""
        names = super().list_commands(ctx)
        groups = [name for name in names if isinstance(self.commands[name], TyperGroup)]
        return [*POOL, *groups, *(n for n in names if n not in POOL and n not in groups)]

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # click's Context
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stderr.write("hpstore: interrupted; what was acknowledged is safe, run it again\n")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
            raise typer.Exit(0) from None
        return found


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Erasure-coded storage for training: data in, checkpoints out.",
)


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Erasure-coded storage for training: data in, checkpoints out."""
    if version:
        sys.stdout.write(f"hpstore {hpstore.__version__}\n")
        raise typer.Exit


def _group(commands: Commands, text: str) -> typer.Typer:
    made = typer.Typer(no_args_is_help=True, help=text)
    _add(made, commands, None)
    return made


def _add(to: typer.Typer, commands: Commands, panel: str | None) -> None:
    for name, command in commands.items():
        to.command(name, rich_help_panel=panel)(command)


objects = _group(OBJECT, "Store, read, list and delete objects.")
devices = _group(DEVICE, "Add, drain, evict, readmit, replace and release devices.")
for _name, _made in {
    "object": objects,
    "device": devices,
    "checkpoint": checkpoints,
    "dataset": datasets,
    "agent": agents,
    "health": health,
    "memory": memory,
    "host": hosts,
    "cache": cache,
    "registers": registers,
}.items():
    app.add_typer(_made, name=_name, rich_help_panel=_GROUPS)
_add(app, POOL, _POOL)
_add(app, OBJECT, _OBJECT)
_add(app, DEVICE, _DEVICE)
_add(app, TOOLS, _TOOLS)
