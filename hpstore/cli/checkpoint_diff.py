"""`hpstore checkpoint diff`: what two steps differ in. torch is imported when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import hpstore
from hpstore.cli.options import Json, Keys, PoolName, Prefix
from hpstore.cli.output import emit_json, table, write_out
from hpstore.cli.progress_bar import progress_bar
from hpstore.cli.step_words import resolved, steps_of

if TYPE_CHECKING:
    from hpstore.checkpoint.diff.step_diff import StepDiff, TensorChange, TensorForm

_HEADINGS = ("tensor", "change", "before", "after")
_NORMS = ("L2", "max abs", "relative", "elements")


def diff(
    pool: PoolName,
    prefix: Prefix,
    before: Annotated[str, typer.Argument(help="a committed step, or latest")],
    after: Annotated[str, typer.Argument(help="the one to compare it with")],
    keys: Keys = None,
    norms: Annotated[
        bool, typer.Option("--norms", help="how far apart: reads all tensors that differ")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what two steps differ in.

    hpstore checkpoint diff pool.toml runs/gpt 100 latest --norms
    """
    from hpstore.checkpoint.diff.step_diff import diff_steps

    with hpstore.open(pool, read_only=True) as opened, progress_bar("diff") as bar:
        steps = steps_of(opened, prefix)
        first, second = (steps.manifest(resolved(steps, step)) for step in (before, after))
        found = diff_steps(steps, first, second, keys=keys, norms=norms, progress=bar.of_bytes)
    if as_json:
        emit_json(found.as_dict())
    else:
        _show(found, norms=norms)


def _show(found: StepDiff, *, norms: bool) -> None:
    """The summary, then what differs."""
    write_out(found.summary + "\n")
    if found.tensors:
        headings = (*_HEADINGS, *_NORMS) if norms else _HEADINGS
        table("", headings, [_cells(change, norms=norms) for change in found.tensors])
    if found.values:
        rows = [(v.name, v.change.value, v.before, v.after) for v in found.values]
        table("", ("value", "change", "before", "after"), rows)


def _cells(change: TensorChange, *, norms: bool) -> tuple[object, ...]:
    cells = (change.name, change.change.value, _form(change.before), _form(change.after))
    if not norms:
        return cells
    far = change.norms
    if far is None:
        return (*cells, *("-",) * len(_NORMS))
    relative = "-" if far.relative is None else f"{far.relative:.3g}"
    return (*cells, f"{far.l2:.4g}", f"{far.max_abs:.4g}", relative, far.differing)


def _form(form: TensorForm | None) -> str:
    return "" if form is None else f"{form.dtype} {list(form.shape)}"
