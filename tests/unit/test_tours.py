"""Tours: one worker asks devices in turn; one that hangs holds no other, and is left in time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import AlreadyClosed, DeviceError, DeviceTimeout
from hpstore.runtime.call_tours import _FIRST, _TRY_EVERY, WORKERS, Quicker, Tour, Tours
from hpstore.runtime.deadline_wait import Patience
from hpstore.runtime.scheduler import Scheduler

LIMIT_SECONDS = 20.0
SHORT_SECONDS = 0.1
Calls = dict[str, Callable[[], object]]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hung calls wait for; set when the test is over, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tours are made whatever is quicker, and left only when they hang: on a busy machine a worker
    may not run for some milliseconds."""
    monkeypatch.setattr(Quicker, "in_turn", lambda _: True)
    monkeypatch.setattr("hpstore.runtime.call_tours.STILL_SECONDS", 0.3)


@pytest.fixture
def scheduler(released: threading.Event, always: None) -> Iterator[Scheduler]:
    made = Scheduler(workers_per_device=2, queue_depth=8, compute_threads=2, threads=True)
    yield made
    released.set()
    made.close()


def ask(scheduler: Scheduler, calls: Calls, patience: Patience | None = None) -> dict[str, object]:
    return dict(scheduler.gather(calls, LIMIT_SECONDS, patience=patience, brief="look"))


def where(scheduler: Scheduler, names: str) -> dict[str, object]:
    """The name of the thread that makes the call of each device."""
    return ask(scheduler, {n: lambda: threading.current_thread().name for n in names})


def in_turn(answers: dict[str, object]) -> bool:
    """Whether all of these calls were made by one worker."""
    return {str(name)[:12] for name in answers.values()} == {"hpstore-tour"}


def test_one_worker_makes_brief_calls(scheduler: Scheduler) -> None:
    """All answers, errors as well; calls that are not brief are made on the lanes."""

    def fail() -> str:
        raise DeviceError("broken")

    assert in_turn(where(scheduler, "abc"))
    assert len(set(where(scheduler, "abc").values())) == 1
    answers = ask(scheduler, {"a": lambda: 1, "b": fail, "c": lambda: 3})
    assert (answers["a"], str(answers["b"]), answers["c"]) == (1, "broken", 3)
    plain = scheduler.gather({"a": lambda: threading.current_thread().name}, LIMIT_SECONDS)
    assert not in_turn(dict(plain))


def test_a_crash_goes_up(scheduler: Scheduler) -> None:
    def crash() -> None:
        raise SimulatedCrash

    with pytest.raises(SimulatedCrash):
        ask(scheduler, {"a": lambda: 1, "b": crash, "c": lambda: 3})


@pytest.mark.parametrize("hangs", "abc")
def test_a_device_that_hangs_holds_no_other(
    scheduler: Scheduler, released: threading.Event, hangs: str
) -> None:
    """First, in between or last: the others answer, each is asked once; it is not asked in turn
    with others before it has answered, and then it is."""
    asked: list[str] = []

    def call(name: str) -> object:
        asked.append(name)
        return released.wait(LIMIT_SECONDS) if name == hangs else name

    spare = Patience(SHORT_SECONDS, lambda silent: silent <= {hangs})
    calls: Calls = {name: lambda name=name: call(name) for name in "abc"}  # type: ignore[misc]
    answers = ask(scheduler, calls, spare)
    assert isinstance(answers.pop(hangs), DeviceTimeout)
    assert answers == {name: name for name in "abc" if name != hangs}
    assert sorted(asked) == ["a", "b", "c"]
    assert not in_turn(where(scheduler, "abc"))
    assert in_turn(where(scheduler, "abc".replace(hangs, "")))
    released.set()
    until = time.monotonic() + LIMIT_SECONDS
    while not in_turn(where(scheduler, "abc")):
        assert time.monotonic() < until


def test_what_cannot_be_spared_is_waited_for(
    scheduler: Scheduler, released: threading.Event
) -> None:
    timer = threading.Timer(3 * SHORT_SECONDS, released.set)
    timer.start()
    calls: Calls = {"a": lambda: 1, "b": lambda: released.wait(LIMIT_SECONDS), "c": lambda: 3}
    assert ask(scheduler, calls) == {"a": 1, "b": True, "c": 3}
    timer.join()


def test_more_callers_than_workers_are_served(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """All workers hang, each on a device of its own: further calls are made on the lanes."""
    hung = [f"hung-{number}" for number in range(WORKERS)]
    for name in hung:
        calls: Calls = {name: released.wait, "a": lambda: 1}
        spare = Patience(SHORT_SECONDS, lambda silent: len(silent) < 2)
        assert ask(scheduler, calls, spare)["a"] == 1
    for _ in range(2):
        assert not in_turn(where(scheduler, "abc"))


@pytest.mark.parametrize("end", ["forget", "close"])
def test_a_device_that_left_is_ended_after_the_tours_that_ask_it(
    scheduler: Scheduler, released: threading.Event, end: str
) -> None:
    """A descriptor that is closed in the middle of a call could be another file by then."""
    begun, ended, early = threading.Event(), threading.Event(), list[bool]()

    def last() -> None:
        begun.set()
        released.wait(LIMIT_SECONDS)
        early.append(ended.is_set())

    def caller() -> None:
        with contextlib.suppress(AlreadyClosed):
            ask(scheduler, {"a": last, "b": lambda: 2})

    thread = threading.Thread(target=caller)
    thread.start()
    assert begun.wait(LIMIT_SECONDS)
    if end == "forget":
        scheduler.forget("a", ended.set)
    else:
        scheduler.close(SHORT_SECONDS, {"a": ended.set})
    assert not ended.wait(SHORT_SECONDS)
    released.set()
    thread.join(LIMIT_SECONDS)
    assert ended.wait(LIMIT_SECONDS)
    assert early == [False]


@pytest.mark.parametrize("device", "ac")
def test_a_tour_that_was_left_uses_one_device(
    scheduler: Scheduler, released: threading.Event, device: str
) -> None:
    """Others can be ended while that one hangs: one that was asked, and one that was not."""
    calls: Calls = {"a": lambda: 1, "b": released.wait, "c": lambda: 3}
    ask(scheduler, calls, Patience(SHORT_SECONDS, lambda silent: silent <= {"b"}))
    ended, late = threading.Event(), threading.Event()
    scheduler.forget("b", late.set)
    scheduler.forget(device, ended.set)
    assert ended.wait(LIMIT_SECONDS)
    assert not late.is_set()
    released.set()
    assert late.wait(LIMIT_SECONDS)


def test_a_left_tour_ends_a_device_after_its_calls(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """Else they would open what was closed."""
    begun, order, ended = threading.Event(), list[str](), threading.Event()

    def stand() -> bool:
        begun.set()
        return released.wait(LIMIT_SECONDS)

    def call() -> None:
        time.sleep(0.05)  # so that an end that did not wait for this call would come before it
        order.append("call")

    def end() -> None:
        order.append("end")
        ended.set()

    patience = Patience(SHORT_SECONDS, lambda silent: silent <= {"a"})
    thread = threading.Thread(target=ask, args=(scheduler, {"a": stand, "b": call}, patience))
    plain, turn = Tour.over, threading.Event()

    def over(tour: Tour) -> bool:
        return turn.wait(LIMIT_SECONDS) and plain(tour)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tour, "over", over)
        thread.start()
        assert begun.wait(LIMIT_SECONDS)
        scheduler.forget("b", end)
        turn.set()
        thread.join(LIMIT_SECONDS)
    assert ended.wait(LIMIT_SECONDS)
    assert order == ["call", "end"]


def test_a_device_is_ended_after_what_waits_for_its_answer(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """A late write is dropped when it has answered: its file is removed through the device."""
    order, ended = list[str](), threading.Event()

    def answered(_: Future[object]) -> None:
        scheduler.forget("a", end)
        order.append("dropped")

    def end() -> None:
        order.append("end")
        ended.set()

    calls: Calls = {"a": released.wait, "b": lambda: 2}
    futures = scheduler.start(calls, brief="look")
    futures["a"].add_done_callback(answered)
    released.set()
    assert ended.wait(LIMIT_SECONDS)
    assert order == ["dropped", "end"]


def test_an_interrupted_caller_leaves_its_tour(
    scheduler: Scheduler, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C: the remaining devices are not asked, and can be ended."""

    def interrupt(_: Tour) -> bool:
        raise KeyboardInterrupt

    asked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Tour, "over", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(scheduler, {"a": released.wait, "b": lambda: asked.append("b")})
    ended = threading.Event()
    scheduler.forget("b", ended.set)
    assert ended.wait(LIMIT_SECONDS)
    released.set()
    assert in_turn(where(scheduler, "cd"))
    assert asked == []


def test_an_interrupted_start_says_what_was_begun(
    scheduler: Scheduler, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 21: who gives up must know of the call that still has its memory."""
    plain, begun = Tour.over, threading.Event()

    def interrupt(tour: Tour) -> bool:
        assert begun.wait(LIMIT_SECONDS)
        raise KeyboardInterrupt

    def stand() -> bool:
        begun.set()
        return released.wait(LIMIT_SECONDS)

    asked: list[str] = []
    futures: dict[str, Future[object]] = {}
    calls: Calls = {"a": lambda: 1, "b": stand, "c": lambda: asked.append("c")}
    with monkeypatch.context() as patch:
        patch.setattr(Tour, "over", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scheduler.start(calls, brief="look", into=futures)
    assert futures.keys() == {"a", "b"}
    assert futures["a"].result(0) == 1
    assert not futures["b"].done()
    assert not futures["b"].cancel()  # else its memory would pass for free
    released.set()
    assert futures["b"].result(LIMIT_SECONDS) is True
    assert asked == []
    assert Tour.over is plain


def test_started_calls_have_their_answers(scheduler: Scheduler) -> None:
    """Errors as well, however they are made."""

    def fail() -> str:
        raise DeviceError("broken")

    for kind in ("", "look"):
        futures = scheduler.start({"a": lambda: "1", "b": fail}, brief=kind)
        assert all(future.done() for future in futures.values()) or not kind
        assert futures["a"].result(LIMIT_SECONDS) == "1"
        assert isinstance(futures["b"].exception(LIMIT_SECONDS), DeviceError)


def test_an_end_that_fails_keeps_no_worker(
    scheduler: Scheduler, released: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise DeviceError("broken")

    spare = Patience(SHORT_SECONDS, lambda silent: silent <= {"a"})
    ask(scheduler, {"a": released.wait, "b": lambda: 2}, spare)
    scheduler.forget("a", fail)
    released.set()
    until = time.monotonic() + LIMIT_SECONDS
    while scheduler._tours._idle < 1:
        assert time.monotonic() < until
    assert "could not be closed" in caplog.text
    assert in_turn(where(scheduler, "cd"))


def test_without_a_thread_for_it_calls_are_made_side_by_side(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many processes as this user may have are there: the lanes' threads are, too."""
    scheduler.gather({"a": lambda: 1, "b": lambda: 2}, LIMIT_SECONDS)

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert ask(scheduler, {"a": lambda: 1, "b": lambda: 2}) == {"a": 1, "b": 2}
    assert in_turn(where(scheduler, "ab"))


def test_a_lane_that_refuses_calls_does_so_in_a_tour(
    scheduler: Scheduler, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that has not answered for half a minute is not waited for again."""
    for _ in range(2):
        scheduler.submit("a", released.wait)
    until = time.monotonic() + LIMIT_SECONDS
    while len(scheduler._lanes["a"].busy_since) < 2:
        assert time.monotonic() < until
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 31)
    asked: list[str] = []
    answers = ask(scheduler, {"a": lambda: asked.append("a"), "b": lambda: 2})
    assert isinstance(answers["a"], DeviceTimeout)
    assert (answers["b"], asked) == (2, [])


def test_what_has_a_forgotten_devices_id_is_in_tours(
    scheduler: Scheduler, released: threading.Event
) -> None:
    spare = Patience(SHORT_SECONDS, lambda silent: silent <= {"a"})
    ask(scheduler, {"a": released.wait, "b": lambda: 2}, spare)
    assert not in_turn(where(scheduler, "bc") | where(scheduler, "ac"))
    scheduler.forget("a", threading.Event().set)
    assert in_turn(where(scheduler, "ac"))


def test_late_ones_are_asked_on_demand(scheduler: Scheduler, released: threading.Event) -> None:
    """A listing hangs on one of its workers: its last word on a put is not that one's."""
    spare = Patience(SHORT_SECONDS, lambda silent: silent <= {"a"})
    calls: Calls = {"a": released.wait, "b": lambda: 2}
    assert isinstance(ask(scheduler, calls, spare)["a"], DeviceTimeout)
    calls = {"a": lambda: 1, "b": lambda: 2}
    assert isinstance(ask(scheduler, calls, spare)["a"], DeviceTimeout)
    found = scheduler.gather(calls, LIMIT_SECONDS, patience=spare, brief="look", ask_late=True)
    assert found == {"a": 1, "b": 2}


def test_the_way_that_is_quicker_is_taken() -> None:
    """A round takes long now and then, or always; the way that was slower is tried again."""
    found = Quicker()

    def in_turn() -> int:
        return sum(found.in_turn() for _ in range(_TRY_EVERY))

    assert [found.in_turn() for _ in range(2 * _FIRST)] == [True, False] * _FIRST
    for _ in range(8):
        found.note(in_turn=True, seconds=40e-6)
        found.note(in_turn=False, seconds=120e-6)
    found.note(in_turn=True, seconds=0.5)  # once
    assert in_turn() == _TRY_EVERY - 1
    for _ in range(8):
        found.note(in_turn=True, seconds=0.5)
    assert in_turn() == 1
    for _ in range(30):
        found.note(in_turn=True, seconds=40e-6)
    assert in_turn() == _TRY_EVERY - 1


@pytest.fixture
def measured(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Scheduler, list[str]]]:
    """A scheduler that takes the way it knows to be quicker, and how each round was made; tours
    are left only when they hang. Its clock stands but for what the calls add."""
    monkeypatch.setattr("hpstore.runtime.call_tours.STILL_SECONDS", LIMIT_SECONDS)
    made = Scheduler(workers_per_device=2, queue_depth=8, compute_threads=2, threads=True)
    rounds: list[str] = []
    plain = Tours.note

    def note(tours: Tours, kind: str, *, in_turn: bool, seconds: float) -> None:
        rounds.append(f"{kind} {'in turn' if in_turn else 'side by side'}")
        cost = {"look": (3.0, 1.0), "write": (1.0, 3.0)}[kind][in_turn]
        plain(tours, kind, in_turn=in_turn, seconds=cost)

    monkeypatch.setattr(Tours, "note", note)
    yield made, rounds
    released.set()
    made.close()


@pytest.mark.parametrize("begun", [False, True])
def test_which_way_is_quicker_is_known_by_kind(
    measured: tuple[Scheduler, list[str]], *, begun: bool
) -> None:
    """To look something up is quicker in turn, to write and sync is not: neither changes how the
    other is done, whether gathered or only begun."""
    scheduler, rounds = measured
    for _ in range(2 * _TRY_EVERY):
        for kind in ("look", "write"):
            calls: Calls = {"a": lambda: 1, "b": lambda: 2}
            if begun:
                found = scheduler.start(calls, brief=kind)
                assert [f.result(LIMIT_SECONDS) for f in found.values()] == [1, 2]
            else:
                assert scheduler.gather(calls, LIMIT_SECONDS, brief=kind) == {"a": 1, "b": 2}
    until = time.monotonic() + LIMIT_SECONDS
    while len(rounds) < 4 * _TRY_EVERY and time.monotonic() < until:
        time.sleep(0.001)  # the last callback runs after its answer is there
    often = 2 * _TRY_EVERY - 2 - _FIRST
    assert Counter(rounds) == {
        "look in turn": often,
        "look side by side": 2 * _TRY_EVERY - often,
        "write in turn": 2 * _TRY_EVERY - often,
        "write side by side": often,
    }


def test_a_round_that_failed_says_nothing_of_its_way(
    measured: tuple[Scheduler, list[str]], released: threading.Event
) -> None:
    """A refused call returns at once, which does not make its way the quicker one."""
    scheduler, rounds = measured

    def fail() -> None:
        raise DeviceError("broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quicker, "in_turn", lambda _: False)
        found = scheduler.start({"a": lambda: 1, "b": fail}, brief="write")
        assert isinstance(found["b"].exception(LIMIT_SECONDS), DeviceError)
        found["a"].result(LIMIT_SECONDS)
        scheduler.start({"a": lambda: 1, "b": lambda: 2}, brief="look")
        until = time.monotonic() + LIMIT_SECONDS
        while not rounds:
            assert time.monotonic() < until
    assert rounds == ["look side by side"]


def test_a_forked_child_has_its_own_workers(
    scheduler: Scheduler, released: threading.Event
) -> None:
    ask(scheduler, {"a": lambda: 1, "b": lambda: 2})
    child = os.fork()
    if child == 0:  # only os._exit from here: pytest must not go on twice
        code = 1
        try:
            scheduler.after_fork()
            good = in_turn(where(scheduler, "ab"))
            scheduler.close()
            code = 0 if good else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert in_turn(where(scheduler, "ab"))


def test_a_closed_scheduler_makes_no_tour(always: None) -> None:
    """No worker of it is left."""
    closed = Scheduler(workers_per_device=2, queue_depth=8, compute_threads=2, threads=True)
    ask(closed, {"a": lambda: 1, "b": lambda: 2})
    threads = closed._tours.threads
    closed.close()
    assert threads
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(AlreadyClosed):
        ask(closed, {"a": lambda: 1, "b": lambda: 2})
