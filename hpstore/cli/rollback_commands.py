"""`hpstore checkpoint rollback` and `undo-rollback`: a run goes back, and forward again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import hpstore
from hpstore.cli.confirm import agree, first_of
from hpstore.cli.options import Json, PoolName, Prefix, Yes
from hpstore.cli.output import say, write_err
from hpstore.cli.step_words import resolved, steps_of
from hpstore.errors import ConfigError
from hpstore.units import seconds_argument

if TYPE_CHECKING:
    from hpstore.checkpoint import Checkpointer
    from hpstore.checkpoint.catalog.hidden_steps import Rollback
    from hpstore.checkpoint.catalog.step_catalog import StepCatalog

Grace = Annotated[
    str, typer.Option("--grace", metavar="SPAN", help="how long hidden steps are kept: 12h, 7d")
]
HideProtected = Annotated[bool, typer.Option("--force", help="hide protected steps, too")]


def rollback(
    pool: PoolName,
    prefix: Prefix,
    step: Annotated[str, typer.Argument(help="the committed step to go back to")],
    grace: Grace = "7d",
    force: HideProtected = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Go back to a step: later ones are hidden, and kept for a time.

    A training that still runs fails at its next save: stop it before.

    hpstore checkpoint rollback pool.toml runs/gpt 1000
    """
    from hpstore.checkpoint.catalog.rollback import may_hide

    seconds = seconds_argument("--grace", grace)
    with hpstore.open(pool) as opened:
        steps = _of_numbers(opened, prefix)
        number = resolved(steps, step)
        later, _ = may_hide(steps, number, force=force)
        if later:
            until = text_of_time(time.time_ns() // 1_000_000 + round(seconds * 1000))
            agree(
                f"hide steps {_numbers(later)} of {prefix}, so that a training goes on from step "
                f"{number}; they can be brought back until {until}",
                yes=yes,
            )
        with _checkpointer(opened, steps.prefix) as ckpt:
            done = ckpt.rollback(number, grace_seconds=seconds, force=force)
    said = f"step {number} is the last one: nothing was hidden"
    if done.hidden:
        said = f"{hidden_line(done)}\nhpstore checkpoint undo-rollback brings them back"
    say(done.as_dict(), said, as_json=as_json)


def undo_rollback(
    pool: PoolName,
    prefix: Prefix,
    name: Annotated[
        str | None, typer.Argument(help="a rollback, as ls shows it (default: the last)")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Bring back the steps that a rollback has hidden.

    A training that still runs fails at its next save: stop it before.

    hpstore checkpoint undo-rollback pool.toml runs/gpt
    """
    from hpstore.checkpoint.catalog.rollback import may_take_back

    with hpstore.open(pool) as opened:
        steps = _of_numbers(opened, prefix)
        chosen = may_take_back(steps, name)
        newest = max(chosen.hidden)
        agree(
            f"bring back steps {_numbers(chosen.hidden)} of {prefix}, so that a training goes on "
            f"from step {newest}",
            yes=yes,
        )
        with _checkpointer(opened, steps.prefix) as ckpt:
            done = ckpt.steps.undo_rollback(chosen.name)
    lost = [step for step in chosen.hidden if step not in done.hidden]
    said = f"steps {_numbers(done.hidden)} are back"
    if lost:
        write_err(f"hpstore: steps {_numbers(lost)} are lost: see the lines above\n")
    say({**done.as_dict(), "lost": lost}, said, as_json=as_json)


def hidden_line(found: Rollback) -> str:
    """Which steps a rollback has hidden, and until when they are kept."""
    return (
        f"steps {_numbers(found.hidden)} are hidden since rollback {found.name} to step "
        f"{found.step}, and kept until {text_of_time(found.until_ms)}"
    )


def text_of_time(wall_ms: int) -> str:
    """A time of this machine's zone. A year that no clock shows is given in milliseconds."""
    try:
        return time.strftime("%F %T", time.localtime(wall_ms / 1000))
    except (ValueError, OverflowError, OSError):
        return f"{wall_ms} ms since 1970"


def _numbers(steps: Sequence[int]) -> str:
    return first_of([str(step) for step in steps])


def _of_numbers(pool: hpstore.Pool, prefix: str) -> StepCatalog:
    """Steps of a run. Raises ConfigError for checkpoints that a trainer has saved by name."""
    steps = steps_of(pool, prefix)
    if steps.prefix != prefix.strip("/"):
        raise ConfigError(
            f"the checkpoints under {prefix!r} were saved by name by a trainer: their numbers are "
            "not its steps, and nothing was changed. Delete single ones by `hpstore checkpoint rm`"
        )
    return steps


def _checkpointer(pool: hpstore.Pool, prefix: str) -> Checkpointer:
    from hpstore.checkpoint import Checkpointer

    return Checkpointer(pool, prefix, group="alone")
