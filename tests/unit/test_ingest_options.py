"""--option of ingest: which values are numbers."""

from __future__ import annotations

import pytest
import typer

from hpstore.cli.dataset_commands import _options


def test_only_what_is_a_number_by_its_name_becomes_one() -> None:
    """A group or a database may be called 0; other digits than ours are text."""
    given = {"group": "0", "database": "7", "a": "007", "e": "", "f": "x=1", "delimiter": "1"}
    assert _options([f"{name}={value}" for name, value in given.items()]) == given
    for value, wanted in [("7", 7), ("007", "007"), ("\u0667", "\u0667"), ("-1", "-1"), ("", "")]:
        assert _options([f"record_tokens={value}"]) == {"record_tokens": wanted}
    with pytest.raises(typer.BadParameter, match="NAME=VALUE"):
        _options(["a"])
