"""Memory commands: which datasets this node keeps in memory, and how to free it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpstore.cli.options import Json, complete_pool
from hpstore.cli.output import emit_json, say, table, write_out
from hpstore.config import Settings, find_config
from hpstore.errors import ConfigError
from hpstore.node_memory.kept_datasets import KeptDataset, free_datasets, kept_datasets
from hpstore.node_memory.meeting_place import keeper_directory
from hpstore.runtime.local_messages import Lost
from hpstore.units import format_bytes

memory = typer.Typer(
    no_args_is_help=True, help="Datasets that this node keeps in memory: list, free."
)

Place = Annotated[
    str,
    typer.Option(
        "--pool",
        help="a pool whose pool.toml sets run_directory; all others share one keeper",
        autocompletion=complete_pool,
    ),
]


@memory.command(name="list")
def show(pool: Place = "", as_json: Json = False) -> None:
    """Show the datasets that loaders of this user have left in this node's memory.

    hpstore memory list
    """
    try:
        found = kept_datasets(_directory(pool))
    except Lost as error:
        raise ConfigError(f"the keeper of this node's memory does not answer: {error}") from error
    if as_json:
        emit_json(found.as_dict())
    elif not found.datasets:
        write_out("nothing is kept in this node's memory\n")
    else:
        columns = ("dataset", "pool", "memory", "filled", "processes", "unused for", "freed")
        table("", columns, [_row(one) for one in found.datasets])
        write_out(f"{format_bytes(found.bytes)}, kept by process {found.process}\n")


@memory.command()
def free(
    dataset: Annotated[str, typer.Argument(help="name of the dataset")] = "",
    everything: Annotated[bool, typer.Option("--all", help="all datasets")] = False,
    pool: Place = "",
    as_json: Json = False,
) -> None:
    """Free the memory of a dataset. Processes that use it go on; it goes with the last of them.

    hpstore memory free train
    """
    if bool(dataset) == everything:
        raise ConfigError("name the dataset to free, or give --all")
    try:
        freed, later = free_datasets(_directory(pool), None if everything else dataset)
    except Lost:
        freed, later = 0, 0  # no keeper, no memory
    text = f"{format_bytes(freed)} are free"
    if later:
        text += f"; {format_bytes(later)} are in use, and free when their processes end"
    say({"freed_bytes": freed, "later_bytes": later}, text, as_json=as_json)


def _directory(pool: str) -> Path:
    return keeper_directory(find_config(pool).settings if pool else Settings())


def _row(found: KeptDataset) -> tuple[str, ...]:
    users = ", ".join(map(str, found.processes))
    left = max(0.0, found.keep_seconds - found.unused_seconds)
    ends = "with its processes" if found.dropped else "in use" if users else f"in {left:.0f} s"
    return (
        found.dataset,
        found.pool,
        format_bytes(found.bytes),
        f"{found.filled:.0%}",
        users or "none",
        "" if users else f"{found.unused_seconds:.0f} s",
        ends,
    )
