"""Lanes: one hung device holds no other, queues are bounded, a fork starts afresh."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import AlreadyClosed, DeviceError, DeviceTimeout
from hpstore.runtime.deadline_wait import Patience
from hpstore.runtime.scheduler import Scheduler, outcome

LIMIT_SECONDS = 20.0
SHORT_SECONDS = 0.1


def make(**changes: int) -> Scheduler:
    values = {"workers_per_device": 2, "queue_depth": 8, "compute_threads": 2, **changes}
    return Scheduler(**values, threads=True)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hung calls wait for; set when the test is over, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def scheduler(released: threading.Event) -> Iterator[Scheduler]:
    """Two workers a device, eight calls in a queue."""
    made = make()
    yield made
    released.set()
    made.close()


def until(true: Callable[[], bool]) -> None:
    """Wait for a condition that another thread brings about."""
    pause = threading.Event()
    for _ in range(int(LIMIT_SECONDS / 0.001)):
        if true():
            return
        pause.wait(0.001)
    raise AssertionError("it never came true")


def test_gather_returns_results_and_errors_by_device(scheduler: Scheduler) -> None:
    """One failing device spoils nobody's answer."""

    def fail() -> str:
        raise DeviceError("broken")

    results = scheduler.gather({"a": lambda: "A", "b": fail, "c": lambda: "C"}, LIMIT_SECONDS)
    assert results["a"] == "A"
    assert results["c"] == "C"
    assert isinstance(results["b"], DeviceError)
    assert scheduler.gather({}, 1.0) == {}


def test_calls_of_devices_run_at_the_same_time(scheduler: Scheduler) -> None:
    """Eight calls meet at a barrier; one after the other they never would."""
    barrier = threading.Barrier(8)
    calls = {str(i): lambda: barrier.wait(LIMIT_SECONDS) for i in range(8)}
    results = scheduler.gather(calls, LIMIT_SECONDS)
    assert sorted(str(r) for r in results.values()) == [str(i) for i in range(8)]


def test_a_hung_device_times_out_and_holds_no_other(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """The others' answers are there; the hung one is a DeviceTimeout that names the device."""
    results = scheduler.gather({"hung": released.wait, "well": lambda: True}, SHORT_SECONDS)
    assert results["well"] is True
    error = results["hung"]
    assert isinstance(error, DeviceTimeout)
    assert error.device == "hung"
    assert "0.1 s" in str(error)
    more = scheduler.gather({"well": lambda: 1, "hung": lambda: 2}, LIMIT_SECONDS)
    assert more == {"well": 1, "hung": 2}  # the second worker of the hung device


def test_a_fully_hung_device_still_holds_no_other(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """Both its workers hang: its calls time out, its queue fills, the others go on."""
    for _ in range(2):
        scheduler.submit("hung", released.wait)
    for i in range(20):
        results = scheduler.gather({"hung": lambda: 0, "well": lambda i=i: i}, SHORT_SECONDS / 20)  # type: ignore[misc]
        assert isinstance(results["hung"], DeviceTimeout)
    assert scheduler.gather({"well": lambda: "yes"}, LIMIT_SECONDS) == {"well": "yes"}


def test_the_abandoned_call_goes_on_and_its_worker_comes_back(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """Giving up a wait cancels nothing: the call finishes when the device answers."""
    finished = threading.Event()

    def slow() -> None:
        released.wait()
        finished.set()

    assert isinstance(scheduler.gather({"a": slow}, SHORT_SECONDS)["a"], DeviceTimeout)
    assert not finished.is_set()
    released.set()
    assert finished.wait(LIMIT_SECONDS)
    until(lambda: scheduler.queued("a") == 0)


def test_a_queue_is_bounded(scheduler: Scheduler, released: threading.Event) -> None:
    """The ninth call fails at once, without being run; other devices take calls."""
    ran = []
    for _ in range(8):
        scheduler.submit("a", released.wait)
    assert scheduler.queued("a") == 8
    late = scheduler.submit("a", lambda: ran.append(1))
    assert isinstance(late.exception(0), DeviceTimeout)
    assert "8 calls already wait" in str(late.exception(0))
    assert scheduler.submit("b", lambda: 5).result(LIMIT_SECONDS) == 5
    released.set()
    until(lambda: scheduler.queued("a") == 0)
    assert ran == []


def test_a_call_that_has_answered_takes_no_place_in_the_queue() -> None:
    """With a queue of one, the next call may be made as soon as the first one's future is done."""
    scheduler = make(queue_depth=1, workers_per_device=1)
    seen: list[BaseException | None] = []

    def again(_: Future[int]) -> None:
        following = scheduler.submit("a", lambda: 2)
        following.add_done_callback(lambda future: seen.append(future.exception()))

    try:
        held = threading.Event()
        first = scheduler.submit("a", lambda: int(held.wait(LIMIT_SECONDS)))
        first.add_done_callback(again)
        held.set()
        until(lambda: bool(seen))
    finally:
        scheduler.close()
    assert seen == [None]


def test_workers_are_as_many_as_stated(scheduler: Scheduler, released: threading.Event) -> None:
    """Two calls of a device run at once, the third waits for a worker."""
    running = threading.Semaphore(0)
    third = threading.Event()

    def call() -> None:
        running.release()
        released.wait()

    for _ in range(2):
        scheduler.submit("a", call)
    scheduler.submit("a", third.set)
    assert running.acquire(timeout=LIMIT_SECONDS)
    assert running.acquire(timeout=LIMIT_SECONDS)
    assert not third.is_set()
    released.set()
    assert third.wait(LIMIT_SECONDS)


@pytest.mark.parametrize("threads", [True, False])
def test_a_simulated_crash_reaches_the_caller(threads: bool) -> None:
    """A crash is no error of a device: no handler may keep it for itself."""
    scheduler = Scheduler(workers_per_device=1, queue_depth=8, compute_threads=1, threads=threads)

    def crash() -> None:
        raise SimulatedCrash("now")

    try:
        with pytest.raises(SimulatedCrash):
            scheduler.gather({"a": crash}, LIMIT_SECONDS)
        assert scheduler.gather({"a": lambda: 1}, LIMIT_SECONDS) == {"a": 1}
    finally:
        scheduler.close()


def test_without_threads_calls_run_at_once_on_the_callers_thread() -> None:
    """In the order given, which makes counted operations deterministic."""
    scheduler = Scheduler(workers_per_device=1, queue_depth=1, compute_threads=1, threads=False)
    order: list[tuple[str, int]] = []

    def call(device: str) -> None:
        order.append((device, threading.get_ident()))

    scheduler.gather({d: partial(call, d) for d in "cab"}, LIMIT_SECONDS)
    assert order == [(d, threading.get_ident()) for d in "cab"]
    assert scheduler.compute(lambda: 7).result(0) == 7
    assert scheduler.queued("a") == 0
    scheduler.close()


@pytest.mark.parametrize("threads", [True, False])
def test_compute_carries_errors_in_its_future(threads: bool) -> None:
    """Encoding that fails is told by the future, with threads and without."""
    scheduler = Scheduler(workers_per_device=1, queue_depth=8, compute_threads=1, threads=threads)

    def fail() -> int:
        raise ValueError("bad")

    try:
        future = scheduler.compute(fail)
        assert isinstance(future.exception(LIMIT_SECONDS), ValueError)
        assert scheduler.compute(lambda: 3).result(LIMIT_SECONDS) == 3
    finally:
        scheduler.close()


def test_a_forked_child_starts_its_own_threads(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """Its parent's lane hangs, the child's answers; the parent goes on unharmed."""
    for _ in range(2):
        scheduler.submit("a", released.wait)
    child = os.fork()
    if child == 0:  # only os._exit from here: pytest must not go on twice
        code = 1
        try:
            scheduler.after_fork()
            answers = scheduler.gather({"a": lambda: 5, "b": lambda: 6}, LIMIT_SECONDS)
            computed = scheduler.compute(lambda: 8).result(LIMIT_SECONDS)
            scheduler.close()
            code = 0 if (answers, computed) == ({"a": 5, "b": 6}, 8) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert scheduler.gather({"b": lambda: 9}, LIMIT_SECONDS) == {"b": 9}


def test_close_ends_the_workers() -> None:
    """No thread of a closed scheduler is left; closing twice is fine."""
    scheduler = make()
    scheduler.gather({"a-device": lambda: 1, "b-device": lambda: 2}, LIMIT_SECONDS)
    scheduler.compute(lambda: 3).result(LIMIT_SECONDS)
    scheduler.close()
    scheduler.close()
    names = [t.name for t in threading.enumerate()]
    assert not [n for n in names if n.startswith(("hpstore-a-devi", "hpstore-b-devi"))]


def test_close_waits_no_longer_than_its_limit(
    released: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread hung on a device is left behind, and a log line says so."""
    scheduler = make()
    scheduler.submit("sick", released.wait)
    with caplog.at_level(logging.WARNING, "hpstore.runtime.scheduler"):
        scheduler.close(limit_seconds=0.05)
    assert "sick" in caplog.text


def test_a_forgotten_device_starts_anew(scheduler: Scheduler, released: threading.Event) -> None:
    """A device that left hung and returns gets fresh workers."""
    for _ in range(2):
        scheduler.submit("a", released.wait)
    ended = threading.Event()
    scheduler.forget("a", ended.set)
    assert scheduler.gather({"a": lambda: 1}, LIMIT_SECONDS) == {"a": 1}
    assert not ended.is_set()
    released.set()
    assert ended.wait(LIMIT_SECONDS)


def test_the_end_of_a_device_that_had_no_lane_comes_at_once(scheduler: Scheduler) -> None:
    """Nothing uses it: at_end runs before forget() returns."""
    ended = threading.Event()
    scheduler.forget("never there", ended.set)
    assert ended.is_set()


def test_a_device_that_left_is_ended_after_its_last_call(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """Calls that wait in its queue are still run, then at_end, once."""
    order: list[str] = []
    ended = threading.Event()

    def last() -> None:
        order.append("end")
        ended.set()

    for _ in range(2):
        scheduler.submit("a", released.wait)
    for i in range(3):
        scheduler.submit("a", partial(order.append, f"call {i}"))
    scheduler.forget("a", last)
    released.set()
    assert ended.wait(LIMIT_SECONDS)
    assert sorted(order[:-1]) == ["call 0", "call 1", "call 2"]
    assert order[-1] == "end"


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock by which lanes measure how long their workers have been busy."""
    real, moved = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + moved[0])

    def move(seconds: float) -> None:
        moved[0] += seconds

    return move


def hang(scheduler: Scheduler, count: int, released: threading.Event) -> None:
    """Make `count` workers of device "a" hang, and wait until they do."""
    begun = threading.Semaphore(0)

    def call() -> None:
        begun.release()
        released.wait()

    for _ in range(count):
        scheduler.submit("a", call)
    for _ in range(count):
        assert begun.acquire(timeout=LIMIT_SECONDS)


def test_a_stuck_lane_refuses_at_once(
    scheduler: Scheduler, released: threading.Event, later: Callable[[float], None]
) -> None:
    """All its workers hang for more than 30 s: no call waits for its own deadline any more."""
    hang(scheduler, 2, released)
    assert not scheduler.submit("a", lambda: 1).done()
    later(31.0)
    assert isinstance(scheduler.submit("a", lambda: 1).exception(0), DeviceTimeout)
    assert scheduler.gather({"b": lambda: 2}, LIMIT_SECONDS) == {"b": 2}
    released.set()
    until(lambda: scheduler.queued("a") == 0)
    assert scheduler.gather({"a": lambda: 3}, LIMIT_SECONDS) == {"a": 3}


def test_a_lane_with_a_free_worker_is_not_stuck(
    scheduler: Scheduler, released: threading.Event, later: Callable[[float], None]
) -> None:
    """One hung call of two is no reason to refuse: the other worker answers."""
    hang(scheduler, 1, released)
    later(1000.0)
    for i in range(20):
        assert scheduler.gather({"a": partial(int, i)}, LIMIT_SECONDS) == {"a": i}


def test_outcome_of_a_future() -> None:
    """Not done is a timeout; an error comes back as a value."""
    future: Future[object] = Future()
    assert isinstance(outcome(future, "a", 1.0), DeviceTimeout)
    future.set_exception(DeviceError("x"))
    assert isinstance(outcome(future, "a", 1.0), DeviceError)
    done: Future[int] = Future()
    done.set_result(4)
    assert outcome(done, "a", 1.0) == 4


def lane_threads(name: str) -> int:
    """Threads of a lane that are alive."""
    return sum(t.name.startswith(f"hpstore-{name[:8]}-") for t in threading.enumerate())


def test_a_place_that_hangs_holds_one_call_however_often_it_is_asked(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """PROTOCOL 15. It is refused until the first call has ended; what came of that is handed over,
    and its lane is gone then, as those of the places that answered."""
    late: list[int] = []

    def hang() -> int:
        released.wait()
        return 7

    calls = {"hung": hang, "well": lambda: 1}
    for _ in range(3):
        found = scheduler.gather_once(
            calls, SHORT_SECONDS, lambda _, future: late.append(future.result())
        )
        assert found["well"] == 1
        assert isinstance(found["hung"], DeviceTimeout)
    assert scheduler.queued("hung") == 1
    assert lane_threads("hung") == 2
    until(lambda: lane_threads("well") == 0)
    released.set()
    until(lambda: late == [7] and lane_threads("hung") == 0)
    assert scheduler.gather_once({"hung": lambda: 2}, LIMIT_SECONDS) == {"hung": 2}


def test_a_call_that_meets_the_end_of_its_lane_is_made_on_a_fresh_one(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is given up between the look for its lane and the call: nobody would make it."""
    find = scheduler._lane
    ended = find("a")
    scheduler.forget("a", lambda: None)
    for thread in ended.threads:
        thread.join(LIMIT_SECONDS)
    found = iter([ended])
    monkeypatch.setattr(scheduler, "_lane", lambda device: next(found, None) or find(device))
    assert scheduler.submit("a", lambda: 3).result(LIMIT_SECONDS) == 3


def test_a_closed_scheduler_starts_no_threads() -> None:
    """Who still reads when a pool is closed is told so, and leaves nothing behind."""
    scheduler = make()
    scheduler.close()
    with pytest.raises(AlreadyClosed):
        scheduler.submit("sick", lambda: 1)
    with pytest.raises(AlreadyClosed):
        scheduler.compute(lambda: 1)
    assert lane_threads("sick") == 0


def waits_for(scheduler: Scheduler, released: threading.Event, patience: Patience) -> set[str]:
    """Asks a, b and c, of which c hangs; who was reported as not having answered."""
    calls: dict[str, Callable[[], object]] = {
        "a": lambda: 1,
        "b": lambda: 2,
        "c": lambda: released.wait(LIMIT_SECONDS),
    }
    found = scheduler.gather(calls, LIMIT_SECONDS, patience=patience)
    return {device for device, answer in found.items() if isinstance(answer, DeviceTimeout)}


def test_gather_with_patience_does_without_a_device_and_asks_it_again_when_it_has_answered(
    scheduler: Scheduler, released: threading.Event
) -> None:
    patience = Patience(SHORT_SECONDS, lambda silent: silent <= {"c"})
    assert waits_for(scheduler, released, patience) == {"c"}
    until(lambda: scheduler.late("abc", SHORT_SECONDS) == {"c"})
    queued = scheduler.queued("c")
    assert waits_for(scheduler, released, patience) == {"c"}
    assert scheduler.queued("c") == queued == 1  # it was not asked
    released.set()
    until(lambda: not scheduler.late("abc", 0.0))
    assert waits_for(scheduler, released, patience) == set()


@pytest.mark.parametrize("spared", ["ab", ""])
def test_gather_waits_for_what_cannot_be_spared(
    scheduler: Scheduler, released: threading.Event, spared: str
) -> None:
    """Also a device that is late already is then asked, and waited for."""
    patience = Patience(SHORT_SECONDS, lambda silent: silent <= {"c"})
    assert waits_for(scheduler, released, patience) == {"c"}
    until(lambda: scheduler.late("c", SHORT_SECONDS) == {"c"})
    timer = threading.Timer(5 * SHORT_SECONDS, released.set)
    timer.start()
    needed = Patience(SHORT_SECONDS, lambda silent: silent <= set(spared))
    assert waits_for(scheduler, released, needed) == set()
    timer.join()


def test_devices_that_fail_count_as_those_that_do_not_answer(
    scheduler: Scheduler, released: threading.Event
) -> None:
    """One may be away: with b failing, c is waited for."""

    def fail() -> None:
        raise DeviceError("broken")

    timer = threading.Timer(5 * SHORT_SECONDS, released.set)
    timer.start()
    calls: dict[str, Callable[[], object]] = {
        "a": lambda: 1,
        "b": fail,
        "c": lambda: released.wait(LIMIT_SECONDS),
    }
    one = Patience(SHORT_SECONDS, lambda silent: len(silent) <= 1)
    found = scheduler.gather(calls, LIMIT_SECONDS, patience=one)
    assert found["c"] is True
    timer.join()
