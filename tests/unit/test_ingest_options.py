"""--option of ingest: which values are numbers."""

from __future__ import annotations

import pytest
import typer

from hpstore.cli.dataset_commands import _options


def test_only_whole_numbers_as_they_are_written_are_numbers() -> None:
    """A database 007 keeps its name; other digits than ours are text."""
    found = _options(["a=7", "b=007", "c=0", "d=\u0667", "e=", "f=x=1", "g=-1"])
    wanted = {"a": 7, "b": "007", "c": 0, "d": "\u0667", "e": "", "f": "x=1", "g": "-1"}
    assert found == wanted
    with pytest.raises(typer.BadParameter, match="NAME=VALUE"):
        _options(["a"])
