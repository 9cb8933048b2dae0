"""Byte budgets: first come first served, never above the limit, nobody left waiting."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hpstore.errors import BudgetExceeded
from hpstore.runtime import budget
from hpstore.runtime.budget import ByteBudget, available_bytes
from hpstore.runtime.open_file_limit import exhausted_hint
from hpstore.runtime.rights import rights_hint

LIMIT_SECONDS = 20.0


def until(true: Callable[[], bool]) -> None:
    """Wait for a condition that another thread brings about."""
    pause = threading.Event()
    for _ in range(int(LIMIT_SECONDS / 0.001)):
        if true():
            return
        pause.wait(0.001)
    raise AssertionError("it never came true")


@contextmanager
def waiter(budget: ByteBudget, nbytes: int, done: queue.Queue[object]) -> Iterator[None]:
    """A thread that acquires `nbytes` and reports; the block begins when it is in the queue."""
    before = budget.waited_total

    def work() -> None:
        try:
            budget.acquire(nbytes, LIMIT_SECONDS)
            done.put(nbytes)
        except BudgetExceeded as error:
            done.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    until(lambda: budget.waited_total == before + 1)
    yield
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()


def test_what_fits_is_leased_at_once() -> None:
    """Up to the limit exactly; the peak is remembered, nobody waited."""
    budget = ByteBudget(10)
    budget.acquire(4)
    budget.acquire(6, 0.0)
    assert budget.used_bytes == 10
    budget.release(4)
    assert budget.used_bytes == 6
    assert (budget.peak_bytes, budget.waited_total) == (10, 0)


def test_what_does_not_fit_in_time_is_refused() -> None:
    """BudgetExceeded, nothing leased, and the place in the queue is given up."""
    budget = ByteBudget(10)
    budget.acquire(4)
    with pytest.raises(BudgetExceeded, match="7 B of the budget of 10 B"):
        budget.acquire(7, 0.0)
    with pytest.raises(BudgetExceeded):
        budget.acquire(7, 0.01)
    assert budget.used_bytes == 4
    budget.acquire(6, 0.0)


def test_requests_are_served_in_order() -> None:
    """A small request that would fit does not overtake the large one before it."""
    budget, done = ByteBudget(10), queue.Queue[object]()
    budget.acquire(5)
    with waiter(budget, 8, done), waiter(budget, 1, done):
        with pytest.raises(BudgetExceeded):
            budget.acquire(1, 0.0)
        assert done.empty()
        budget.release(5)
        assert {done.get(timeout=LIMIT_SECONDS), done.get(timeout=LIMIT_SECONDS)} == {8, 1}
    assert budget.used_bytes == 9
    assert budget.peak_bytes == 9


def test_a_request_that_gives_up_lets_the_next_one_through() -> None:
    """The head of the queue times out; who stood behind it is woken."""
    budget, done = ByteBudget(10), queue.Queue[object]()
    budget.acquire(5)
    head = threading.Thread(target=lambda: _swallow(budget, 8, 0.2), daemon=True)
    head.start()
    until(lambda: budget.waited_total == 1)
    with waiter(budget, 1, done):
        assert done.get(timeout=LIMIT_SECONDS) == 1
    head.join(LIMIT_SECONDS)
    assert budget.used_bytes == 6


def _swallow(budget: ByteBudget, nbytes: int, seconds: float) -> None:
    with pytest.raises(BudgetExceeded):
        budget.acquire(nbytes, seconds)


def test_more_than_the_budget_is_admitted_alone() -> None:
    """A request above the limit waits for everybody else, then runs; nothing joins it."""
    budget, done = ByteBudget(10), queue.Queue[object]()
    budget.acquire(1)
    with waiter(budget, 25, done):
        assert done.empty()
        budget.release(1)
        assert done.get(timeout=LIMIT_SECONDS) == 25
    with pytest.raises(BudgetExceeded):
        budget.acquire(1, 0.0)
    budget.release(25)
    budget.acquire(1, 0.0)


def test_close_wakes_and_refuses_all_who_wait() -> None:
    """Two waiters and all later ones get BudgetExceeded."""
    budget, done = ByteBudget(10), queue.Queue[object]()
    budget.acquire(10)
    with waiter(budget, 1, done), waiter(budget, 2, done):
        budget.close()
        for _ in range(2):
            assert isinstance(done.get(timeout=LIMIT_SECONDS), BudgetExceeded)
    with pytest.raises(BudgetExceeded):
        budget.acquire(1, 0.0)
    assert budget.used_bytes == 10


def test_a_lease_is_given_back_when_its_block_fails() -> None:
    """The context manager releases on every way out."""
    budget = ByteBudget(10)

    def work() -> None:
        with budget.lease(10):
            assert budget.used_bytes == 10
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert budget.used_bytes == 0


def test_a_waiter_that_is_interrupted_leaves_the_queue() -> None:
    """Ctrl-C during a wait must not make everybody after it wait for ever."""

    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    budget = ByteBudget(10)
    budget.acquire(10)

    def strike() -> None:
        until(lambda: budget.waited_total == 1)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=strike)
    thread.start()
    try:
        with pytest.raises(Interrupted):
            budget.acquire(1, LIMIT_SECONDS)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    budget.release(10)
    budget.acquire(1, 0.5)


def test_many_threads_never_pass_the_limit() -> None:
    """16 threads lease and return; the sum in use is checked by the budget's own peak."""
    budget = ByteBudget(100)

    def work(step: int) -> None:
        for i in range(50):
            with budget.lease(1 + (7 * step + i) % 60, LIMIT_SECONDS):
                pass

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < budget.peak_bytes <= 100
    assert budget.used_bytes == 0


@pytest.mark.parametrize(
    ("lines", "limit", "usage"),
    [
        (["0::/job/step"], "/sys/fs/cgroup/job/memory.max", "/sys/fs/cgroup/job/memory.current"),
        (
            ["4:cpu,memory:/job/step", "0::/"],
            "/sys/fs/cgroup/memory/job/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/job/memory.usage_in_bytes",
        ),
    ],
)
def test_limit_of_a_group_above_our_own_counts(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], limit: str, usage: str
) -> None:
    """A batch job limits its steps; what the node has free is no measure there."""
    files = {
        "/proc/self/cgroup": lines,
        limit: ["800000"],
        usage: ["300000"],
        "/proc/meminfo": ["MemAvailable: 1000 kB"],
    }
    monkeypatch.setattr(budget, "_lines", lambda path: files.get(path, []))
    assert available_bytes() == 500_000
    files[limit] = ["max"]
    assert available_bytes() == 1000 * 1024


def test_available_memory_is_the_nodes_or_the_tightest_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of both versions of cgroups, at every level; "max" and no files are no limit."""
    root = "/sys/fs/cgroup"
    files = {"/proc/self/cgroup": ["4:memory:/", "0::/"], "/proc/meminfo": ["MemAvailable: 9 kB"]}
    monkeypatch.setattr(budget, "_lines", lambda path: files.get(path, []))
    assert available_bytes() == 9 * 1024  # no such files
    for first, second, wanted in (
        (("8000", "4000"), ("max", "1"), 4000),
        (("8000", "4000"), ("7000", "4000"), 3000),
        (("9223372036854771712", "5"), ("1000", "4000"), 0),  # over its limit
    ):
        files[f"{root}/memory.max"], files[f"{root}/memory.current"] = [first[0]], [first[1]]
        files[f"{root}/memory/memory.limit_in_bytes"] = [second[0]]
        files[f"{root}/memory/memory.usage_in_bytes"] = [second[1]]
        assert available_bytes() == wanted


def test_memory_that_does_not_become_free_says_nothing_of_what_was_written_before() -> None:
    """It is one batch's of many, by a part that does not know of the others."""
    made = ByteBudget(10)
    made.acquire(10)
    with pytest.raises(BudgetExceeded) as said:
        made.acquire(1, timeout_seconds=0.0)
    assert "nothing" not in str(said.value)


@pytest.mark.parametrize("hint", [exhausted_hint(), rights_hint("/nowhere")])
def test_what_a_process_lacks_says_nothing_of_what_is_stored(hint: str) -> None:
    """It takes the place of errors which say that units are lost: some may be, besides."""
    assert "nothing is lost" not in hint.lower()
