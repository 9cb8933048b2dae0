"""Arguments and options that several commands share, each declared once; completion of names."""

from __future__ import annotations

import glob
from typing import Annotated

import typer
from typer.models import OptionInfo

from hpstore.config import find_config
from hpstore.errors import ConfigError
from hpstore.pool.pool_names import pool_names
from hpstore.units import parse_bytes


def complete_pool(incomplete: str) -> list[str]:
    """Names of registered pools and settings files that begin so. Opens no device."""
    try:
        names = pool_names()
    except (ConfigError, OSError):  # a table of names that cannot be read completes nothing
        names = []
    files = sorted(glob.glob(f"{glob.escape(incomplete)}*.toml"))
    return [name for name in (*names, *files) if name.startswith(incomplete)]


def complete_device(context: typer.Context, incomplete: str) -> list[str]:
    """Devices in the settings of the pool that is on the line already. Opens none of them."""
    try:
        devices = find_config(str(context.params.get("pool") or "")).devices
    except (ConfigError, OSError):
        return []
    return [url for url in devices if url.startswith(incomplete)]


def parse_size(text: str | int) -> int:
    """Bytes of an option: above 0, such as 64MiB, 200MB or 4096. Raises typer.BadParameter, which
    names the option and ends with exit code 2."""
    try:
        size = parse_bytes(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if size < 1:
        raise typer.BadParameter(f"{text} is not above 0")
    return size


def size_option(text: str, default: str | None = None, *names: str) -> OptionInfo:
    """An option of bytes. `default`: what --help shows for it. `names`: when it has several."""
    option: OptionInfo = typer.Option(
        *names, parser=parse_size, metavar="SIZE", help=text, show_default=default or False
    )
    return option


PoolName = Annotated[
    str,
    typer.Argument(
        help="pool.toml, or the name of a registered pool", autocompletion=complete_pool
    ),
]
DeviceName = Annotated[
    str,
    typer.Argument(
        help="path, URL, or the beginning of a device id", autocompletion=complete_device
    ),
]
Prefix = Annotated[str, typer.Argument(help="where the checkpoints are, such as runs/gpt")]
StepName = Annotated[str, typer.Argument(help="a committed step, or latest")]
Keys = Annotated[
    list[str] | None, typer.Option("--keys", help="only these parts, such as model; repeatable")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]
Rate = Annotated[int | None, size_option("limit in bytes per second, such as 200MB")]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray", help="address of a Ray cluster whose nodes do the work, auto or host:port"
    ),
]
Force = Annotated[bool, typer.Option("--force", help="without the usual safety checks")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do it without a question")]
AllowRootDisk = Annotated[
    bool, typer.Option("--allow-root-disk", help="also where a mount seems to be missing")
]
DataUnits = Annotated[int | None, typer.Option("--data", help="data units per stripe, k")]
ParityUnits = Annotated[
    int | None,
    typer.Option("--parity", help="parity units per stripe, m: how many losses it survives"),
]
SchemeText = Annotated[str | None, typer.Option("--scheme", help="k+m, such as 4+2, for both")]
