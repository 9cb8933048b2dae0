"""`hpstore checkpoint export` and `import`: to and from safetensors, torch.save and DCP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hpstore
from hpstore.cli.confirm import agree_to_replace
from hpstore.cli.options import Json, Keys, PoolName, Prefix, StepName, Yes, size_option
from hpstore.cli.output import emit_json, write_out
from hpstore.cli.progress_bar import progress_bar
from hpstore.cli.step_words import resolved, steps_of
from hpstore.units import GIB, format_bytes

if TYPE_CHECKING:
    from hpstore.checkpoint import ExportReport

Format = Annotated[
    str | None, typer.Option("--format", help="safetensors, torch or dcp (default: by the name)")
]
Layout = Annotated[
    str | None, typer.Option("--layout", help="torchtitan: names and optimizer as it has them")
]
_SHOWN = 8


def export(
    pool: PoolName,
    prefix: Prefix,
    step: StepName,
    target: Annotated[str, typer.Argument(help="the file, or folder/, to make")],
    kind: Format = None,
    layout: Layout = None,
    keys: Keys = None,
    strip: Annotated[
        str | None, typer.Option("--strip", help="take this path off the names, such as model/")
    ] = None,
    max_shard: Annotated[
        int,
        size_option(
            "largest safetensors file in a folder", "5GiB", "--max-shard", "--max-shard-size"
        ),
    ] = 5 * GIB,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bf16, fp16 or fp32, of floats that are wider")
    ] = None,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="the model, no optimizer and nothing else")
    ] = False,
    rank: Annotated[int, typer.Option(min=0, help="whose values, where each rank has its own")] = 0,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Write a step as files.

    hpstore checkpoint export pool.toml runs/gpt 100 hf/ --keys model
    """
    from hpstore.checkpoint import export_checkpoint

    replaces = agree_to_replace(Path(target), yes=yes)
    with hpstore.open(pool, read_only=True) as opened, progress_bar("export") as bar:
        steps = steps_of(opened, prefix)
        report = export_checkpoint(
            opened,
            steps.prefix,
            resolved(steps, step),
            target,
            format=kind,
            layout=layout,
            keys=keys,
            strip=strip,
            max_shard_bytes=max_shard,
            dtype=dtype,
            model_only=model_only,
            rank=rank,
            force=replaces,
            progress=bar.of_bytes,
        )
    if as_json:
        emit_json(report.as_dict())
    else:
        _say(report, dtype)


def _say(report: ExportReport, dtype: str | None) -> None:
    """What was written, for people."""
    write_out(
        f"step {report.step} as {report.format}: {report.tensors} tensors, "
        f"{format_bytes(report.bytes)} in {len(report.files)} files at {report.path}\n"
    )
    if report.cast:
        write_out(f"cast to {dtype}: {_some(report.cast, 'tensors')}\n")
    if report.left_out:
        write_out(f"left out {_some(report.left_out, 'entries')}\n")


def _some(names: Sequence[str], word: str) -> str:
    """How many, and the first of them."""
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} {word}: {', '.join(names[:_SHOWN])}{more} (all of them: --json)"


def import_(
    pool: PoolName,
    prefix: Prefix,
    source: Annotated[
        str, typer.Argument(help="a file or folder that another tool wrote, or hpstore://NAME/path")
    ],
    step: Annotated[int, typer.Option("--step", min=0, help="the step to commit it as")],
    under: Annotated[str, typer.Option("--as", help="put it into a subtree, such as model")] = "",
    kind: Format = None,
    layout: Layout = None,
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

    prefix = prefix.strip("/")  # as the commands that look for steps take it
    with hpstore.open(pool) as opened, progress_bar("import") as bar:
        report = import_checkpoint(
            opened,
            prefix,
            step,
            source,
            format=kind,
            layout=layout,
            under=under,
            allow_pickle=allow_pickle,
            overwrite=overwrite,
            take_over=take_over,
            progress=bar.of_bytes,
        )
    if as_json:
        emit_json(report.as_dict())
        return
    write_out(
        f"{report.path} is step {report.step} under {prefix}: {report.tensors} tensors, "
        f"{format_bytes(report.bytes)}\n"
    )
