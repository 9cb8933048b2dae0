"""Many reads in one call: right bytes, errors by read, one ring a thread, or none and why."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.codec import address_of
from hpstore.devices import io_uring
from hpstore.devices.io_uring import LATE, UNTRIED, Ring, read_batch
from hpstore.runtime.buffers import aligned_array
from tests.fault.common import exit_status, forked, needs_ring
from tests.unit.ring_cases import BODY, SIZE, open_body

Spans = list[tuple[int, int]]
pytestmark = needs_ring


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with open_body(tmp_path_factory.mktemp("ring")) as opened:
        yield opened


def ask(
    files: list[int], spans: Spans, used: Ring | None = None
) -> tuple[list[npt.NDArray[np.uint8]], list[int]]:
    """What was read for spans (offset, length), and the results."""
    lengths = np.array([length for _, length in spans], np.int64)
    ends = np.cumsum(lengths)
    memory = aligned_array(int(ends[-1]) + 1)
    memory[:] = 0xEE
    arguments = (
        np.array(files, np.int64),
        np.array([offset for offset, _ in spans], np.int64),
        address_of(memory) + ends - lengths,
        lengths,
    )
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
            np.full(count, file),
            np.arange(count),
            address_of(memory) + 64 * np.arange(count),
            np.full(count, 64),
            seconds=20.0,
            keep=memory,
            most=most,
            landed=landed,
        )
    used.close()
    assert found.late is None
    assert sorted(told) == list(range(count))


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

    monkeypatch.setattr(io_uring, "_problem", [])
    monkeypatch.setattr(io_uring, "_own", io_uring._Own())
    monkeypatch.setattr(Ring, "_call", refuse)
    nothing = np.zeros(0, np.int64)
    with caplog.at_level(logging.WARNING):
        assert read_batch(nothing, nothing, nothing, nothing, seconds=1.0, keep=None) is None
        assert read_batch(nothing, nothing, nothing, nothing, seconds=1.0, keep=None) is None
    assert io_uring.problem() == "io_uring: Operation not permitted"
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

    monkeypatch.setattr(io_uring, "_problem", [])
    monkeypatch.setattr(used, "_call", fail_second)
    memory = aligned_array(20 * 64)
    places = np.arange(20) * 64
    with caplog.at_level(logging.WARNING):
        found = used.read(
            np.full(20, file),
            places,
            address_of(memory) + places,
            np.full(20, 64),
            seconds=20.0,
            keep=memory,
            landed=lambda numbers, _: told.extend(numbers.tolist()),
        )
    assert found.late is not None
    assert sorted(told) == np.flatnonzero(found.results == 64).tolist()
    assert told
    found.late.result(20)
    assert not used._in_flight()
    rest = set(range(20)) - set(told)  # how many of the first eight had ended is the kernel's
    late = set(np.flatnonzero(found.results == LATE).tolist())
    assert late <= set(range(8))
    assert (
        set(np.flatnonzero(found.results == UNTRIED).tolist()) == rest - late >= set(range(8, 20))
    )
    assert io_uring.problem() == "io_uring: gone"


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


@given(entries=st.sampled_from([1, 2, 8, 64]), count=st.integers(1, 40))
def test_timing_changes_no_bytes(file: int, entries: int, count: int) -> None:
    """However small the ring; every read has a time."""
    memory = aligned_array(count * 64)
    used = Ring(entries)
    found = used.read(
        np.full(count, file),
        64 * np.arange(count),
        address_of(memory) + 64 * np.arange(count),
        np.full(count, 64),
        seconds=20.0,
        keep=memory,
        timed=True,
    )
    used.close()
    assert found.results.tolist() == [64] * count
    assert (memory[: 64 * count] == BODY[: 64 * count]).all()
    assert found.seconds is not None
    assert (found.seconds >= 0).all()
    assert (found.seconds < 20).all()


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
