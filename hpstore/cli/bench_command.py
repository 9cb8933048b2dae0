"""`hpstore bench NAME...`: benchmarks against raw rates of the same minute."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpstore.cli.confirm import agree_to_replace
from hpstore.cli.options import Yes
from hpstore.cli.output import emit_json, json_text, table, write_out
from hpstore.errors import ConfigError

if TYPE_CHECKING:
    from hpstore.benchmarks.harness.measure import Options


_NAMES = (
    "cache, checkpoint, devices, erasure, health, hosts, ingest, loader, pipeline, remote, train"
)
_SIZES = "object size, 1GiB; of a checkpoint 1.5GiB; of a data set 2.3GiB; or small"
_PEERS = (
    "for checkpoint: torch.save,dcp,dcp.async,safetensors and others; for loader: "
    "torch,litdata,webdataset,streaming,ffcv,grain; for cache: libcachesim,theine or none "
    "(default: those installed); for health: all"
)
_CASES = (
    "for loader: warm,cold,limited,degraded,restart,special; for cache: workloads, cost, "
    "end-to-end; "
    "for health: slow,healthy,few,many,pauses,nvme,load,hang,telemetry,small,window,global,reads,"
    "saves,overhead,rebuild,"
    "forecast; for train: methods (default: all)"
)
_DEVICE = "for loader and train: cpu or cuda; for loader also cuda:1 and so on"
_STAGES = "for loader: the stages of the GPU first (default: with --device cuda)"


def run(
    names: Annotated[list[str], typer.Argument(help=_NAMES)],
    json_file: Annotated[
        str, typer.Option("--json", help="write results to a file, - for standard output")
    ] = "",
    directory: Annotated[
        Path | None, typer.Option(help="where to make the pool (default: a temporary directory)")
    ] = None,
    size: Annotated[str, typer.Option(help=_SIZES)] = "",
    repeats: Annotated[
        int, typer.Option(min=1, help="repeats of each figure; the median counts")
    ] = 5,
    peers: Annotated[str, typer.Option(help=_PEERS)] = "",
    compression: Annotated[
        bool, typer.Option("--compression", help="for checkpoint: what each codec costs")
    ] = False,
    cases: Annotated[str, typer.Option(help=_CASES)] = "",
    device: Annotated[str, typer.Option(help=_DEVICE)] = "cpu",
    stages: Annotated[bool | None, typer.Option("--stages/--no-stages", help=_STAGES)] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="for cache, health, pipeline, train: little data, to see that all works"
        ),
    ] = False,
    drive_stats: Annotated[
        list[Path] | None, typer.Option(help="for health: a file to forecast failures from")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="for cache, pipeline, train: a directory for pictures (PNG)")
    ] = None,
    yes: Yes = False,
) -> None:
    """Measure against the raw rates of the same minute.

    hpstore bench devices erasure --json -
    """
    from hpstore.benchmarks.harness.measure import Options
    from hpstore.benchmarks.suite import BENCHMARKS, size_named

    _require_runnable(names, BENCHMARKS, json_file, yes=yes)
    told = Options(
        directory=directory.absolute() if directory else None,
        size_bytes=0,
        repeats=repeats,
        peers=peers,
        compression=compression,
        cases=cases,
        device=device,
        stages=stages,
        quick=quick,
        drive_stats=tuple(drive_stats or ()),
        plots=plots,
    )
    results = measured(
        {name: replace(told, size_bytes=size_named(size, name)) for name in names}, json_file
    )
    _show(results, json_file)


def _require_runnable(
    names: Sequence[str], known: Collection[str], json_file: str, *, yes: bool
) -> None:
    """Raise ConfigError for an unknown benchmark, or a file that results cannot be written to."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no benchmark is called {unknown[0]!r}; there are {list(known)}")
    if json_file not in ("", "-") and not Path(json_file).absolute().parent.is_dir():
        raise ConfigError(f"results cannot be written: {Path(json_file).parent} is not a directory")
    if json_file:
        agree_to_replace(Path(json_file), yes=yes, named=True)


def _show(results: Mapping[str, object], json_file: str) -> None:
    """Write JSON to standard output where that was asked for, else tables."""
    from hpstore.benchmarks.harness.bench_report import describe

    if json_file == "-":
        emit_json(results)
    else:
        write_out(describe(results))
        show_stages(results)


def show_stages(results: Mapping[str, object]) -> None:
    """How the stages of the GPU ended, where the loader's benchmark ran them."""
    loader = results.get("loader")
    stages = loader.get("stages") if isinstance(loader, dict) else None
    if stages:
        columns = ("stage", "what", "status", "reason")
        table(
            "Stages of the GPU (docs/gpu.md)",
            columns,
            [[row[column] for column in columns] for row in stages.values()],
        )


def measured(todo: Mapping[str, Options], json_file: str) -> dict[str, object]:
    """Results by benchmark, written as they come, so that a run that is cut has its repetitions."""
    from hpstore.benchmarks.harness.bench_report import machine
    from hpstore.benchmarks.suite import BENCHMARKS

    results: dict[str, object] = {"machine": machine()}

    def write() -> None:
        if json_file not in ("", "-"):
            Path(json_file).write_text(json_text(results, indent=1) + "\n", encoding="utf-8")

    def keep(name: str, found: dict[str, object]) -> None:
        results[name] = {**found, "unfinished": True}
        write()

    for name, options in todo.items():
        try:
            with interrupted_by(signal.SIGTERM):
                results[name] = BENCHMARKS[name](replace(options, keep=partial(keep, name)))
        except KeyboardInterrupt:
            if json_file == "-":
                emit_json(results)
            raise
        write()
    return results


@contextmanager
def interrupted_by(number: signal.Signals) -> Iterator[None]:
    """A signal is taken as Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
