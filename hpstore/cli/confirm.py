"""Before what cannot be undone: a question on a terminal, --yes everywhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from hpstore.cli.output import appears_whole
from hpstore.errors import ConfigError

REFUSED_EXIT_CODE = 1  # the answer was no
_NAMED = 5


def agree(question: str, *, yes: bool, named: bool = False) -> None:
    """Return when the user means it; before anything is changed.

    `question`: what will be gone, such as "delete data set train". Raises ConfigError where no
    terminal can be asked, unless what goes was `named` one by one, as scripts do it; typer.Exit on
    any answer but yes.
    """
    terminal = sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()
    if yes or (named and not terminal):
        return
    if not terminal:
        raise ConfigError(
            f"{question}? There is no terminal to ask, and nothing was changed: say --yes"
        )
    if not typer.confirm(f"{question}?", err=True):
        sys.stderr.write("nothing was changed\n")
        raise typer.Exit(REFUSED_EXIT_CODE)


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raises ConfigError for a file that writing would replace. Not for pipes and devices."""
    if not force and path.exists() and appears_whole(path):
        raise ConfigError(f"{path} exists, and was left as it is; --force replaces it")


def first_of(things: list[str]) -> str:
    """The first few of them, and how many there are."""
    more = f" and {len(things) - _NAMED} more" if len(things) > _NAMED else ""
    return ", ".join(things[:_NAMED]) + more


__all__ = ["REFUSED_EXIT_CODE", "agree", "first_of", "refuse_existing"]
