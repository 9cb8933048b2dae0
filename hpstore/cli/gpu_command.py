"""`hpstore gpu PLACE...`: whether reads go straight to the GPU from there, and if not, why."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from hpstore.cli.options import Json
from hpstore.cli.output import emit_json, table, write_out
from hpstore.config import find_config
from hpstore.errors import ConfigError


def run(
    places: Annotated[
        list[str], typer.Argument(help="directories, pool.toml files, names of registered pools")
    ],
    gpu: Annotated[int, typer.Option(min=0, help="index among the visible GPUs")] = 0,
    as_json: Json = False,
) -> None:
    """Check whether reads go straight to the GPU (GPUDirect), and if not, why.

    hpstore gpu pool.toml

    Where the machine could do it, a child process writes, reads and removes a file of 1 MiB in
    each filesystem.
    """
    from hpstore.loaders.gpu.direct.detect import process_detector

    directories = [found for place in places for found in _directories(place)]
    detector = process_detector()
    verdicts = [detector.detect(directory, gpu) for directory in directories]
    if as_json:
        # a verdict is kept for a whole file system: it names the directory that was looked at first
        emit_json(
            [
                {**found.as_dict(), "directory": asked}
                for asked, found in zip(directories, verdicts, strict=True)
            ]
        )
        return
    rows = []
    for asked, found in zip(directories, verdicts, strict=True):
        mount = found.mount
        where = "" if mount is None else f"{mount.filesystem} on {mount.source}, {mount.transport}"
        rows.append((asked, where, found.route, found.reason, "; ".join(found.doubts)))
    table("", ("directory", "mount", "GPUDirect", "because", "doubts"), rows)
    if not any(verdict.direct for verdict in verdicts):
        write_out("Reads reach the GPU over pinned host memory.\n")


def _directories(place: str) -> list[str]:
    """A directory itself, or the local devices of a pool that are there."""
    if os.path.isdir(place):
        return [os.path.abspath(place)]
    found = [url for url in find_config(place).devices if os.path.isdir(url)]
    if not found:
        raise ConfigError(f"no device of {place} is a directory that is there now")
    return found
