"""Counters count from all threads; histograms answer quantiles within their bucket."""

from __future__ import annotations

import threading

import pytest

from hpstore.runtime.clock import HybridCounter, SystemClock
from hpstore.runtime.metrics import Histogram, Metrics
from hpstore.testing import ManualClock


def test_counts_from_many_threads_are_all_there() -> None:
    """8 threads add 1000 each; none is lost."""
    metrics = Metrics()

    def work() -> None:
        for _ in range(1000):
            metrics.count("read_total")
            metrics.observe("read_seconds", 0.001)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.value("read_total") == 8000
    assert metrics.snapshot()["read_seconds_count"] == 8000


def test_count_returns_the_new_value() -> None:
    """A caller that acts on the n-th event needs no second look."""
    metrics = Metrics()
    assert [metrics.count("n"), metrics.count("n", 5), metrics.value("n")] == [1, 6, 6]
    assert metrics.value("never") == 0
    assert "never" not in metrics.snapshot()


@pytest.mark.parametrize("seconds", [1e-6, 0.001, 0.5, 1.0, 30.0])
def test_quantile_is_the_upper_edge_of_a_narrow_bucket(seconds: float) -> None:
    """Above the value, by no more than a quarter power of two."""
    histogram = Histogram()
    histogram.add(seconds)
    assert seconds < histogram.quantile(0.5) <= seconds * 2**0.25 * (1 + 1e-9)


def test_quantiles_tell_the_slow_tail_from_the_rest() -> None:
    """98 fast and 2 slow: p50 is fast, p99 is slow."""
    histogram = Histogram()
    for _ in range(98):
        histogram.add(0.001)
    for _ in range(2):
        histogram.add(1.0)
    assert histogram.quantile(0.5) < 0.002
    assert histogram.quantile(0.98) < 0.002
    assert histogram.quantile(0.99) >= 1.0
    assert histogram.total == 100
    assert histogram.sum_seconds == pytest.approx(2.098)


def test_empty_and_zero_observations_are_no_error() -> None:
    """An empty histogram answers 0; a duration of 0 is counted."""
    histogram = Histogram()
    assert histogram.quantile(0.5) == 0.0
    histogram.add(0.0)
    assert 0 < histogram.quantile(0.5) < 1e-8


def test_snapshot_is_a_copy_with_p50_and_p99() -> None:
    """Later counts do not change a snapshot that was taken."""
    metrics = Metrics()
    metrics.count("a")
    metrics.observe("b", 0.25)
    taken = metrics.snapshot()
    metrics.count("a")
    assert taken["a"] == 1
    assert taken["b_p50"] == taken["b_p99"] >= 0.25


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
