"""Reads of a batch that do not end: others are there, memory lives on, and patience has an end."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hpstore.codec import address_of
from hpstore.devices import io_uring
from hpstore.devices.io_uring import LATE, UNTRIED, Ring, RingBatch
from hpstore.runtime.buffers import aligned_array
from tests.fault.common import needs_ring, poll, within
from tests.unit.ring_cases import BODY, open_body

LIMIT = 20.0
pytestmark = needs_ring


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with open_body(tmp_path_factory.mktemp("ring")) as opened:
        yield opened


class Kept:
    """Something that lives as long as somebody holds on to it."""

    def __init__(self) -> None:
        self.memory = aligned_array(4096)


@pytest.fixture
def silent() -> Iterator[tuple[int, int]]:
    """A pipe that has nothing to read, and its other end."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def wait_for_pipe(silent: tuple[int, int], file: int, used: Ring, kept: Kept) -> RingBatch:
    """A read that does not end, and one that does."""
    at = address_of(kept.memory)
    return used.read(
        np.array([silent[0], file]),
        np.zeros(2, np.int64),
        np.array([at, at + 64]),
        np.full(2, 64),
        seconds=0.2,
        keep=kept,
    )


def test_what_has_landed_is_told_although_others_never_do(
    file: int, silent: tuple[int, int]
) -> None:
    """PROTOCOL 21: of a batch that is given up all that has ended is told, and nothing else."""
    kept, told = Kept(), list[int]()
    at = address_of(kept.memory)

    def landed(numbers: npt.NDArray[np.int64], results: npt.NDArray[np.int64]) -> None:
        assert (results[numbers] == 64).all()
        told.extend(numbers.tolist())

    found = Ring(4).read(
        np.array([silent[0], *[file] * 9]),
        np.zeros(10, np.int64),
        at + 64 * np.arange(10),
        np.full(10, 64),
        seconds=0.2,
        keep=kept,
        landed=landed,
    )
    assert found.late is not None
    assert sorted(told) == list(range(1, 10))
    os.write(silent[1], b"x" * 64)
    found.late.result(20)


def test_a_read_that_was_never_sent_is_not_late(file: int, silent: tuple[int, int]) -> None:
    """hang_in_large_batch: a full ring of silent reads keeps the others from being sent."""
    kept = Kept()
    at = address_of(kept.memory)
    found = Ring(4).read(
        np.array([*[silent[0]] * 4, *[file] * 6]),
        np.zeros(10, np.int64),
        at + 64 * np.arange(10),
        np.full(10, 64),
        seconds=0.2,
        keep=kept,
    )
    assert found.results.tolist() == [LATE] * 4 + [UNTRIED] * 6
    assert found.late is not None
    assert not found.late.done()
    os.write(silent[1], b"x" * 256)
    found.late.result(20)


@pytest.mark.parametrize("kind", [OSError, TimeoutError])
def test_an_error_of_who_is_told_is_theirs_and_no_fault_of_the_ring(
    file: int, silent: tuple[int, int], monkeypatch: pytest.MonkeyPatch, kind: type[OSError]
) -> None:
    """PROTOCOL 21: it goes up, the memory lives until nothing is in flight, rings stay in use."""
    monkeypatch.setattr(io_uring, "_problem", [])
    kept, asked = Kept(), []
    alive, at = weakref.ref(kept), address_of(kept.memory)

    def landed(*_: object) -> None:
        asked.append(1)
        raise kind(5, "mine")  # a new one: its traceback holds on to what is kept

    with pytest.raises(OSError, match="mine"):
        Ring(4).read(
            np.array([silent[0], file]),
            np.zeros(2, np.int64),
            np.array([at, at + 64]),
            np.full(2, 64),
            seconds=20.0,
            keep=kept,
            landed=landed,
        )
    assert len(asked) == 1
    assert io_uring.problem() == ""
    del kept
    gc.collect()
    assert alive() is not None
    os.write(silent[1], b"x" * 64)
    poll(20, lambda: alive() is None)


def test_a_read_that_does_not_end_is_late_and_keeps_its_memory(
    file: int, silent: tuple[int, int]
) -> None:
    """PROTOCOL 21: the others are there in time; the memory lives until the last has ended."""
    kept = Kept()
    alive, memory = weakref.ref(kept), kept.memory
    found = wait_for_pipe(silent, file, Ring(4), kept)
    assert found.results.tolist() == [LATE, 64]
    assert (memory[64:128] == BODY[:64]).all()
    del kept
    gc.collect()
    assert found.late is not None
    assert not found.late.done()
    assert alive() is not None
    os.write(silent[1], b"x" * 64)
    found.late.result(20)
    assert memory[:64].tobytes() == b"x" * 64
    poll(20, lambda: alive() is None)


def test_an_interrupt_in_the_midst_of_it_keeps_the_memory_too(
    file: int, silent: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C on the thread that reads: it goes on at once, the kernel may still write."""
    used, kept = Ring(4), Kept()

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(used, "_collect", interrupt)
    alive = weakref.ref(kept)
    with pytest.raises(KeyboardInterrupt):
        wait_for_pipe(silent, file, used, kept)
    del kept
    gc.collect()
    assert alive() is not None
    os.write(silent[1], b"x" * 64)
    poll(20, lambda: alive() is None)


def test_a_timed_batch_tells_slow_reads_from_fast_ones(
    file: int, silent: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ended before the first look is not as late as what began to end after it."""
    memory, count, used = aligned_array(16 * 64), 15, Ring(16)
    collect, looks = used._collect, []
    enter, waits = used._enter, []

    def wait(submit: int, least: int, seconds: float) -> None:
        waits.append(least)
        enter(submit, least, seconds)

    def look(*arguments: Any) -> npt.NDArray[np.int64]:  # Any: passed on
        looks.append(collect(*arguments))
        if len(looks) == 1:
            os.write(silent[1], b"x" * 64)
        return looks[-1]

    monkeypatch.setattr(used, "_enter", wait)
    monkeypatch.setattr(used, "_collect", look)
    found = used.read(
        np.array([*[file] * count, silent[0]]),
        np.zeros(count + 1, np.int64),
        address_of(memory) + 64 * np.arange(count + 1),
        np.full(count + 1, 64),
        seconds=20.0,
        keep=memory,
        timed=True,
    )
    assert found.results.tolist() == [64] * 16
    assert found.seconds is not None
    assert np.argmax(found.seconds) == 15
    assert (waits[0], waits[-1]) == (8, 1)
    assert found.seconds[-1] > found.seconds.min() > 0


def test_a_hopeless_batch_is_given_up_before_its_deadline(
    file: int, silent: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked after a silent while, with what has come so far; it is told nothing that was not so."""
    monkeypatch.setattr(io_uring, "_SILENT_SECONDS", 0.01)
    seen: list[list[int]] = []

    def hopeless(results: npt.NDArray[np.int64]) -> bool:
        seen.append(results.tolist())
        return len(seen) == 3

    memory = aligned_array(128)
    found = Ring(4).read(
        np.array([silent[0], file]),
        np.zeros(2, np.int64),
        address_of(memory) + np.array([0, 64]),
        np.full(2, 64),
        seconds=1000.0,
        keep=memory,
        hopeless=hopeless,
    )
    assert seen == [[LATE, 64]] * 3
    assert found.results.tolist() == [LATE, 64]
    assert found.late is not None
    os.write(silent[1], b"x" * 64)
    found.late.result(20)


def test_signals_do_not_lengthen_the_patience_with_a_read_that_hangs(
    file: int, silent: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profiler's timer wakes the thread more often than the patience lasts: it is given up."""
    used, kept = Ring(4), Kept()
    calls: list[int] = []
    plain = used._call

    def interrupted(number: int, *arguments: Any) -> int:  # Any: passed on
        calls.append(number)
        if len(calls) % 2:
            return plain(number, *arguments)
        threading.Event().wait(0.01)
        raise InterruptedError(errno.EINTR, "a signal")

    monkeypatch.setattr(io_uring, "_SILENT_SECONDS", 0.02)
    monkeypatch.setattr(used, "_call", interrupted)
    found = within(LIMIT, lambda: wait_for_pipe(silent, file, used, kept))
    assert found.results.tolist() == [LATE, 64]
    assert len(calls) > 5
    os.write(silent[1], b"x" * 64)
    assert found.late is not None
    found.late.result(LIMIT)


def test_time_in_which_the_process_was_stopped_is_no_silence(
    file: int, silent: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock is an hour later: a step counts for what it may take at most."""
    used, kept, hours = Ring(4), Kept(), itertools.count()
    monkeypatch.setattr(io_uring, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(time, "monotonic", lambda: 3600.0 * next(hours))
    enter, entered = used._enter, []

    def count(submit: int, least: int, seconds: float) -> None:
        entered.append(seconds)
        if len(entered) == 5:
            os.write(silent[1], b"x" * 64)
        enter(submit, least, seconds)

    monkeypatch.setattr(used, "_enter", count)
    found = wait_for_pipe(silent, file, used, kept)
    assert found.late is None
    assert found.results.tolist() == [64, 64]


def test_a_kernel_that_stays_short_of_memory_is_waited_for_only_so_long(
    file: int, silent: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGAIN without end: given up, so that the reads are made in another way."""
    used, kept = Ring(4), Kept()

    def short(number: int, *arguments: Any) -> int:  # Any: passed on
        raise BlockingIOError(errno.EAGAIN, "no memory")

    monkeypatch.setattr(used, "_call", short)
    found = within(LIMIT, lambda: wait_for_pipe(silent, file, used, kept))
    assert found.results.tolist() == [UNTRIED, UNTRIED]
    assert found.late is not None
    assert found.late.done()  # nothing was taken
