"""What a Checkpointer is told about its saves is checked before anything is made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.errors import ConfigError

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"staging": "overlapped"}, "staging 'overlapped' is not one of copy, overlap"),
    ({"staging": None}, "staging None is not one of"),
    ({"background": "process", "on_failure": "retry"}, 'has no on_failure="retry"'),
    ({"background": "fork"}, "background 'fork' is not one of thread, process"),
    ({"on_busy": "later"}, "on_busy 'later' is not one of wait, skip, error"),
    ({"on_failure": "ignore"}, "on_failure 'ignore' is not one of raise, warn, retry"),
    ({"retry_seconds": -1}, "retry_seconds must be a number of seconds"),
    ({"pace": "slow"}, "pace 'slow' is not one of fast, gentle"),
    ({"on_sigterm": "stop"}, "on_sigterm 'stop' is not one of finish, save"),
    ({"compression": "gzip"}, "compression 'gzip' is not one of lz4, zstd, shuffle-lz4"),
    ({"compression": ""}, "compression '' is not one of"),
    ({"memory": "much"}, "'much' is not a number of bytes"),
    ({"memory": 0}, "memory must be at least one byte"),
    ({"memory": -1}, "memory must be at least one byte"),
    ({"commit_seconds": -1.0}, "commit_seconds must be a number of seconds"),
    ({"commit_seconds": None}, "commit_seconds must be a number of seconds"),
    ({"drain_seconds": math.nan}, "drain_seconds must be a number of seconds"),
    ({"drain_seconds": "60"}, "drain_seconds must be a number of seconds"),
    ({"max_stall_seconds": -0.5}, "max_stall_seconds must be a number of seconds"),
    ({"min_losses_tolerated": -1}, "min_losses_tolerated must be a whole number"),
    ({"min_losses_tolerated": 1.5}, "min_losses_tolerated must be a whole number"),
    ({"lineage": {"at": object()}}, "lineage must hold JSON values only"),
]


# Any: wrong on purpose
@pytest.mark.parametrize(("options", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_option_is_a_value_error_that_names_it(options: dict[str, Any], said: str) -> None:
    """Each option with a value that it cannot have."""
    with pytest.raises(ConfigError, match=said) as caught:
        SaveOptions(**options)
    assert isinstance(caught.value, ValueError)


def test_every_option_but_switches_is_among_the_wrong_ones() -> None:
    """A new option gets a row above; True and False need none, nor does what tests pass."""
    checked = {name for options, _ in WRONG for name in options}
    every = {field.name for field in dataclasses.fields(SaveOptions)}
    assert every - checked == {"reuse", "prewrite", "warm", "accelerator"}


def test_memory_takes_bytes_and_texts() -> None:
    """64 MiB, said in two ways; None is for the share of what is available."""
    assert SaveOptions(memory="64MiB").memory_bytes == SaveOptions(memory=64 << 20).memory_bytes
    assert SaveOptions().memory_bytes is None


def test_options_cannot_be_changed_in_place() -> None:
    """They may be shared by checkpointers."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        SaveOptions().pace = "gentle"  # type: ignore[misc]  # on purpose


def test_what_is_no_pool_is_refused() -> None:
    """A path, as is tried."""
    with pytest.raises(ConfigError, match=r"takes an open pool, not a str: hpstore\.open"):
        Checkpointer("pool.toml", "run")  # type: ignore[arg-type]  # on purpose
