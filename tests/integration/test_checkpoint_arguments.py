"""Wrong arguments of a Checkpointer are ValueErrors; CheckpointError is for what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Best, Checkpointer
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.errors import CheckpointError, ConfigError

STATE = {"w": torch.ones(3)}
MADE: list[tuple[dict[str, Any], str]] = [  # Any: wrong on purpose
    ({"keep_last": 0}, "keep_last must be a whole number of at least 1"),
    ({"keep_last": 1.5}, "keep_last must be a whole number"),
    ({"keep_last": True}, "keep_last must be a whole number"),
    ({"keep_last": 1, "keep_every": 0}, "keep_every must be a whole number"),
    ({"keep_every": 10}, "keep_every, keep_best and keep_for say what stays beyond keep_last"),
    ({"keep_best": "min:loss"}, "keep_for say what stays beyond keep_last"),
    ({"keep_for": "7d"}, "keep_for say what stays beyond keep_last"),
    ({"keep_last": 1, "keep_for": "soon"}, "keep_for: 'soon' is not a span of time"),
    ({"keep_last": 1, "keep_best": "loss"}, '"min:loss"'),
    (
        {"keep_last": 1, "keep_best": Best(metric="loss", mode="min", count=0)},
        "keep_best's count must be a whole number",
    ),
    ({"group": "all"}, "group 'all' is not one of alone"),
    ({"save": "overlap"}, "save= takes SaveOptions"),
    ({"save": {"pace": "gentle"}}, "save= takes SaveOptions"),
]
CALLED: list[tuple[str, Callable[[Any], object], str]] = [
    ("save -1", lambda c: c.save(-1, STATE), "step -1 is not a whole number"),
    ("save text", lambda c: c.save("7", STATE), "step '7' is not a whole number"),
    ("save True", lambda c: c.save(True, STATE), "step True is not a whole number"),
    ("save a list", lambda c: c.save(2, [STATE]), "a state is a dict with str names"),
    ("save numbers", lambda c: c.save(2, {1: 2}), "a state is a dict with str names"),
    ("restore a list", lambda c: c.restore([STATE]), "a state is a dict with str names"),
    ("read 1.5", lambda c: c.read(1.5), "step 1.5 is not a whole number"),
    ("delete -1", lambda c: c.delete(-1), "step -1 is not a whole number"),
    ("a slash", lambda c: c.steps.protect(1, "a/b"), "'a/b' is not a name"),
    ("no name", lambda c: c.steps.unprotect(""), "'' is not a name"),
    ("staging", lambda c: c.saver.stage_by("late", CopyGate(blocks=False)), "staging 'late'"),
]


@pytest.mark.parametrize(("words", "said"), MADE, ids=[str(words) for words, _ in MADE])
def test_a_wrong_argument_of_the_constructor(
    pool: hpstore.Pool, words: dict[str, Any], said: str
) -> None:
    """Refused when it is made, and nothing is left in the pool."""
    with pytest.raises(ConfigError, match=said) as caught:
        Checkpointer(pool, "run", **words)
    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, CheckpointError)
    assert pool.list("run") == []


@pytest.mark.parametrize(("call", "said"), [row[1:] for row in CALLED], ids=[r[0] for r in CALLED])
def test_a_wrong_argument_of_a_call(
    pool: hpstore.Pool, call: Callable[[Any], object], said: str
) -> None:
    """Refused by the call itself; what is committed stays, and the next save works."""
    with Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, STATE).result()
        with pytest.raises(ConfigError, match=said) as caught:
            call(ckpt)
        assert isinstance(caught.value, ValueError)
        ckpt.save(2, STATE).result()
        assert ckpt.steps() == [1, 2]


def test_an_argument_of_before_is_an_error_that_names_it(pool: hpstore.Pool) -> None:
    """What SaveOptions takes now is not dropped in silence."""
    for name in ("staging_bytes", "background", "prepare", "alone", "on_busy", "on_sigterm"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            Checkpointer(pool, "run", **dict[str, Any]({name: None}))
