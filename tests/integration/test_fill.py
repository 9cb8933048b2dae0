"""Whole units of objects straight into memory: verified, decoded, or left to the caller."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.codec.galois import Bytes
from hpstore.devices.io_uring import read_batch
from hpstore.format.column_header import ColumnHeader
from hpstore.objects.read import metered_batch
from hpstore.objects.read import unit_batch_read as fill_module
from hpstore.objects.read.column_reader import ColumnReader
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.objects.read.unit_batch_read import Filled, UnitFill
from hpstore.pool.pool import Pool
from hpstore.runtime.buffers import aligned_array
from hpstore.units import KIB
from tests.fault.common import Bench, Hangs, column_number, flip, needs_ring, payload, poll, within

UNIT, DATA = 64 * KIB, 3
STRIPE = UNIT * DATA
SIZE = 4 * STRIPE + 100_000  # the last stripe is shrunk
BODY = payload("fill", SIZE)
ALL = list(range(14))  # units; from 12 on they lie in the last stripe


def filled(root: Path, **settings: Any) -> Bench:
    bench = Bench(root)
    with bench.create(5, data=DATA, parity=2, **settings) as pool:
        pool.put("x", BODY, unit_bytes=UNIT)
        pool.put("odd", BODY, unit_bytes=12 * KIB)
    return bench


@pytest.fixture
def made(tmp_path: Path) -> Bench:
    return filled(tmp_path)


@pytest.fixture(autouse=True, params=["on lanes", pytest.param("in batches", marks=needs_ring)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How units are read: as the first ones of a column, or as those after it."""
    monkeypatch.setattr(ColumnReader, "has_table", request.param == "in batches")
    return str(request.param)


def read(
    reader: PooledReader, units: Sequence[int], unit_bytes: int = UNIT
) -> tuple[list[Bytes], Filled, list[int]]:
    """Targets, what became of them, and which arrived, in this order."""
    memory = aligned_array(max(1, len(units)) * unit_bytes)
    memory[:] = 0xEE
    targets = [memory[i * unit_bytes : (i + 1) * unit_bytes] for i in range(len(units))]
    arrived: list[int] = []

    def note(number: int) -> None:
        assert right(targets[number], units[number])  # it is whole when it is said to be
        arrived.append(number)

    fill = UnitFill(targets, note)
    starts = np.array(units, np.int64) * unit_bytes
    reader.add_to(fill, starts, np.arange(len(units)))
    found = reader.run_fill(fill)
    assert sorted(arrived) == np.flatnonzero(found.good).tolist()
    return targets, found, arrived


def right(target: Bytes, unit: int) -> bool:
    return target.tobytes() == BODY[unit * UNIT : (unit + 1) * UNIT]


def files(made: Bench) -> list[Path]:
    return sorted(made.files("x"), key=column_number)


def test_units_of_whole_stripes_are_read_and_others_are_left(made: Bench) -> None:
    with made.open() as pool, pool.open("x") as reader:
        _, found, _ = read(reader, ALL)
        assert found.good.tolist() == [unit < 12 for unit in ALL]
        assert not found.late.any()
        assert read(reader, [])[1].good.tolist() == []
        assert read(reader, [7, 2, 11])[1].good.tolist() == [True] * 3
    with made.open() as pool, pool.open("odd") as reader:  # blocks of 64 KiB cross such units
        assert not read(reader, [0, 1], 12 * KIB)[1].good.any()


@pytest.mark.parametrize("lost", [(c,) for c in range(5)] + [(0, 1), (1, 3), (2, 4), (0, 2)])
def test_lost_columns_are_decoded(made: Bench, lost: tuple[int, ...]) -> None:
    """Whole stripes, and units whose neighbours nobody asked for."""
    with made.open() as pool:
        columns = files(made)
        for column in lost:
            os.unlink(columns[column])
        with pool.open("x") as reader:
            assert read(reader, ALL)[1].good.tolist() == [unit < 12 for unit in ALL]
            assert read(reader, [0, 4, 8, 10])[1].good.all()
            assert reader._store.buffers.budget.used_bytes == 0  # spare units are given back
        degraded = any(column < DATA for column in lost)
        assert (pool.metrics.value("read_degraded_total") > 0) == degraded


@pytest.mark.parametrize("units", [ALL, [0, 4, 8, 10]])
def test_units_of_a_device_that_reads_keep_off_are_decoded(made: Bench, units: list[int]) -> None:
    """Its open file is not read; with all devices kept off, those are read that are least bad."""
    with made.open() as pool, pool.open("x") as reader:
        pool.admin.health.pause()
        routing = pool._store.routing
        held = reader._reader.columns[1]
        spared = held.device_id
        check, asked = ColumnReader.check, []

        def spy(column: ColumnReader, start: int, target: Bytes) -> None:
            asked.append(column.device_id)
            check(column, start, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ColumnReader, "check", spy)
            routing.set_avoided({spared: 0.0})
            assert read(reader, units)[1].good.tolist() == [unit < 12 for unit in units]
            assert asked
            assert spared not in asked
        routing.set_avoided(dict.fromkeys(pool._store.view.devices, 0.0))
        assert read(reader, units)[1].good.tolist() == [unit < 12 for unit in units]


@pytest.mark.parametrize("piece_bytes", [1, 2 * UNIT, 100 * UNIT])
def test_spare_units_share_large_pieces_of_memory(
    made: Bench, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Three stripes want one each: as few pieces as hold them, none larger than is needed."""
    monkeypatch.setattr(fill_module, "_PIECE_BYTES", piece_bytes)
    os.unlink(files(made)[0])
    with made.open() as pool, pool.open("x") as reader:
        store = reader._store
        lease, asked = store.buffers.lease, []

        def spy(nbytes: int, *given: Any, **options: Any) -> Any:  # Any: passed on
            asked.append(nbytes)
            return lease(nbytes, *given, **options)

        monkeypatch.setattr(store.buffers, "lease", spy)
        assert read(reader, ALL[:9])[1].good.all()
        wanted = {1: [UNIT] * 3, 2 * UNIT: [2 * UNIT, UNIT], 100 * UNIT: [3 * UNIT]}
        assert asked == wanted[piece_bytes]
        assert store.buffers.budget.used_bytes == 0


def test_a_flipped_bit_costs_its_unit_and_what_is_decoded_from_it(made: Bench) -> None:
    """PROTOCOL 10: nothing is decoded from bytes that do not match."""
    flip(files(made)[1], 4096 + UNIT + 5)  # of stripe 1
    with made.open() as pool, pool.open("x") as reader:
        assert read(reader, ALL)[1].good.tolist() == [unit < 12 and unit != 4 for unit in ALL]
    os.unlink(files(made)[0])
    with made.open() as pool, pool.open("x") as reader:
        good = read(reader, ALL)[1].good
        assert not good[[3, 4]].any()
        assert good[[0, 1, 2, 6, 7, 8]].all()


def test_without_memory_for_spare_units_only_the_lost_are_left(made: Bench) -> None:
    """Sources that nobody asked for need room."""
    os.unlink(files(made)[0])
    with made.open() as pool, pool.open("x") as reader:
        reader.read_into(bytearray(10))
        budget = reader._store.buffers.budget
        taken = budget.limit_bytes - budget.used_bytes - 1000
        budget.acquire(taken)
        try:
            good = read(reader, ALL)[1].good
        finally:
            budget.release(taken)
        assert good.tolist() == [unit < 12 and unit % DATA != 0 for unit in ALL]
        assert pool.metrics.value("fill_without_memory_total") > 0
        assert read(reader, ALL)[1].good[0]


@pytest.mark.parametrize("room", [0, 1, 2])
def test_memory_for_some_of_the_spare_units_is_given_back(
    made: Bench, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """One lost unit wants three spare ones; said once, however often."""
    os.unlink(files(made)[0])
    with made.open() as pool, pool.open("x") as reader:
        reader.read_into(bytearray(10))
        budget = reader._store.buffers.budget
        taken = budget.limit_bytes - budget.used_bytes - room * UNIT - 1000
        budget.acquire(taken)
        before = budget.used_bytes
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert not read(reader, [0])[1].good.any()
        assert budget.used_bytes == before
        assert pool.metrics.value("fill_without_memory_total") == 2
        assert len([r for r in caplog.records if "memory_bytes" in r.message]) == 1
        budget.release(taken)
        assert read(reader, [0])[1].good.all()


def test_units_of_a_hung_device_are_late_and_others_arrive(tmp_path: Path) -> None:
    """PROTOCOL 21: run() returns in time and names the units whose memory is lost; it does not
    wait for the deadline of a device that it can do without."""
    made = filled(tmp_path, device_deadline_seconds=300.0)
    hangs = Hangs(made)
    with made.open(wrap=hangs.wrap) as pool, pool.open("x") as reader:
        held = files(made)[2]
        hangs.hang(next(path for path in made.paths if held.is_relative_to(path)))
        try:
            targets, found, _ = within(12, lambda: read(reader, ALL))
            assert found.late.tolist() == [unit < 12 and unit % DATA == 2 for unit in ALL]
            assert found.good.tolist() == [unit < 12 and unit % DATA != 2 for unit in ALL]
        finally:
            hangs.release()
        del targets


def test_a_failing_device_costs_its_own_units(made: Bench) -> None:
    hangs = Hangs(made)
    with made.open(wrap=hangs.wrap) as pool, pool.open("x") as reader:
        hangs.hang(next(p for p in made.paths if files(made)[1].is_relative_to(p)), "E*")
        _, found, _ = read(reader, ALL)
        assert found.good.tolist() == [unit < 12 and unit % DATA != 1 for unit in ALL]
        assert not found.late.any()


@pytest.mark.parametrize("lost", [None, 0, 4])
@pytest.mark.parametrize("way", ["on lanes"], indirect=True)
def test_reads_that_a_device_refuses_cost_its_own_units(made: Bench, lost: int | None) -> None:
    """Its queue is full: with a data column lost, those that would be decoded from it, too. None
    is late, and no memory stays in use."""
    with made.open() as pool:
        if lost is not None:
            os.unlink(files(made)[lost])
        with pool.open("x") as reader:
            lane = pool._store.scheduler._lane(reader._reader.columns[1].device_id)
            lane.pending += 1 << 20
            _, found, _ = within(10, lambda: read(reader, ALL))
            lane.pending -= 1 << 20
            good = [lost != 0 and unit < 12 and unit % DATA != 1 for unit in ALL]
            assert found.good.tolist() == good
            assert not found.late.any()
            assert reader._store.buffers.budget.used_bytes == 0


def test_the_seed_of_a_column_is_worked_out_with_its_table_and_not_at_each_read(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made.open() as pool, pool.open("x") as reader:
        assert read(reader, ALL[:12])[1].good.all()
        monkeypatch.setattr(ColumnHeader, "checks", None)
        assert read(reader, ALL[:12])[1].good.all()


def test_it_reads_without_threads(made: Bench) -> None:
    """As in tests that count operations."""
    pool: Pool
    with made.open(threads=False) as pool, pool.open("x") as reader:
        assert read(reader, ALL)[1].good[:12].all()


def test_time_in_which_the_process_was_stopped_is_no_delay_of_a_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock is an hour later: no unit is given up, no memory is lost."""
    bench = filled(tmp_path)
    hangs, hours = Hangs(bench), itertools.count()
    with bench.open(wrap=hangs.wrap) as pool, pool.open("x") as reader:
        assert read(reader, [0])[1].good.all()
        hangs.hang(reader._reader.columns[0].url)
        monkeypatch.setattr(fill_module, "STEP_SECONDS", 0.01)

        def later() -> float:
            if next(hours) == 10:
                hangs.release()
            return 3600.0 * next(hours)

        monkeypatch.setattr(time, "monotonic", later)
        _, found, _ = within(20.0, lambda: read(reader, [0]))
        monkeypatch.undo()
        assert next(hours) > 10
        assert found.good.all()
        assert not found.late.any()


# --- many reads in one call ---------------------------------------------------------------------


@needs_ring
def test_only_the_first_reads_of_a_column_are_calls_of_their_own(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read its checksums, which on a device that hangs may wait; all others are one batch."""
    monkeypatch.undo()
    with made.open() as pool, pool.open("x") as reader:
        scheduler = reader._store.scheduler
        submit, calls, batches = scheduler.submit, [], []

        def count(device: str, call: Any, *, bulk: bool = False) -> Any:
            calls.append(device)
            return submit(device, call, bulk=bulk)

        def note(files: Any, *rest: Any, **options: Any) -> Any:
            batches.append(len(files))
            return read_batch(files, *rest, **options)

        monkeypatch.setattr(scheduler, "submit", count)
        monkeypatch.setattr(metered_batch, "read_batch", note)
        for wanted in ([0], [0, 1, 3], ALL, ALL):
            assert read(reader, wanted)[1].good[: len(wanted)].sum() == min(len(wanted), 12)
        columns = reader._reader.columns
        devices = [columns[column].device_id for column in (0, 1, *[2] * 4)]
        assert calls == devices
        assert batches == [2, 8, 12]


@pytest.mark.parametrize("way", ["in batches"], indirect=True)
def test_units_of_one_batch_that_do_not_end_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 21: the silent device is named and not asked again before it answers; what it may
    still write into is late and stays charged; all others are right. It costs no deadline."""
    made = filled(tmp_path, device_deadline_seconds=300.0)
    silent, other = os.pipe()  # stands for a device that does not answer
    plain = vars(ColumnReader)["descriptor"].fget

    def descriptor(held: ColumnReader) -> int:
        return silent if held.header.column == 2 else plain(held)

    os.unlink(files(made)[0])
    with made.open() as pool, pool.open("x") as reader:
        monkeypatch.setattr(ColumnReader, "descriptor", property(descriptor))
        targets, found, _ = within(12, lambda: read(reader, ALL))
        device = reader._reader.columns[2].device_id
        # unit 0 of each stripe would be decoded from unit 2, with which unit 1 is read for it
        assert found.late.tolist() == [unit < 12 and unit % DATA == 2 for unit in ALL]
        assert not found.good.any()
        budget = reader._store.buffers.budget
        assert budget.used_bytes >= 4 * UNIT  # four spare units
        assert not reader._store.scheduler.answers(device)
        _, again, _ = read(reader, [1, 4])
        assert again.good.all()
        os.close(other)  # what is in flight ends
        poll(20, lambda: reader._store.scheduler.answers(device))
        del targets
    os.close(silent)


@pytest.mark.parametrize("way", ["in batches"], indirect=True)
def test_a_read_of_a_batch_that_fails_costs_its_own_unit(made: Bench) -> None:
    """A file that was cut: the read over its end is short; the one behind it has nothing."""
    held = files(made)[1]
    with made.open() as pool, pool.open("x") as reader:
        assert read(reader, [1])[1].good.all()  # the checksums, at the end of the file
        os.truncate(held, 4096 + 2 * UNIT + 4096)
        _, found, _ = read(reader, ALL)
        assert found.good.tolist() == [unit < 12 and unit not in (7, 10) for unit in ALL]
        assert not found.late.any()


@pytest.mark.parametrize("way", ["in batches"], indirect=True)
def test_where_there_are_no_batches_units_are_read_on_lanes(
    made: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where io_uring is forbidden."""
    monkeypatch.setattr(metered_batch, "read_batch", lambda *_, **__: None)
    with made.open() as pool, pool.open("x") as reader:
        assert read(reader, ALL)[1].good.tolist() == [unit < 12 for unit in ALL]
