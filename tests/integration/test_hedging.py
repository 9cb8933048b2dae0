"""Late reads are overtaken: right bytes, within a budget, and what is late lands where it may.

Devices hang until they are released; no test waits for time to pass.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpstore.devices.base import Device
from hpstore.devices.wrappers import FaultyDevice
from hpstore.health.detect.io_recorder import IoOutcome
from hpstore.health.detect.verdicts import HealthState
from hpstore.objects.read import hedge
from hpstore.objects.read import object_reader as read_module
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.pool.pool import Pool
from hpstore.runtime.deadline_wait import wait_awake
from hpstore.testing import ManualClock
from hpstore.units import KIB
from tests.fault.common import Bench, payload, poll, within, wrapping

LIMIT = 20.0
SIZE = 700 * KIB
BODY = payload("x", SIZE)


class Late:
    """A 3+2 pool over six directories with an object, a reader of it, and devices that hang."""

    def __init__(self, root: Path, clock: ManualClock | None = None, **settings: Any) -> None:
        self.bench = Bench(root)
        with self.bench.create(6, data=3, parity=2, **settings) as pool:
            pool.put("x", BODY)
        self.devices: dict[str, FaultyDevice] = {}
        config = pool.config
        opener = wrapping(config, self._wrap)
        self.pool = Pool(config, opener=opener, clock=clock, monitor=True)
        self.pool.admin.health.pause()
        self.reader: PooledReader = self.pool.open("x")
        columns = self.reader._reader.columns
        self.held = [columns[c].device_id for c in sorted(columns)]
        self.urls = [columns[c].url for c in sorted(columns)]

    def _wrap(self, url: str, device: Device) -> Device:
        self.devices[url] = FaultyDevice(device)
        return self.devices[url]

    def hang(self, *columns: int) -> None:
        """From now on, and as if peers of these devices, and no others, had answered at once."""
        for column in columns:
            self.devices[self.urls[column]].plan = "H*"
        self.pool._store.routing.deadlines = {self.held[c]: (1e-4,) * 16 for c in columns}

    def release(self) -> None:
        for device in self.devices.values():
            device.plan = ""
            device.released.set()

    def read(self) -> bytes:
        buffer = bytearray(SIZE)
        self.reader.read_into(buffer)
        return bytes(buffer)

    def count(self, name: str) -> int:
        return self.pool.metrics.value(name)


@contextmanager
def late_pool(root: Path, clock: ManualClock | None = None, **settings: Any) -> Iterator[Late]:
    made = Late(root, clock, **settings)
    try:
        yield made
    finally:
        made.release()
        made.reader.close()
        made.pool.close()


@pytest.mark.parametrize("columns", [(0,), (2,), (0, 1)])
def test_up_to_two_late_reads_are_overtaken_by_spares(
    tmp_path: Path, columns: tuple[int, ...]
) -> None:
    """PROTOCOL 21: right bytes while devices hang; their reads land in a lease that stays taken,
    are timed when they end, and give it back then."""
    with late_pool(tmp_path) as late:
        assert late.read() == BODY
        budget = late.pool._store.buffers.budget
        late.hang(*columns)
        assert within(LIMIT, late.read) == BODY
        assert late.count("read_hedged_total") == 1
        assert late.count("read_hedge_won_total") == 1
        assert budget.used_bytes > 0
        recorders = [late.pool.admin.health.telemetry.recorder(late.held[c]) for c in columns]
        for recorder in recorders:
            assert recorder.oldest_seconds(late.pool._store.clock.monotonic()) > 0
            recorder.drain()
        late.release()
        poll(LIMIT, lambda: budget.used_bytes == 0)
        for recorder in recorders:
            assert 0 in recorder.drain().operation  # a read


def test_the_memory_of_a_spare_read_goes_with_it(tmp_path: Path) -> None:
    """Spare reads are rare and of many sizes: a long run would gain a buffer of each."""
    with late_pool(tmp_path) as late:
        assert late.read() == BODY
        buffers = late.pool._store.buffers
        late.hang(0)
        before = buffers.kept_bytes + buffers.budget.used_bytes
        assert within(LIMIT, late.read) == BODY
        assert late.count("read_hedge_won_total") == 1
        late.release()
        poll(LIMIT, lambda: buffers.budget.used_bytes == 0)
        assert buffers.kept_bytes <= before


def test_late_reads_of_a_file_that_was_closed_do_not_accuse_the_device(tmp_path: Path) -> None:
    """A hedged read closes its files; ten errors in ten minutes would make its devices faulty."""
    with late_pool(tmp_path) as late:
        assert late.read() == BODY
        late.hang(0, 1)
        assert within(LIMIT, late.read) == BODY
        recorders = [late.pool.admin.health.telemetry.recorder(late.held[c]) for c in (0, 1)]
        for recorder in recorders:
            recorder.drain()
        late.reader.close()
        late.release()
        poll(LIMIT, lambda: late.pool._store.buffers.budget.used_bytes == 0)
        for recorder in recorders:
            assert IoOutcome.ERROR not in recorder.drain().outcome
            assert recorder.oldest_seconds(1e12) == 0


def test_a_spare_that_was_opened_serves_the_next_reads(tmp_path: Path) -> None:
    """The parity column's file is opened by the first spare, and kept."""
    with late_pool(tmp_path) as late:
        late.hang(1)
        assert within(LIMIT, late.read) == BODY
        assert len(late.reader._reader.columns) == 4
        assert within(LIMIT, late.read) == BODY
        assert late.count("read_hedge_won_total") == 2


def test_while_a_device_hangs_later_reads_do_not_wait_for_it(tmp_path: Path) -> None:
    """A spare that won shows that it hangs; once it has answered, reads are patient again."""
    with late_pool(tmp_path) as late:
        late.hang(0)
        assert within(LIMIT, late.read) == BODY
        routing, device = late.pool._store.routing, late.held[0]
        routing.deadlines = {device: (1e9,) * 16}
        assert routing.lags(device)
        assert within(LIMIT, late.read) == BODY
        assert late.count("read_hedge_won_total") == 2
        late.release()
        poll(LIMIT, lambda: not routing.lags(device))


def test_three_late_reads_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two spares a window: what is later than that is not one device's fault."""
    monkeypatch.setattr(hedge, "_LOOK_SECONDS", 0.001)
    looks: list[tuple[int, str]] = []
    due = hedge._Race._due

    def look(race: hedge._Race, late: list[int]) -> str:
        looks.append((len(late), due(race, late)))
        return looks[-1][1]

    monkeypatch.setattr(hedge._Race, "_due", look)
    with late_pool(tmp_path) as late, ThreadPoolExecutor(1) as threads:
        late.hang(0, 1, 2)
        reading = threads.submit(late.read)
        poll(LIMIT, lambda: len(looks) > 20)
        assert set(looks) == {(3, "")}
        late.release()
        assert reading.result(LIMIT) == BODY


@pytest.mark.parametrize("percent", [0.0, 5.0])
def test_without_budget_no_spare_is_read(tmp_path: Path, percent: float) -> None:
    """The late read is given up at the device's deadline, as without hedging."""
    with late_pool(tmp_path, hedge_percent=percent, device_deadline_seconds=0.3) as late:
        late.pool._store.routing.budget._left = 0.0
        late.hang(0)
        assert within(LIMIT, late.read) == BODY
        assert late.count("read_hedged_total") == 0
        assert late.count("read_hedge_refused_total") > 0
        assert late.count("read_degraded_total") == 1


def test_without_deadlines_of_peers_nothing_is_hedged(tmp_path: Path) -> None:
    """Before peers have read as much, or of other sizes: nobody knows what late is."""
    with late_pool(tmp_path, device_deadline_seconds=0.3) as late:
        late.hang(0)
        late.pool._store.routing.deadlines = {}
        assert within(LIMIT, late.read) == BODY
        assert late.count("read_hedged_total") == 0


def test_damaged_spares_are_not_served(tmp_path: Path) -> None:
    """A flipped bit in the spare column: the late read is waited for, and the object mended."""
    with late_pool(tmp_path) as late, ThreadPoolExecutor(1) as threads:
        spares = late.reader._reader.closed_columns()
        for found in spares.values():
            url = late.pool._store.view.devices[found.device].url
            late.devices[url].plan = "RRF*"  # its header, its table, then damage
        late.hang(0)
        reading = threads.submit(late.read)
        poll(LIMIT, lambda: late.count("read_hedged_total") == 1)
        poll(LIMIT, lambda: late.count("column_mismatch_total") == 1)
        late.release()
        assert reading.result(LIMIT) == BODY
        assert late.count("read_hedge_won_total") == 0


def test_a_hung_device_is_found_and_reads_under_way_go_round_it(tmp_path: Path) -> None:
    """PROTOCOL 16. No deadlines of peers, no budget: after five seconds of the clock the device is
    suspect, a read that already waits for it is overtaken, later ones do not ask it."""
    clock = ManualClock()
    with (
        late_pool(tmp_path, clock, hedge_percent=0.0) as late,
        ThreadPoolExecutor(1) as threads,
    ):
        late.hang(1)
        late.pool._store.routing.deadlines = {}
        reading = threads.submit(late.read)
        recorder = late.pool.admin.health.telemetry.recorder(late.held[1])
        poll(LIMIT, lambda: recorder.oldest_seconds(clock.monotonic() + 1.0) > 0)
        for _ in range(6):
            clock.advance(1.0)
            late.pool.admin.health.tick_now()
        assert reading.result(LIMIT) == BODY
        snapshot = late.pool.admin.health.snapshot()
        assert snapshot.devices[late.held[1]].state is HealthState.SUSPECT
        assert late.count("read_rerouted_total") == 1
        late.pool._store.routing.probe = lambda _: False
        asked = late.devices[late.urls[1]].operations
        assert late.read() == BODY
        assert late.devices[late.urls[1]].operations == asked


def test_a_hung_device_holds_no_thread_that_another_one_needs(tmp_path: Path) -> None:
    """Eight readers of eight objects at once while a device hangs: all are served."""
    with late_pool(tmp_path) as late:
        for number in range(8):
            late.pool.put(f"k{number}", payload(f"k{number}", SIZE))
        readers = [late.pool.open(f"k{number}") for number in range(8)]
        late.hang(0)
        found: list[bool] = [False] * 8

        def read(number: int) -> None:
            buffer = bytearray(SIZE)
            readers[number].read_into(buffer)
            found[number] = bytes(buffer) == payload(f"k{number}", SIZE)

        threads = [threading.Thread(target=read, args=(n,), daemon=True) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert all(found)
        late.release()
        for reader in readers:
            reader.close()


def test_a_late_read_is_waited_for_one_deadline_not_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was waited for a spare that could not be read counts as waited for the device."""
    asked: list[float] = []

    def note(futures: Collection[Future[Any]], seconds: float) -> float:
        asked.append(seconds)
        return wait_awake(futures, seconds)

    deadline = 0.3
    with late_pool(tmp_path, device_deadline_seconds=deadline) as late:
        late.hang(0)
        late.pool._store.routing.deadlines = {}
        monkeypatch.setattr(read_module, "wait_awake", note)
        assert within(LIMIT, late.read) == BODY
        assert late.count("read_degraded_total") == 1
        assert min(asked) <= 0  # for the read that had its time
        monkeypatch.undo()


def test_damage_that_a_spare_meets_in_an_open_column_is_mended(tmp_path: Path) -> None:
    """The spare reads a column that is open already: its damage counts as any other's."""
    with late_pool(tmp_path) as late, ThreadPoolExecutor(1) as threads:
        late.hang(1)
        assert within(LIMIT, late.read) == BODY  # a parity column is open from now on
        late.release()
        (spare,) = set(late.reader._reader.columns) - {0, 1, 2}
        held = late.reader._reader.columns[spare]
        late.devices[held.url].plan = "F*"
        late.devices[late.urls[1]].released.clear()
        late.hang(1)
        reading = threads.submit(late.read)
        poll(LIMIT, lambda: late.count("column_mismatch_total") == 1)
        late.release()
        assert reading.result(LIMIT) == BODY
        recorder = late.pool.admin.health.telemetry.recorder(held.device_id)
        assert IoOutcome.CHECKSUM in recorder.drain().outcome
        poll(LIMIT, lambda: late.count("read_repair_total") == 1)
