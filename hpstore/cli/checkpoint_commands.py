"""Checkpoint commands: list, inspect, verify, remove, protect. torch is imported when one runs.

Those that only read open the pool read-only; rollback and its undo alone take the writer's fence
and collect garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import hpstore
from hpstore.cli.checkpoint_diff import diff
from hpstore.cli.confirm import agree, first_of
from hpstore.cli.copy_command import copy
from hpstore.cli.export_import import export, import_
from hpstore.cli.options import Json, Keys, PoolName, Prefix, StepName, Yes
from hpstore.cli.output import UNMENDED_EXIT_CODE, emit_json, say, table, write_err, write_out
from hpstore.cli.progress_bar import progress_bar
from hpstore.cli.retention_command import retention
from hpstore.cli.rollback_commands import hidden_line, rollback, undo_rollback
from hpstore.cli.step_words import resolved, steps_of
from hpstore.errors import CheckpointError, ConfigError, HpstoreError
from hpstore.units import format_bytes

if TYPE_CHECKING:
    from hpstore.checkpoint import Manifest, VerifyReport
    from hpstore.checkpoint.catalog.hidden_steps import Rollback
    from hpstore.checkpoint.catalog.step_catalog import StepCatalog

checkpoints = typer.Typer(
    no_args_is_help=True, help="List, inspect, verify, export, import, remove checkpoints."
)
checkpoints.command("copy")(copy)
checkpoints.command("diff")(diff)
checkpoints.command("export")(export)
checkpoints.command("import")(import_)
checkpoints.command("retention")(retention)
checkpoints.command("rollback")(rollback)
checkpoints.command("undo-rollback")(undo_rollback)

Force = Annotated[bool, typer.Option("--force", help="protected steps too")]


@checkpoints.command()
def ls(
    pool: PoolName,
    prefix: Prefix,
    hidden: Annotated[
        bool, typer.Option("--hidden", help="only rollbacks, and the steps that they have hidden")
    ] = False,
    as_json: Json = False,
) -> None:
    """List committed steps, and those that a rollback has hidden.

    hpstore checkpoint ls pool.toml runs/gpt
    """
    from hpstore.checkpoint.catalog.not_found_hint import nothing_under
    from hpstore.cli.checkpoint_tables import listed, table_of

    problems: dict[int, HpstoreError] = {}
    manifests: list[Manifest] = []
    with hpstore.open(pool, read_only=True) as opened:
        steps = steps_of(opened, prefix)
        protected = steps.protected()
        for step in steps.all():
            try:
                manifests.append(steps.manifest(step))
            except HpstoreError as error:
                problems[step] = error
        rollbacks = [found for found in _rollbacks(steps) if found.hidden]
        there = manifests or problems or rollbacks
        absent = "" if there else nothing_under(opened, steps.prefix)
    if hidden:
        emit_json([found.as_dict() for found in rollbacks]) if as_json else _show(rollbacks)
        return
    rows = listed(manifests, protected)
    if as_json:
        damaged = [{"step": step, "problem": str(error)} for step, error in problems.items()]
        emit_json([row.as_dict() for row in rows] + damaged)
    else:
        columns, cells = table_of(rows)
        table("", columns, cells)
        _show(rollbacks)
    if absent:
        write_err(f"hpstore: {absent}\n")
    for step, problem in problems.items():
        write_err(f"hpstore: step {step} cannot be listed: {problem}\n")
    if problems:
        raise typer.Exit(next(iter(problems.values())).exit_code)


def _rollbacks(steps: StepCatalog) -> list[Rollback]:
    """Those whose steps are hidden still."""
    from hpstore.checkpoint.catalog.hidden_steps import RollbackState
    from hpstore.checkpoint.catalog.rollback import rollbacks

    kept = (RollbackState.HIDDEN, RollbackState.RETURNING)
    return [found for found in rollbacks(steps) if found.state in kept]


def _show(rollbacks: Sequence[Rollback]) -> None:
    for found in rollbacks:
        write_out(f"{hidden_line(found)}\n")


@checkpoints.command()
def inspect(
    pool: PoolName,
    prefix: Prefix,
    step: StepName = "latest",
    keys: Keys = None,
    tree: Annotated[bool, typer.Option("--tree", help="sizes, summed at each level")] = False,
    depth: Annotated[
        int | None, typer.Option("--depth", min=0, help="levels of that tree (means --tree)")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a step holds, as a tree.

    hpstore checkpoint inspect pool.toml runs/gpt 100 --depth 2
    """
    from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
    from hpstore.cli.checkpoint_tables import described, show_tree
    from hpstore.cli.size_tree import show_sizes, size_tree

    with hpstore.open(pool, read_only=True) as opened:
        steps = steps_of(opened, prefix)
        manifest = steps.manifest(resolved(steps, step))
        if tree or depth is not None:
            sizes = size_tree(manifest, keys)
            emit_json(sizes.as_dict(depth)) if as_json else show_sizes(sizes, depth)
            return
        names = [name for name, kept in steps.protected().items() if kept == manifest.step]
        named = [manifest_key(steps.prefix, manifest.step), *(s.key for s in manifest.objects)]
        tolerated = [opened.stat(key).losses_tolerated for key in named]
    found = described(manifest, keys, names, min(tolerated))
    if as_json:
        emit_json(found.as_dict())
    else:
        show_tree(found)


@checkpoints.command()
def verify(
    pool: PoolName,
    prefix: Prefix,
    step: Annotated[str | None, typer.Argument(help="a committed step (default: latest)")] = None,
    every: Annotated[bool, typer.Option("--all", help="all committed steps")] = False,
    as_json: Json = False,
) -> None:
    """Read every byte and compare every item.

    hpstore checkpoint verify pool.toml runs/gpt 100
    """
    from hpstore.checkpoint.catalog.not_found_hint import nothing_under

    if every and step is not None:
        raise ConfigError(
            f"both step {step} and --all were asked for; nothing was read. Leave one of them out"
        )
    with hpstore.open(pool, read_only=True) as opened:
        steps = steps_of(opened, prefix)
        newest = steps.all()[-1:]  # not the newest valid one: that would pass over damage
        if not newest:
            raise CheckpointError(nothing_under(opened, steps.prefix))
        one = newest if step in (None, "latest") else [resolved(steps, str(step))]
        found = {
            number: _verified(opened, steps.prefix, number, alone=not every)
            for number in (steps.all() if every else one)
        }
    if as_json:
        rows = [
            {"step": n, "ok": False, "problem": str(r)}
            if isinstance(r, HpstoreError)
            else r.as_dict()
            for n, r in found.items()
        ]
        emit_json(rows if every else rows[0])
    else:
        for number, report in found.items():
            write_out(f"step {number}: {_said(report)}\n")
    if not all(not isinstance(r, HpstoreError) and r.ok for r in found.values()):
        raise typer.Exit(UNMENDED_EXIT_CODE)


def _verified(
    pool: hpstore.Pool, prefix: str, step: int, *, alone: bool
) -> VerifyReport | HpstoreError:
    """A step's report; with others to come, also what kept it from being read."""
    from hpstore.checkpoint import Checkpointer

    with (
        Checkpointer(pool, prefix, group="alone") as checkpointer,
        progress_bar(f"step {step}") as bar,
    ):
        try:
            return checkpointer.verify(step, progress=bar.of_bytes)
        except HpstoreError as error:
            if alone:
                raise
            return error


def _said(report: VerifyReport | HpstoreError) -> str:
    if isinstance(report, HpstoreError):
        return f"CANNOT BE READ {report}"
    amount = f"{report.items} items, {format_bytes(report.bytes)}: "
    return amount + ("all as saved" if report.ok else f"DAMAGED {', '.join(report.damaged)}")


@checkpoints.command()
def rm(
    pool: PoolName,
    prefix: Prefix,
    steps: Annotated[list[str], typer.Argument(help="committed steps, or latest")],
    force: Force = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete steps; not protected ones.

    hpstore checkpoint rm pool.toml runs/gpt 100 200 --yes
    """
    failed: dict[int, HpstoreError] = {}
    deleted: list[int] = []
    with hpstore.open(pool) as opened:
        found = steps_of(opened, prefix)
        numbers = dict.fromkeys(resolved(found, step) for step in steps)  # before any is deleted
        question = f"delete steps {first_of([str(number) for number in numbers])} of {prefix}"
        if "latest" in steps:
            number = resolved(found, "latest")
            question += f"; latest is step {number}, from which a training would go on"
        agree(question, yes=yes, named="latest" not in steps)
        for step in numbers:
            try:
                found.delete(step, force=force)
            except HpstoreError as error:
                failed[step] = error
                write_err(f"hpstore: {type(error).__name__}: {error}\n")
            else:
                deleted.append(step)
                if not as_json:
                    write_out(f"step {step} is deleted\n")
    if as_json:
        emit_json({"deleted": deleted, "failed": {n: str(why) for n, why in failed.items()}})
    if failed:
        raise typer.Exit(next(iter(failed.values())).exit_code)


@checkpoints.command()
def protect(
    pool: PoolName,
    prefix: Prefix,
    step: StepName,
    name: Annotated[str, typer.Argument(help="a name for it, such as release-1")],
    as_json: Json = False,
) -> None:
    """Keep a step, whatever retention says.

    hpstore checkpoint protect pool.toml runs/gpt 100 best
    """
    with hpstore.open(pool) as opened:
        steps = steps_of(opened, prefix)
        number = resolved(steps, step)
        before = steps.protected().get(name)
        if before is not None and before != number:
            raise CheckpointError(f"{name!r} protects step {before}: unprotect it first")
        steps.protect(number, name)
    say({"step": number, "name": name}, f"step {number} is protected as {name}", as_json=as_json)


@checkpoints.command()
def unprotect(
    pool: PoolName,
    prefix: Prefix,
    name: Annotated[str, typer.Argument(help="the name it was protected as")],
    as_json: Json = False,
) -> None:
    """Let retention have a step again.

    hpstore checkpoint unprotect pool.toml runs/gpt best
    """
    with hpstore.open(pool) as opened:
        steps = steps_of(opened, prefix)
        before = steps.protected().get(name)
        steps.unprotect(name)
    say({"step": before, "name": name}, f"{name} protects nothing now", as_json=as_json)
