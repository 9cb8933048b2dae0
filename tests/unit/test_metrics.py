"""Counters count from all threads, and show what the process was refused."""

from __future__ import annotations

import threading

import pytest

from hpstore.errors import ThreadsExhausted
from hpstore.runtime.clock import HybridCounter, SystemClock
from hpstore.runtime.metrics import Metrics
from hpstore.runtime.threads import refused_total, start_thread
from hpstore.testing import ManualClock


def test_counts_from_many_threads_are_all_there() -> None:
    """8 threads add 1000 each; none is lost."""
    metrics = Metrics()

    def work() -> None:
        for _ in range(1000):
            metrics.count("read_total")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.value("read_total") == 8000


def test_count_returns_the_new_value() -> None:
    """A caller that acts on the n-th event needs no second look."""
    metrics = Metrics()
    assert [metrics.count("n"), metrics.count("n", 5), metrics.value("n")] == [1, 6, 6]
    assert metrics.value("never") == 0
    assert "never" not in metrics.snapshot()


def test_snapshot_is_a_copy() -> None:
    """Later counts do not change a snapshot that was taken."""
    metrics = Metrics()
    metrics.count("a")
    taken = metrics.snapshot()
    metrics.count("a")
    assert taken["a"] == 1


def test_refused_threads_show_in_every_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that works with fewer threads than it wants says so."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = refused_total()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ThreadsExhausted):
        start_thread(threading.Thread(target=print))
    assert Metrics().snapshot() == {"threads_refused_total": before + 1}


def test_counter_of_versions_never_goes_back() -> None:
    """max(milliseconds, highest seen + 1), also when the clock stands or steps back."""
    clock = ManualClock(wall_ms=1000)
    counter = HybridCounter(clock)
    assert [counter.next(), counter.next()] == [1000, 1001]
    clock.advance(1.0)
    assert counter.next() == 2000
    assert counter.next(seen=5000) == 5001
    assert counter.next() == 5002
    backwards = HybridCounter(ManualClock(wall_ms=0))
    assert backwards.next(seen=7) == 8


def test_counter_gives_every_thread_another_value() -> None:
    """No two of 4000 versions share a counter."""
    counter, found, lock = HybridCounter(ManualClock()), set(), threading.Lock()

    def work() -> None:
        mine = [counter.next() for _ in range(1000)]
        with lock:
            found.update(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4000


def test_system_clock_reads_the_machine() -> None:
    """Wall time is after 2020; monotonic time does not go back; waiting 0 returns."""
    clock = SystemClock()
    assert clock.wall_ms() > 1_577_836_800_000
    before = clock.monotonic()
    clock.wait(-1.0)
    assert clock.monotonic() >= before
