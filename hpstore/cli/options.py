"""Arguments and options that several commands share, each declared once; completion of names."""

from __future__ import annotations

import glob
from typing import Annotated

import typer

from hpstore.config import find_config
from hpstore.errors import ConfigError
from hpstore.pool.pool_names import pool_names


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

__all__ = ["DeviceName", "PoolName", "complete_device", "complete_pool"]
