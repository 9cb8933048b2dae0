"""Many small ranges of one object straight from the devices: right bytes, or not good."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, DeviceTimeout
from hpstore.objects.read import metered_batch
from hpstore.objects.read.column_reader import ColumnReader
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.objects.read.record_batch_read import Scatter, Scattered
from hpstore.pool.pool import Pool
from hpstore.runtime.buffers import Lease, aligned_array
from hpstore.units import KIB
from tests.fault.common import Bench, Hangs, column_number, flip, needs_ring, payload, within

UNIT, DATA = 64 * KIB, 3
STRIPE = UNIT * DATA
SIZE = 2 * STRIPE + 100_000  # the last stripe is shrunk
BODY = payload("scatter", SIZE)


def filled(root: Path, **settings: Any) -> Bench:
    bench = Bench(root)
    with bench.create(5, data=DATA, parity=2, **settings) as pool:
        pool.put("x", BODY, unit_bytes=UNIT)
        pool.put("y", BODY[::-1], unit_bytes=UNIT)
        pool.put("small", BODY[:1000])
    return bench


@pytest.fixture
def made(tmp_path: Path) -> Bench:
    return filled(tmp_path)


@pytest.fixture(scope="module")
def open_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with filled(Path(tmp_path_factory.mktemp("pool"))).open() as pool:
        yield pool


def column_of(start: int) -> int:
    return start % STRIPE // UNIT


def is_direct(start: int, length: int) -> bool:
    """Inside one unit of a full stripe."""
    return start // UNIT == (start + length - 1) // UNIT and start < 2 * STRIPE and length > 0


def read(
    reader: PooledReader, spans: Sequence[tuple[int, int]], *, body: bytes = BODY
) -> tuple[list[Bytes], Scattered]:
    """Targets of ranges (start, length), and what became of them."""
    targets = [np.full(length, 0xEE, np.uint8) for _, length in spans]

    def right(number: int, found: Bytes) -> bool:
        start, length = spans[number]
        return found.tobytes() == body[start : start + length]

    scatter = Scatter(targets, right)
    starts = np.array([start for start, _ in spans], np.int64)
    reader.add_to(scatter, starts, np.arange(len(spans)))
    return targets, reader.run_scatter(scatter)


SPANS = [
    (0, 1),
    (1, 4095),
    (4096, 4096),
    (4095, 2),
    (UNIT - 1, 1),
    (0, UNIT),
    (100, UNIT - 100),
    (UNIT - 1, 2),
    (UNIT, UNIT),
    (2 * UNIT + 5, 999),
    (STRIPE - 7, 7),
    (STRIPE - 7, 8),
    (STRIPE, 5000),
    (2 * STRIPE - 1, 1),
    (2 * STRIPE, 10),
    (SIZE - 1, 1),
    (7, 0),
    (0, 3 * UNIT),
    (STRIPE + UNIT + 12_288, 12_288),
    (STRIPE + UNIT + 12_288, 12_288),
]


def test_ranges_inside_a_unit_are_read_and_others_are_left(open_pool: Pool) -> None:
    """Unaligned, whole units, the last byte; across units, in the last stripe, empty: not good."""
    with open_pool.open("x") as reader:
        targets, found = read(reader, SPANS)
    assert not found.late
    assert found.good.tolist() == [is_direct(*span) for span in SPANS]
    for (start, length), target, good in zip(SPANS, targets, found.good, strict=True):
        wanted = BODY[start : start + length] if good else b"\xee" * length
        assert target.tobytes() == wanted


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spans=st.lists(
        st.integers(0, SIZE - 1).flatmap(
            lambda start: st.tuples(st.just(start), st.integers(0, min(70_000, SIZE - start)))
        ),
        max_size=12,
    )
)
def test_any_ranges_are_right_where_they_are_good(
    open_pool: Pool, spans: list[tuple[int, int]]
) -> None:
    with open_pool.open("x") as reader:
        targets, found = read(reader, spans)
    assert found.good.tolist() == [is_direct(*span) for span in spans]
    for (start, length), target, good in zip(spans, targets, found.good, strict=True):
        assert not good or target.tobytes() == BODY[start : start + length]


def test_aligned_memory_is_filled_in_place(open_pool: Pool) -> None:
    """What needs no widening comes without a copy in between; the neighbours stay."""
    memory = aligned_array(5 * 4096)
    memory[:] = 0x11
    targets = [memory[4096:8192], memory[8292:9000]]
    scatter = Scatter(targets, lambda number, found: True)
    with open_pool.open("x") as reader:
        reader.add_to(scatter, np.array([8192, 333], np.int64), np.array([0, 1]))
        assert reader.run_scatter(scatter).good.all()
    assert memory[4096:8192].tobytes() == BODY[8192 : 8192 + 4096]
    assert memory[8292:9000].tobytes() == BODY[333 : 333 + 708]
    assert set(memory[:4096]) | set(memory[8192:8292]) | set(memory[9000:]) == {0x11}


@pytest.mark.parametrize("batches", [pytest.param(True, marks=needs_ring), False])
def test_a_range_with_room_behind_it_is_read_in_place(
    open_pool: Pool, monkeypatch: pytest.MonkeyPatch, batches: bool
) -> None:
    """5000 bytes at a multiple of 4 KiB with room for 8192: no memory in between, and nothing
    behind those is touched. 4999 bytes with room for 5000 take the other way.
    """
    if not batches:
        monkeypatch.setattr(metered_batch, "read_batch", lambda *_, **__: None)
    memory = aligned_array(6 * 4096)
    memory[:] = 0x11
    targets, room = [memory[:5000], memory[12_288:17_287]], [memory[:12_288], memory[12_288:17_288]]
    asked = list[int]()
    buffers = open_pool._store.buffers
    lease = buffers.lease

    def noted(nbytes: int, *given: Any, **options: Any) -> Lease:  # Any: passed on
        asked.append(nbytes)
        return lease(nbytes, *given, **options)

    monkeypatch.setattr(buffers, "lease", noted)
    for which, wanted in ((slice(0, 1), []), (slice(0, 2), [8192])):
        asked.clear()
        scatter = Scatter(targets[which], lambda number, found: True, room=room[which])
        with open_pool.open("x") as reader:
            numbers = np.arange(len(targets[which]))
            reader.add_to(scatter, np.array([8192, 4096], np.int64)[which], numbers)
            assert reader.run_scatter(scatter).good.all()
        assert asked == wanted
        assert memory[:5000].tobytes() == BODY[8192 : 8192 + 5000]
    assert memory[12_288:17_287].tobytes() == BODY[4096 : 4096 + 4999]
    assert set(memory[8192:12_288]) | set(memory[17_287:]) == {0x11}


def test_ranges_of_several_objects_are_read_at_once(open_pool: Pool) -> None:
    targets = [np.empty(500, np.uint8) for _ in range(4)]
    wanted = [BODY[:500], BODY[::-1][:500], BODY[70_000:70_500], BODY[::-1][70_000:70_500]]
    scatter = Scatter(targets, lambda number, found: found.tobytes() == wanted[number])
    with open_pool.open("x") as one, open_pool.open("y") as two:
        one.add_to(scatter, np.array([0, 70_000], np.int64), np.array([0, 2]))
        two.add_to(scatter, np.array([0, 70_000], np.int64), np.array([1, 3]))
        assert one.run_scatter(scatter).good.all()
    assert [target.tobytes() for target in targets] == wanted


def test_a_small_object_is_left_to_the_caller(open_pool: Pool) -> None:
    """Less than a stripe: nothing is read raw."""
    with open_pool.open("small") as reader:
        assert not read(reader, [(0, 1000), (10, 5)])[1].good.any()


def test_what_the_check_refuses_is_not_good(open_pool: Pool) -> None:
    """Only that one; and it is not asked about ranges that were not read."""
    asked = []

    def refuse(number: int, found: Bytes) -> bool:
        asked.append(number)
        return number != 1

    scatter = Scatter([np.empty(n, np.uint8) for n in (10, 10, 10, 2 * UNIT)], refuse)
    with open_pool.open("x") as reader:
        reader.add_to(scatter, np.array([0, 70_000, 9, 0], np.int64), np.arange(4))
        assert reader.run_scatter(scatter).good.tolist() == [True, False, True, False]
    assert sorted(asked) == [0, 1, 2]


@pytest.mark.parametrize("lost", [(c,) for c in range(5)] + [(0, 1), (1, 3), (2, 4), (0, 2)])
def test_lost_columns_are_decoded(made: Bench, lost: tuple[int, ...]) -> None:
    """Every column, and pairs of them, are away when the object is opened: all the same bytes."""
    with made.open() as pool:
        files = sorted(made.files("x"), key=column_number)
        for column in lost:
            os.unlink(files[column])
        with pool.open("x") as reader:
            targets, found = read(reader, SPANS)
        assert found.good.tolist() == [is_direct(*span) for span in SPANS]
        for (start, length), target, good in zip(SPANS, targets, found.good, strict=True):
            assert not good or target.tobytes() == BODY[start : start + length]
        decoded = sum(is_direct(*span) and column_of(span[0]) in lost for span in SPANS)
        assert pool.metrics.value("read_degraded_total") == decoded


def test_too_few_columns_leave_what_is_lost_to_the_caller(made: Bench) -> None:
    """m + 1 of them go under an open reader: the lost one's ranges are not good, others are."""
    hangs = Hangs(made)
    with made.open(wrap=hangs.wrap) as pool, pool.open("x") as reader:
        for path in made.paths:
            hangs.hang(path, "E*")
        _, found = read(reader, SPANS)
        assert not found.good.any()
        assert not found.late
        hangs.release()
        assert read(reader, SPANS)[1].good.any()


def test_a_failing_device_costs_its_own_ranges(made: Bench) -> None:
    """I/O errors from one device: ranges of its column are not good, all others are."""
    hangs = Hangs(made)
    with made.open(wrap=hangs.wrap) as pool, pool.open("x") as reader:
        held = next(file for file in made.files("x") if column_number(file) == 1)
        path = next(path for path in made.paths if str(held).startswith(path))
        hangs.hang(path, "E*")
        _, found = read(reader, SPANS)
        wanted = [is_direct(*span) and column_of(span[0]) != 1 for span in SPANS]
        assert found.good.tolist() == wanted


def test_a_flipped_bit_is_not_good(made: Bench) -> None:
    """One bit on the device: the range over it fails its check, its neighbours do not."""
    with made.open() as pool, pool.open("x") as reader:
        held = next(file for file in made.files("x") if column_number(file) == 0)
        flip(held, 4096 + 5000)
        spans = [(4999, 1), (5000, 1), (4000, 2000), (5001, 10)]
        assert read(reader, spans)[1].good.tolist() == [True, False, False, True]


def test_reads_of_a_hung_device_are_late_and_end(tmp_path: Path) -> None:
    """PROTOCOL 21: run() returns in time and names the reads that still own the memory."""
    made = filled(tmp_path, device_deadline_seconds=2.0, straggler_seconds=2.0)
    hangs = Hangs(made)
    with made.open(wrap=hangs.wrap) as pool, pool.open("x") as reader:
        held = next(file for file in made.files("x") if column_number(file) == 2)
        hangs.hang(next(path for path in made.paths if str(held).startswith(path)))
        try:
            targets, found = within(60, lambda: read(reader, SPANS))
            assert found.late
            wanted = [is_direct(*span) and column_of(span[0]) != 2 for span in SPANS]
            assert [bool(g) for g in found.good] == wanted
        finally:
            hangs.release()
        for future in found.late:
            future.result(60)
        assert found.good.tolist() == [is_direct(*span) for span in SPANS]
        del targets


@needs_ring
def test_reads_of_one_batch_that_do_not_end_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 21, where all devices are read in one call: the silent one is named and not asked
    again before it answers; all others are right.
    """
    made = filled(tmp_path, device_deadline_seconds=0.5, straggler_seconds=0.5)
    silent, other = os.pipe()  # stands for a device that does not answer
    plain = vars(ColumnReader)["descriptor"].fget

    def descriptor(held: ColumnReader) -> int:
        return silent if held.header.column == 2 else plain(held)

    with made.open() as pool, pool.open("x") as reader:
        monkeypatch.setattr(ColumnReader, "descriptor", property(descriptor))
        targets, found = read(reader, SPANS)
        wanted = [is_direct(*span) and column_of(span[0]) != 2 for span in SPANS]
        assert found.good.tolist() == wanted
        assert len(found.late) == 1
        device = reader._reader.columns[2].device_id
        scheduler = reader._store.scheduler
        assert not scheduler.answers(device)
        with pytest.raises(DeviceTimeout):
            scheduler.submit(device, lambda: None).result(60)
        assert read(reader, SPANS)[1].good.tolist() == wanted  # at once
        monkeypatch.undo()
        os.write(other, b"x" * 65_000)
        os.close(other)
        found.late[0].result(60)
        assert scheduler.answers(device)
        assert read(reader, SPANS)[1].good.tolist() == [is_direct(*span) for span in SPANS]
        del targets
    os.close(silent)


def test_without_batches_the_same_bytes_come_one_by_one(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where io_uring is forbidden."""
    monkeypatch.setattr(metered_batch, "read_batch", lambda *_, **__: None)
    with made.open() as pool, pool.open("x") as reader:
        targets, found = read(reader, SPANS)
    assert found.good.tolist() == [is_direct(*span) for span in SPANS]
    for (start, length), target, good in zip(SPANS, targets, found.good, strict=True):
        assert not good or target.tobytes() == BODY[start : start + length]


def test_a_closed_reader_says_so(open_pool: Pool) -> None:
    reader = open_pool.open("x")
    reader.close()
    with pytest.raises(ConfigError, match="is closed"):
        reader.add_to(
            Scatter([np.empty(1, np.uint8)], lambda n, b: True),
            np.zeros(1, np.int64),
            np.zeros(1, np.int64),
        )
