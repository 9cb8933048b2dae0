"""Rounds of calls are made by the thread that has them; one that stands still is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hpstore.hosts import round_watch
from hpstore.hosts.round_watch import RoundWatch
from hpstore.runtime.call_tours import Tour


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[RoundWatch]:
    monkeypatch.setattr(round_watch, "STILL_SECONDS", 0.01)
    monkeypatch.setattr(round_watch, "_STEP_SECONDS", 0.002)
    monkeypatch.setattr(round_watch, "_IDLE_STEPS", 0)
    made = RoundWatch()
    yield made
    made.close()


def test_a_round_is_made_by_the_thread_that_has_it(watch: RoundWatch) -> None:
    """In its order, and its answers are those of the calls, errors as well."""
    error, threads = ValueError("for this test"), list[int]()

    def fails() -> None:
        threads.append(threading.get_ident())
        raise error

    for _ in range(2):
        tour = Tour({"a": threading.get_ident, "b": fails})
        assert watch.run(tour, lambda *_: pytest.fail("it was left"))
        assert tour.results() == {"a": threading.get_ident(), "b": error}
    assert set(threads) == {threading.get_ident()}


def test_a_round_that_stands_still_is_left_to_another_thread(watch: RoundWatch) -> None:
    """Also one that begins while the watcher sleeps. The call under way goes on, those after it are
    not made, and the thread returns after its place was taken."""
    for _ in range(2):
        _stand_still(watch)


def _stand_still(watch: RoundWatch) -> None:
    free, mine = threading.Event(), threading.get_ident()
    seen: list[tuple[set[str], set[str], bool]] = []

    def leave(tour: Tour, _: float) -> None:
        left = tour.leave()
        under_way = {name for name, future in left.answers.items() if not future.done()}
        seen.append((under_way, set(left.calls), threading.get_ident() == mine))
        free.set()

    tour = Tour({"a": int, "b": lambda: free.wait(10), "c": lambda: pytest.fail("it was made")})
    assert not watch.run(tour, leave)
    assert seen == [({"b"}, {"c"}, False)]


def test_what_fails_in_its_place_holds_no_thread(watch: RoundWatch) -> None:
    free = threading.Event()

    def leave(*_: object) -> None:
        free.set()
        raise OSError("the connection has ended")

    assert not watch.run(Tour({"a": lambda: free.wait(10)}), leave)
    assert watch.run(Tour({"a": int}), leave)
