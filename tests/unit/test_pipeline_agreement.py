"""A step counts on all ranks or on none: what they compare, what each of them raises."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpstore.errors import CheckpointError, ConfigError, StepVoid
from hpstore.trainers.pipelining.step_agreement import Agreement, Votes, broken_off


class Said:
    """Ranks that have said their part already; this is rank 0 of them."""

    def __init__(self, *others: tuple[int, int], text: object = None) -> None:
        self._others, self._text = others, text

    def numbers(self, mine: tuple[int, ...], *_: object, **__: object) -> list[tuple[int, ...]]:
        return [mine, *self._others]

    def all_gather(self, mine: bytes, _: object) -> list[bytes]:
        return [mine, *(json.dumps(self._text).encode() for _ in self._others)]


def agreement(*others: tuple[int, int], text: object = None) -> Agreement:
    ranks: Any = Said(*others, text=text)
    return Agreement(ranks)


def test_all_that_are_fine_go_on() -> None:
    assert agreement((3, 0), (3, 0)).reach(3, None)
    assert agreement().reach(3, None)


def test_gradients_of_any_rank_count() -> None:
    """One flag for all."""
    assert not agreement((3, 1)).reach(3, None)
    assert not agreement((3, 0)).reach(3, None, finite=False)


@pytest.mark.parametrize("kind", [OSError, FloatingPointError, ValueError, KeyError, RuntimeError])
def test_anothers_error_is_of_its_type_here(kind: type[Exception]) -> None:
    """One `except` is enough on all ranks (a_void_step, aa_one_rank_void)."""
    with pytest.raises(kind, match=r"rank 1: .*: hiccup.*same micro-batches again") as raised:
        agreement((2, 2), text=[kind.__name__, "hiccup"]).reach(2, None)
    assert isinstance(raised.value, StepVoid)
    assert isinstance(raised.value, CheckpointError)


@pytest.mark.parametrize(
    "kind", ["UnicodeDecodeError", "StopIteration", "Mine", "SystemExit", "int"]
)
def test_what_takes_no_text_is_a_void_step_all_the_same(kind: str) -> None:
    with pytest.raises(StepVoid, match=f"rank 1: {kind}"):
        agreement((2, 2), text=[kind, "why"]).reach(2, None)


def test_the_rank_that_failed_raises_its_own_error() -> None:
    mine = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised:
        agreement((2, 0)).reach(2, mine)
    assert raised.value is mine


def test_ranks_at_different_steps_are_refused_on_all() -> None:
    """Whatever else they have to say: agreement is on calls of step()."""
    for other in ((3, 0), (3, 2)):
        with pytest.raises(CheckpointError, match=r"different steps \(\[2, 3\]") as raised:
            agreement(other).reach(2, None)
        assert not isinstance(raised.value, StepVoid)


def test_votes_are_those_that_any_rank_needs() -> None:
    assert Votes.of_any([Votes(), Votes(early=True), Votes(late=True)]) == Votes(True, True)
    assert Votes.of_any([Votes()]) == Votes()


def test_a_broken_schedule_says_what_to_do() -> None:
    error = ConfigError("first")
    text = broken_off(7, error)
    assert "step 7" in text
    assert "End it" in text
    assert error.__notes__ == [text]
