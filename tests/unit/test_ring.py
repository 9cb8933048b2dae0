"""Many reads in one call: right bytes, errors by read, one ring a thread, or none and why."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.buffers import aligned_array
from hpstore.codec import address_of
from hpstore.devices import ring
from hpstore.devices.ring import LATE, Batch, Ring, read_batch
from tests.fault.common import exit_status, forked, needs_ring, poll, within

LIMIT = 20.0
SIZE = 1 << 20
BODY = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)

Spans = list[tuple[int, int]]


pytestmark = needs_ring


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("ring") / "body"
    path.write_bytes(BODY.tobytes())
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


def ask(
    files: list[int], spans: Spans, used: Ring | None = None
) -> tuple[list[npt.NDArray[np.uint8]], list[int]]:
    """What was read for spans (offset, length), and the results."""
    lengths = np.array([length for _, length in spans], np.int64)
    ends = np.cumsum(lengths)
    memory = aligned_array(int(ends[-1]) + 1)
    memory[:] = 0xEE
    arguments = (
        np.array(files, np.int64), np.array([offset for offset, _ in spans], np.int64),
        address_of(memory) + ends - lengths, lengths,
    )  # fmt: skip
    read = read_batch if used is None else used.read
    found = read(*arguments, seconds=20.0, keep=memory)
    assert found is not None
    assert found.late is None
    assert memory[-1] == 0xEE
    bounds = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    return [memory[a:b] for a, b in bounds], found.results.tolist()


def same(got: npt.NDArray[np.uint8], span: tuple[int, int]) -> bool:
    return bool((got == BODY[span[0] : span[0] + span[1]]).all())


@given(
    spans=st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.integers(1, 5000)), min_size=1, max_size=40
    ),
    entries=st.sampled_from([1, 2, 8]),
)
def test_any_reads_are_right_however_small_the_ring(file: int, spans: Spans, entries: int) -> None:
    """More reads than it has entries, and reads over the end of the file, which are short."""
    used = Ring(entries)
    found, results = ask([file] * len(spans), spans, used)
    used.close()
    for (offset, length), got, result in zip(spans, found, results, strict=True):
        assert result == min(length, SIZE - offset)
        assert (got[:result] == BODY[offset : offset + result]).all()


@given(count=st.integers(1, 40), most=st.integers(1, 12))
def test_what_has_landed_is_told_once_while_others_are_in_flight(
    file: int, count: int, most: int
) -> None:
    """Each read is told of when its bytes are there, and never more than `most` are in flight."""
    used, told = Ring(8), list[int]()
    memory = aligned_array(64 * count)
    begun, queue = [0], used._queue

    def count_begun(asked: npt.NDArray[np.void]) -> None:
        begun[0] += len(asked)
        ended = int((found_so_far[0] != LATE).sum()) if found_so_far else 0
        assert begun[0] - ended <= most
        queue(asked)

    found_so_far, collect = list[npt.NDArray[np.int64]](), used._collect

    def look(results: npt.NDArray[np.int64], times: None) -> npt.NDArray[np.int64]:
        found_so_far[:] = [results]
        return collect(results, times)

    def landed(numbers: npt.NDArray[np.int64], results: npt.NDArray[np.int64]) -> None:
        for number in numbers.tolist():
            assert results[number] == 64
            assert (memory[64 * number : 64 * number + 64] == BODY[number : number + 64]).all()
        told.extend(numbers.tolist())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(used, "_queue", count_begun)
        patch.setattr(used, "_collect", look)
        found = used.read(
            np.full(count, file), np.arange(count), address_of(memory) + 64 * np.arange(count),
            np.full(count, 64), seconds=20.0, keep=memory, most=most, landed=landed,
        )  # fmt: skip
    used.close()
    assert found.late is None
    assert sorted(told) == list(range(count))


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
        np.array([silent[0], *[file] * 9]), np.zeros(10, np.int64), at + 64 * np.arange(10),
        np.full(10, 64), seconds=0.2, keep=kept, landed=landed,
    )  # fmt: skip
    assert found.late is not None
    assert sorted(told) == list(range(1, 10))
    os.write(silent[1], b"x" * 64)
    found.late.result(20)


@pytest.mark.parametrize("kind", [OSError, TimeoutError])
def test_an_error_of_who_is_told_is_theirs_and_no_fault_of_the_ring(
    file: int, silent: tuple[int, int], monkeypatch: pytest.MonkeyPatch, kind: type[OSError]
) -> None:
    """PROTOCOL 21: it goes up, the memory lives until nothing is in flight, rings stay in use."""
    monkeypatch.setattr(ring, "_problem", [])
    kept, asked = Kept(), []
    alive, at = weakref.ref(kept), address_of(kept.memory)

    def landed(*_: object) -> None:
        asked.append(1)
        raise kind(5, "mine")  # a new one: its traceback holds on to what is kept

    with pytest.raises(OSError, match="mine"):
        Ring(4).read(
            np.array([silent[0], file]), np.zeros(2, np.int64), np.array([at, at + 64]),
            np.full(2, 64), seconds=20.0, keep=kept, landed=landed,
        )  # fmt: skip
    assert len(asked) == 1
    assert ring.problem() == ""
    del kept
    gc.collect()
    assert alive() is not None
    os.write(silent[1], b"x" * 64)
    poll(20, lambda: alive() is None)


def test_one_ring_serves_batch_after_batch(file: int) -> None:
    """Head and tail go round many times."""
    used = Ring(4)
    for batch in range(50):
        spans = [(batch * 100 + i, 64) for i in range(7)]
        found, results = ask([file] * 7, spans, used)
        assert results == [64] * 7
        assert all(
            (got == BODY[at : at + 64]).all() for got, (at, _) in zip(found, spans, strict=True)
        )
    used.close()


def test_a_read_that_fails_has_its_errors_number_and_others_are_right(file: int) -> None:
    found, results = ask([file, 10_000, file], [(0, 100), (0, 100), (200, 100)])
    assert results == [100, -errno.EBADF, 100]
    assert (found[2] == BODY[200:300]).all()


def test_every_thread_has_its_own(file: int) -> None:
    """And a forked child makes one anew, whatever the parent's thread had."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            spans = [(int(offset), 512) for offset in rng.integers(0, SIZE - 512, 20)]
            found, _ = ask([file] * 20, spans)
            if not all(map(same, found, spans)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    ask([file], [(0, 10)])

    def child() -> None:
        found, results = ask([file], [(77, 10)])
        assert results == [10]
        assert (found[0] == BODY[77:87]).all()

    with forked(child) as pid:
        assert exit_status(pid, 20) == 0
    assert ask([file], [(5, 10)])[1] == [10]


def test_where_there_is_none_it_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that forbids it. No exception: reads are made one by one."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(ring, "_problem", [])
    monkeypatch.setattr(ring, "_own", ring._Own())
    monkeypatch.setattr(Ring, "_call", refuse)
    nothing = np.zeros(0, np.int64)
    with caplog.at_level(logging.WARNING):
        assert read_batch(nothing, nothing, nothing, nothing, seconds=1.0, keep=None) is None
        assert read_batch(nothing, nothing, nothing, nothing, seconds=1.0, keep=None) is None
    assert ring.problem() == "io_uring: Operation not permitted"
    assert len(caplog.records) == 1


def test_a_ring_that_fails_is_used_no_more_and_nothing_stays_in_flight(
    file: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PROTOCOL 21: what was in flight is waited for before anybody may use the memory. What had
    ended before is told of."""
    used = Ring(8)
    plain = used._call
    calls: list[int] = []
    told: list[int] = []

    def fail_second(number: int, *arguments: object) -> int:
        calls.append(number)
        if len(calls) == 2:
            raise OSError(errno.EBADF, "gone")
        return plain(number, *arguments)

    monkeypatch.setattr(ring, "_problem", [])
    monkeypatch.setattr(used, "_call", fail_second)
    memory = aligned_array(20 * 64)
    places = np.arange(20) * 64
    with caplog.at_level(logging.WARNING):
        found = used.read(
            np.full(20, file), places, address_of(memory) + places, np.full(20, 64), seconds=20.0,
            keep=memory, landed=lambda numbers, _: told.extend(numbers.tolist()),
        )  # fmt: skip
    assert found.late is not None
    assert sorted(told) == np.flatnonzero(found.results == 64).tolist()
    assert told
    found.late.result(20)
    assert not used._in_flight()
    assert set(found.results[found.results != 64].tolist()) == {LATE}
    assert ring.problem() == "io_uring: gone"


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


def wait_for_pipe(silent: tuple[int, int], file: int, used: Ring, kept: Kept) -> Batch:
    """A read that does not end, and one that does."""
    at = address_of(kept.memory)
    return used.read(
        np.array([silent[0], file]), np.zeros(2, np.int64), np.array([at, at + 64]),
        np.full(2, 64), seconds=0.2, keep=kept,
    )  # fmt: skip


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


def test_a_file_that_is_read_directly(tmp_path: Path) -> None:
    """O_DIRECT: aligned reads, as of columns."""
    path = tmp_path / "direct"
    path.write_bytes(BODY.tobytes())
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("no O_DIRECT here")
    spans = [(at * 4096, 4096) for at in (5, 0, 99, 255)]
    found, results = ask([opened] * 4, spans)
    os.close(opened)
    assert results == [4096] * 4
    assert all(
        (got == BODY[at : at + 4096]).all() for got, (at, _) in zip(found, spans, strict=True)
    )


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
        np.array([*[file] * count, silent[0]]), np.zeros(count + 1, np.int64),
        address_of(memory) + 64 * np.arange(count + 1), np.full(count + 1, 64), seconds=20.0,
        keep=memory, timed=True,
    )  # fmt: skip
    assert found.results.tolist() == [64] * 16
    assert found.seconds is not None
    assert np.argmax(found.seconds) == 15
    assert (waits[0], waits[-1]) == (8, 1)
    assert found.seconds[-1] > found.seconds.min() > 0


@given(entries=st.sampled_from([1, 2, 8, 64]), count=st.integers(1, 40))
def test_timing_changes_no_bytes(file: int, entries: int, count: int) -> None:
    """However small the ring; every read has a time."""
    memory = aligned_array(count * 64)
    used = Ring(entries)
    found = used.read(
        np.full(count, file), 64 * np.arange(count), address_of(memory) + 64 * np.arange(count),
        np.full(count, 64), seconds=20.0, keep=memory, timed=True,
    )  # fmt: skip
    used.close()
    assert found.results.tolist() == [64] * count
    assert (memory[: 64 * count] == BODY[: 64 * count]).all()
    assert found.seconds is not None
    assert (found.seconds >= 0).all()
    assert (found.seconds < 20).all()


def test_a_hopeless_batch_is_given_up_before_its_deadline(
    file: int, silent: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked after a silent while, with what has come so far; it is told nothing that was not so."""
    monkeypatch.setattr(ring, "_SILENT_SECONDS", 0.01)
    seen: list[list[int]] = []

    def hopeless(results: npt.NDArray[np.int64]) -> bool:
        seen.append(results.tolist())
        return len(seen) == 3

    memory = aligned_array(128)
    found = Ring(4).read(
        np.array([silent[0], file]), np.zeros(2, np.int64), address_of(memory) + np.array([0, 64]),
        np.full(2, 64), seconds=1000.0, keep=memory, hopeless=hopeless,
    )  # fmt: skip
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

    monkeypatch.setattr(ring, "_SILENT_SECONDS", 0.02)
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
    monkeypatch.setattr(ring, "_SILENT_SECONDS", 0.01)
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
    assert found.results.tolist() == [LATE, LATE]
    assert found.late is not None
    assert found.late.done()  # nothing was taken


def test_a_ring_closes_its_descriptor_once(tmp_path: Path) -> None:
    """What has its number after close() is another's, also when the ring is dropped."""
    used = Ring(2)
    number = used._fd
    used.close()
    other = os.open(tmp_path, os.O_RDONLY)
    if other != number:
        assert fcntl.fcntl(other, fcntl.F_DUPFD, number) == number  # the lowest free one from there
    used.close()
    del used
    gc.collect()
    os.fstat(number)
    for opened in {other, number}:
        os.close(opened)
