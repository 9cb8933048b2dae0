"""Checkpoints by name of a trainer that was stopped, while another one goes on (PROTOCOL 18)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpstore.errors import HpstoreError, VersionConflict
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.trainers.named_checkpoints import Named, NamedCheckpoints
from tests.thorough import some_of
from tests.trainers.test_named import numbers, state

PLACES = [
    *(("_doubt", n) for n in (1, 2, 3)),
    *(("_look", n) for n in (1, 2, 3)),
    *(("_require_mine", n) for n in (1, 2, 3, 4)),
    *(("_seen", n) for n in (1, 2)),
    *(("_decided", n) for n in (1, 2)),
]


def stop(
    named: NamedCheckpoints, monkeypatch: pytest.MonkeyPatch, place: str, call: int
) -> Callable[[Callable[[], None]], None]:
    """Let others act after the `call`-th call of a method of this object; what they do is given."""
    plain, left, act = getattr(named, place), [call], list[Callable[[], None]]()

    def stopped(*words: Any) -> Any:
        found = plain(*words)
        left[0] -= 1
        if left[0] == 0:
            act[0]()
        return found

    monkeypatch.setattr(named, place, stopped)
    return act.append


@pytest.mark.parametrize(("place", "call"), some_of(PLACES, 1, 3, 4, 6, 9, 11, 12))
def test_what_another_session_has_saved_stays_wherever_the_first_one_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, call: int
) -> None:
    """It saved and removed; the other saves the same name again, and one more."""
    with Harness(tmp_path, data=2, parity=1, devices=4).open() as pool:
        first = NamedCheckpoints(pool, "run", keep_last=2)
        for number, name in enumerate(("a", "last")):
            first.save(name, state(number))
        first.wait()

        def others() -> None:
            with NamedCheckpoints(pool, "run") as second:
                second.save("last", state(70))
                second.wait()
                second.save("new", state(71))
                second.wait()
                expected.update(numbers(second))

        expected: dict[str, int] = {}
        stop(first, monkeypatch, place, call)(others)
        raised = act_on(first)
        assert expected, f"{place} is not called {call} times"
        with NamedCheckpoints(pool, "run") as third:
            found = numbers(third)
            assert {name: found.get(name) for name in ("last", "new")} == {"last": 70, "new": 71}
            third.save("more", state(80))
            third.wait()
            assert numbers(third) == {**found, "more": 80}
            assert len(third._checkpoints.steps()) == len(found) + 1  # nothing is left over
        assert all("another checkpointer" in str(error) for error in raised)


def act_on(named: NamedCheckpoints) -> list[HpstoreError]:
    """What a trainer does: save under a name that is there, remove another; what it raised."""
    raised = []
    calls: list[Callable[[], None]] = [
        lambda: named.save("last", state(5)),
        lambda: named.remove("a"),
        named.wait,
        named.close,
    ]
    for call in calls:
        try:
            call()
        except HpstoreError as error:
            raised.append(error)
    return raised


def test_a_name_is_put_only_by_the_session_that_saves(pool: Pool) -> None:
    """It was stopped between its commit and the name; the error says that another one saves."""
    with NamedCheckpoints(pool, "run") as first, NamedCheckpoints(pool, "run") as second:
        first.save("last", state(1))
        first.wait()
        second.save("last", state(2))
        second.wait()
        with pytest.raises(VersionConflict, match="another checkpointer"):
            first._point(Named(name="last", number=0))
        assert numbers(second) == {"last": 2}


def test_what_was_left_by_a_session_that_ended_goes_unless_its_name_means_it(pool: Pool) -> None:
    """Killed before its name was put, and after."""
    with NamedCheckpoints(pool, "run") as first:
        first.save("a", state(1))
        first.wait()
        for number in (1, 2):  # committed, never named
            first._doubt(Named(name=f"b{number}", number=number))
            first._checkpoints.save(number, {"name": "b", "checkpoint": {}}).result()
        first._doubt(Named(name="a", number=0))
    with NamedCheckpoints(pool, "run") as second:
        second.save("c", state(3))
        second.wait()
        assert numbers(second) == {"a": 1, "c": 3}
        assert second._checkpoints.steps() == [0, 3]
        assert pool.list("run/doubtful/") == []
