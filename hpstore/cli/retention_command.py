"""`hpstore checkpoint retention`: which steps stay or go by given rules, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import hpstore
from hpstore.cli.confirm import agree, first_of, on_terminal
from hpstore.cli.options import Json, PoolName, Prefix, Yes
from hpstore.cli.output import emit_json, table, write_err, write_out
from hpstore.cli.step_words import steps_of
from hpstore.errors import CheckpointError, ConfigError, HpstoreError
from hpstore.runtime.clock import SystemClock
from hpstore.units import seconds_argument

if TYPE_CHECKING:
    from hpstore.checkpoint import StepDecision
    from hpstore.checkpoint.catalog.retention import Retention
    from hpstore.checkpoint.catalog.step_catalog import StepCatalog

KeepLast = Annotated[
    int, typer.Option("--keep-last", min=1, help="the last steps stay, this many of them")
]
KeepEvery = Annotated[
    int | None, typer.Option("--keep-every", min=1, help="multiples of this stay")
]
KeepBest = Annotated[
    str | None,
    typer.Option("--keep-best", metavar="MODE:METRIC", help="the best stays: min:loss, max:acc"),
]
BestCount = Annotated[
    int, typer.Option("--best-count", min=1, help="with --keep-best: how many of the best stay")
]
KeepFor = Annotated[
    str | None,
    typer.Option("--keep-for", metavar="SPAN", help="what is younger stays: 12h, 7d"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="only show; ask and delete nothing")]


def retention(
    pool: PoolName,
    prefix: Prefix,
    keep_last: KeepLast,
    keep_every: KeepEvery = None,
    keep_best: KeepBest = None,
    best_count: BestCount = 1,
    keep_for: KeepFor = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Show which steps stay or go by these rules, and why; delete those that go with --yes.

    A step stays when any of the rules keeps it; protected ones do.

    hpstore checkpoint retention pool.toml runs/gpt --keep-last 3 --keep-every 1000 --keep-for 7d
    """
    from hpstore.checkpoint.catalog.writer_fence import manifests_of

    if yes and dry_run:
        raise ConfigError("--yes deletes, --dry-run does not; nothing was read. Leave one out")
    rules = _rules(keep_last, keep_every, keep_best, best_count, keep_for)
    # without a terminal it only shows, unless --yes
    may_delete = not dry_run and (yes or (on_terminal() and not as_json))
    with hpstore.open(pool, read_only=not may_delete) as opened:
        steps = _steps_by_number(opened, prefix)
        there = manifests_of(opened, steps.prefix)
        decisions = _decisions(steps, rules)
        going = [found.step for found in decisions if not found.stays]
        if not as_json:
            _show(decisions, going)
        deleted: list[int] = []
        failed = ""
        if going and may_delete:
            agree(f"delete steps {first_of([str(step) for step in going])} of {prefix}", yes=yes)
            deleted, failed = _delete(steps, rules, {s: there[s] for s in going if s in there})
    if as_json:
        rows = [found.as_dict() for found in decisions]
        emit_json({"steps": rows, "going": going, "deleted": deleted, "failed": failed})
    elif going and may_delete:
        write_out(f"{len(deleted)} of {len(going)} steps are deleted\n")
    elif going and not dry_run:
        write_err("nothing was deleted: --yes does it\n")
    if failed:
        raise CheckpointError(failed)


def _rules(
    keep_last: int,
    keep_every: int | None,
    keep_best: str | None,
    best_count: int,
    keep_for: str | None,
) -> Retention:
    """As a Checkpointer takes them. Raises ConfigError."""
    from hpstore.checkpoint.catalog.retention import Best, Retention

    best = Best.of(keep_best)
    if best is None and best_count != 1:
        raise ConfigError("--best-count says how many --keep-best keeps: give that, too")
    return Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=Best(metric=best.metric, mode=best.mode, count=best_count) if best else None,
        keep_for_seconds=None if keep_for is None else seconds_argument("--keep-for", keep_for),
    )


def _steps_by_number(pool: hpstore.Pool, prefix: str) -> StepCatalog:
    """The steps under a prefix. Raises CheckpointError where there are none, ConfigError for those
    that a trainer knows by name: their numbers are not its steps."""
    from hpstore.checkpoint.catalog.not_found_hint import nothing_under

    steps = steps_of(pool, prefix)
    if steps.prefix != prefix.strip("/"):
        raise ConfigError(
            f"the checkpoints under {prefix!r} were saved by name by a trainer, which deletes them "
            "by its own rules (save_top_k, save_total_limit); nothing was changed. Delete single "
            "ones by `hpstore checkpoint rm`"
        )
    if not steps.all():
        raise CheckpointError(nothing_under(pool, steps.prefix))
    return steps


def _decisions(steps: StepCatalog, rules: Retention) -> list[StepDecision]:
    from hpstore.checkpoint.catalog.retain_steps import decisions_now

    return decisions_now(steps, rules, now_ms=SystemClock().wall_ms())


def _show(decisions: Sequence[StepDecision], going: Collection[int]) -> None:
    cells = [
        (found.step, "stays" if found.stays else "goes", ", ".join(found.rules), found.reason)
        for found in decisions
    ]
    table("", ("step", "", "by", "why"), cells)
    staying = len(decisions) - len(going)
    stay = "1 step stays" if staying == 1 else f"{staying} steps stay"
    write_out(f"{stay}, {len(going)} {'goes' if len(going) == 1 else 'go'}\n")


def _delete(
    steps: StepCatalog, rules: Retention, agreed: Mapping[int, str]
) -> tuple[list[int], str]:
    """Delete those that were agreed to and still go: a step may have been protected, or become
    part of another run's last ones, while the question was asked. What is deleted, and what went
    wrong."""
    from hpstore.checkpoint.catalog.retain_steps import remove_steps

    going = [found.step for found in _decisions(steps, rules) if not found.stays]
    chosen = [step for step in going if step in agreed]
    problem: Exception | None = None
    try:
        remove_steps(steps, chosen, agreed)
    except (HpstoreError, OSError) as error:
        problem = error
    left = set(steps.all())
    still = [str(step) for step in chosen if step in left]
    said = f"steps {first_of(still)} are still there" if still else "no step is still there"
    gone = [step for step in chosen if step not in left]
    return gone, f"some deletes failed, {said}: {problem}" if problem else ""
