"""`hpstore checkpoint export` and `import`: to and from safetensors, torch.save and DCP."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

import hpstore
from hpstore.cli.options import PoolName
from hpstore.cli.output import byte_progress, emit_json
from hpstore.cli.step_words import resolved, steps_of
from hpstore.units import format_bytes, parse_bytes

Prefix = Annotated[str, typer.Argument(help="where the checkpoints are, such as runs/gpt")]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]
Format = Annotated[
    str | None, typer.Option("--format", help="safetensors, torch or dcp (default: by the name)")
]
_SHOWN = 8


def _moves(bar: Progress) -> Callable[[int, int], None]:
    def moved(done: int, total: int) -> None:
        bar.update(bar.task_ids[0], completed=done, total=total)

    return moved


def export(
    pool: PoolName,
    prefix: Prefix,
    step: Annotated[str, typer.Argument(help="a committed step, or latest")],
    target: Annotated[str, typer.Argument(help="the file, or folder/, to make")],
    kind: Format = None,
    keys: Annotated[
        list[str] | None, typer.Option("--keys", help="only these parts, such as model; repeatable")
    ] = None,
    strip: Annotated[
        str | None, typer.Option("--strip", help="take this path off the names, such as model/")
    ] = None,
    max_shard: Annotated[
        str, typer.Option("--max-shard", help="largest safetensors file in a folder")
    ] = "5GiB",
    rank: Annotated[int, typer.Option(min=0, help="whose values, where each rank has its own")] = 0,
    force: Annotated[bool, typer.Option("--force", help="replace what is there")] = False,
    as_json: Json = False,
) -> None:
    """Write a step as files.

    hpstore checkpoint export pool.toml runs/gpt 100 hf/ --keys model
    """
    from hpstore.checkpoint import export_checkpoint

    with hpstore.open(pool, read_only=True) as opened, byte_progress("export", 0) as bar:
        steps = steps_of(opened, prefix)
        report = export_checkpoint(
            opened, steps.prefix, resolved(steps, step), target, format=kind, keys=keys,
            strip=strip, max_shard_bytes=parse_bytes(max_shard), rank=rank, force=force,
            progress=_moves(bar),
        )  # fmt: skip
    if as_json:
        emit_json(report.as_dict())
        return
    sys.stdout.write(
        f"step {report.step} as {report.format}: {report.tensors} tensors, "
        f"{format_bytes(report.bytes)} in {len(report.files)} files at {report.path}\n"
    )
    if report.left_out:
        more = ", ..." if len(report.left_out) > _SHOWN else ""
        sys.stdout.write(
            f"left out {len(report.left_out)} entries: {', '.join(report.left_out[:_SHOWN])}"
            f"{more} (all of them: --json)\n"
        )


def import_(
    pool: PoolName,
    prefix: Prefix,
    source: Annotated[Path, typer.Argument(help="a file or folder that another tool wrote")],
    step: Annotated[int, typer.Option("--step", min=0, help="the step to commit it as")],
    under: Annotated[str, typer.Option("--as", help="put it into a subtree, such as model")] = "",
    kind: Format = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="run the code in a source that you trust")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a step")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="though a running training saves there")
    ] = False,
    as_json: Json = False,
) -> None:
    """Commit files as a step.

    hpstore checkpoint import pool.toml runs/new hf/ --step 0 --as model
    """
    from hpstore.checkpoint import import_checkpoint

    with hpstore.open(pool) as opened, byte_progress("import", 0) as bar:
        report = import_checkpoint(
            opened, prefix, step, source, format=kind, under=under, allow_pickle=allow_pickle,
            overwrite=overwrite, take_over=take_over, progress=_moves(bar),
        )  # fmt: skip
    if as_json:
        emit_json(report.as_dict())
        return
    sys.stdout.write(
        f"{report.path} is step {report.step} under {prefix}: {report.tensors} tensors, "
        f"{format_bytes(report.bytes)}\n"
    )


__all__ = ["export", "import_"]
