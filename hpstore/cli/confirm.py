"""Before what cannot be undone: a question on a terminal, --yes everywhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from hpstore.cli.output import appears_whole, visible, write_err
from hpstore.errors import ConfigError

REFUSED_EXIT_CODE = 1  # the answer was no
_NAMED = 5


def on_terminal() -> bool:
    """Whether a user can be asked."""
    return bool(sys.stdin and sys.stdin.isatty() and sys.stderr.isatty())


def agree(question: str, *, yes: bool, named: bool = False) -> None:
    """Return when the user means it; before anything is changed.

    `question`: what will be gone, such as `delete dataset train`. Raises ConfigError where no
    terminal can be asked, unless what goes was `named` one by one, as scripts do it; typer.Exit on
    any answer but yes.
    """
    if yes or (named and not on_terminal()):
        return
    if not on_terminal():
        raise ConfigError(
            f"{question}? There is no terminal to ask, and nothing was changed: say --yes"
        )
    if not typer.confirm(visible(f"{question}?"), err=True):
        write_err("nothing was changed\n")
        raise typer.Exit(REFUSED_EXIT_CODE)


def agree_to_replace(path: Path, *, yes: bool, named: bool = False) -> bool:
    """As agree(), for a file or folder that writing would replace: whether there is one. Not for
    pipes and devices, nor for an empty folder."""
    there = any(path.iterdir()) if path.is_dir() else path.exists() and appears_whole(path)
    if there:
        agree(f"replace {path}", yes=yes, named=named)
    return there


def first_of(things: list[str]) -> str:
    """The first few of them, and how many there are."""
    more = f" and {len(things) - _NAMED} more" if len(things) > _NAMED else ""
    return ", ".join(things[:_NAMED]) + more
