"""`hpstore bench NAME...`: benchmarks against raw rates of the same minute."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hpstore.cli.output import emit_json
from hpstore.errors import ConfigError


def run(
    names: Annotated[list[str], typer.Argument(help="cache, checkpoint, devices, erasure, loader")],
    json_file: Annotated[
        str, typer.Option("--json", help="write results to a file, - for standard output")
    ] = "",
    directory: Annotated[
        Path | None, typer.Option(help="where to make the pool (default: a temporary directory)")
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            help="object size, 1GiB; of a checkpoint 1.5GiB; of a data set 2.3GiB; or small"
        ),
    ] = "",
    repeats: Annotated[
        int, typer.Option(min=1, help="repeats of each figure; the median counts")
    ] = 5,
    peers: Annotated[
        str,
        typer.Option(
            help="for checkpoint: torch.save,dcp,dcp.async,safetensors and others; for loader: "
            "torch,litdata,webdataset,streaming,ffcv,grain; for cache: libcachesim,theine or none "
            "(default: those installed)"
        ),
    ] = "",
    compression: Annotated[
        bool, typer.Option("--compression", help="for checkpoint: what each codec costs")
    ] = False,
    cases: Annotated[
        str,
        typer.Option(
            help="for loader: warm,cold,limited,degraded,special; for cache: workloads, cost "
            "(default: all)"
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="for loader: where batches go, cpu or cuda")] = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="for cache: small data, to show that all works")
    ] = False,
    plots: Annotated[
        Path | None, typer.Option(help="for cache: a directory for pictures (PNG)")
    ] = None,
) -> None:
    """Measure against raw rates of the same minute.  hpstore bench devices erasure --json -"""
    from hpstore.benchmarks.report import describe, machine
    from hpstore.benchmarks.suite import BENCHMARKS, Options, size_named

    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise ConfigError(f"no benchmark is called {unknown[0]!r}; there are {list(BENCHMARKS)}")
    results: dict[str, object] = {"machine": machine()}

    def keep(name: str, found: Mapping[str, object]) -> None:
        """A run that is cut leaves what it has."""
        if json_file not in ("", "-"):
            text = json.dumps(results | {name: found}, indent=1)
            Path(json_file).write_text(text + "\n")

    for name in names:
        options = Options(
            directory=directory.absolute() if directory else None,
            size_bytes=size_named(size, name),
            repeats=repeats,
            peers=peers,
            compression=compression,
            cases=cases,
            device=device,
            quick=quick,
            plots=plots,
            report=partial(keep, name),
        )
        results[name] = BENCHMARKS[name](options)
    if json_file == "-":
        emit_json(results)
        return
    if json_file:
        Path(json_file).write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(describe(results))


__all__ = ["run"]
